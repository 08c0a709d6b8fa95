"""Loading one batch: open, check the length, move, compare checksums."""

from __future__ import annotations

import errno
import os
import stat

from pdoffload.agent.agent import Op
from pdoffload.errors import CorruptChunk, PdOffloadError, StorageError
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Verify
from pdoffload.tiers.chunkfile import TRAILER_BYTES
from pdoffload.tiers.fs.evict import lock_for_reading
from pdoffload.tiers.fs.lane import Files, Lane, Terms, remove_quietly
from pdoffload.tiers.parts import Batch

# O_NONBLOCK: a FIFO in a chunk's place must not hold the thread.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def load_batch(terms: Terms, lane: Lane, batch: Batch, files: Files) -> None:
    """Load what is there and sound, and enter into `batch` how it goes with each chunk.

    Raises what `Lane.move` raises; the chunks that have no entry then are the caller's to fail.
    """
    opened: list[tuple[int, str, bool]] = []
    terms.memory.forget(batch.slots)
    for number, key in enumerate(batch.keys):
        path = terms.space.path(key)
        try:
            opened.append((number, path, _open(terms, files, path)))
        except OSError as error:
            batch.vanished[number] = isinstance(error, FileNotFoundError)
            batch.errors[number] = StorageError.from_os_error(path, error)
        except StorageError as error:
            batch.errors[number] = error
    if not opened:
        _tell_quota(terms, batch)
        return
    lane.chunks.begin(Op.READ, [batch.slots[number] for number, _, _ in opened])
    lost = lane.move(Op.READ, batch, files, [bare for _, _, bare in opened])
    for place, (fd, (number, path, bare)) in enumerate(zip(files.open, opened, strict=True)):
        batch.moved[number] = True
        start = place * TRAILER_BYTES
        page = b"" if bare else lane.memory[start : start + TRAILER_BYTES]
        try:
            key = batch.keys[number]
            batch.verified[number] = _check(terms, lane, place, key, path, page, lost)
        except CorruptChunk as error:
            _remove(fd, path)
            batch.errors[number] = error
        except StorageError as error:
            batch.errors[number] = error
    _tell_quota(terms, batch)


def _tell_quota(terms: Terms, batch: Batch) -> None:
    """Which chunks were used, and which have no file any more."""
    if terms.quota is None:
        return
    gone = [
        batch.keys[number]
        for number, error in batch.errors.items()
        if batch.vanished[number] or isinstance(error, CorruptChunk)
    ]
    if gone:
        terms.quota.gone(gone)
    terms.quota.used(key for number, key in enumerate(batch.keys) if number not in batch.errors)


def _open(terms: Terms, files: Files, path: str) -> bool:
    """Open `path` into `files`; whether it is bare: without a trailer. Raises `OSError`, `StorageError`."""
    fd = os.open(path, _FLAGS | terms.open_flags)
    files.open[fd] = None
    try:
        status = os.fstat(fd)
        size_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(path, "is not a regular file", errno.EINVAL)
        if size_bytes not in (terms.format.file_bytes, terms.format.chunk_bytes):
            _remove(fd, path)
            raise CorruptChunk(path, f"has {size_bytes} bytes, not {terms.format.file_bytes}")
        if size_bytes not in terms.sound_sizes:
            raise StorageError(path, "carries no checksum, and `verify` is `always`")
        lock_for_reading(fd)
    except BaseException:
        files.close_one(fd)
        raise
    return size_bytes == terms.format.chunk_bytes


def _check(
    terms: Terms,
    lane: Lane,
    place: int,
    key: BlockKey,
    path: str,
    page: bytes,
    lost: PdOffloadError | None,
) -> bool:
    """Whether the chunk's bytes were compared with a checksum. Raises `StorageError` if they are not right.

    A request tells that one of its reads failed, not which (`lost`): bytes that match their checksum are
    right all the same; of others nothing is known, and their file is not to blame.
    """
    try:
        compared = _compare(terms, lane, place, key, path, page)
    except StorageError as error:
        if lost is None:
            raise
        raise StorageError(path, f"was not read: {lost}", errno.EIO) from error
    if lost is not None and not compared:
        raise StorageError(path, f"was not read: {lost}", errno.EIO)
    return compared


def _compare(terms: Terms, lane: Lane, place: int, key: BlockKey, path: str, page: bytes) -> bool:
    digest = terms.format.digest(page, key, path) if page else None
    if terms.verify is Verify.OFF:
        return False
    if digest is None:
        if terms.verify is Verify.ALWAYS:
            raise StorageError(path, "carries no checksum, and `verify` is `always`")
        return False
    if not lane.chunks.matches(place, digest):
        raise CorruptChunk(path, "does not match its checksum")
    return True


def _remove(fd: int, path: str) -> None:
    """Remove a corrupt file, unless another process has put a new one in its place."""
    try:
        there, here = os.stat(path, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return
    if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
        remove_quietly(path)
