"""Chunks as objects of an S3 or Azure store, moved by NIXL."""
