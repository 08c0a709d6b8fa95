"""Storing one batch: write beside, prove that it is whole, publish by rename."""

from __future__ import annotations

import errno
import os

from pdoffload.agent.agent import Op
from pdoffload.errors import DeadlineExceeded, PdOffloadError, StorageError, StorageFull
from pdoffload.tiers.base import Verify
from pdoffload.tiers.chunkfile import TRAILER_BYTES
from pdoffload.tiers.fs.lane import Files, Lane, Terms
from pdoffload.tiers.fs.paths import is_chunk_file
from pdoffload.tiers.parts import Batch

_FLAGS = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

Numbers = list[int]
"""Chunks, by their number in the batch."""


def store_batch(terms: Terms, lane: Lane, batch: Batch, files: Files) -> None:
    """Store what is not there yet, and enter into `batch` how it goes with each chunk.

    Raises what `Lane.move` raises and what `Quota.reserve` does; the chunks that have no entry then are the
    caller's to fail.
    """
    paths = [terms.space.path(key) for key in batch.keys]
    wanted = _absent(terms, batch, paths)
    if terms.quota is not None and len(wanted) < len(paths):
        terms.quota.used(key for key, there in zip(batch.keys, batch.present, strict=True) if there)
    if not wanted:
        return
    wanted = _that_fit_the_disk(terms, batch, wanted)
    quota, claim = terms.quota, 0
    if quota is not None and wanted:
        # A little before the deadline, so that who waits in vain is not taken for stuck.
        claim = quota.reserve(
            [batch.keys[number] for number in wanted],
            len(wanted) * terms.format.file_bytes,
            timeout_s=0.9 * terms.time_left_s(batch),
        )
    try:
        opened = _open_all(terms, batch, wanted, paths, files)
        if opened:
            _write_all(terms, lane, batch, opened, paths, files)
    finally:
        if quota is not None and wanted:
            stored = (batch.keys[number] for number in wanted if batch.moved[number])
            quota.wrote(claim, stored, terms.format.file_bytes)


def _absent(terms: Terms, batch: Batch, paths: list[str]) -> Numbers:
    """The chunks that have no sound file yet; the others are entered as present."""
    forced = batch.forced()
    wanted = []
    for number, path in enumerate(paths):
        if batch.keys[number] not in forced and _is_sound(path, terms.sound_sizes):
            batch.present[number] = True
        else:
            wanted.append(number)
    return wanted


def _is_sound(path: str, sizes_bytes: tuple[int, ...]) -> bool:
    # Mostly there is no such file, and this way of asking raises nothing then.
    if not os.access(path, os.F_OK):
        return False
    try:
        return is_chunk_file(os.stat(path), sizes_bytes)
    except OSError:
        return False  # evicted this moment; writing it anew is right for all other causes too


def _that_fit_the_disk(terms: Terms, batch: Batch, wanted: Numbers) -> Numbers:
    """The first of `wanted`, as many as leave `min_free_bytes` on the disk; the others have failed."""
    free_bytes = _free_bytes(terms)
    count = max(0, free_bytes - terms.min_free_bytes) // terms.format.file_bytes
    if count < len(wanted):
        reason = f"{free_bytes} bytes free, and min_free_bytes is {terms.min_free_bytes}"
        full = StorageFull(terms.space.base, reason, errno.ENOSPC)
        batch.errors.update(dict.fromkeys(wanted[count:], full))
    return wanted[:count]


def _free_bytes(terms: Terms) -> int:
    try:
        status = os.statvfs(terms.space.base)
    except FileNotFoundError:
        # Somebody removed the namespace; it is made again when the first file is opened.
        status = os.statvfs(os.path.dirname(terms.space.root_dir))
    return status.f_bavail * status.f_frsize


def _open_all(
    terms: Terms, batch: Batch, wanted: Numbers, paths: list[str], files: Files
) -> Numbers:
    """An unfinished file of the final length for each chunk, in this order in `files`."""
    opened = []
    for number in wanted:
        try:
            _open_one(terms, files)
        except OSError as error:
            batch.errors[number] = _storage_error(terms, error, paths[number])
        else:
            opened.append(number)
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
        os.ftruncate(fd, terms.format.file_bytes)
    except OSError:
        files.close_one(fd)
        raise


def _write_all(
    terms: Terms, lane: Lane, batch: Batch, opened: Numbers, paths: list[str], files: Files
) -> None:
    lane.chunks.begin(Op.WRITE, [batch.slots[number] for number in opened])
    for place, number in enumerate(opened):
        digest = None if terms.verify is Verify.OFF else lane.chunks.checksum(place)
        start = place * TRAILER_BYTES
        lane.memory[start : start + TRAILER_BYTES] = terms.format.pack(batch.keys[number], digest)
    lost = lane.move(Op.WRITE, batch, files, [False] * len(opened))
    if terms.time_left_s(batch) <= 0:
        # The job may have been told as failed, and its memory changed, while the last bytes were read.
        raise DeadlineExceeded(batch.what, terms.timeout_s)
    for fd, number in zip(tuple(files.open), opened, strict=True):
        path = paths[number]
        try:
            _require_whole(terms, fd, path, lost)
            if terms.fsync:
                os.fsync(fd)
            _publish(terms, files, fd, path)
        except OSError as error:
            batch.errors[number] = _storage_error(terms, error, path)
        except StorageError as error:
            batch.errors[number] = error
        else:
            batch.moved[number] = True


def _require_whole(terms: Terms, fd: int, path: str, lost: PdOffloadError | None) -> None:
    """Raise the reason unless every byte of the file was written.

    A request tells that one of its writes failed, not which, and a NIXL before 1.5 counts a short write
    as done. What was not written is a hole in the file, whose length was set before.
    """
    whole = os.lseek(fd, 0, os.SEEK_HOLE) == terms.format.file_bytes
    if whole and (lost is None or terms.shows_holes):
        return
    # The reason does not reach us through NIXL: ask for the same space again. The file goes anyway.
    os.posix_fallocate(fd, 0, terms.format.file_bytes)
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
        if not _is_sound(path, terms.sound_sizes):
            raise


def _storage_error(terms: Terms, error: OSError, path: str) -> StorageError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return StorageError.from_os_error(path, error)
    reason = f"{os.strerror(error.errno)}, {_free_bytes(terms)} bytes free"
    return StorageFull(path, reason, error.errno)
