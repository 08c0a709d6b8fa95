"""The format of a chunk file: the chunk's bytes, then one trailer of `TRAILER_BYTES`.

    |<------ chunk_bytes ------>|<--------- 4096 --------->|
    | the chunk, as in its slot |         trailer          |

The trailer, little endian:

    offset  size  what
         0     8  magic `PDOCHUNK`
         8     4  format version, 1
        12     4  checksum algorithm: 0 none, 1 xxh3-128
        16     8  chunk length in bytes
        24    32  fingerprint of the run configuration (`RunConfig.fingerprint`)
        56    16  xxh3-128 of the chunk, big endian as xxhash prints it; zero with algorithm 0
        72     4  key length
        76     n  key
         .     .  zero
      4080    16  xxh3-128 of the 4080 bytes before it

Magic, version and the last 16 bytes stay where they are in every later version. A file of exactly
`chunk_bytes`, as vLLM's own fs tier writes it, carries no trailer and counts as unverified.
"""

from __future__ import annotations

import struct

import xxhash

from pdoffload.errors import CorruptChunk, MisuseError, StorageError
from pdoffload.layout import PAGE_BYTES, BlockKey

TRAILER_BYTES = PAGE_BYTES
VERSION = 1
CHECKSUM_NONE = 0
CHECKSUM_XXH3_128 = 1
DIGEST_BYTES = 16
FINGERPRINT_BYTES = 32

_MAGIC = b"PDOCHUNK"
_START = struct.Struct("<8sIIQ32s")
_KEY_AT = _START.size + DIGEST_BYTES
_BODY_BYTES = TRAILER_BYTES - DIGEST_BYTES
MAX_KEY_BYTES = _BODY_BYTES - _KEY_AT - 4


def stated_chunk_bytes(page: bytes) -> int | None:
    """The chunk length in a trailer of any configuration; None if `page` is no sound trailer."""
    if len(page) != TRAILER_BYTES or page[: len(_MAGIC)] != _MAGIC:
        return None
    if xxhash.xxh3_128_digest(page[:_BODY_BYTES]) != page[_BODY_BYTES:]:
        return None
    chunk_bytes: int = _START.unpack_from(page)[3]
    return chunk_bytes


class ChunkFormat:
    """Trailers of one configuration: all chunks have `chunk_bytes` and `fingerprint`. Any thread."""

    __slots__ = ("_starts", "chunk_bytes", "file_bytes", "fingerprint")

    def __init__(self, chunk_bytes: int, fingerprint: bytes) -> None:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise MisuseError(
                f"a fingerprint has {FINGERPRINT_BYTES} bytes, got {len(fingerprint)}"
            )
        self.chunk_bytes = chunk_bytes
        self.fingerprint = fingerprint
        self.file_bytes = chunk_bytes + TRAILER_BYTES
        # What every trailer of this configuration begins with, by checksum algorithm.
        self._starts = {
            algorithm: _START.pack(_MAGIC, VERSION, algorithm, chunk_bytes, fingerprint)
            for algorithm in (CHECKSUM_NONE, CHECKSUM_XXH3_128)
        }

    def pack(self, key: BlockKey, digest: bytes | None) -> bytes:
        """The `TRAILER_BYTES` of the chunk `key`, whose xxh3-128 is `digest`, or None if not computed.

        Raises `MisuseError` for a key that does not fit.
        """
        if len(key) > MAX_KEY_BYTES:
            raise MisuseError(f"a trailer takes a key of {MAX_KEY_BYTES} bytes, got {len(key)}")
        start = self._starts[CHECKSUM_NONE if digest is None else CHECKSUM_XXH3_128]
        head = start + (digest or bytes(DIGEST_BYTES)) + len(key).to_bytes(4, "little") + key
        body = head.ljust(_BODY_BYTES, b"\0")
        return body + xxhash.xxh3_128_digest(body)

    def digest(self, page: bytes, key: BlockKey, path: str) -> bytes | None:
        """The digest in the trailer `page` (`TRAILER_BYTES`), or None if it carries none.

        Raises `CorruptChunk` for bytes that no version wrote, and for another key, length or
        configuration; `StorageError` for a sound trailer of a version or algorithm that is not known
        here: such a file is somebody's and stays. `path` names the file in errors.
        """
        start = page[: _START.size]
        named = len(key).to_bytes(4, "little") + key
        known = start in (self._starts[CHECKSUM_XXH3_128], self._starts[CHECKSUM_NONE])
        sound = xxhash.xxh3_128_digest(page[:_BODY_BYTES]) == page[_BODY_BYTES:]
        if not known or not sound or page[_KEY_AT : _KEY_AT + len(named)] != named:
            raise self._fault(page, key, path)
        if start == self._starts[CHECKSUM_NONE]:
            return None
        return page[_START.size : _KEY_AT]

    def _fault(self, page: bytes, key: BlockKey, path: str) -> StorageError:
        """What is wrong with `page`."""
        magic, version, algorithm, chunk_bytes, fingerprint = _START.unpack_from(page)
        if magic != _MAGIC:
            return CorruptChunk(path, "its last page is no trailer")
        if xxhash.xxh3_128_digest(page[:_BODY_BYTES]) != page[_BODY_BYTES:]:
            return CorruptChunk(path, "its trailer does not match its own checksum")
        if version != VERSION:
            return StorageError(path, f"format version {version}; this release reads {VERSION}")
        if algorithm not in self._starts:
            return StorageError(path, f"checksum algorithm {algorithm} is not known here")
        if chunk_bytes != self.chunk_bytes:
            return CorruptChunk(
                path, f"holds a chunk of {chunk_bytes} bytes, not {self.chunk_bytes}"
            )
        if fingerprint != self.fingerprint:
            theirs, ours = fingerprint.hex()[:16], self.fingerprint.hex()[:16]
            return CorruptChunk(path, f"was written by configuration {theirs}, not {ours}")
        key_bytes = int.from_bytes(page[_KEY_AT : _KEY_AT + 4], "little")
        stored = page[_KEY_AT + 4 : _KEY_AT + 4 + key_bytes]
        return CorruptChunk(path, f"holds key {stored.hex()}, not {key.hex()}")
