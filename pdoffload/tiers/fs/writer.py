"""The folder a process writes its unfinished files in, and the sweep of folders whose process is gone.

    <base>/.tmp/<host>-<pid>-<8 hex digits>/.lock     flocked for as long as the process lives
                                            /<n>.part

A file is written here and renamed to its final name when it is whole, so a crash leaves remains here
and nowhere else. Whoever holds the lock lives: pids come back and host names are shared, locks are
neither. Another host's locks cannot be seen on every network file system, so folders of another host
also have to have been quiet for `FOREIGN_QUIET_S`; a writer whose folder was taken away all the same
makes a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Iterator

from pdoffload.clock import Clock
from pdoffload.errors import StorageError
from pdoffload.tiers.fs.paths import TEMP_NAME, Namespace

_log = logging.getLogger(__name__)

LOCK_NAME = ".lock"
FOREIGN_QUIET_S = 3600.0
_ATTEMPTS = 5


class WriterDir:
    """This process's folder for unfinished files. Made at the first store; any thread."""

    def __init__(self, space: Namespace) -> None:
        self._space = space
        self._serial = itertools.count()
        self._making = threading.Lock()
        self._path: str | None = None
        self._lock_fd = -1

    def __repr__(self) -> str:
        return f"<WriterDir {self._path or 'not made yet'}>"

    def temp_path(self) -> str:
        """A name nobody else uses. `OSError` or `StorageError` if the folder cannot be made."""
        path = self._path
        if path is None:
            path = self._make(None)
        return f"{path}/{next(self._serial)}.part"

    def owner(self) -> str:
        """The name of our folder, whose lock says that we live; as `temp_path`."""
        return os.path.basename(self._path or self._make(None))

    def renew(self, temp_path: str) -> str:
        """A name in a new folder: the one of `temp_path` was taken away by somebody."""
        return f"{self._make(os.path.dirname(temp_path))}/{next(self._serial)}.part"

    def _make(self, lost: str | None) -> str:
        # Made under the lock, files and all: another thread must not see half a folder, and this is
        # once in a process's life.
        with self._making:
            if self._path is not None and self._path != lost:
                return self._path
            self._let_go()
            for _ in range(_ATTEMPTS):
                if self._try_make():
                    assert self._path is not None
                    return self._path
            raise StorageError(
                f"{self._space.base}/{TEMP_NAME}", "no folder of our own stays there"
            )

    def _try_make(self) -> bool:
        name = f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = f"{self._space.base}/{TEMP_NAME}/{name}"
        self._space.make_dir(path)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        fd = -1
        try:
            fd = os.open(f"{path}/{LOCK_NAME}", flags, self._space.file_mode)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A sweeper may have had the lock in between and removed the folder: then the name is gone.
            os.stat(f"{path}/{LOCK_NAME}")
        except (FileNotFoundError, BlockingIOError):
            if fd >= 0:
                os.close(fd)
            return False
        except OSError:
            if fd >= 0:
                os.close(fd)
            remove_folder(path)
            raise
        self._path, self._lock_fd = path, fd
        return True

    def _let_go(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._path, self._lock_fd = None, -1

    def close(self) -> None:
        """Remove the folder and what is in it; idempotent. Not in a forked child: it is the parent's.

        What the system refuses to remove is left to the next start's sweep.
        """
        with self._making:
            if self._path is not None:
                try:
                    remove_folder(self._path)
                except OSError as error:
                    _log.warning("%s is left behind: %s", self._path, error)
            self._let_go()


def is_live(space: Namespace, owner: str) -> bool:
    """Whether the process with that folder lives, as far as this host can see."""
    path = f"{space.base}/{TEMP_NAME}/{owner}/{LOCK_NAME}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError as error:
        _log.debug("%s: %s", path, error)
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def sweep(space: Namespace, clock: Clock) -> tuple[int, int]:
    """Remove what dead writers left under `space`; (files, bytes) reclaimed. Never a live writer's.

    Says so in the log when there was anything. An `OSError` on one folder leaves that folder alone.
    """
    root = f"{space.base}/{TEMP_NAME}"
    files = size_bytes = 0
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return 0, 0
    for name in names:
        try:
            counts = _sweep_one(f"{root}/{name}", clock)
        except OSError as error:
            # Another process sweeps at the same time, or the folder is not ours to remove.
            _log.debug("%s/%s is left alone: %s", root, name, error)
            continue
        files, size_bytes = files + counts[0], size_bytes + counts[1]
    if files:
        _log.info(
            "%s: reclaimed %d unfinished files, %d bytes, of dead writers", root, files, size_bytes
        )
    return files, size_bytes


def _sweep_one(path: str, clock: Clock) -> tuple[int, int]:
    with _looked_at(path, clock) as is_dead:
        return remove_folder(path) if is_dead else (0, 0)


def unfinished(space: Namespace, clock: Clock) -> tuple[tuple[int, int], tuple[int, int]]:
    """(files, bytes) that a sweep would reclaim, and those of writers that live. Removes nothing."""
    counts = {True: (0, 0), False: (0, 0)}
    root = f"{space.base}/{TEMP_NAME}"
    if os.path.islink(root) or not os.path.isdir(root):
        return counts[True], counts[False]
    with os.scandir(root) as folders:
        for folder in folders:
            # Another process may sweep it at the same time.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                with _looked_at(folder.path, clock) as is_dead, os.scandir(folder.path) as entries:
                    sizes = [
                        each.stat(follow_symlinks=False).st_size
                        for each in entries
                        if each.name != LOCK_NAME
                    ]
                files, size_bytes = counts[is_dead]
                counts[is_dead] = (files + len(sizes), size_bytes + sum(sizes))
    return counts[True], counts[False]


@contextlib.contextmanager
def _looked_at(path: str, clock: Clock) -> Iterator[bool]:
    """Whether the writer of that folder is gone, as far as it can be told. Its lock is held meanwhile, so
    that nobody else removes it. `OSError`."""
    try:
        fd = os.open(f"{path}/{LOCK_NAME}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Its owner is between two system calls, or died there.
        yield _is_quiet(path, clock)
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            own_host = os.path.basename(path).rsplit("-", 2)[0] == os.uname().nodename
            yield own_host or _is_quiet(path, clock)
    finally:
        os.close(fd)


def _is_quiet(path: str, clock: Clock) -> bool:
    """Whether nothing in `path` was written for `FOREIGN_QUIET_S`, by the clock of the file system."""
    with os.scandir(path) as entries:
        newest_s = max((entry.stat().st_mtime for entry in entries), default=0.0)
    newest_s = max(newest_s, os.stat(path).st_mtime)
    return clock.wall_s() - newest_s > FOREIGN_QUIET_S


def remove_folder(path: str) -> tuple[int, int]:
    """Remove a writer's folder; (files, bytes) removed, the lock file not counted. `OSError` if refused.

    The lock goes last: until then another sweeper sees that somebody holds it.
    """
    files = size_bytes = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name != LOCK_NAME:
                size_bytes += entry.stat(follow_symlinks=False).st_size
                os.unlink(entry.path)
                files += 1
    if os.path.lexists(f"{path}/{LOCK_NAME}"):
        os.unlink(f"{path}/{LOCK_NAME}")
    os.rmdir(path)
    return files, size_bytes
