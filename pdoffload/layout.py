"""Values that every room shares: what a chunk is called, how big it is, whose configuration made it.

One *chunk* is the KV of `blocks_per_chunk` device blocks of one KV-cache group, over all workers. It
occupies one *slot* of the host pool, one file, or one object. Its bytes inside a slot:

    |<------------------------------ chunk_bytes ------------------------------>|
    | worker 0: t0 b0 b1 .. | t1 b0 b1 .. | ... | worker 1: ...    | ... | zero |
                 ^ tensor 0, the chunk's blocks in order                   ^ padding to PAGE_BYTES
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NewType

import msgspec

PAGE_BYTES = 4096
"""Slots, and with them every address and length given to direct I/O, are multiples of this."""

BlockKey = NewType("BlockKey", bytes)
"""Names one chunk: its block hash, then the KV-cache group as 4 bytes, big endian (vLLM's own form)."""

_GROUP_BYTES = 4


def make_key(block_hash: bytes, group: int) -> BlockKey:
    """The key of the chunk with `block_hash` (any length) in KV-cache `group` (0 .. 2**32-1)."""
    return BlockKey(block_hash + group.to_bytes(_GROUP_BYTES, "big"))


def block_hash(key: BlockKey) -> bytes:
    """The block hash inside `key`."""
    return key[:-_GROUP_BYTES]


def group_index(key: BlockKey) -> int:
    """The KV-cache group inside `key`."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the host pool. All in bytes or counts; `num_copies` is 1 where ranks hold equal bytes."""

    num_slots: int
    worker_bytes: int
    """Bytes of one worker's part of a chunk."""
    num_copies: int
    """Worker parts in a chunk: the world size, or 1 for a replicated layout."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk and of its slot: all workers' parts, padded to a page."""
        return round_up(self.worker_bytes * self.num_copies, PAGE_BYTES)

    @property
    def pool_bytes(self) -> int:
        return self.num_slots * self.chunk_bytes


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for two processes to share chunks.

    `fields` name the namespace on disk: equal fields share a directory, different ones live side by
    side. `guards` are checked inside it: a difference there is an error with both values, because the
    directory's name cannot tell the two apart (it is vLLM's own naming, so that roots can be shared).
    """

    fields: dict[str, Any]
    guards: dict[str, Any] = {}

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 over `fields` as sorted, compact JSON."""
        return hashlib.sha256(_canonical(self.fields)).hexdigest()[:12]

    @property
    def fingerprint(self) -> bytes:
        """32 bytes over fields and guards; stands in every chunk's trailer."""
        return hashlib.sha256(_canonical({"fields": self.fields, "guards": self.guards})).digest()

    @property
    def namespace(self) -> str:
        """`<model>_<digest>`, the directory (or key prefix) of this configuration."""
        return f"{str(self.fields['model_name']).replace('/', '_')}_{self.digest}"


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
