"""Storing and loading one batch: copy between slots and staging memory, move, compare checksums."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import xxhash

from pdoffload.agent.agent import Op
from pdoffload.errors import CorruptChunk, DeadlineExceeded, PdOffloadError, StorageError
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Verify
from pdoffload.tiers.chunkfile import TRAILER_BYTES
from pdoffload.tiers.obj.lane import Lane, Terms
from pdoffload.tiers.parts import Batch, Part

_UNTOUCHED = b"pdoffload: nothing was read here"
"""Stands at the end of a chunk's place before a read: of an object that is too short some of it stays."""


def store_batch(terms: Terms, lane: Lane, batch: Batch) -> None:
    """Store what is not there yet, and enter into `batch` how it goes with each chunk.

    Raises what `Lane.move` raises; the chunks that have no entry then are the caller's to fail.
    """
    staged = [
        number
        for number, part in _wanted(terms, lane, batch)
        if _copy_out(terms, lane, batch, number, part)
    ]
    if not staged:
        return
    failed = lane.move(Op.WRITE, batch, staged)
    for number in staged:
        error = failed.get(number)
        if error is None:
            batch.moved[number] = True
        else:
            batch.errors[number] = _of_write(terms, batch.keys[number], error)


def _wanted(terms: Terms, lane: Lane, batch: Batch) -> list[tuple[int, Part]]:
    """The chunks that have no object yet; the others are entered as present."""
    forced = batch.forced()
    numbered = list(enumerate(_parts(batch)))
    open_keys = dict.fromkeys(key for key in batch.keys if key not in forced)
    if open_keys:
        names = [terms.keys.key(key) for key in open_keys]
        try:
            found = lane.agent.query_objects(names)
        except PdOffloadError as error:
            raise _of_read(terms, names[0], error) from error
        there = {key for key, is_there in zip(open_keys, found, strict=True) if is_there}
        for number, key in enumerate(batch.keys):
            batch.present[number] = key in there
    return [(number, part) for number, part in numbered if not batch.present[number]]


def _copy_out(terms: Terms, lane: Lane, batch: Batch, number: int, part: Part) -> bool:
    """Put the object of a chunk together. False if its job was given up meanwhile."""
    slot, chunk_bytes = batch.slots[number], terms.format.chunk_bytes
    with _claimed(terms, part) as ours:
        if not ours:
            return False
        digest = None if terms.verify is Verify.OFF else terms.region.checksum(slot)
        place = lane.staged(number)
        place[:chunk_bytes] = terms.region.slot_view(slot)
        place[chunk_bytes:] = terms.format.pack(batch.keys[number], digest)
    return True


def load_batch(terms: Terms, lane: Lane, batch: Batch) -> None:
    """Load what is there and sound, and enter into `batch` how it goes with each chunk.

    Raises what `Lane.move` raises; the chunks that have no entry then are the caller's to fail.
    """
    numbers = range(len(batch.keys))
    _clear(terms, lane, numbers, _UNTOUCHED)
    failed = lane.move(Op.READ, batch, numbers)
    cut = _cut_short(terms, lane, batch, [number for number in numbers if number not in failed])
    for number, part in enumerate(_parts(batch)):
        name = terms.keys.key(batch.keys[number])
        try:
            if number in failed:
                raise _absent_or(terms, lane, name, failed[number])
            batch.moved[number] = True
            if number in cut:
                raise CorruptChunk(name, f"is shorter than {terms.format.chunk_bytes} bytes")
            digest = _checked(terms, lane, batch, number, name)
        except PdOffloadError as error:
            batch.vanished[number] = isinstance(error, StorageError) and error.errno == errno.ENOENT
            batch.errors[number] = error
            digest = None
        _copy_in(terms, lane, batch, number, part, digest)


def _clear(terms: Terms, lane: Lane, numbers: Iterable[int], mark: bytes) -> None:
    """Make the places of these chunks show what a read leaves out: the end of the chunk, the trailer."""
    chunk_bytes = terms.format.chunk_bytes
    for number in numbers:
        place = lane.staged(number)
        place[chunk_bytes - len(mark) : chunk_bytes] = mark
        place[chunk_bytes:] = bytes(TRAILER_BYTES)


