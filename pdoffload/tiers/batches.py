"""Jobs, the batches they are cut into, and the queue between the tier's owner and its I/O threads.

    owner: Job --cut--> Batch, Batch --put--> BatchQueue --take--> an I/O thread --> Outcome --> owner

A batch is what one I/O thread moves with one NIXL request.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from pdoffload.errors import PdOffloadError
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Job

Failures = tuple[tuple[BlockKey, PdOffloadError], ...]


class Batch:
    """A part of a job. Constant but for `started_s`, set once by the thread that works on it,
    and `expired` and `told`, set once by the owner."""

    __slots__ = ("expired", "forced", "is_load", "job_id", "keys", "slots", "started_s", "told")

    def __init__(
        self,
        job_id: int,
        is_load: bool,
        keys: tuple[BlockKey, ...],
        slots: tuple[int, ...],
        forced: frozenset[BlockKey],
    ) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.keys = keys
        self.slots = slots
        self.forced = forced
        """Stores only: keys to write although a file stands there, because it could not be loaded."""
        self.started_s: float | None = None
        self.expired = False
        """Its deadline has passed: its thread is stuck."""
        self.told = False
        """How it ended has been taken in."""

    def __repr__(self) -> str:
        verb = "load" if self.is_load else "store"
        state = "queued" if self.started_s is None else "expired" if self.expired else "begun"
        return f"<Batch {verb} of {len(self.keys)} chunks of job {self.job_id}, {state}>"

    @property
    def what(self) -> str:
        """Names the work in errors."""
        return f"{'load' if self.is_load else 'store'} of {len(self.keys)} chunks"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch ended. Where `settled` is False, another one follows when it is; only that it is
    settled then counts."""

    batch: Batch
    failed: Failures = ()
    settled: bool = True
    moved_bytes: int = 0
    already_present: int = 0
    verified: int = 0
    vanished: int = 0
    ended_s: float = 0.0


def failed_outcome(
    batch: Batch, error: PdOffloadError, *, settled: bool = True, ended_s: float = 0.0
) -> Outcome:
    """All of `batch` failed by `error`."""
    failed = tuple((key, error) for key in batch.keys)
    return Outcome(batch=batch, failed=failed, settled=settled, ended_s=ended_s)


class Limits(msgspec.Struct, frozen=True):
    """How much one batch holds."""

    chunks: int
    size_bytes: int


def cut(
    job: Job, chunk_bytes: int, limits: Limits, *, is_load: bool, forced: frozenset[BlockKey]
) -> list[Batch]:
    """`job` in batches of equal size, as far as that goes; at least one chunk in each, none for no key."""
    most = max(1, min(limits.chunks, limits.size_bytes // chunk_bytes))
    if not job.keys:
        return []
    count = -(-len(job.keys) // most)
    size = -(-len(job.keys) // count)
    return [
        Batch(job.job_id, is_load, job.keys[at : at + size], job.slots[at : at + size], forced)
        for at in range(0, len(job.keys), size)
    ]


class BatchQueue:
    """Batches that wait for a thread: loads and stores apart. Any thread.

    A reader takes loads first, a writer stores first; each helps the other side when its own is empty.
    One reader never helps, so that a load finds a thread even while every store is stuck; unless it is
    the only reader and no store is under way.
    """

    def __init__(self, *, num_readers: int, max_stored_chunks: int) -> None:
        lock = threading.Lock()
        self._lock = lock
        # True: readers, False: writers. A wake-up goes to a thread that may take the batch.
        self._woken = {True: threading.Condition(lock), False: threading.Condition(lock)}
        self._idle = {True: 0, False: 0}
        self._waking = {True: 0, False: 0}
        self._loads: deque[Batch] = deque()
        self._stores: deque[Batch] = deque()
        self._num_readers = num_readers
        self._max_chunks = max_stored_chunks
        self._storing_chunks = 0
        self._readers_storing = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<BatchQueue {len(self._loads)} loads, {len(self._stores)} stores waiting>"

    def __len__(self) -> int:
        return len(self._loads) + len(self._stores)

    def has_room(self, chunks: int) -> bool:
        """Whether a store of so many chunks may wait here; where none waits, one of any size."""
        with self._lock:
            return not self._stores or self._storing_chunks + chunks <= self._max_chunks

    def put(self, batches: Sequence[Batch]) -> None:
        """Queue a job's batches."""
        if not batches:
            return
        is_load = batches[0].is_load
        with self._lock:
            if is_load:
                self._loads.extend(batches)
            else:
                self._stores.extend(batches)
                self._storing_chunks += sum(len(batch.keys) for batch in batches)
            left = len(batches) - self._wake(is_load, len(batches))
            self._wake(not is_load, left)

    def _wake(self, reader: bool, count: int) -> int:
        count = min(count, self._idle[reader])
        self._idle[reader] -= count
        self._waking[reader] += count
        self._woken[reader].notify(count)
        return count

    def wants_thread(self, *, reader: bool) -> bool:
        """Whether work of that side waits that no thread of that side is on its way to."""
        with self._lock:
            waiting = self._loads if reader else self._stores
            return len(waiting) > self._waking[reader]

    def take(self, *, reader: bool) -> Batch | None:
        """The next batch for a thread of that side; waits for one. None once the queue is closed.

        A reader that was given a store says `stored` when it is done with it.
        """
        with self._lock:
            while not self._closed:
                batch = self._next(reader)
                if batch is not None:
                    return batch
                self._idle[reader] += 1
                self._woken[reader].wait()
                self._waking[reader] -= 1
            return None

    def _next(self, reader: bool) -> Batch | None:
        if self._loads and (reader or not self._stores):
            return self._loads.popleft()
        if not self._stores:
            return None
        if reader:
            if self._readers_storing >= max(1, self._num_readers - 1):
                return None
            self._readers_storing += 1
        batch = self._stores.popleft()
        self._storing_chunks -= len(batch.keys)
        return batch

    def stored(self) -> None:
        """A reader has ended the store it was given."""
        with self._lock:
            self._readers_storing -= 1

    def drain(self) -> list[Batch]:
        """Take everything that waits out of the queue."""
        with self._lock:
            waiting = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._storing_chunks = 0
        return waiting

    def close(self) -> None:
        """Nothing is taken any more; every waiting thread is told."""
        with self._lock:
            self._closed = True
            for woken in self._woken.values():
                woken.notify_all()
