"""Counters and gauges of the host pool and the tiers, through vLLM's own /metrics.

Names carry vLLM's prefix because its front end collects only those. Labels are the tier's name, and the
name of a transport where peers are reached: the number of series does not grow with requests, keys, peers
or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from pdoffload.tiering.manager import Tiering
from pdoffload.tiering.plan import PlanCounts
from pdoffload.tiers.base import PeerStats, TierStats

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
    "failed_lookups": "Chunks looked up of which the tier could not tell: forbidden, unreachable.",
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

_PEER_COUNTERS = {
    "handshakes_done": "Handshakes with peers that ended well.",
    "handshakes_refused": "Handshakes refused by either side: another model, layout, length or seed.",
    "logins_refused": "Connections that did not prove the cluster's secret.",
    "bad_messages": "Messages of peers that did not parse or came out of turn.",
    "peers_lost": "Peers whose line went down.",
    "served_lookups": "Chunks that peers asked about, here or not.",
    "served_chunks": "Chunks written to peers.",
    "served_bytes": "Bytes written to peers.",
    "expired_keeps": "Chunks kept for a consumer that did not come in time.",
    "refused_fetches": "Fetches of peers that were refused without moving a byte.",
    "refused_requests": "Requests whose peer roles were wrong; they ran without peers.",
    "lookup_deadlines": "Lookups that no peer answered in time.",
    "load_deadlines": "Loads from peers that were given up at their deadline.",
    "store_deadlines": "Writes to peers that were given up at their deadline.",
    "abort_deadlines": "Aborted loads that the peer did not confirm in time.",
}

_PEER_GAUGES = {
    "peers_up": "Peers that can be asked or served now.",
    "kept_slots": "Slots of the host pool kept for peers or being sent to them.",
}

_DIRECT_COUNTERS = ("lookups", "stores_refused", "failed_device_loads")
"""Of `_HOST_COUNTERS`, those that mean something where there is no host pool."""
_DIRECT_TIER = "fs"

_TRANSPORT = "peer_transport"
_MOST_TRANSPORTS = 16
"""Names come from the network library and the machine's devices; any beyond these are told together."""
_OTHER_TRANSPORTS = "other"


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
        for name, text in _PEER_COUNTERS.items():
            found[f"{_PREFIX}peer_{name}"] = OffloadingCounterMetadata(text, label)
        for name, text in _PEER_GAUGES.items():
            found[f"{_PREFIX}peer_{name}"] = OffloadingGaugeMetadata(text, label)
        found[_PREFIX + _TRANSPORT] = OffloadingGaugeMetadata(
            "Peers reached by this transport, as the network library reports it.",
            ("tier", "transport"),
        )
    return found


def direct_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric of direct offloading: the tier's, and what is left of the host pool's."""
    found = definitions(with_tiers=True)
    kept = tuple(f"{_PREFIX}tier_{name}" for name in (*_TIER_COUNTERS, *_TIER_GAUGES))
    kept += tuple(_PREFIX + name for name in _DIRECT_COUNTERS)
    texts = {"stores_refused": "Chunks not stored because too many were on their way already."}
    replaced = {
        _PREFIX + name: OffloadingCounterMetadata(documentation=text)
        for name, text in texts.items()
    }
    return {name: found[name] for name in kept} | replaced


class _Reader:
    """What changed in a tier's counters and gauges since the last reading."""

    def __init__(self) -> None:
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._tier_stats: dict[str, TierStats] = {}
        # By tier: every transport that was ever told, because a gauge that is told stays.
        self._transports: dict[str, set[str]] = {}

    def _read_tier(self, stats: OffloadingConnectorStats, name: str, now: TierStats) -> None:
        before = self._tier_stats.get(name, TierStats())
        for counter, grown in _grown(_TIER_COUNTERS, before, now):
            stats.increase_counter(f"{_PREFIX}tier_{counter}", grown, (name,))
        if now.peers is not None:
            self._read_peers(stats, name, before.peers or PeerStats(), now.peers)
        self._tier_stats[name] = now
        for gauge in _TIER_GAUGES:
            self._gauge(
                stats,
                f"tier_{gauge}",
                float(bool(now.degraded)) if gauge == "degraded" else getattr(now, gauge),
                name,
            )

    def _read_peers(
        self, stats: OffloadingConnectorStats, name: str, before: PeerStats, now: PeerStats
    ) -> None:
        for counter, grown in _grown(_PEER_COUNTERS, before, now):
            stats.increase_counter(f"{_PREFIX}peer_{counter}", grown, (name,))
        for gauge in _PEER_GAUGES:
            self._gauge(stats, f"peer_{gauge}", getattr(now, gauge), name)
        told = self._transports.setdefault(name, set())
        peers: Counter[str] = Counter()
        for transport, count in now.transports:
            if transport not in told and len(told) >= _MOST_TRANSPORTS:
                transport = _OTHER_TRANSPORTS
            told.add(transport)
            peers[transport] += count
        for transport in sorted(told):
            self._gauge(stats, _TRANSPORT, peers[transport], name, transport)

    def _gauge(
        self, stats: OffloadingConnectorStats, name: str, value: float, *labels: str
    ) -> None:
        if self._gauges.get((name, labels)) == value:
            return
        self._gauges[(name, labels)] = value
        stats.set_gauge(_PREFIX + name, value, labels)


class StatsReader(_Reader):
    """Turns the counters of a `Tiering` into what changed since the last reading."""

    def __init__(self, tiering: Tiering) -> None:
        super().__init__()
        self._tiering = tiering
        self._counts = PlanCounts()

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


class DirectStatsReader(_Reader):
    """Counts what the scheduler's side of direct offloading does; `tier` is the worker's last word."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = TierStats()
        self.lookups = 0
        self.stores_refused = 0
        self.failed_device_loads = 0
        self._told = dict.fromkeys(_DIRECT_COUNTERS, 0)

    def read(self) -> OffloadingConnectorStats | None:
        """What changed, or None when nothing did."""
        stats = OffloadingConnectorStats()
        for name, told in self._told.items():
            now: int = getattr(self, name)
            if now > told:
                stats.increase_counter(_PREFIX + name, now - told)
                self._told[name] = now
        self._read_tier(stats, _DIRECT_TIER, self.tier)
        return None if stats.is_empty() else stats


_Stats = TypeVar("_Stats", TierStats, PeerStats)


def _grown(names: Iterable[str], before: _Stats, now: _Stats) -> Iterator[tuple[str, int]]:
    for name in names:
        grown = getattr(now, name) - getattr(before, name)
        if grown > 0:
            yield name, grown
