"""What tests of tiers stand on: a pool with known bytes, and jobs carried to their end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import BlockKey, Geometry, RunConfig, make_key
from pdoffload.memory.host import HostRegion
from pdoffload.tiers.base import (
    Job,
    JobResult,
    Lookup,
    PeerStats,
    Settled,
    Tier,
    TierContext,
    TierStats,
)

PATIENCE_S = 30.0
_PAUSE_S = 0.0005
_GAUGES = ("quarantined_slots", "queued_jobs", "degraded", "peers_up", "kept_slots", "transports")


def filled_region(num_slots: int = 64, chunk_bytes: int = 8192, seed: int = 0) -> HostRegion:
    """A pool whose slots hold different random bytes, the same for the same `seed`."""
    region = HostRegion.private(
        Geometry(num_slots=num_slots, worker_bytes=chunk_bytes, num_copies=1)
    )
    region.array[:] = np.random.default_rng(seed).integers(0, 256, region.size_bytes, np.uint8)
    return region


def keys_of(*names: object) -> tuple[BlockKey, ...]:
    """A key per name; equal names give equal keys."""
    return tuple(make_key(hashlib.sha256(str(name).encode()).digest(), 0) for name in names)


def context_of(region: HostRegion, **changes: object) -> TierContext:
    """A context over `region`, the same configuration each time unless `changes` say otherwise."""
    fields = {"model_name": "org/model", "dtype": "bfloat16"}
    terms: dict[str, object] = {"run_config": RunConfig(fields=fields), **changes}
    return TierContext(region=region, **terms)  # type: ignore[arg-type]


class ShiftedClock:
    """The machine's clock, which a test can push forward: threads go on, deadlines pass."""

    def __init__(self) -> None:
        self.shift_s = 0.0

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s() + self.shift_s

    def wall_s(self) -> float:
        return SYSTEM_CLOCK.wall_s() + self.shift_s

    def sleep(self, duration_s: float) -> None:
        SYSTEM_CLOCK.sleep(duration_s)


class TierDriver:
    """Drives a tier as its owner does, and keeps what it has told. Checks the counters at every poll.

    Lookups and loads are for the request `request_id`.
    """

    def __init__(self, tier: Tier, region: HostRegion, request_id: str = "") -> None:
        self.tier = tier
        self.region = region
        self.request_id = request_id
        self.patience_s = PATIENCE_S
        """How long a result is waited for."""
        self.results: dict[int, JobResult] = {}
        self.settled: set[int] = set()
        self._next_id = 0
        self._last = tier.stats()

    def submit_store(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> int:
        """Queue a store; its job's number."""
        self._next_id += 1
        self.tier.store(Job(self._next_id, tuple(keys), tuple(slots)))
        return self._next_id

    def submit_load(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> int:
        """Queue a load; its job's number."""
        self._next_id += 1
        self.tier.load(Job(self._next_id, tuple(keys), tuple(slots), self.request_id))
        return self._next_id

    def store(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> JobResult:
        """Store, and wait for the result."""
        return self.result(self.submit_store(keys, slots))

    def load(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> JobResult:
        """Load, and wait for the result."""
        return self.result(self.submit_load(keys, slots))

    def take(self, news: Sequence[JobResult | Settled]) -> None:
        """Enter what the tier told; each thing is told once."""
        for each in news:
            if isinstance(each, Settled):
                assert not self.results[each.job_id].settled, "settled, but never was unsettled"
                assert each.job_id not in self.settled, "settled twice"
                self.settled.add(each.job_id)
            else:
                assert each.job_id not in self.results, "a second result for one job"
                self.results[each.job_id] = each

    def poll(self) -> None:
        self.take(self.tier.poll())
        self._last = check_counters(self._last, self.tier.stats())

    def result(self, job_id: int) -> JobResult:
        """Wait for the result of a job. `AssertionError` if there is none in `patience_s`."""
        self.until(lambda: job_id in self.results, f"the result of job {job_id}")
        return self.results[job_id]

    def until(self, happened: object, what: str) -> None:
        """Poll until `happened()`; the contract of a tier knows no other way to wait for it."""
        assert callable(happened)
        give_up_s = SYSTEM_CLOCK.monotonic_s() + self.patience_s
        while not happened():
            self.poll()
            if happened():
                return
            late = SYSTEM_CLOCK.monotonic_s() >= give_up_s
            assert not late, f"waited {self.patience_s:g} s for {what}"
            SYSTEM_CLOCK.sleep(_PAUSE_S)

    def lookup(self, *keys: BlockKey) -> list[Lookup]:
        """Ask until no answer is PENDING."""
        answers = self.tier.lookup(keys, self.request_id)

        def answered() -> bool:
            nonlocal answers
            answers = self.tier.lookup(keys, self.request_id)
            return Lookup.PENDING not in answers

        self.until(answered, "an answer to a lookup")
        return answers

    def bytes_of(self, *slots: int) -> list[bytes]:
        """What lies in these slots."""
        return [bytes(self.region.slot_view(slot)) for slot in slots]

    def clear(self, *slots: int) -> None:
        """Zero these slots."""
        for slot in slots:
            self.region.slot_view(slot)[:] = bytes(self.region.geometry.chunk_bytes)
            self.region.forget_checksum(slot)


def check_counters(before: TierStats, after: TierStats) -> TierStats:
    """Counters are not negative and never fall (C23). Returns `after`."""
    _check_counters(before, after)
    if after.peers is not None:
        _check_counters(before.peers or PeerStats(), after.peers)
    return after


def _check_counters(before: TierStats | PeerStats, after: TierStats | PeerStats) -> None:
    for name in after.__struct_fields__:
        value = getattr(after, name)
        if isinstance(value, int):
            assert value >= 0, f"{name} is {value}"
            if name not in _GAUGES:
                assert value >= getattr(before, name), f"{name} fell"
