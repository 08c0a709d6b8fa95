from __future__ import annotations

import hashlib
import os
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdoffload.errors import CorruptChunk, MisuseError, StorageError
from pdoffload.layout import make_key
from pdoffload.tiers.chunkfile import MAX_KEY_BYTES, TRAILER_BYTES, ChunkFormat, stated_chunk_bytes

KEY = make_key(hashlib.sha256(b"block").digest(), 7)
FINGERPRINT = hashlib.sha256(b"configuration").digest()
DIGEST = xxhash.xxh3_128_digest(b"the chunk")
FORM = ChunkFormat(8192, FINGERPRINT)


def test_the_layout_is_the_documented_one() -> None:
    page = FORM.pack(KEY, DIGEST)
    assert len(page) == TRAILER_BYTES == 4096
    fields = struct.unpack_from("<8sIIQ32s16sI", page)
    assert fields == (b"PDOCHUNK", 1, 1, 8192, FINGERPRINT, DIGEST, len(KEY))
    assert page[76 : 76 + len(KEY)] == KEY
    assert page[76 + len(KEY) : 4080] == bytes(4080 - 76 - len(KEY))
    assert page[4080:] == xxhash.xxh3_128_digest(page[:4080])


@pytest.mark.parametrize("digest", [DIGEST, None])
def test_a_trailer_gives_back_the_digest(digest: bytes | None) -> None:
    assert FORM.digest(FORM.pack(KEY, digest), KEY, "f") == digest


@pytest.mark.parametrize("key", [make_key(b"", 0), make_key(b"x" * (MAX_KEY_BYTES - 4), 1)])
def test_keys_of_any_length_that_fits(key: bytes) -> None:
    assert FORM.digest(FORM.pack(key, DIGEST), key, "f") == DIGEST  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused_before_it_is_written() -> None:
    with pytest.raises(MisuseError, match=str(MAX_KEY_BYTES)):
        FORM.pack(make_key(b"x" * MAX_KEY_BYTES, 0), DIGEST)
    with pytest.raises(MisuseError, match="32 bytes"):
        ChunkFormat(8192, b"short")


@given(at=st.integers(0, TRAILER_BYTES - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(at: int, bit: int) -> None:
    page = bytearray(FORM.pack(KEY, DIGEST))
    page[at] ^= 1 << bit
    with pytest.raises(CorruptChunk):
        FORM.digest(bytes(page), KEY, "f")


@given(st.binary(min_size=1, max_size=64))
def test_a_page_of_anything_is_corrupt(start: bytes) -> None:
    with pytest.raises(CorruptChunk):
        FORM.digest(start.ljust(TRAILER_BYTES, start[-1:]), KEY, "f")


@pytest.mark.parametrize(
    ("form", "key", "told"),
    [
        (ChunkFormat(4096, FINGERPRINT), KEY, "4096 bytes, not 8192"),
        (ChunkFormat(8192, os.urandom(32)), KEY, FINGERPRINT.hex()[:16]),
        (FORM, make_key(hashlib.sha256(b"block").digest(), 8), KEY.hex()),
        (FORM, make_key(hashlib.sha256(b"another").digest(), 7), KEY.hex()),
        (FORM, make_key(b"a longer key" * 9, 7), KEY.hex()),
    ],
)
def test_a_sound_trailer_of_something_else_names_both(
    form: ChunkFormat, key: bytes, told: str
) -> None:
    page = form.pack(key, DIGEST)  # type: ignore[arg-type]
    with pytest.raises(CorruptChunk, match=told) as caught:
        FORM.digest(page, KEY, "/some/file")
    assert caught.value.path == "/some/file"


@pytest.mark.parametrize(("at", "told"), [(8, "version 2"), (12, "algorithm 2")])
def test_what_a_later_version_wrote_is_not_called_corrupt(at: int, told: str) -> None:
    page = bytearray(FORM.pack(KEY, DIGEST))
    page[at] = 2
    page[4080:] = xxhash.xxh3_128_digest(bytes(page[:4080]))
    with pytest.raises(StorageError, match=told) as caught:
        FORM.digest(bytes(page), KEY, "f")
    assert not isinstance(caught.value, CorruptChunk)


def test_a_sound_trailer_of_any_configuration_states_the_chunks_length() -> None:
    other = ChunkFormat(1 << 20, hashlib.sha256(b"another").digest())
    page = other.pack(KEY, None)
    assert stated_chunk_bytes(page) == 1 << 20
    for spoilt in (b"", bytes(TRAILER_BYTES), page[1:], page[:-1] + b"?", b"X" + page[1:]):
        assert stated_chunk_bytes(spoilt) is None
