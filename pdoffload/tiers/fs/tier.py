"""The fs tier: chunk files in a directory, moved by NIXL POSIX. This file is the owner's side.

    owner thread                           I/O threads (`io_threads`) lookup thread   quota thread
    store, load --> PartQueue ----------> open, move, verify,       stat            walk, evict
    poll        <-- outcomes <------------ rename                      |
    lookup      <-- answers <------------------------------------------'

The owner counts and decides and never touches the disk; what the threads find out comes back as values.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Sequence

from pdoffload.config import FsTierConfig
from pdoffload.errors import DeadlineExceeded, MisuseError, PdOffloadError, StorageError
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import (
    Job,
    JobResult,
    Lookup,
    Settled,
    Tier,
    TierContext,
    TierStats,
)
from pdoffload.tiers.fs.io_threads import IoPool
from pdoffload.tiers.fs.lane import MakeAgent
from pdoffload.tiers.fs.lookup import FileLookup
from pdoffload.tiers.fs.memory import FsContext
from pdoffload.tiers.fs.start import prepare
from pdoffload.tiers.health import StoreHealth
from pdoffload.tiers.jobs import JobBook, LiveJob
from pdoffload.tiers.part_queue import PartQueue
from pdoffload.tiers.parts import NONE_FORCED, Outcome, Part, cut, failed_outcome

_log = logging.getLogger(__name__)

MAX_QUEUED_CHUNKS = 4096
"""Chunks that may wait to be stored; and never more than half of the pool, whose slots they pin."""
LOOK_S = 0.05
"""How often `poll` looks for what is late."""
_SIDE_THREADS_S = 1.0
"""What `close` gives the lookup and the quota thread, which hold nothing of the pool."""


class FsTier(Tier):
    """Chunks as files under `config.root_dir`; the layout is in `paths` and `chunkfile`.

    Opening it makes folders, writes one small file to try the file system, removes what dead writers
    left, and waits for all that: it belongs to the start of an engine. Raises `ConfigError` before any
    thread is started.

    Every verb raises `MisuseError` in a forked child, whose parent's files it leaves alone, and all but
    `poll`, `stats` and `close` do so after `close`. `make_agent` is for tests; by default each I/O thread has
    a `NixlAgent` with the backend that `prepare` found.
    """

    name = "fs"

    def __init__(
        self,
        config: FsTierConfig,
        context: TierContext | FsContext,
        *,
        rank: int = 0,
        make_agent: MakeAgent | None = None,
    ) -> None:
        self.locality = config.locality
        self.publishes_events = config.enable_kv_events
        self._pid = os.getpid()
        self._closed = False
        start = prepare(config, context, rank=rank, make_agent=make_agent)
        self._terms = terms = start.terms
        self._base = terms.space.base
        self._outcomes: deque[Outcome] = deque()
        self._book = JobBook()
        self._next_look_s = 0.0
        self._health = StoreHealth()
        self._lookup = FileLookup(
            terms.space, terms.sound_sizes, timeout_s=terms.timeout_s, clock=terms.clock
        )
        half = terms.memory.num_slots // 2
        self._queue = PartQueue(
            num_readers=start.num_readers,
            max_waiting_stores=min(MAX_QUEUED_CHUNKS, half),
            most_chunks=terms.most_chunks,
        )
        self._pool = IoPool(
            terms,
            self._queue,
            num_readers=start.num_readers,
            num_writers=start.num_writers,
            report=self._outcomes.extend,
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._degraded() or "open"
        return f"<FsTier {self._base}: {state}, {self._book!r}, {self._queue!r}, {self._pool!r}>"

    # --- the verbs ---

    def lookup(self, keys: Sequence[BlockKey], request_id: str = "") -> list[Lookup]:
        self._enter()
        self._take_in()
        return self._lookup.ask(keys)

    def store(self, job: Job) -> None:
        self._enter()
        if not self._health.admits(self._now_s()):
            self._refuse(job, self._health.refusal(), is_load=False)
            return
        parts = self._cut(job, is_load=False)
        if not self._queue.has_room(len(job.keys)):
            error = StorageError(self._base, f"{len(self._queue)} parts wait to be moved")
            self._refuse(job, error, is_load=False)
            return
        self._book.begin(job, parts, is_load=False)
        self._queue.put(parts)
        self._pool.grow(False)

    def withdraw(self, job_id: int) -> bool:
        """Drop a store of which nothing has begun: it ends now, and `poll` says so. False if it has."""
        self._enter()
        parts = self._book.parts_of(job_id)
        if not parts or not self._queue.remove_stores(parts):
            return False
        error = StorageError(self._base, "given up before its turn came")
        for part in self._book.drop(job_id):
            self._enter_outcome(failed_outcome(part, error))
        return True

    def load(self, job: Job) -> None:
        self._enter()
        if self._pool.all_stuck():
            self._refuse(job, self._stuck_error(), is_load=True)
            return
        parts = self._cut(job, is_load=True)
        self._book.begin(job, parts, is_load=True)
        if self._terms.quota is not None:
            self._terms.quota.hold(job.keys)
        self._queue.put(parts)
        self._pool.grow(True)

    def poll(self) -> list[JobResult | Settled]:
        self._require_own_process()
        self._take_in()
        self._expire()
        news, self._book.news = self._book.news, []
        return news

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._enter()
        if self._terms.quota is not None:
            self._terms.quota.touch(keys)

    def stats(self) -> TierStats:
        return self._book.stats(degraded=self._degraded())

    def close(self, *, timeout_s: float) -> list[JobResult | Settled]:
        self._require_own_process()
        if self._closed:
            return self.poll()
        self._closed = True
        self._queue.close()
        closed = StorageError(self._base, "the tier was closed before its turn came")
        for part in self._queue.drain():
            self._enter_outcome(failed_outcome(part, closed))
        late = self._pool.close(timeout_s=timeout_s)
        self._take_in()
        for part in self._book.begun():
            error = DeadlineExceeded(f"{part.what} while closing", timeout_s)
            self._enter_outcome(failed_outcome(part, error, settled=False))
        self._lookup.close(timeout_s=_SIDE_THREADS_S)
        if self._terms.quota is not None:
            self._terms.quota.close(timeout_s=_SIDE_THREADS_S)
        if late:
            _log.warning(
                "%s: %d I/O threads still hang after %g s and are left behind",
                self._base,
                len(late),
                timeout_s,
            )
        else:
            self._terms.writer.close()
        news, self._book.news = self._book.news, []
        return news

    def path(self, key: BlockKey) -> str:
        """The file that holds the chunk `key`, if any does."""
        return self._terms.space.path(key)

    # --- what the threads have found out ---

    def _take_in(self) -> None:
        while self._outcomes:
            self._enter_outcome(self._outcomes.popleft())
        quota = self._terms.quota
        while quota is not None and quota.evicted:
            self._lookup.gone((quota.evicted.popleft(),))

    def _enter_outcome(self, outcome: Outcome) -> None:
        part = outcome.part
        if not part.told:
            part.told = True
            bad = dict(outcome.failed)
            good = tuple(key for key in part.keys if key not in bad) if bad else part.keys
            if not part.is_load:
                self._lookup.stored(good)
            elif bad:
                gone = [key for key, error in bad.items() if _is_gone(error)]
                self._lookup.gone(gone)
                self._lookup.failed(bad.keys() - set(gone))
        live = self._book.take_in(outcome)
        if live is not None:
            self._job_ended(live)

    def _job_ended(self, live: LiveJob) -> None:
        result = live.result
        assert result is not None
        if live.is_load:
            if self._terms.quota is not None and not live.dropped:
                self._terms.quota.let_go(live.job.keys)
        elif live.dropped:
            return
        elif result.failed:
            if self._health.failed(result.failed[0][1], self._now_s()):
                _log.warning("stores to %s stop; %s", self._base, self._health.refusing)
        elif result.moved_bytes and self._health.succeeded():
            _log.info("stores to %s go on", self._base)

    def _expire(self) -> None:
        """Give up what is late, and what no thread will ever take."""
        now_s, timeout_s = self._now_s(), self._terms.timeout_s
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        for part in self._book.late(now_s, timeout_s):
            part.expired = True
            error = DeadlineExceeded(part.what, timeout_s)
            self._enter_outcome(failed_outcome(part, error, settled=False, ended_s=now_s))
            self._pool.expired(part)
        if not len(self._queue):
            return
        hopeless: StorageError | None = None
        if self._pool.all_stuck():
            hopeless = self._stuck_error()
        elif self._pool.is_empty():
            self._pool.grow(True)
            self._pool.grow(False)
            if self._pool.is_empty():
                hopeless = StorageError(self._base, "no I/O thread can be started", errno.EAGAIN)
        if hopeless is not None:
            _log.warning("%s", hopeless)
            for part in self._queue.drain():
                self._enter_outcome(failed_outcome(part, hopeless))

    # --- small parts ---

    def _cut(self, job: Job, *, is_load: bool) -> list[Part]:
        forced = NONE_FORCED if is_load else self._lookup.barred(job.keys)
        return cut(job, self._terms.most_chunks, is_load=is_load, forced=forced)

    def _refuse(self, job: Job, error: PdOffloadError, *, is_load: bool) -> None:
        """End `job` at once, without a thread."""
        part = Part(job.job_id, is_load, job.keys, job.slots)
        self._book.begin(job, [part], is_load=is_load, dropped=True)
        self._enter_outcome(failed_outcome(part, error))

    def _stuck_error(self) -> StorageError:
        return StorageError(self._base, "all I/O threads hang in the file system", errno.EIO)

    def _degraded(self) -> str:
        if self._health.refusing:
            return self._health.refusing
        return "stuck: all I/O threads hang in the file system" if self._pool.all_stuck() else ""

    def _now_s(self) -> float:
        return self._terms.clock.monotonic_s()

    def _enter(self) -> None:
        self._require_own_process()
        if self._closed:
            raise MisuseError(f"the fs tier at {self._base} is closed")

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError(
                f"the fs tier at {self._base} belongs to process {self._pid}; "
                "a forked child opens its own"
            )

    def check(self) -> None:
        """Prove that the books agree; for tests."""
        self._book.check()


def _is_gone(error: PdOffloadError) -> bool:
    return isinstance(error, StorageError) and error.errno == errno.ENOENT
