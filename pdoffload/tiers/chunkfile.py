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

import msgspec
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
_HEAD = struct.Struct("<8sIIQ32s16sI")
_BODY_BYTES = TRAILER_BYTES - DIGEST_BYTES
MAX_KEY_BYTES = _BODY_BYTES - _HEAD.size


class Trailer(msgspec.Struct, frozen=True):
    """What a trailer says. `digest` is the chunk's xxh3-128, or None where it was not computed."""

    key: BlockKey
    chunk_bytes: int
    fingerprint: bytes
    digest: bytes | None


def pack(trailer: Trailer) -> bytes:
    """The `TRAILER_BYTES` of `trailer`. `MisuseError` for a field that does not fit its place."""
    digest = trailer.digest
    if len(trailer.key) > MAX_KEY_BYTES or len(trailer.fingerprint) != FINGERPRINT_BYTES:
        raise MisuseError(
            f"a trailer takes a key of up to {MAX_KEY_BYTES} bytes and a fingerprint of "
            f"{FINGERPRINT_BYTES}; got {len(trailer.key)} and {len(trailer.fingerprint)}"
        )
    if digest is not None and len(digest) != DIGEST_BYTES:
        raise MisuseError(f"a digest has {DIGEST_BYTES} bytes, got {len(digest)}")
    head = _HEAD.pack(
        _MAGIC,
        VERSION,
        CHECKSUM_NONE if digest is None else CHECKSUM_XXH3_128,
        trailer.chunk_bytes,
        trailer.fingerprint,
        digest or bytes(DIGEST_BYTES),
        len(trailer.key),
    )
    body = (head + trailer.key).ljust(_BODY_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def parse(page: bytes | bytearray | memoryview, path: str) -> Trailer:
    """What the trailer in `page` (exactly `TRAILER_BYTES`) says; `path` names it in errors.

    Raises `CorruptChunk` for bytes no version ever wrote, and `StorageError` for a sound trailer of a
    version or checksum algorithm this one does not know: such a file is somebody's and stays.
    """
    magic, version, algorithm, chunk_bytes, fingerprint, digest, key_bytes = _HEAD.unpack_from(page)
    if magic != _MAGIC:
        raise CorruptChunk(path, "its last page is no trailer")
    if xxhash.xxh3_128_digest(page[:_BODY_BYTES]) != page[_BODY_BYTES:]:
        raise CorruptChunk(path, "its trailer does not match its own checksum")
    if version != VERSION:
        raise StorageError(path, f"format version {version}; this release reads {VERSION}")
    if algorithm not in (CHECKSUM_NONE, CHECKSUM_XXH3_128):
        raise StorageError(path, f"checksum algorithm {algorithm} is not known to this release")
    if key_bytes > MAX_KEY_BYTES:
        raise CorruptChunk(path, f"its trailer claims a key of {key_bytes} bytes")
    key = BlockKey(bytes(page[_HEAD.size : _HEAD.size + key_bytes]))
    return Trailer(key, chunk_bytes, fingerprint, digest if algorithm else None)


def require(trailer: Trailer, wanted: Trailer, path: str) -> None:
    """Raise `CorruptChunk` unless `trailer` is of the key, length and configuration of `wanted`."""
    if trailer.key != wanted.key:
        raise CorruptChunk(path, f"holds key {trailer.key.hex()}, not {wanted.key.hex()}")
    if trailer.chunk_bytes != wanted.chunk_bytes:
        raise CorruptChunk(
            path, f"holds a chunk of {trailer.chunk_bytes} bytes, not {wanted.chunk_bytes}"
        )
    if trailer.fingerprint != wanted.fingerprint:
        raise CorruptChunk(
            path,
            f"was written by configuration {trailer.fingerprint.hex()[:16]}, "
            f"not {wanted.fingerprint.hex()[:16]}",
        )
