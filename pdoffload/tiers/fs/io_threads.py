"""The I/O threads of the fs tier: each with an agent of its own, started when there is work for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pdoffload.errors import PdOffloadError, StorageError
from pdoffload.tiers.fs.growth import Growth
from pdoffload.tiers.fs.lane import Files, Lane, Terms
from pdoffload.tiers.fs.load import load_batch
from pdoffload.tiers.fs.store import store_batch
from pdoffload.tiers.part_queue import PartQueue
from pdoffload.tiers.parts import Batch, Outcome, Part

_log = logging.getLogger(__name__)

MAX_STUCK = 8
"""Threads that hang in the file system and have been replaced; beyond it none is replaced."""


class IoThread(threading.Thread):
    """Takes batches until the queue is closed; whatever happens to one becomes its outcome."""

    def __init__(
        self,
        name: str,
        *,
        reader: bool,
        terms: Terms,
        queue: PartQueue,
        report: Callable[[list[Outcome]], None],
        took: Callable[[bool], object],
        moved: Callable[[Batch], object],
        stuck: Callable[[IoThread], object],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.reader = reader
        self.current: Batch | None = None
        """What it works on; read by the owner to tell which threads are stuck."""
        self.settling = False
        """It waits for bytes that may still move, long after the deadline."""
        self.retiring = False
        """Set by the pool: it is stuck and has been replaced; it ends after its present batch."""
        self.stopping = threading.Event()
        self._terms = terms
        self._queue = queue
        self._report = report
        self._took = took
        self._moved = moved
        self._stuck = stuck
        self._lane: Lane | None = None

    def run(self) -> None:
        try:
            while not self.retiring:
                parts = self._queue.take(reader=self.reader)
                if not parts:
                    break
                self._took(self.reader)
                self.current = Batch(parts, self._terms.clock.monotonic_s())
                self._run_batch(self.current)
                self._moved(self.current)
                if self.reader and not self.current.is_load:
                    self._queue.stored()
                self.current = None
                self.settling = False
        finally:
            self._drop_lane()

    def _run_batch(self, batch: Batch) -> None:
        files = Files()
        try:
            if self._lane is None:
                self._lane = Lane(self._terms, self.name)
            work = load_batch if batch.is_load else store_batch
            work(self._terms, self._lane, batch, files)
            sound = not self._lane.failed
        except BaseException as error:  # noqa: BLE001
            # The seam where anything at all, a SystemExit out of a plugin included, becomes the
            # batch's result: nobody else would ever tell its jobs, and the thread has to go on.
            batch.fail_rest(_as_ours(batch, error))
            sound = False
        told = not sound and self._lane is not None and self._lane.in_flight
        if told:
            files.drop_names()
            self._tell(batch, settled=False)
            self.settling = True
            self._stuck(self)
        if sound or self._drop_lane():
            files.close()
            self._tell(batch, settled=True)
            return
        files.drop_names()
        if not told:
            self._tell(batch, settled=False)

    @property
    def hangs(self) -> bool:
        """Its present work should have ended long ago."""
        batch = self.current
        return self.settling or (batch is not None and batch.parts[0].expired)

    def _tell(self, batch: Batch, *, settled: bool) -> None:
        ended_s = self._terms.clock.monotonic_s()
        chunk_bytes = self._terms.format.chunk_bytes
        self._report(batch.outcomes(chunk_bytes, settled=settled, ended_s=ended_s))

    def _drop_lane(self) -> bool:
        """Close the agent, if there is one, when nothing is in flight. False if something stays so."""
        lane, self._lane = self._lane, None
        if lane is None:
            return True
        try:
            lane.settle(self.stopping)
            return lane.close()
        except Exception as error:  # noqa: BLE001 - the thread goes on without this agent
            _log.warning("%s: its agent did not close: %s", self.name, error)
            return not lane.in_flight


def _as_ours(batch: Batch, error: BaseException) -> PdOffloadError:
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
        terms: Terms,
        queue: PartQueue,
        *,
        num_readers: int,
        num_writers: int,
        report: Callable[[list[Outcome]], None],
    ) -> None:
        self._terms = terms
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
            if self._growth[reader].one_more(len(at_work), self._terms.clock.monotonic_s()):
                self._start(reader)

    def _at_work(self, reader: bool) -> list[IoThread]:
        return [each for each in self._threads if each.reader is reader and not each.retiring]

    def _start(self, reader: bool) -> None:
        self._serial += 1
        thread = IoThread(
            f"pdoffload-fs-{'read' if reader else 'write'}-{self._serial}",
            reader=reader,
            terms=self._terms,
            queue=self._queue,
            report=self._report,
            took=self.grow,
            moved=self._moved,
            stuck=self.replace,
        )
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
        clock = self._terms.clock
        until_s = clock.monotonic_s() + timeout_s
        for thread in self.threads():
            thread.join(max(0.0, until_s - clock.monotonic_s()))
        for thread in (late := self.threads()):
            thread.stopping.set()
        return late
