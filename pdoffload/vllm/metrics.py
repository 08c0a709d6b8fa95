"""Counters and gauges of the host pool and the tiers, through vLLM's own /metrics.

Names carry vLLM's prefix because its front end collects only those. Labels are the tier's name and
nothing else: the number of series does not grow with requests, keys or time.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from pdoffload.tiering.manager import Tiering
from pdoffload.tiering.plan import PlanCounts
from pdoffload.tiers.base import TierStats

_PREFIX = "vllm:pdoffload_"

_HOST_COUNTERS = {
    "lookups": "Chunks looked up in the host pool.",
    "host_hits": "Chunks found ready in the host pool.",
    "promoted_chunks": "Chunks brought back from a tier into the host pool.",
    "promotions_refused": "Promotions that found no slot to spare: the chunk was recomputed.",
    "failed_promotions": "Chunks that a tier had announced and did not deliver intact.",
    "evicted_chunks": "Chunks that left the host pool.",
    "stored_chunks": "Chunks copied from the device into the host pool.",
    "loaded_chunks": "Chunks copied from the host pool to the device.",
    "stores_refused": "Chunks not stored because every slot was pinned or filling.",
    "stores_below_threshold": "Chunks not stored because they were not yet seen store_threshold times.",
    "failed_device_stores": "Chunks whose copy from the device failed: never served.",
    "failed_device_loads": "Chunks whose copy to the device failed: their request recomputed them.",
}

_HOST_GAUGES = {
    "host_slots": "Slots of the host pool.",
    "host_free_slots": "Slots that hold nothing.",
    "host_pinned_slots": "Slots that a transfer or a waiting request keeps in place.",
    "host_quarantined_slots": "Slots that bytes of an unfinished transfer may still enter or leave.",
}

_TIER_COUNTERS = {
    "stored_chunks": "Chunks stored in the tier.",
    "already_present": "Stores of chunks that the tier held already; they move no byte.",
    "loaded_chunks": "Chunks loaded from the tier.",
    "verified_chunks": "Loaded chunks whose checksum was compared and matched.",
    "corrupt_chunks": "Chunks that came back wrong, were removed, and were recomputed.",
    "vanished_chunks": "Chunks that a lookup had found and a load had not.",
    "failed_stores": "Chunks whose store failed.",
    "failed_loads": "Chunks whose load failed.",
    "dropped_stores": "Chunks not stored because the tier was full, degraded or behind.",
    "deadlines_exceeded": "Jobs that were given up at their deadline.",
    "bytes_written": "Bytes written to the tier's medium.",
    "bytes_read": "Bytes read from the tier's medium.",
}

_TIER_GAUGES = {
    "quarantined_slots": "Slots of the tier's jobs that may still move bytes after their deadline.",
    "queued_jobs": "Jobs that wait in the tier.",
    "degraded": "1 while the tier refuses stores; the log says why.",
}


def definitions(*, with_tiers: bool) -> dict[str, OffloadingMetricMetadata]:
    """Every metric this adapter emits, as vLLM wants them declared."""
    found: dict[str, OffloadingMetricMetadata] = {}
    for name, text in _HOST_COUNTERS.items():
        found[_PREFIX + name] = OffloadingCounterMetadata(documentation=text)
    for name, text in _HOST_GAUGES.items():
        found[_PREFIX + name] = OffloadingGaugeMetadata(documentation=text)
    if with_tiers:
        label = ("tier",)
        for name, text in _TIER_COUNTERS.items():
            found[f"{_PREFIX}tier_{name}"] = OffloadingCounterMetadata(text, label)
        for name, text in _TIER_GAUGES.items():
            found[f"{_PREFIX}tier_{name}"] = OffloadingGaugeMetadata(text, label)
    return found


class StatsReader:
    """Turns the counters of a `Tiering` into what changed since the last reading."""

    def __init__(self, tiering: Tiering) -> None:
        self._tiering = tiering
        self._counts = PlanCounts()
        self._gauges: dict[tuple[str, str], float] = {}
        self._tier_stats: dict[str, TierStats] = {}

    def read(self) -> OffloadingConnectorStats | None:
        """What changed, or None when nothing did."""
        stats = OffloadingConnectorStats()
        self._read_host(stats)
        for name, now in self._tiering.tier_stats().items():
            self._read_tier(stats, name, now)
        return None if stats.is_empty() else stats

    def _read_host(self, stats: OffloadingConnectorStats) -> None:
        counts = self._tiering.plan.counts
        for name in _HOST_COUNTERS:
            grown = getattr(counts, name) - getattr(self._counts, name)
            if grown:
                stats.increase_counter(_PREFIX + name, grown)
        self._counts = msgspec.structs.replace(counts)
        pool = self._tiering.plan.index.pool
        for name, value in (
            ("host_slots", self._tiering.region.geometry.num_slots),
            ("host_free_slots", pool.num_free),
            ("host_pinned_slots", pool.num_pinned),
            ("host_quarantined_slots", pool.num_quarantined),
        ):
            self._gauge(stats, name, value)

    def _read_tier(self, stats: OffloadingConnectorStats, name: str, now: TierStats) -> None:
        before = self._tier_stats.get(name, TierStats())
        for counter, grown in _grown(before, now):
            stats.increase_counter(f"{_PREFIX}tier_{counter}", grown, (name,))
        self._tier_stats[name] = now
        for gauge in _TIER_GAUGES:
            self._gauge(
                stats,
                f"tier_{gauge}",
                float(bool(now.degraded)) if gauge == "degraded" else getattr(now, gauge),
                name,
            )

    def _gauge(
        self, stats: OffloadingConnectorStats, name: str, value: float, tier: str = ""
    ) -> None:
        if self._gauges.get((name, tier)) == value:
            return
        self._gauges[(name, tier)] = value
        stats.set_gauge(_PREFIX + name, value, (tier,) if tier else ())


def _grown(before: TierStats, now: TierStats) -> Iterator[tuple[str, int]]:
    for name in _TIER_COUNTERS:
        grown = getattr(now, name) - getattr(before, name)
        if grown > 0:
            yield name, grown
