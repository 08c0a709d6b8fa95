"""The shell: chunks go out to real tiers and come back byte for byte, or are honestly missed."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from pdoffload.layout import BlockKey, Geometry, RunConfig, make_key
from pdoffload.memory.host import HostRegion, SlotStatus
from pdoffload.policy.lru import Lru
from pdoffload.tiering.manager import Answer, Tiering
from pdoffload.tiers.base import TierContext
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


def test_equal_tiers_are_told_apart_in_metrics(tiering):
    fill(tiering, 1)
    stats = tiering.tier_stats()
    assert set(stats) == {"memory-0", "memory-1"}
    assert all(each.stored_chunks == 1 for each in stats.values())
