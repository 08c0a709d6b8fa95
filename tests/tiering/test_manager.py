"""The shell: chunks go out to real tiers and come back byte for byte, or are honestly missed."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from pdoffload.errors import StorageError
from pdoffload.layout import BlockKey, Geometry, RunConfig, make_key
from pdoffload.memory.host import HostRegion, SlotStatus
from pdoffload.policy.lru import Lru
from pdoffload.tiering.manager import Answer, Tiering
from pdoffload.tiers.base import Job, JobResult, Lookup, TierContext, TierRequest
from pdoffload.tiers.memory import MemoryTier

SLOTS = 8


def key(number: int) -> BlockKey:
    return make_key(number.to_bytes(32, "big"), 0)


@pytest.fixture
def region():
    return HostRegion.private(Geometry(num_slots=SLOTS, worker_bytes=2048, num_copies=2))


@pytest.fixture
def tiers(region):
    context = TierContext(region=region, run_config=RunConfig(fields={"model_name": "m"}))
    return [MemoryTier(context), MemoryTier(context)]


@pytest.fixture
def tiering(region, tiers):
    tiering = Tiering(region, Lru(SLOTS), tiers)
    yield tiering
    tiering.check()
    tiering.close(timeout_s=5)


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, 4096, dtype=np.uint8)


def fill(tiering: Tiering, *numbers: int, failed_by: int | None = None) -> None:
    """What a worker does: write the bytes, then one status word per rank."""
    wanted, slots, _ = tiering.reserve_store([key(number) for number in numbers])
    for each, slot in zip(wanted, slots, strict=True):
        number = int.from_bytes(each[:32], "big")
        np.asarray(tiering.region.slot_view(slot))[:] = content(number)
        tiering.region.status[slot] = SlotStatus.STORED
        if failed_by is not None:
            tiering.region.status[slot, failed_by] = SlotStatus.FAILED
    tiering.complete_store(wanted)
    tiering.poll()


def bytes_of(tiering: Tiering, number: int) -> bytes:
    return bytes(tiering.region.slot_view(tiering.plan.index.slot_of(key(number))))


def test_a_chunk_evicted_from_the_pool_comes_back_from_a_tier(tiering):
    fill(tiering, *range(SLOTS))
    fill(tiering, 100, 101)
    tiering.plan.request_started("r")
    assert tiering.lookup(key(0), "r") is Answer.ARRIVING
    assert tiering.lookup(key(100), "r") is Answer.HIT
    tiering.flush()
    tiering.poll()
    assert tiering.lookup(key(0), "r") is Answer.HIT
    assert bytes_of(tiering, 0) == content(0).tobytes()
    assert tiering.plan.source_of(key(0), "r") == 0
    assert tiering.plan.source_of(key(100), "r") is None


def test_the_first_tier_is_asked_first_and_the_second_when_it_has_nothing(tiering, tiers):
    fill(tiering, *range(SLOTS))
    fill(tiering, *range(100, 100 + SLOTS))
    tiers[0].chunks.clear()
    tiering.plan.request_started("r")
    assert tiering.lookup(key(0), "r") is Answer.ARRIVING
    assert tiering.plan.source_of(key(0), "r") == 1
    assert tiering.lookup(key(1), "r", allowed_tiers=[0]) is Answer.MISS
    tiering.flush()
    tiering.poll()


def test_c02_a_chunk_that_comes_back_wrong_is_missed_and_gone(tiering, tiers):
    fill(tiering, *range(SLOTS))
    fill(tiering, *range(100, 100 + SLOTS))
    for tier in tiers:
        tier.chunks[key(0)][77] ^= 1
    tiering.plan.request_started("r")
    for number in (0, 1):
        assert tiering.lookup(key(0), "r") is Answer.ARRIVING
        tiering.flush()
        tiering.poll()
        assert tiers[number].stats().corrupt_chunks == 1
    assert tiering.lookup(key(0), "r") is Answer.MISS


def test_a_chunk_one_rank_did_not_write_is_never_served(tiering, tiers, caplog):
    with caplog.at_level(logging.WARNING):
        fill(tiering, 1, failed_by=1)
    tiering.plan.request_started("r")
    assert tiering.lookup(key(1), "r") is Answer.MISS
    assert not tiers[0].chunks
    assert "1 of 1 chunks did not reach host memory" in caplog.text


def test_a_reused_slot_carries_nothing_of_its_last_chunk(tiering):
    """Neither the checksum nor the status words: both would vouch for the wrong bytes."""
    fill(tiering, *range(SLOTS))
    sums = {tiering.region.checksum(slot) for slot in range(SLOTS)}
    wanted, slots, _ = tiering.reserve_store([key(200)])
    assert not tiering.region.all_stored(slots[0])
    np.asarray(tiering.region.slot_view(slots[0]))[:] = 9
    tiering.region.status[slots[0]] = SlotStatus.STORED
    tiering.complete_store(wanted)
    assert tiering.region.checksum(slots[0]) not in sums
    tiering.poll()


def test_a_failed_copy_to_the_device_bars_the_request_and_clears_its_mark(tiering):
    fill(tiering, 1, 2)
    for request in ("r", "s"):
        tiering.plan.request_started(request)
    slots = tiering.prepare_load([key(1), key(2)], "r")
    tiering.region.status[slots[0], 1] = SlotStatus.FAILED
    tiering.complete_load([key(1), key(2)], "r")
    assert tiering.lookup(key(2), "r") is Answer.MISS
    assert tiering.lookup(key(1), "s") is Answer.HIT
    assert tiering.region.failed_among([slots[0]]) == []


def test_no_room_is_an_answer(tiering):
    fill(tiering, *range(SLOTS))
    tiering.plan.request_started("r")
    tiering.prepare_load([key(number) for number in range(SLOTS)], "r")
    assert tiering.reserve_store([key(100)]) is None
    fill_later = [key(number) for number in range(SLOTS)]
    tiering.complete_load(fill_later, "r")
    assert tiering.reserve_store([key(100)]) is not None
    tiering.complete_store([key(100)], success=False)


def test_a_reset_forgets_the_pool_and_leaves_the_tiers(tiering, tiers):
    fill(tiering, 1)
    tiering.reset()
    tiering.plan.request_started("r")
    assert key(1) in tiers[0].chunks
    assert tiering.lookup(key(1), "r") is Answer.ARRIVING
    tiering.flush()
    tiering.poll()
    assert bytes_of(tiering, 1) == content(1).tobytes()


class FakePeerTier(MemoryTier):
    """Notes what it is told of requests, and wants every chunk of those that say `keep`."""

    name = "peers"
    takes_stores = False

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self.told: list[object] = []

    def borrow_from(self, lender):
        self.lender = lender

    def lookup(self, keys, request_id=""):
        self.told.append(("lookup", request_id))
        return super().lookup(keys)

    def load(self, job: Job) -> None:
        self.told.append(("load", job.request_id))
        super().load(job)

    def store(self, job: Job) -> None:
        raise AssertionError("a store for a tier that takes none")

    def request_started(self, request: TierRequest) -> bool:
        self.told.append(request)
        return bool(request.params and request.params.get("keep"))

    def offered(self, keys, request_id):
        self.told.append(([self.lender.find(each).value for each in keys], request_id))

    def request_finished(self, request_id):
        self.told.append(("finished", request_id))


@pytest.fixture
def peers(region, tiers):
    peers = FakePeerTier(TierContext(region=region, run_config=RunConfig(fields={})))
    tiers.append(peers)
    return peers


def test_a_tier_borrows_from_the_pool_it_stands_behind(peers, tiering):
    fill(tiering, 1)
    (slot,) = peers.lender.lend([key(1)]).slots
    assert bytes(tiering.region.slot_view(slot)) == content(1).tobytes()
    peers.lender.give_back([slot])


def test_requests_reach_the_tiers_with_their_parameters(peers, tiering):
    assert tiering.request_started(TierRequest("r")) is False
    assert tiering.request_started(TierRequest("s", {"keep": 1})) is True
    fill(tiering, 1)
    assert tiering.lookup(key(5), "r") is Answer.MISS
    peers.chunks[key(6)] = bytearray(4096)
    peers._digests[key(6)] = b""
    assert tiering.lookup(key(6), "s") is Answer.ARRIVING
    tiering.flush()
    tiering.poll()
    tiering.request_finished("s")
    tiering.request_finished("r")
    assert peers.told == [
        TierRequest("r"),
        TierRequest("s", {"keep": 1}),
        ("lookup", "r"),
        ("lookup", "s"),
        ("load", "s"),
        ("finished", "s"),
        ("finished", "r"),
    ]


def test_a_kept_requests_chunks_are_offered_once_they_have_their_slots(peers, tiering):
    fill(tiering, 0, 1)
    for name, params in (("r", None), ("s", {"keep": 1})):
        tiering.request_started(TierRequest(name, params))
    peers.told.clear()
    wanted, _, _ = tiering.reserve_store([key(2), key(1), key(3)], "s")
    assert peers.told == [(["filling", "ready", "filling"], "s")]
    assert tiering.reserve_store([key(2), key(0)], "s") == ([], [], [])
    assert peers.told[1:] == [(["filling", "ready"], "s")], "also when nothing is left to store"
    tiering.complete_store(wanted, success=False)
    tiering.reserve_store([key(0)], "r")
    assert len(peers.told) == 2, "the other request did not ask for it"
    tiering.request_finished("s")
    tiering.reserve_store([key(0)], "s")
    assert peers.told[2:] == [("finished", "s")]


def test_chunks_that_found_no_room_are_not_offered(peers, tiering):
    fill(tiering, *range(SLOTS))
    tiering.request_started(TierRequest("s", {"keep": 1}))
    everything = [key(number) for number in range(SLOTS)]
    tiering.prepare_load(everything, "s")
    assert tiering.reserve_store([key(0), key(100)], "s") is None
    assert peers.told[-1] == (["ready"], "s")
    assert tiering.reserve_store([key(100)], "s") is None
    assert len(peers.told) == 2, "there is nothing to offer"
    tiering.complete_load(everything, "s")


class FakeLiar(MemoryTier):
    """Says that it holds everything, and fails every load."""

    def lookup(self, keys, request_id=""):
        return [Lookup.HIT] * len(keys)

    def load(self, job: Job) -> None:
        error = StorageError("nowhere", "never was there")
        failed = tuple((each, error) for each in job.keys)
        self._ended.append(JobResult(job_id=job.job_id, succeeded=(), failed=failed))


def test_a_request_never_loops_on_a_tier_that_does_not_deliver(region, tiers):
    liar = FakeLiar(TierContext(region=region, run_config=RunConfig(fields={})))
    tiering = Tiering(region, Lru(SLOTS), [liar, tiers[0]])
    fill(tiering, *range(SLOTS))
    fill(tiering, *range(100, 100 + SLOTS))
    for request in ("r", "s"):
        tiering.request_started(TierRequest(request))
        answers = []
        for _ in range(5):
            answers.append(tiering.lookup(key(0), request))
            tiering.flush()
            tiering.poll()
        if request == "r":
            assert answers == [Answer.ARRIVING] * 2 + [Answer.HIT] * 3, "the next tier has it"
            assert tiering.plan.source_of(key(0), "r") == 1
            tiers[0].chunks.clear()
            tiering.reset()
        else:
            assert answers == [Answer.ARRIVING] + [Answer.MISS] * 4
    assert tiering.plan.counts.failed_promotions == 2
    tiering.check()
    tiering.close(timeout_s=5)


def test_equal_tiers_are_told_apart_in_metrics(tiering):
    fill(tiering, 1)
    stats = tiering.tier_stats()
    assert set(stats) == {"memory-0", "memory-1"}
    assert all(each.stored_chunks == 1 for each in stats.values())
