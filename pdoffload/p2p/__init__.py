"""Peers: chunks pulled from other processes, and given to them, over a NIXL agent of their own."""
