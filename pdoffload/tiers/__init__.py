"""Tiers: where chunks live beside the host pool. `base` is the contract."""
