"""Storing one batch: write beside, prove that it is whole, publish by rename."""

from __future__ import annotations

import errno
import os

from pdoffload.agent.agent import Op
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import PdOffloadError, StorageError, StorageFull
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Verify
from pdoffload.tiers.batches import Batch, Outcome
from pdoffload.tiers.chunkfile import TRAILER_BYTES, Trailer, pack
from pdoffload.tiers.fs_lane import Files, Lane, Terms, time_left_s
from pdoffload.tiers.paths import is_chunk_file
from pdoffload.tiers.quota import Quota

_FLAGS = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

Failed = list[tuple[BlockKey, PdOffloadError]]
Chunk = tuple[BlockKey, int, str]
"""Key, slot, final path."""


def store_batch(terms: Terms, lane: Lane, batch: Batch, files: Files) -> Outcome:
    """Store what is not there yet. Raises what `Lane.move` raises; chunk by chunk failures are values."""
    failed: Failed = []
    wanted = _absent(terms, batch)
    already_present = len(batch.keys) - len(wanted)
    fitting = _that_fit_the_disk(terms, wanted, failed) if wanted else wanted
    reserved_bytes = stored = 0
    if terms.quota is not None and fitting:
        reserved_bytes = _reserve(terms, terms.quota, batch, fitting)
    try:
        opened = _open_all(terms, fitting, files, failed)
        stored = _write_all(terms, lane, batch, opened, files, failed) if opened else 0
    finally:
        if terms.quota is not None:
            terms.quota.wrote(stored * terms.file_bytes, reserved_bytes=reserved_bytes)
    return Outcome(
        batch=batch,
        failed=tuple(failed),
        moved_bytes=stored * terms.chunk_bytes,
        already_present=already_present,
        ended_s=terms.clock.monotonic_s(),
    )


def _absent(terms: Terms, batch: Batch) -> list[Chunk]:
    """The chunks of `batch` that have no sound file yet."""
    sizes = terms.sound_sizes
    wanted = []
    for key, slot in zip(batch.keys, batch.slots, strict=True):
        path = terms.space.path(key)
        if key not in batch.forced:
            try:
                if is_chunk_file(os.stat(path), sizes):
                    continue
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.ENOTDIR:
                    raise
        wanted.append((key, slot, path))
    return wanted


def _that_fit_the_disk(terms: Terms, wanted: list[Chunk], failed: Failed) -> list[Chunk]:
    """The first chunks of `wanted`, as many as leave `min_free_bytes` on the disk."""
    free_bytes = _free_bytes(terms)
    count = max(0, free_bytes - terms.min_free_bytes) // terms.file_bytes
    if count < len(wanted):
        reason = f"{free_bytes} bytes free, and min_free_bytes is {terms.min_free_bytes}"
        full = StorageFull(terms.space.base, reason, errno.ENOSPC)
        failed += [(key, full) for key, _, _ in wanted[count:]]
    return wanted[:count]


def _reserve(terms: Terms, quota: Quota, batch: Batch, wanted: list[Chunk]) -> int:
    """Bytes of the quota set aside for `wanted`. Raises `StorageFull` if there is no room in time."""
    size_bytes = len(wanted) * terms.file_bytes
    if not quota.reserve(size_bytes, timeout_s=time_left_s(terms, batch)):
        raise StorageFull(
            terms.space.base, f"no room for {size_bytes} bytes in {quota!r}", errno.EDQUOT
        )
    return size_bytes


def _free_bytes(terms: Terms) -> int:
    try:
        status = os.statvfs(terms.space.base)
    except FileNotFoundError:
        # Somebody removed the namespace; it is made again when the first file is published.
        status = os.statvfs(os.path.dirname(terms.space.root_dir))
    return status.f_bavail * status.f_frsize


def _open_all(terms: Terms, wanted: list[Chunk], files: Files, failed: Failed) -> list[Chunk]:
    """An unfinished file of the final length for each chunk, in this order in `files`."""
    opened = []
    for chunk in wanted:
        try:
            _open_one(terms, files)
        except OSError as error:
            failed.append((chunk[0], _storage_error(terms, error, chunk[2])))
        except StorageError as error:
            failed.append((chunk[0], error))
        else:
            opened.append(chunk)
    return opened


def _open_one(terms: Terms, files: Files) -> None:
    temp = terms.writer.temp_path()
    flags = _FLAGS | terms.open_flags
    try:
        fd = os.open(temp, flags, terms.space.file_mode)
    except FileNotFoundError:
        temp = terms.writer.renew(temp)
        fd = os.open(temp, flags, terms.space.file_mode)
    files.open[fd] = temp
    try:
        if terms.space.chmod_needed:
            os.fchmod(fd, terms.space.file_mode)
        # The final length first: no write has to extend the file, which file systems do one at a
        # time, and a limit on file sizes shows here, by key.
        os.ftruncate(fd, terms.file_bytes)
    except OSError:
        files.close_one(fd)
        raise


def _write_all(
    terms: Terms, lane: Lane, batch: Batch, chunks: list[Chunk], files: Files, failed: Failed
) -> int:
    """Write and publish; how many were stored."""
    for number, (key, slot, _) in enumerate(chunks):
        digest = None if terms.verify is Verify.OFF else terms.region.checksum(slot)
        start = number * TRAILER_BYTES
        trailer = Trailer(key, terms.chunk_bytes, terms.fingerprint, digest)
        lane.memory[start : start + TRAILER_BYTES] = pack(trailer)
    slots = [slot for _, slot, _ in chunks]
    transfer = lane.move(Op.WRITE, batch, files, slots, [False] * len(slots))
    lost = transfer.error if transfer.state is not TransferState.DONE else None
    stored = 0
    for fd, (key, _, path) in zip(tuple(files.open), chunks, strict=True):
        try:
            _require_whole(terms, fd, path, lost)
            if terms.fsync:
                os.fsync(fd)
            _publish(terms, files, fd, path)
        except OSError as error:
            failed.append((key, _storage_error(terms, error, path)))
        except StorageError as error:
            failed.append((key, error))
        else:
            stored += 1
    return stored


def _require_whole(terms: Terms, fd: int, path: str, lost: PdOffloadError | None) -> None:
    """Raise the reason unless every byte of the file was written.

    A request tells that one of its writes failed, not which, and a NIXL before 1.5 counts a short write
    as done. What was not written is a hole in the file, whose length was set before.
    """
    whole = os.lseek(fd, 0, os.SEEK_HOLE) == terms.file_bytes
    if whole and (lost is None or terms.shows_holes):
        return
    # The reason does not reach us through NIXL: ask for the same space again. The file goes anyway.
    os.posix_fallocate(fd, 0, terms.file_bytes)
    raise StorageError(path, f"not written whole: {lost or 'a short write'}", errno.EIO)


def _publish(terms: Terms, files: Files, fd: int, path: str) -> None:
    try:
        try:
            files.publish(fd, path)
        except FileNotFoundError:
            terms.space.make_parents(path)
            files.publish(fd, path)
    except FileExistsError:
        # Some network file systems do not replace: somebody else was first.
        if not is_chunk_file(os.stat(path), terms.sound_sizes):
            raise


def _storage_error(terms: Terms, error: OSError, path: str) -> StorageError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return StorageError.from_os_error(path, error)
    reason = f"{os.strerror(error.errno)}, {_free_bytes(terms)} bytes free"
    return StorageFull(path, reason, error.errno)
