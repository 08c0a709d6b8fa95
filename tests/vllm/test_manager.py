"""The scheduler's side in vLLM's own words, without an engine."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from pdoffload.config import Locality as OurLocality
from pdoffload.layout import BlockKey, Geometry, RunConfig
from pdoffload.memory.host import HostRegion, SlotStatus
from pdoffload.policy.lru import Lru
from pdoffload.testing.clock import FakeClock
from pdoffload.tiering.manager import Tiering
from pdoffload.tiers.base import Job, Medium, PeerStats, TierContext, TierRequest, TierStats
from pdoffload.tiers.memory import MemoryTier

with warnings.catch_warnings():
    # vLLM and what it imports warn of one another; that is not ours to judge.
    warnings.simplefilter("ignore")
    base = pytest.importorskip("vllm.v1.kv_offload.base", reason="no vLLM here: make setup")
    from pdoffload.vllm import metrics
    from pdoffload.vllm.manager import NixlOffloadingManager

pytestmark = pytest.mark.vllm

SLOTS = 8


class FakePeerTier(MemoryTier):
    """A tier of peers whose chunks lie in memory; what it counts is set by the test."""

    name = "p2p"
    medium = None
    takes_stores = False
    from_peers = True
    peers = PeerStats()

    def request_started(self, request: TierRequest) -> bool:
        return bool(request.params and "remote_decoder" in request.params)

    def stats(self) -> TierStats:
        return TierStats(peers=self.peers)


class Bench:
    def __init__(self) -> None:
        region = HostRegion.private(Geometry(num_slots=SLOTS, worker_bytes=4096, num_copies=1))
        self.tier = MemoryTier(
            TierContext(region=region, run_config=RunConfig(fields={"model_name": "m"}))
        )
        self.tier.medium = Medium.STORAGE
        self.tier.locality = OurLocality.LOCAL
        self.tier.publishes_events = True
        self.peers = FakePeerTier(
            TierContext(region=region, run_config=RunConfig(fields={"model_name": "m"}))
        )
        self.clock = FakeClock()
        self.tiering = Tiering(region, Lru(SLOTS), [self.tier, self.peers], record_moves=True)
        self.manager = NixlOffloadingManager(self.tiering, flush_bound_s=10, clock=self.clock)

    def request(self, name: str, **fields) -> base.ReqContext:
        context = base.ReqContext(req_id=name, **fields)
        assert self.manager.on_new_request(context).policy is base.OffloadPolicy.CHUNK_LEVEL
        return context

    def step(self, *new: str) -> None:
        self.manager.on_schedule_end(
            base.ScheduleEndContext(new_req_ids=list(new), preempted_req_ids=())
        )

    def store(self, context, *numbers: int) -> base.PrepareStoreOutput:
        output = self.manager.prepare_store([key(number) for number in numbers], context)
        for slot in output.store_spec.chunk_ids:
            np.asarray(self.tiering.region.slot_view(int(slot)))[:] = slot
            self.tiering.region.status[slot] = SlotStatus.STORED
        self.manager.complete_store(output.keys_to_store, context)
        return output


def key(number: int) -> base.OffloadKey:
    return base.make_offload_key(number.to_bytes(32, "big"), 0)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.tiering.check()
    bench.manager.shutdown()


def test_a_chunk_goes_out_and_comes_back_in_vllms_steps(bench):
    request = bench.request("r")
    bench.store(request, *range(SLOTS))
    bench.step("r")
    assert bench.store(request, 100).evicted_keys == [key(0)]
    other = bench.request("s")
    assert bench.manager.lookup(key(0), other) is base.LookupResult.HIT_PENDING
    assert bench.manager.has_pending_work()
    bench.step()
    assert bench.manager.lookup(key(0), other) is base.LookupResult.HIT
    assert not bench.manager.has_pending_work()
    assert bench.manager.get_load_source(key(0), other).value == "disk"
    spec = bench.manager.prepare_load([key(0), key(100)], other)
    assert len(set(spec.chunk_ids.tolist())) == 2
    bench.manager.complete_load([key(0), key(100)], other)
    assert bench.manager.get_load_source(key(100), other).value == "host"
    bench.manager.on_request_finished(other)
    assert bench.manager.lookup(key(55), bench.request("t")) is base.LookupResult.MISS


def test_a_store_to_a_tier_does_not_keep_an_idle_engine_stepping(bench):
    bench.store(bench.request("r"), 1)
    assert bench.tiering.plan.num_jobs == 1
    assert not bench.manager.has_pending_work()


def test_a_request_that_names_its_tiers_is_served_from_no_other(bench):
    bench.store(bench.request("r"), *range(SLOTS))
    bench.step()
    bench.store(bench.request("s"), *range(100, 100 + SLOTS))
    bench.step()
    only_remote = base.TierFilter((base.TierMatcher(base.Medium.STORAGE, base.Locality.REMOTE),))
    picky = bench.request("t", load_tier_filter=only_remote)
    assert bench.manager.lookup(key(0), picky) is base.LookupResult.MISS
    local = base.TierFilter((base.TierMatcher(base.Medium.STORAGE, base.Locality.LOCAL),))
    assert (
        bench.manager.lookup(key(0), bench.request("u", load_tier_filter=local))
        is base.LookupResult.HIT_PENDING
    )
    bench.step()


def test_a_request_whose_chunks_a_peer_will_pull_is_offloaded_whole(bench):
    for params, policy in (
        ({"remote_decoder": {"kv_request_id": "x"}}, base.OffloadPolicy.REQUEST_LEVEL),
        ({"max_offload_tokens": 7}, base.OffloadPolicy.CHUNK_LEVEL),
    ):
        context = base.ReqContext(req_id="r", kv_transfer_params=params)
        assert bench.manager.on_new_request(context).policy is policy
        bench.manager.on_request_finished(context)


def test_what_peers_send_is_told_as_such_and_whoever_chooses_by_medium_gets_it(bench):
    bench.peers.store(Job(1, (BlockKey(key(0)),), (0,)))
    bench.peers.poll()
    only_remote = base.TierFilter((base.TierMatcher(base.Medium.STORAGE, base.Locality.REMOTE),))
    request = bench.request("r", load_tier_filter=only_remote)
    assert bench.manager.lookup(key(0), request) is base.LookupResult.HIT_PENDING
    bench.step()
    bench.step()
    assert bench.manager.lookup(key(0), request) is base.LookupResult.HIT
    assert bench.manager.get_load_source(key(0), request).value == "p2p"
    assert [event.medium for event in bench.manager.take_events()] == [base.Medium.CPU]


def test_c23_metrics_of_peers_are_declared_bounded_and_never_fall(bench):
    declared = metrics.definitions(with_tiers=True)
    names = {name.removeprefix("vllm:pdoffload_peer_") for name in declared}
    counted = set(PeerStats.__struct_fields__) - {"transports"}
    assert counted <= names
    series: set[tuple[str, tuple[str, ...]]] = set()
    gauges: dict[tuple[str, tuple[str, ...]], float] = {}
    for number in range(1, 60):
        bench.peers.peers = PeerStats(
            peers_up=number % 3,
            transports=((f"rc/mlx5_{number}", 2), ("tcp/eth0", 1)),
            served_bytes=1000 * number,
            handshakes_done=number // 2,
        )
        stats = bench.manager.get_stats()
        for name, by_label in stats.data["data"].items():
            for labels, value in by_label.items():
                assert len(labels) == len(declared[name].labelnames)
                assert value >= (1 if stats.data["types"][name] == "counter" else 0)
                series.add((name, labels))
                if stats.data["types"][name] == "gauge":
                    gauges[name, labels] = value
    transport = "vllm:pdoffload_peer_transport"
    told = [labels for name, labels in series if name == transport]
    assert len(told) == 17, "sixteen by name and the others together"
    assert gauges[transport, ("p2p", "tcp/eth0")] == 1
    assert gauges[transport, ("p2p", "rc/mlx5_1")] == 0, "no peer is reached by it any more"
    assert gauges[transport, ("p2p", "other")] == 2
    assert ("vllm:pdoffload_peer_served_bytes", ("p2p",)) in series
    assert bench.manager.get_stats() is None


def test_events_carry_medium_and_locality(bench):
    request = bench.request("r")
    bench.store(request, *range(SLOTS))
    bench.step()
    bench.store(request, 100)
    bench.step()
    seen = [
        (event.medium, event.locality, event.removed, len(event.keys))
        for event in bench.manager.take_events()
    ]
    assert seen == [
        (base.Medium.CPU, None, False, SLOTS),
        (base.Medium.STORAGE, base.Locality.LOCAL, False, SLOTS),
        (base.Medium.CPU, None, True, 1),
        (base.Medium.CPU, None, False, 1),
        (base.Medium.STORAGE, base.Locality.LOCAL, False, 1),
    ]
    assert list(bench.manager.take_events()) == []


@pytest.mark.parametrize("word", ["told", "bound"])
def test_slots_of_copies_from_before_a_reset_are_freed_in_time(bench, word):
    request = bench.request("r")
    bench.store(request, 1)
    bench.step()
    bench.manager.prepare_load([key(1)], request)
    bench.manager.reset_cache()
    pool = bench.tiering.plan.index.pool
    assert pool.num_quarantined == 1
    if word == "told":
        bench.manager.on_reset_flushed()
    else:
        bench.clock.advance(9)
        bench.step()
        assert pool.num_quarantined == 1
        bench.clock.advance(2)
        bench.step()
    assert pool.num_quarantined == 0


def test_c23_metrics_are_declared_bounded_and_never_fall(bench):
    declared = metrics.definitions(with_tiers=True)
    totals: dict[tuple[str, tuple[str, ...]], float] = {}
    for number in range(300):
        request = bench.request(f"request-{number}")
        bench.manager.lookup(key(number), request)
        bench.store(request, number)
        bench.store(request, number)
        bench.step(f"request-{number}")
        bench.manager.on_request_finished(request)
        stats = bench.manager.get_stats()
        types, values = stats.data["types"], stats.data["data"]
        for name, by_label in values.items():
            for labels, value in by_label.items():
                assert len(labels) == len(declared[name].labelnames)
                if types[name] == "counter":
                    assert value > 0, "an increment that is none is not sent"
                    totals[name, labels] = totals.get((name, labels), 0) + value
                else:
                    assert value >= 0
    assert {labels for _, labels in totals} == {(), ("memory",)}
    assert totals["vllm:pdoffload_tier_stored_chunks", ("memory",)] == 300
    assert totals["vllm:pdoffload_tier_bytes_written", ("memory",)] == 300 * 4096
    assert totals["vllm:pdoffload_stored_chunks", ()] == 300
    assert bench.manager.get_stats() is None, "nothing happened, nothing is sent"
