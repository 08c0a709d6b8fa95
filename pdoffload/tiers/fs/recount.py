"""Comparing the ledger with the disk: files that another program put there or removed are found here.

Folder by folder, so that no transaction is long and nobody waits for the whole. What is written or removed
meanwhile is not misread:

    rows, claims <- ledger      1
    files        <- disk        2
    file, no row at 1           nobody of ours is at it unless its key was claimed at 1, or is at 3
    row at 1, no file           gone at 2: a row appears after its file, and rows in use change their time
    corrections  -> ledger      3
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from pdoffload.clock import Clock
from pdoffload.errors import StorageError
from pdoffload.layout import BlockKey
from pdoffload.tiers.fs.ledger import Ledger, LedgerBusy, Row
from pdoffload.tiers.fs.paths import Namespace
from pdoffload.tiers.fs.walk import Found, files_in, prefixes

_log = logging.getLogger(__name__)

LOCK_NAME = ".count.lock"
_REST = 3.0
"""A count nobody waits for rests for so many times as long as it works: it takes the interpreter's lock."""
_SHORTEST_REST_S = 0.0005
_BUSY_PAUSE_S = 0.02
_BUSY_TRIES = 500
_CORRECTIONS = 500
"""In one transaction. What is done late is not done wrong: see 3 above."""
_AGAIN_S = 1.0
"""Between two counts, however much the second is wanted."""
_T = TypeVar("_T")


class Count(msgspec.Struct, frozen=True):
    """What a count found."""

    files: int
    added: int
    """Files that were not in the ledger."""
    dropped: int
    """Rows without a file of their size."""


def recount(
    ledger: Ledger, space: Namespace, clock: Clock, *, stopping: Callable[[], bool]
) -> Count | None:
    """Bring `ledger` in line with the disk. None if another process is at it, or `stopping()`.

    Runs in a thread of its own, which owns `ledger`. Raises `StorageError`.
    """
    path = f"{space.base}/{LOCK_NAME}"
    try:
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, space.file_mode)
    except OSError as error:
        raise StorageError.from_os_error(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _recount(ledger, space, clock, stopping)
    except BlockingIOError:
        return None
    except OSError as error:
        raise StorageError.from_os_error(str(error.filename or path), error) from error
    finally:
        os.close(fd)


def _recount(
    ledger: Ledger, space: Namespace, clock: Clock, stopping: Callable[[], bool]
) -> Count | None:
    awaited = not _patiently(clock, stopping, lambda: ledger.usage().counted_us)
    files = added = dropped = 0
    there: list[Row] = []
    gone: list[Row] = []

    def correct() -> None:
        _patiently(clock, stopping, lambda: ledger.correct(there, gone))
        there.clear()
        gone.clear()

    for first, last in _spans(prefixes(space.base)):
        if stopping():
            return None
        started_s = clock.monotonic_s()
        rows, claimed = _patiently(clock, stopping, lambda: ledger.between(first, last))  # noqa: B023
        # A folder that was not there a moment ago may have been made for one of these rows.
        listed = [first] if first == last else sorted({key.hex()[:3] for key in rows})
        found = {each.key: each for name in listed for each in files_in(space.base, name)}
        files += len(found)
        differences = _differences(rows, claimed, found)
        added, dropped = added + len(differences[0]), dropped + len(differences[1])
        there += differences[0]
        gone += differences[1]
        if len(there) + len(gone) >= _CORRECTIONS:
            correct()
        if not awaited:
            clock.sleep(max(_SHORTEST_REST_S, _REST * (clock.monotonic_s() - started_s)))
    if there or gone:
        correct()
    _patiently(clock, stopping, lambda: ledger.counted(int(clock.wall_s() * 1e6)))
    if added or dropped:
        _log.info(
            "%s: %d files counted; %d were not in the ledger, %d of it were gone",
            space.base,
            files,
            added,
            dropped,
        )
    return Count(files, added, dropped)


def _patiently(clock: Clock, stopping: Callable[[], bool], work: Callable[[], _T]) -> _T:
    """Nobody waits for one step of a count: it can wait for others."""
    for _ in range(_BUSY_TRIES):
        try:
            return work()
        except LedgerBusy:
            if stopping():
                raise
            clock.sleep(_BUSY_PAUSE_S)
    return work()


def _spans(names: list[str]) -> Iterator[tuple[str, str]]:
    """Every `<hhh>` there may be: those in `names` (sorted) one by one, what lies between them as one."""
    begin = 0
    for number in (int(name, 16) for name in names):
        if begin < number:
            yield f"{begin:03x}", f"{number - 1:03x}"
        yield f"{number:03x}", f"{number:03x}"
        begin = number + 1
    if begin < 0x1000:
        yield f"{begin:03x}", "fff"


def _differences(
    rows: dict[BlockKey, Row], claimed: set[BlockKey], found: dict[BlockKey, Found]
) -> tuple[list[Row], list[Row]]:
    """Files to be entered, and rows to be dropped; of a file of another size than its row, both."""
    sizes_bytes = {key: row.size_bytes for key, row in rows.items()}
    there = [
        Row(key, each.size_bytes, int(each.used_s * 1e6))
        for key, each in found.items()
        if key not in claimed and sizes_bytes.get(key) != each.size_bytes
    ]
    gone = [
        row
        for key, row in rows.items()
        if key not in found or found[key].size_bytes != row.size_bytes
    ]
    return there, gone


class CountThread:
    """Counts in the background, one count at a time. `look` belongs to one thread."""

    def __init__(self, space: Namespace, clock: Clock, ended: Callable[[], object]) -> None:
        self._space = space
        self._clock = clock
        self._ended = ended
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._first = True
        self._not_before_s = float("-inf")

    def look(self, *, due: bool) -> None:
        """Begin a count if one is due, and the first in any case. Afterwards `ended` is called."""
        now_s = self._clock.monotonic_s()
        if not (due or self._first) or self._stopping or now_s < self._not_before_s:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._first = False
        self._not_before_s = now_s + _AGAIN_S
        thread = threading.Thread(target=self._run, name="pdoffload-fs-count", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        ledger = Ledger(self._space)
        try:
            ledger.open()
            recount(ledger, self._space, self._clock, stopping=lambda: self._stopping)
        except StorageError as error:
            if not self._stopping:
                _log.warning("%s: its files could not be counted: %s", self._space.base, error)
        finally:
            ledger.close()
            self._ended()

    def stop(self) -> None:
        """End the count soon, and begin none. Any thread."""
        self._stopping = True

    def close(self, *, timeout_s: float) -> None:
        """Wait for its end, when nobody calls `look` any more; one that hangs is left behind."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(timeout_s)
