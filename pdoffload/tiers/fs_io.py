"""The I/O threads of the fs tier: each with an agent of its own, started when there is work for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from pdoffload.errors import PdOffloadError, StorageError
from pdoffload.tiers.batches import Batch, BatchQueue, Outcome, failed_outcome
from pdoffload.tiers.fs_lane import Files, Lane, Terms
from pdoffload.tiers.fs_load import load_batch
from pdoffload.tiers.fs_store import store_batch

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
        queue: BatchQueue,
        report: Callable[[Outcome], None],
        took: Callable[[bool], object],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.reader = reader
        self.current: Batch | None = None
        """What it works on; read by the owner to tell which threads are stuck."""
        self.retiring = False
        """Set by the owner: it was stuck and has been replaced; it ends after its present batch."""
        self.stopping = threading.Event()
        self._terms = terms
        self._queue = queue
        self._report = report
        self._took = took
        self._lane: Lane | None = None

    def run(self) -> None:
        try:
            while not self.retiring:
                batch = self._queue.take(reader=self.reader)
                if batch is None:
                    break
                self.current = batch
                batch.started_s = self._terms.clock.monotonic_s()
                self._took(self.reader)
                self._run_batch(batch)
                self.current = None
                if self.reader and not batch.is_load:
                    self._queue.stored()
        finally:
            self._drop_lane()

    def _run_batch(self, batch: Batch) -> None:
        files = Files()
        try:
            if self._lane is None:
                self._lane = Lane(self._terms, self.name)
            work = load_batch if batch.is_load else store_batch
            outcome = work(self._terms, self._lane, batch, files)
            sound = not self._lane.failed
        except BaseException as error:  # noqa: BLE001
            # The seam where anything at all, a SystemExit out of a plugin included, becomes the
            # batch's result: nobody else would ever tell its job, and the thread has to go on.
            now_s = self._terms.clock.monotonic_s()
            outcome = failed_outcome(batch, _as_ours(batch, error), ended_s=now_s)
            sound = False
        told = not sound and self._lane is not None and self._lane.in_flight
        if told:
            self._report(msgspec.structs.replace(outcome, settled=False))
            outcome = Outcome(batch=batch)
        if sound or self._drop_lane():
            files.close()
            self._report(outcome)
            return
        files.abandon()
        if not told:
            self._report(msgspec.structs.replace(outcome, settled=False))

    def _drop_lane(self) -> bool:
        """Close the agent, if there is one, when nothing is in flight. False if something stays so."""
        lane, self._lane = self._lane, None
        if lane is None:
            return True
        try:
            lane.settle(self.stopping)
            return lane.close()
        except PdOffloadError as error:
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
        queue: BatchQueue,
        *,
        num_readers: int,
        num_writers: int,
        report: Callable[[Outcome], None],
    ) -> None:
        self._terms = terms
        self._queue = queue
        self._report = report
        self._most = {True: num_readers, False: num_writers}
        # Under the lock: who there is. Threads that ended stay in the list until the next look.
        self._lock = threading.Lock()
        self._threads: list[IoThread] = []
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
        """Start one more thread of that side, if work waits for it and its number allows."""
        if not self._queue.wants_thread(reader=reader):
            return
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            at_work = sum(t.reader is reader and not t.retiring for t in self._threads)
            if self._closed or at_work >= self._most[reader]:
                return
            self._serial += 1
            thread = IoThread(
                f"pdoffload-fs-{'read' if reader else 'write'}-{self._serial}",
                reader=reader,
                terms=self._terms,
                queue=self._queue,
                report=self._report,
                took=self.grow,
            )
            self._threads.append(thread)
            thread.start()

    def replace(self, batch: Batch) -> None:
        """The thread at work on `batch` is stuck: let another one take its place, within the bound."""
        threads = self.threads()
        stuck = sum(thread.retiring for thread in threads)
        for thread in threads:
            if thread.current is batch and not thread.retiring and stuck < MAX_STUCK:
                thread.retiring = True
                self.grow(thread.reader)

    def all_stuck(self) -> bool:
        """Every thread there may be hangs in work whose deadline has passed."""
        threads = [thread for thread in self.threads() if not thread.retiring]
        if len(threads) < sum(self._most.values()):
            return False
        return all(thread.current is not None and thread.current.expired for thread in threads)

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
