"""Removing chunk files: one process at a time, and never a file that is being read.

A reader holds a shared lock (`flock`) on the file from opening to closing it; the kernel drops it with the
process. An evictor asks for the exclusive lock without waiting, and leaves the file alone if it does not
get it. Between processes this costs a reader one system call per file. On a file system without such locks
files are removed all the same: one that is open stays readable on its host, elsewhere the load fails and
its request computes.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
from collections.abc import Collection, Iterable

from pdoffload.clock import Clock
from pdoffload.errors import StorageError
from pdoffload.layout import BlockKey
from pdoffload.tiers.fs.ledger import Ledger, Row
from pdoffload.tiers.fs.paths import Namespace
from pdoffload.tiers.fs.writer import is_live, sweep

LOCK_NAME = ".evict.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF, errno.ENOSYS)


class EvictorLock:
    """The lock of the one evictor of a namespace. Dies with its process."""

    def __init__(self, space: Namespace) -> None:
        self._path = f"{space.base}/{LOCK_NAME}"
        self._mode = space.file_mode
        self._fd = -1

    def __repr__(self) -> str:
        return f"<EvictorLock {self._path}{': held' if self._fd >= 0 else ''}>"

    def take(self) -> bool:
        """Whether we have it now; never waits. Raises `StorageError`."""
        try:
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._path, flags, self._mode)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(fd)
                raise
        except BlockingIOError:
            return False
        except OSError as error:
            raise StorageError.from_os_error(self._path, error) from error
        self._fd = fd
        return True

    def give(self) -> None:
        """Let go of it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def lock_for_reading(fd: int) -> None:
    """Say that the chunk file `fd` is being read, until it is closed.

    Where an evictor has it this very moment the file is gone already, and its bytes are right all the same.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


class Removal(enum.Enum):
    """What became of a file that was to go."""

    REMOVED = "removed"
    GONE = "gone"
    """Somebody else was first."""
    BEING_READ = "being read"


def remove_unread(path: str) -> Removal:
    """Remove a chunk file unless somebody reads it. `OSError` if the system refuses."""
    fd = -1
    try:
        with contextlib.suppress(PermissionError):
            # Not ours to read: then it is nobody's whose locks we could see.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if fd >= 0:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Removal.BEING_READ
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        os.unlink(path)
    except FileNotFoundError:
        return Removal.GONE
    finally:
        if fd >= 0:
            os.close(fd)
    return Removal.REMOVED


class Tally:
    """What has come of the rounds of one eviction so far."""

    def __init__(self) -> None:
        self.removed = 0
        self.removed_bytes = 0
        self.being_read = 0
        self.refused: list[OSError] = []
        """Why the system did not let some files go."""

    def __repr__(self) -> str:
        return f"<Tally {self.removed} removed, {self.why()}>"

    def why(self) -> str:
        """Why the others stay."""
        if self.refused:
            return f"{len(self.refused)} files cannot be removed: {self.refused[-1]}"
        return f"all files left are being read or written ({self.being_read} met)"


def remove_rows(
    space: Namespace, rows: Iterable[Row], now_us: int, tally: Tally
) -> tuple[list[Row], list[Row]]:
    """Remove the files of an evictor's claim: those that are gone, and those to be entered again.

    The latter count as used just now: they are being read, or would be tried in vain again and again.
    """
    removed: list[Row] = []
    kept: list[Row] = []
    for row in rows:
        try:
            removal = remove_unread(space.path(row.key))
        except OSError as error:
            tally.refused.append(error)
            kept.append(row._replace(used_us=now_us))
            continue
        if removal is Removal.BEING_READ:
            tally.being_read += 1
            kept.append(row._replace(used_us=now_us))
        else:
            tally.removed += 1
            tally.removed_bytes += row.size_bytes
            removed.append(row)
    return removed, kept


def resolve_dead(ledger: Ledger, space: Namespace, clock: Clock, *, live: Collection[str]) -> int:
    """Settle the claims of processes that have died; how many. Under the evictor's lock.

    Their unfinished files go first, since the claim counted them. `live` are owners known to live.
    """
    claims = [claim for claim in ledger.claims() if claim.owner not in live]
    dead = [claim for claim in claims if not is_live(space, claim.owner)]
    if not dead:
        return 0
    sweep(space, clock)
    for claim in dead:
        ledger.settle((claim.id,), _standing(space, claim.keys))
    return len(dead)


def _standing(space: Namespace, keys: Iterable[BlockKey]) -> list[Row]:
    rows = []
    for key in keys:
        try:
            status = os.lstat(space.path(key))
        except OSError:
            continue
        rows.append(Row(key, status.st_size, int(status.st_mtime * 1e6)))
    return rows
