"""Tiering: which chunk is where, and what moves next.

`index` says where a chunk lies in the host pool and who holds it; `plan` turns events into commands and
touches nothing else; `manager` carries the commands out on real tiers.
"""
