"""Tiers as a scheduler drives them, ours and vLLM's: jobs of chunks between a pool and a medium, in turns.

What differs between the two is behind `Side`; how many jobs are under way, and what is measured, is the same.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
from common import Cost, measure
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm_sides import bare_spec

from pdoffload.config import FsTierConfig
from pdoffload.layout import BlockKey, Geometry, RunConfig, make_key
from pdoffload.memory.host import HostRegion
from pdoffload.tiers.base import Job, JobResult, Tier, TierContext
from pdoffload.tiers.fs.tier import FsTier

Work = Callable[[], Cost]

DEADLINE_S = 120.0
_POLL_S = 0.001


class Pool:
    """A host region full of random bytes; every side moves to and from it."""

    def __init__(self, chunk_bytes: int, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        # Twice the slots, of which the upper half is never touched: our tier refuses to queue stores of
        # more than half of a pool, and here all are queued at once.
        geometry = Geometry(num_slots=2 * num_chunks, worker_bytes=chunk_bytes, num_copies=1)
        self.region = HostRegion.private(geometry)
        self.total_bytes = num_chunks * chunk_bytes
        self.rows = self.region.array[: self.total_bytes].reshape(num_chunks, chunk_bytes)
        random = np.random.default_rng(5)
        for row in self.rows:
            row[:] = np.frombuffer(random.bytes(chunk_bytes), np.uint8)
        self._expected = self.rows[:: max(num_chunks // 16, 1)].copy()

    def forget_checksums(self) -> None:
        """As if the slots had new bytes, whose checksums are not known yet."""
        for slot in range(self.num_chunks):
            self.region.forget_checksum(slot)

    def clear(self) -> None:
        self.rows[:] = 0
        self.forget_checksums()

    def check(self, who: str) -> None:
        """A sample of chunks has the bytes that were stored."""
        found = self.rows[:: max(self.num_chunks // 16, 1)]
        assert np.array_equal(found, self._expected), f"{who} brought other bytes back"

    def context(self) -> TierContext:
        """What our tiers are given."""
        return TierContext(
            region=self.region,
            run_config=RunConfig(fields={"model_name": "bench"}),
            transfer_timeout_s=DEADLINE_S,
        )


class Window(msgspec.Struct, frozen=True):
    """How a scheduler cuts the work: so many chunks to a job, so many jobs under way."""

    chunks_per_job: int = 16
    jobs_in_flight: int = 1 << 30


class Side(ABC):
    """One tier, driven through its own verbs."""

    @abstractmethod
    def submit(
        self, job_id: int, keys: tuple[BlockKey, ...], slots: tuple[int, ...], *, is_load: bool
    ) -> None: ...

    @abstractmethod
    def finished(self) -> Iterable[int]:
        """Jobs that have ended since it was asked last. `AssertionError` where one has failed."""

    @abstractmethod
    def close(self) -> None: ...


class OurSide(Side):
    """A tier of pdoffload, as the tiering room drives it."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def submit(
        self, job_id: int, keys: tuple[BlockKey, ...], slots: tuple[int, ...], *, is_load: bool
    ) -> None:
        (self._tier.load if is_load else self._tier.store)(Job(job_id, keys, slots))

    def finished(self) -> Iterable[int]:
        for news in self._tier.poll():
            assert isinstance(news, JobResult)
            assert not news.failed, news.failed[0]
            yield news.job_id

    def close(self) -> None:
        self._tier.close(timeout_s=DEADLINE_S)


class StockSide(Side):
    """A secondary tier of vLLM, as its TieringOffloadingManager drives it."""

    def __init__(self, tier: SecondaryTierManager) -> None:
        self._tier = tier
        self._request = ReqContext("bench")

    def submit(
        self, job_id: int, keys: tuple[BlockKey, ...], slots: tuple[int, ...], *, is_load: bool
    ) -> None:
        (self._tier.submit_load if is_load else self._tier.submit_store)(
            TransferJob(
                job_id=job_id,
                keys=[OffloadKey(key) for key in keys],
                chunk_ids=np.array(slots, np.int32),
                is_promotion=is_load,
                req_context=self._request,
            )
        )

    def finished(self) -> Iterable[int]:
        for result in self._tier.get_finished_jobs():
            assert result.success
            yield result.job_id

    def close(self) -> None:
        self._tier.shutdown()


class Contender:
    """A side at work on a pool: new chunks at every store, the latest ones at every load."""

    def __init__(self, name: str, side: Side, pool: Pool, window: Window) -> None:
        self._name = name
        self._side = side
        self._pool = pool
        self._window = window
        self._next_job_id = 0
        self._round = 0

    def store(self) -> Cost:
        self._round += 1
        self._pool.forget_checksums()
        return measure(lambda: self._run(is_load=False))

    def load(self) -> Cost:
        self._pool.clear()
        cost = measure(lambda: self._run(is_load=True))
        self._pool.check(self._name)
        return cost

    def close(self) -> None:
        self._side.close()

    def _keys(self) -> list[BlockKey]:
        names = (f"{self._name} {self._round} {chunk}" for chunk in range(self._pool.num_chunks))
        return [make_key(hashlib.sha256(name.encode()).digest(), 0) for name in names]

    def _run(self, *, is_load: bool) -> None:
        keys = self._keys()
        firsts = iter(range(0, len(keys), self._window.chunks_per_job))
        under_way: set[int] = set()
        last_s = time.monotonic()
        while True:
            while len(under_way) < self._window.jobs_in_flight:
                first = next(firsts, None)
                if first is None:
                    break
                last = min(first + self._window.chunks_per_job, len(keys))
                under_way.add(self._next_job_id)
                self._side.submit(
                    self._next_job_id,
                    tuple(keys[first:last]),
                    tuple(range(first, last)),
                    is_load=is_load,
                )
                self._next_job_id += 1
            if not under_way:
                return
            ended = set(self._side.finished())
            if ended:
                under_way -= ended
                last_s = time.monotonic()
                continue
            assert time.monotonic() < last_s + DEADLINE_S, f"{self._name} does not get on"
            time.sleep(_POLL_S)


def our_fs(pool: Pool, directory: Path, **settings: object) -> OurSide:
    """Our tier in `directory`, with O_DIRECT; `settings` are more keys of its table."""
    config = FsTierConfig(root_dir=str(directory), direct="on", min_free_bytes=0, **settings)
    return OurSide(FsTier(config, pool.context()))


def stock_fs(pool: Pool, directory: Path, config: OffloadingConfig) -> StockSide:
    """vLLM's tier in `directory`, with its defaults."""
    tier = FileSystemTierManager(bare_spec(config), pool.rows.data, "fs", str(directory))
    assert tier._use_o_direct, "no O_DIRECT here: compare on another disk"
    return StockSide(tier)
