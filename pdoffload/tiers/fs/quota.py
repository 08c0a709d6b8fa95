"""The quota of a directory: least recently used files go first, safely across processes.

Usage is what a walk over the files finds, plus what this process has written since. A walk is made when
the tier opens, every `WALK_EVERY_S` while something is written, and whenever the quota is reached. Between
walks other processes' files are not seen, so several writers together may pass the quota until the next
one of them walks.

The time a file was last used is its modification time: loads and touches set it. One process at a
time evicts (a lock file says who); a file that is removed while another process reads it stays readable
there to the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pdoffload.clock import Clock
from pdoffload.layout import BlockKey, make_key
from pdoffload.tiers.fs.paths import Namespace

_log = logging.getLogger(__name__)

LOW_WATER = 0.95
"""Eviction goes down to this share of the quota."""
WALK_EVERY_S = 600.0
LOCK_NAME = ".evict.lock"
LOCK_PATIENCE_S = 5.0
_LOCK_PAUSE_S = 0.05
_MAX_TOUCHED = 16_384
_GROUP_DIR = re.compile(r"[0-9a-f]{2}_g\d+")
_CHUNK_NAME = re.compile(r"(?:[0-9a-f]{2})+\.bin")


class Quota:
    """Keeps the chunk files of one namespace within `max_bytes`. A thread of its own; methods from any."""

    def __init__(self, space: Namespace, max_bytes: int, clock: Clock) -> None:
        self.evicted: deque[BlockKey] = deque()
        """Keys whose files were removed; the owner takes them out."""
        self._space = space
        self._max_bytes = max_bytes
        self._clock = clock
        # Everything below is kept under the condition.
        self._changed = threading.Condition(threading.Lock())
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._wanted_bytes = 0
        self._written_bytes = 0
        self._walks_asked = 1
        self._walks_done = 0
        self._walking = False
        self._walked_at_s = clock.monotonic_s()
        self._held: Counter[BlockKey] = Counter()
        self._touched: set[BlockKey] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pdoffload-fs-quota", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Quota {self._used_bytes} of {self._max_bytes} bytes used>"

    # --- the writers' side ---

    def reserve(self, size_bytes: int, *, timeout_s: float) -> bool:
        """Set `size_bytes` aside, after an eviction if need be. False if there is no room in time.

        Blocks its thread; `wrote` ends the reservation.
        """
        if size_bytes > self._max_bytes:
            return False
        until_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            # Before the first walk nothing is known.
            self._wait(lambda: self._walks_done > 0, until_s)
            if self._walks_done and not self._fits(size_bytes):
                self._wanted_bytes = max(self._wanted_bytes, size_bytes)
                number = self._walks_asked = self._walks_done + (2 if self._walking else 1)
                self._changed.notify_all()
                self._wait(lambda: self._walks_done >= number or self._fits(size_bytes), until_s)
            if self._closed or not self._walks_done or not self._fits(size_bytes):
                return False
            self._reserved_bytes += size_bytes
            return True

    def _wait(self, happened: Callable[[], bool], until_s: float) -> None:
        left_s = max(0.0, until_s - self._clock.monotonic_s())
        self._changed.wait_for(lambda: self._closed or happened(), left_s)

    def _fits(self, size_bytes: int) -> bool:
        return self._used_bytes + self._reserved_bytes + size_bytes <= self._max_bytes

    def wrote(self, size_bytes: int, *, reserved_bytes: int) -> None:
        """`size_bytes` of what was reserved were written; the rest of the reservation is void."""
        with self._changed:
            self._reserved_bytes -= reserved_bytes
            self._used_bytes += size_bytes
            self._written_bytes += size_bytes
            if self._clock.monotonic_s() - self._walked_at_s > WALK_EVERY_S:
                self._walks_asked = max(self._walks_asked, self._walks_done + 1)
            self._changed.notify_all()

    # --- the owner's side ---

    def hold(self, keys: Iterable[BlockKey]) -> None:
        """These are about to be read: not to be evicted."""
        with self._changed:
            self._held.update(keys)

    def let_go(self, keys: Iterable[BlockKey]) -> None:
        """They have been read."""
        with self._changed:
            self._held.subtract(keys)
            self._held = +self._held

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These were used again. Best effort: beyond a bound some are left out."""
        with self._changed:
            if len(self._touched) < _MAX_TOUCHED:
                self._touched.update(keys)
                self._changed.notify_all()

    def close(self, *, timeout_s: float) -> None:
        """Stop the thread; one that hangs in the file system is left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._touched or self._walks_asked > self._walks_done
                )
                if self._closed:
                    return
                touched, self._touched = self._touched, set()
                self._walking = self._walks_asked > self._walks_done
            for key in touched:
                _mark_used(self._space.path(key))
            if self._walking:
                self._walk()

    def _walk(self) -> None:
        """Count what is there and evict what is too much."""
        with self._changed:
            self._written_bytes = 0
        lock_fd = -1
        found: list[_Found] = []
        removed: list[_Found] = []
        try:
            lock_fd = self._lock()
            found = list(_files(self._space.base))
            if lock_fd >= 0:
                removed = self._evict(found)
        except OSError as error:
            _log.warning("%s: the quota cannot be kept: %s", self._space.base, error)
        finally:
            if lock_fd >= 0:
                os.close(lock_fd)
        size_bytes = sum(file.size_bytes for file in found)
        removed_bytes = sum(file.size_bytes for file in removed)
        if removed:
            _log.info(
                "%s: evicted %d files, %d bytes", self._space.base, len(removed), removed_bytes
            )
        with self._changed:
            self._used_bytes = size_bytes - removed_bytes + self._written_bytes
            self._wanted_bytes = 0
            self._walked_at_s = self._clock.monotonic_s()
            self._walks_done += 1
            self._walking = False
            self._changed.notify_all()

    def _lock(self) -> int:
        """The lock of the one evictor. -1 if another process keeps it: then it evicts, or hangs."""
        path = f"{self._space.base}/{LOCK_NAME}"
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, self._space.file_mode)
        until_s = self._clock.monotonic_s() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _LOCK_PAUSE_S)
                if self._closed or self._clock.monotonic_s() > until_s:
                    os.close(fd)
                    return -1

    def _evict(self, found: list[_Found]) -> list[_Found]:
        with self._changed:
            spoken_for_bytes = self._reserved_bytes + self._wanted_bytes
            held = {self._space.path(key) for key in self._held}
        used_bytes = sum(file.size_bytes for file in found)
        if used_bytes + spoken_for_bytes <= self._max_bytes:
            return []
        goal_bytes = min(int(self._max_bytes * LOW_WATER), self._max_bytes - spoken_for_bytes)
        removed = []
        for file in sorted(found):
            if used_bytes <= goal_bytes:
                break
            if file.path not in held and _remove(file.path):
                used_bytes -= file.size_bytes
                removed.append(file)
                self.evicted.append(file.key())
        return removed


class _Found(NamedTuple):
    """A chunk file; sorts by the time it was last used."""

    used_s: float
    path: str
    size_bytes: int

    def key(self) -> BlockKey:
        folder, name = os.path.split(self.path)
        return make_key(bytes.fromhex(name[:-4]), int(folder.rsplit("_g", 1)[1]))


def _files(base: str) -> Iterator[_Found]:
    """The chunk files under `base`. What vanishes meanwhile was removed by another process."""
    for first in _entries(base):
        if first.name.startswith("."):
            continue
        for second in _entries(first.path):
            if not _GROUP_DIR.fullmatch(second.name):
                continue
            for entry in _entries(second.path):
                if not _CHUNK_NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield _Found(status.st_mtime, entry.path, status.st_size)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _mark_used(path: str) -> None:
    try:
        os.utime(path)
    except OSError as error:
        _log.debug("%s cannot be marked as used: %s", path, error)


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        _log.warning("%s cannot be evicted: %s", path, error)
        return False
    return True
