"""The worker's side: vLLM's OffloadingWorker over an fs tier whose memory is the device.

A store ends when the tier says how it went: nothing of it can be published later, whatever its I/O still
reads. A load that failed is reported when no byte of it can land any more, because its blocks are computed
anew at once. Where that takes too long there is no right way on, and the engine stops. When the engine needs
blocks back, stores that have not begun are given up: it does not wait for a disk's backlog.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

import msgspec
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from pdoffload.agent.completion import Patience
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import MisuseError, PdOffloadError, StorageError, TransferError
from pdoffload.layout import BlockKey
from pdoffload.memory.device import written_so_far
from pdoffload.tiers.base import Job, JobResult, Settled, TierStats
from pdoffload.tiers.fs.tier import FsTier
from pdoffload.vllm.copies import BlockRun, block_runs, chunks_of
from pdoffload.vllm.direct.chunks import DeviceMemory
from pdoffload.vllm.direct.jobs import DirectNews, KeysSpec
from pdoffload.vllm.worker import FailedLoad

logger = logging.getLogger(__name__)

SETTLE_DEADLINES = 3
"""Deadlines after which a load that is still not over stops the engine: an I/O thread waits for one more
after its own, and closes its agent."""


class _Running(msgspec.Struct):
    is_load: bool
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    chunk_blocks: tuple[frozenset[int], ...]
    """Of a load, the device blocks of each chunk."""
    result: JobResult | None = None
    give_up_s: float = 0.0
    """An instant: when an unsettled load stops the engine."""


class NixlDirectWorker(OffloadingWorker):
    """One worker's transfers. Takes ownership of `tier`, whose memory is `memory`; called by the engine's
    worker thread only.

    `reports_load_errors` is there for the connector, which is always ours: see `NixlDirectOffloadingSpec`.
    """

    def __init__(
        self,
        tier: FsTier,
        memory: DeviceMemory,
        *,
        fingerprint: bytes,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.reports_load_errors = False
        self._tier = tier
        self._memory = memory
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._clock = clock
        self._running: dict[int, _Running] = {}
        self._late: dict[int, tuple[int, ...]] = {}
        """Slots of jobs that have ended for the engine and are not settled."""
        self._finished: list[TransferResult] = []
        self._failed_loads: list[FailedLoad] = []
        self._news: list[DirectNews] = []
        self._stats = TierStats()

    def __repr__(self) -> str:
        return f"<NixlDirectWorker {len(self._running)} jobs, {self._tier!r}>"

    # --- vLLM's verbs ---

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._tier.store(self._begin(job_id, src_spec, dst_spec, is_load=False))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        self._tier.load(self._begin(job_id, dst_spec, src_spec, is_load=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        self._take_in()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Until these jobs have let go of their blocks. Bounded: each ends by its deadline, and a load
        that does not let go stops the engine."""
        for job_id in job_ids & self._running.keys():
            if not self._running[job_id].is_load:
                self._tier.withdraw(job_id)
        patience = Patience(self._clock)
        while not job_ids.isdisjoint(self._running):
            self._take_in()
            patience.pause()

    def shutdown(self) -> None:
        for news in self._tier.close(timeout_s=self._timeout_s):
            self._enter(news)
        if self._running:
            logger.warning("%d transfers are left to the kernel", len(self._running))

    # --- for the connector ---

    def take_failed_loads(self) -> list[FailedLoad]:
        """Loads of which chunks failed, since the last call: with the blocks of those chunks alone."""
        failed, self._failed_loads = self._failed_loads, []
        return failed

    def take_news(self) -> list[DirectNews]:
        """What the scheduler's side does not know yet."""
        news, self._news = self._news, []
        stats = self._tier.stats()
        if stats != self._stats:
            self._stats = stats
            news.append(DirectNews(stats=stats))
        return news

    # --- how jobs begin and end ---

    def _begin(
        self, job_id: int, device: GPULoadStoreSpec, files: LoadStoreSpec, *, is_load: bool
    ) -> Job:
        if not isinstance(files, KeysSpec):
            raise MisuseError(f"job {job_id}: {type(files).__name__} does not name chunks")
        if files.fingerprint != self._fingerprint:
            theirs, ours = files.fingerprint.hex()[:16], self._fingerprint.hex()[:16]
            raise MisuseError(
                f"job {job_id}: the scheduler's run configuration is {theirs}, this worker's {ours}"
            )
        runs = block_runs(device.group_sizes, device.block_indices, device.block_ids)
        count = sum(chunks_of(run, self._memory.blocks_per_chunk) for run in runs)
        if count != len(files.keys):
            raise MisuseError(
                f"job {job_id}: the blocks cover {count} chunks, {len(files.keys)} are named"
            )
        ready = written_so_far(self._memory.caches)
        slots = self._memory.add(runs, count, ready)
        blocks = _blocks_of_chunks(runs, self._memory.blocks_per_chunk) if is_load else ()
        self._running[job_id] = _Running(is_load, files.keys, slots, blocks)
        return Job(job_id, files.keys, slots)

    def _take_in(self) -> None:
        for news in self._tier.poll():
            self._enter(news)
        now_s = self._clock.monotonic_s()
        for job_id, job in self._running.items():
            if job.result is not None and now_s > job.give_up_s:
                # Its blocks can be neither reused nor computed: bytes may land in them at any time.
                raise TransferError(
                    f"load of {len(job.keys)} chunks (job {job_id}) may still write into device "
                    f"memory {SETTLE_DEADLINES} x {self._timeout_s:g} s after it began; the engine "
                    "stops rather than serve wrong bytes: look at the file system"
                )

    def _enter(self, news: JobResult | Settled) -> None:
        if news.job_id in self._late:
            self._memory.drop(self._late.pop(news.job_id))
            return
        job = self._running[news.job_id]
        if isinstance(news, Settled):
            assert job.result is not None
            self._end(news.job_id, job, job.result)
        elif job.is_load and not news.settled and not self._never_began(job, news):
            job.result = news
            wait_s = (SETTLE_DEADLINES - 1) * self._timeout_s
            job.give_up_s = self._clock.monotonic_s() + wait_s
            logger.error(
                "load of %d chunks has passed its deadline and may still write into device memory: "
                "its blocks are kept until it is over, for %g s at most",
                len(job.keys),
                wait_s,
            )
        else:
            self._end(news.job_id, job, news)

    def _never_began(self, job: _Running, result: JobResult) -> bool:
        """Whether nothing was asked of NIXL for the chunks that failed: a thread hangs in the file system
        before that, and when it comes back it will not ask."""
        bad = {key for key, _ in result.failed}
        slots = [slot for key, slot in zip(job.keys, job.slots, strict=True) if key in bad]
        return self._memory.withdraw(slots)

    def _end(self, job_id: int, job: _Running, result: JobResult) -> None:
        if result.settled or job.result is not None:
            self._memory.drop(job.slots)
        else:
            # What a store's I/O still reads goes into a file without a name.
            self._late[job_id] = job.slots
        del self._running[job_id]
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=not (job.is_load and result.failed) or self.reports_load_errors,
                transfer_size=result.moved_bytes,
                transfer_time=result.elapsed_s,
            )
        )
        if result.failed:
            key, error = result.failed[0]
            # Of stores the tier itself warns, once per change: one that fails costs nobody anything.
            logger.log(
                logging.WARNING if job.is_load else logging.INFO,
                "%s: %d of %d chunks failed; first: %s: %s",
                "load" if job.is_load else "store",
                len(result.failed),
                len(job.keys),
                key.hex(),
                error,
            )
        if not job.is_load:
            self._news.append(DirectNews(stored=result.succeeded))
        elif result.failed:
            self._load_failed(job_id, job, result.failed)

    def _load_failed(
        self, job_id: int, job: _Running, failed: Sequence[tuple[BlockKey, PdOffloadError]]
    ) -> None:
        bad = dict(failed)
        gone = tuple(key for key, error in bad.items() if _is_gone(error))
        self._news.append(
            DirectNews(gone=gone, unusable=tuple(key for key in bad if key not in gone))
        )
        blocks: frozenset[int] = frozenset().union(
            *(blocks for key, blocks in zip(job.keys, job.chunk_blocks, strict=True) if key in bad)
        )
        self._failed_loads.append(FailedLoad(job_id, blocks))


def _is_gone(error: PdOffloadError) -> bool:
    return isinstance(error, StorageError) and error.errno == errno.ENOENT


def _blocks_of_chunks(
    runs: Sequence[BlockRun], blocks_per_chunk: int
) -> tuple[frozenset[int], ...]:
    """The device blocks of each chunk that `runs` touch, in order."""
    found: list[frozenset[int]] = []
    for run in runs:
        blocks = run.blocks.tolist()
        first = -(run.first_index % blocks_per_chunk)
        found += (
            frozenset(blocks[max(0, at) : at + blocks_per_chunk])
            for at in range(first, len(blocks), blocks_per_chunk)
        )
    return tuple(found)
