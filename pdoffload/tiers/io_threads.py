"""The I/O threads of a storage tier, started when there is work for them, and replaced when they hang.

What a thread does with a batch is its tier's: a subclass of `IoThread`.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable

import msgspec

from pdoffload.clock import Clock
from pdoffload.errors import PdOffloadError, StorageError
from pdoffload.tiers.growth import Growth
from pdoffload.tiers.part_queue import PartQueue
from pdoffload.tiers.parts import Batch, Outcome, Part

_log = logging.getLogger(__name__)

MAX_STUCK = 8
"""Threads that hang in their medium and have been replaced; beyond it none is replaced."""


class IoThread(threading.Thread):
    """Takes batches until the queue is closed; whatever happens to one becomes its outcome."""

    def __init__(self, place: Place) -> None:
        super().__init__(name=place.name, daemon=True)
        self.reader = place.reader
        self.current: Batch | None = None
        """What it works on; read by the owner to tell which threads are stuck."""
        self.settling = False
        """It waits for bytes that may still move, long after the deadline."""
        self.retiring = False
        """Set by the pool: it is stuck and has been replaced; it ends after its present batch."""
        self.stopping = threading.Event()
        self._place = place

    def run(self) -> None:
        place = self._place
        try:
            while not self.retiring:
                parts = place.queue.take(reader=self.reader)
                if not parts:
                    break
                place.took(self.reader)
                self.current = Batch(parts, place.clock.monotonic_s())
                self.run_batch(self.current)
                place.moved(self.current)
                if self.reader and not self.current.is_load:
                    place.queue.stored()
                self.current = None
                self.settling = False
        finally:
            self.leave()

    @abstractmethod
    def run_batch(self, batch: Batch) -> None:
        """Move `batch` and report an outcome for each of its parts. Raises nothing."""

    @abstractmethod
    def leave(self) -> None:
        """Give back what the thread works with."""

    @property
    def hangs(self) -> bool:
        """Its present work should have ended long ago."""
        batch = self.current
        return self.settling or (batch is not None and batch.parts[0].expired)

    def tell(self, batch: Batch, chunk_bytes: int, *, settled: bool) -> None:
        """Report how it went with each part of `batch`."""
        ended_s = self._place.clock.monotonic_s()
        self._place.report(batch.outcomes(chunk_bytes, settled=settled, ended_s=ended_s))

    def settle_aside(self) -> None:
        """What follows may take long: let another thread take this one's place."""
        self.settling = True
        self._place.stuck(self)


class Place(msgspec.Struct, frozen=True):
    """What a pool gives a thread: its name and side, where work comes from and where news go to."""

    name: str
    reader: bool
    queue: PartQueue
    clock: Clock
    report: Callable[[list[Outcome]], None]
    took: Callable[[bool], object]
    moved: Callable[[Batch], object]
    stuck: Callable[[IoThread], object]


def as_storage_error(batch: Batch, error: BaseException) -> PdOffloadError:
    """The error that ends what is left of `batch`: `error`, or the one of ours that tells of it."""
    if isinstance(error, PdOffloadError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return StorageError.from_os_error(str(error.filename or batch.what), error)
    _log.error("%s ended unexpectedly", batch.what, exc_info=error)
    return StorageError(batch.what, f"ended unexpectedly: {type(error).__name__}: {error}")


class IoPool:
    """Starts the threads one by one, and replaces those that hang. Any thread may call `grow`."""

    def __init__(
        self,
        make_thread: Callable[[Place], IoThread],
        queue: PartQueue,
        *,
        tier: str,
        clock: Clock,
        num_readers: int,
        num_writers: int,
        report: Callable[[list[Outcome]], None],
    ) -> None:
        self._make_thread = make_thread
        self._tier = tier
        self._clock = clock
        self._queue = queue
        self._report = report
        self._most = {True: num_readers, False: num_writers}
        # Under the lock: who there is. Threads that ended stay in the list until the next look.
        self._lock = threading.Lock()
        self._threads: list[IoThread] = []
        self._growth = {True: Growth(), False: Growth()}
        self._serial = 0
        self._closed = False

    def __repr__(self) -> str:
        threads = self.threads()
        readers = sum(thread.reader for thread in threads)
        return f"<IoPool {readers} readers, {len(threads) - readers} writers>"

    def threads(self) -> list[IoThread]:
        """Those that live."""
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            return list(self._threads)

    def grow(self, reader: bool) -> None:
        """Start one more thread of that side, if work waits for it and it would be of use."""
        if not self._queue.wants_thread(reader=reader):
            return
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            at_work = self._at_work(reader)
            if len(at_work) >= self._most[reader] and all(each.hangs for each in at_work):
                reader = not reader  # the other side helps
                at_work = self._at_work(reader)
            if self._closed or len(at_work) >= self._most[reader]:
                return
            if self._growth[reader].one_more(len(at_work), self._clock.monotonic_s()):
                self._start(reader)

    def _at_work(self, reader: bool) -> list[IoThread]:
        return [each for each in self._threads if each.reader is reader and not each.retiring]

    def _start(self, reader: bool) -> None:
        self._serial += 1
        side = "read" if reader else "write"
        place = Place(
            f"pdoffload-{self._tier}-{side}-{self._serial}",
            reader,
            self._queue,
            self._clock,
            report=self._report,
            took=self.grow,
            moved=self._moved,
            stuck=self.replace,
        )
        thread = self._make_thread(place)
        try:
            thread.start()
        except RuntimeError as error:
            # The system's limit of threads. Those there are go on; `is_empty` tells if there are none.
            _log.warning("%s cannot be started: %s", thread.name, error)
        else:
            self._threads.append(thread)
            if len(self._at_work(reader)) >= self._most[reader]:
                self._queue.take_help(reader=reader)

    def is_empty(self) -> bool:
        """There is no thread at all."""
        return not self.threads()

    def _moved(self, batch: Batch) -> None:
        with self._lock:
            self._growth[batch.is_load].moved(len(batch.keys))

    def expired(self, part: Part) -> None:
        """The deadline of `part` has passed: let another thread take the place of the one at it."""
        for thread in self.threads():
            batch = thread.current
            if batch is not None and part in batch.parts:
                self.replace(thread)
        for reader in (True, False):
            self.grow(reader)

    def replace(self, thread: IoThread) -> None:
        """`thread` is stuck: let another one take its place, within the bound."""
        with self._lock:
            stuck = sum(other.retiring and other.is_alive() for other in self._threads)
            if thread.retiring or stuck >= MAX_STUCK:
                return
            thread.retiring = True
        self.grow(thread.reader)

    def all_stuck(self) -> bool:
        """Every thread there may be hangs in work whose deadline has passed."""
        threads = [thread for thread in self.threads() if not thread.retiring]
        return len(threads) >= sum(self._most.values()) and all(each.hangs for each in threads)

    def close(self, *, timeout_s: float) -> list[IoThread]:
        """Stop all threads after their present batch; those that live after `timeout_s`. Idempotent.

        The queue must be closed before.
        """
        with self._lock:
            self._closed = True
        clock = self._clock
        until_s = clock.monotonic_s() + timeout_s
        for thread in self.threads():
            thread.join(max(0.0, until_s - clock.monotonic_s()))
        for thread in (late := self.threads()):
            thread.stopping.set()
        return late