def _cut_short(terms: Terms, lane: Lane, batch: Batch, numbers: list[int]) -> set[int]:
    """Those of `numbers` whose object ends before its chunk does.

    NIXL does not tell how much came. Where a trailer came, the chunk before it did. Where none came, the
    object is read once more over another mark: what differs then did not come from the store.
    """
    chunk_bytes = terms.format.chunk_bytes
    bare = [number for number in numbers if not any(lane.staged(number)[chunk_bytes:])]
    if not bare or terms.verify is Verify.ALWAYS:
        return set()
    end = slice(chunk_bytes - len(_UNTOUCHED), chunk_bytes)
    before = {number: bytes(lane.staged(number)[end]) for number in bare}
    _clear(terms, lane, bare, bytes(byte ^ 0xFF for byte in _UNTOUCHED))
    failed = lane.move(Op.READ, batch, bare)
    return {
        number
        for number in bare
        if number in failed or bytes(lane.staged(number)[end]) != before[number]
    }


def _checked(terms: Terms, lane: Lane, batch: Batch, number: int, name: str) -> bytes | None:
    """The checksum that the staged chunk was found to have; None if none is asked for, or none is there.

    Raises `CorruptChunk` for wrong bytes, `StorageError` for a chunk that cannot be judged.
    """
    chunk_bytes = terms.format.chunk_bytes
    place = lane.staged(number)
    chunk, page = place[:chunk_bytes], bytes(place[chunk_bytes:])
    # An object without a trailer, as vLLM's own tier writes it, leaves the page as it was.
    bare = not any(page)
    digest = None if bare else terms.format.digest(page, batch.keys[number], name)
    if terms.verify is Verify.OFF:
        return None
    if digest is None:
        if terms.verify is Verify.ALWAYS:
            raise StorageError(name, "carries no checksum, and `verify` is `always`")
        return None
    if xxhash.xxh3_128_digest(chunk) != digest:
        raise CorruptChunk(name, "does not match its checksum")
    return digest


def _copy_in(
    terms: Terms, lane: Lane, batch: Batch, number: int, part: Part, digest: bytes | None
) -> None:
    """Give the slot its bytes, if they are right; whatever it held before, its old checksum goes."""
    slot = batch.slots[number]
    with _claimed(terms, part) as ours:
        if not ours:
            return
        terms.region.forget_checksum(slot)
        if number in batch.errors:
            return
        terms.region.slot_view(slot)[:] = lane.staged(number)[: terms.format.chunk_bytes]
        if digest is not None:
            terms.region.set_checksum(slot, digest)
            batch.verified[number] = True


def _absent_or(terms: Terms, lane: Lane, name: str, error: PdOffloadError) -> PdOffloadError:
    """Why a read failed: NIXL does not tell an object that is not there from a store that is not."""
    if isinstance(error, DeadlineExceeded):
        return error
    finding = terms.why.of_read(name)
    if finding is not None:
        return finding.error(name)
    try:
        (there,) = lane.agent.query_objects([name])
    except PdOffloadError:
        return _unread(name, error)
    return _unread(name, error) if there else StorageError(name, "is not there", errno.ENOENT)


def _unread(name: str, error: PdOffloadError) -> StorageError:
    return StorageError(name, f"was not read: {error}", errno.EIO)


def _of_read(terms: Terms, name: str, error: PdOffloadError) -> PdOffloadError:
    finding = terms.why.of_read(name)
    return finding.error(name) if finding is not None else _unread(name, error)


def _of_write(terms: Terms, key: BlockKey, error: PdOffloadError) -> PdOffloadError:
    name = terms.keys.key(key)
    if isinstance(error, DeadlineExceeded):
        return error
    finding = terms.why.of_write()
    if finding is not None:
        return finding.error(name)
    return StorageError(name, f"was not written: {error}", errno.EIO)


def _parts(batch: Batch) -> Iterator[Part]:
    """The part of each chunk of `batch`."""
    return (part for part in batch.parts for _ in part.keys)


@contextmanager
def _claimed(terms: Terms, part: Part) -> Iterator[bool]:
    """Whether the slots of `part` may be touched in the block."""
    ours = terms.claims.take(part)
    try:
        yield ours
    finally:
        if ours:
            terms.claims.drop(part)
