"""Loading one batch: open, check the length, move, compare checksums."""

from __future__ import annotations

import errno
import os
import stat

import xxhash

from pdoffload.agent.agent import Op
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import CorruptChunk, PdOffloadError, StorageError
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Verify
from pdoffload.tiers.batches import Batch, Outcome
from pdoffload.tiers.chunkfile import TRAILER_BYTES, Trailer, parse, require
from pdoffload.tiers.fs_lane import Files, Lane, Terms, remove_quietly

# O_NONBLOCK: a FIFO in a chunk's place must not hold the thread.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TOUCH_GRAIN_S = 60.0
"""A file read again within this time is not marked as used again."""

Failed = list[tuple[BlockKey, PdOffloadError]]
Opened = tuple[BlockKey, int, str, bool]
"""Key, slot, path, and whether the file is bare: without a trailer."""


def load_batch(terms: Terms, lane: Lane, batch: Batch, files: Files) -> Outcome:
    """Load what is there and sound. Raises what `Lane.move` raises; chunk by chunk failures are values."""
    failed: Failed = []
    vanished = verified = moved_bytes = 0
    opened: list[Opened] = []
    for key, slot in zip(batch.keys, batch.slots, strict=True):
        terms.region.forget_checksum(slot)
        path = terms.space.path(key)
        try:
            opened.append((key, slot, path, _open(terms, files, path)))
        except FileNotFoundError as error:
            vanished += 1
            failed.append((key, StorageError.from_os_error(path, error)))
        except OSError as error:
            failed.append((key, StorageError.from_os_error(path, error)))
        except StorageError as error:
            failed.append((key, error))
    if opened:
        slots = [slot for _, slot, _, _ in opened]
        transfer = lane.move(Op.READ, batch, files, slots, [bare for *_, bare in opened])
        lost = transfer.error if transfer.state is not TransferState.DONE else None
        moved_bytes = len(opened) * terms.chunk_bytes
        for number, (fd, chunk) in enumerate(zip(tuple(files.open), opened, strict=True)):
            start = number * TRAILER_BYTES
            page = lane.memory[start : start + TRAILER_BYTES]
            try:
                verified += _check(terms, chunk, page, lost)
            except CorruptChunk as error:
                _remove(fd, chunk[2])
                failed.append((chunk[0], error))
            except StorageError as error:
                failed.append((chunk[0], error))
    return Outcome(
        batch=batch,
        failed=tuple(failed),
        moved_bytes=moved_bytes,
        verified=verified,
        vanished=vanished,
        ended_s=terms.clock.monotonic_s(),
    )


def _open(terms: Terms, files: Files, path: str) -> bool:
    """Open `path` into `files`; whether it is bare. Raises `OSError` or `StorageError`."""
    fd = os.open(path, _FLAGS | terms.open_flags)
    files.open[fd] = None
    try:
        status = os.fstat(fd)
        size_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(path, "is not a regular file", errno.EINVAL)
        if size_bytes not in (terms.file_bytes, terms.chunk_bytes):
            _remove(fd, path)
            raise CorruptChunk(
                path,
                f"has {size_bytes} bytes; want {terms.file_bytes}, or {terms.chunk_bytes} bare",
            )
        if size_bytes not in terms.sound_sizes:
            raise StorageError(path, "carries no checksum, and `verify` is `always`")
        if terms.quota is not None and terms.clock.wall_s() - status.st_mtime > _TOUCH_GRAIN_S:
            os.utime(fd)
    except BaseException:
        files.close_one(fd)
        raise
    return size_bytes == terms.chunk_bytes


def _check(terms: Terms, chunk: Opened, page: bytes, lost: PdOffloadError | None) -> bool:
    """Whether the slot's bytes were compared with a checksum. Raises `StorageError` if they are not right.

    A request tells that one of its reads failed, not which (`lost`): bytes that match their checksum are
    right all the same; of others nothing is known, and their file is not to blame.
    """
    try:
        compared = _compare(terms, chunk, page)
    except StorageError as error:
        if lost is None:
            raise
        raise StorageError(chunk[2], f"was not read: {lost}", errno.EIO) from error
    if lost is not None and not compared:
        raise StorageError(chunk[2], f"was not read: {lost}", errno.EIO)
    return compared


def _compare(terms: Terms, chunk: Opened, page: bytes) -> bool:
    key, slot, path, bare = chunk
    digest = None
    if not bare:
        trailer = parse(page, path)
        require(trailer, Trailer(key, terms.chunk_bytes, terms.fingerprint, None), path)
        digest = trailer.digest
    if terms.verify is Verify.OFF:
        return False
    if digest is None:
        if terms.verify is Verify.ALWAYS:
            raise StorageError(path, "carries no checksum, and `verify` is `always`")
        return False
    if xxhash.xxh3_128_digest(terms.region.slot_view(slot)) != digest:
        raise CorruptChunk(path, "does not match its checksum")
    terms.region.set_checksum(slot, digest)
    return True


def _remove(fd: int, path: str) -> None:
    """Remove a corrupt file, unless another process has put a new one in its place."""
    try:
        there, here = os.stat(path, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return
    if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
        remove_quietly(path)
