"""The plan: every story a chunk can go through; the proof after each is `check`."""

from __future__ import annotations

import random

import pytest

from pdoffload.errors import MisuseError, StorageError
from pdoffload.layout import BlockKey, make_key
from pdoffload.memory.lending import Presence
from pdoffload.policy.lru import Lru
from pdoffload.tiering.plan import LoadFrom, Moved, Plan, StoreTo
from pdoffload.tiers.base import Job, JobResult, Settled

LOST = StorageError("/somewhere", "gone")


def key(number: int) -> BlockKey:
    return make_key(number.to_bytes(32, "big"), 0)


def done(job: Job) -> JobResult:
    return JobResult(job_id=job.job_id, succeeded=job.keys)


def failed(job: Job, *, settled: bool = True) -> JobResult:
    return JobResult(
        job_id=job.job_id,
        succeeded=(),
        failed=tuple((each, LOST) for each in job.keys),
        settled=settled,
    )


@pytest.fixture
def plan():
    plan = Plan(8, Lru(8), store_to=range(1), record_moves=True)
    plan.request_started("r")
    yield plan
    plan.check()


def store(plan: Plan, *numbers: int) -> list[StoreTo]:
    wanted, _ = plan.reserve_store([key(number) for number in numbers])
    return plan.complete_store(wanted, lambda slot: True)


def promote(plan: Plan, request: str, *numbers: int) -> LoadFrom:
    for number in numbers:
        assert plan.lookup(key(number), request) is Presence.ABSENT
        assert plan.promote(0, key(number), request)
    (command,) = plan.flush()
    return command


def test_a_stored_chunk_goes_to_every_tier():
    plan = Plan(8, Lru(8), store_to=range(2))
    commands = store(plan, 1, 2)
    assert [type(command) for command in commands] == [StoreTo, StoreTo]
    assert [command.tier for command in commands] == [0, 1]
    assert all(command.job.keys == (key(1), key(2)) for command in commands)
    assert plan.index.pool.pins(plan.index.slot_of(key(1))) == 2
    plan.check()
    for command in commands:
        plan.job_ended(done(command.job))
    assert plan.index.pool.num_pinned == 0
    plan.check()


def test_a_chunk_that_some_worker_did_not_write_is_never_served(plan):
    wanted, reservation = plan.reserve_store([key(1), key(2)])
    commands = plan.complete_store(wanted, lambda slot: slot != reservation.slots[0])
    assert plan.index.find(key(1)) is Presence.ABSENT
    assert plan.index.find(key(2)) is Presence.READY
    assert commands[0].job.keys == (key(2),)
    assert plan.counts.failed_device_stores == 1


def test_a_promoted_chunk_is_held_until_its_request_has_loaded_it(plan):
    command = promote(plan, "r", 1)
    assert plan.lookup(key(1), "r") is Presence.FILLING
    plan.job_ended(done(command.job))
    assert plan.lookup(key(1), "r") is Presence.READY
    assert plan.num_held == 1
    slots = plan.prepare_load([key(1)], "r")
    assert slots == list(command.job.slots)
    assert plan.num_held == 0
    assert plan.source_of(key(1), "r") == 0
    plan.complete_load([key(1)], "r")
    assert plan.index.pool.num_pinned == 0


@pytest.mark.parametrize("ending", ["finished", "scheduled"])
def test_c18_holds_of_a_request_that_goes_another_way_are_returned(plan, ending):
    command = promote(plan, "r", 1, 2)
    plan.job_ended(done(command.job))
    assert plan.num_held == 2
    getattr(plan, f"request_{ending}")("r")
    assert plan.num_held == 0
    assert plan.index.pool.num_pinned == 0


def test_c18_a_late_arrival_for_an_aborted_request_is_kept_but_not_held(plan):
    command = promote(plan, "r", 1)
    plan.request_finished("r")
    plan.request_finished("r")
    plan.job_ended(done(command.job))
    assert plan.index.find(key(1)) is Presence.READY
    assert plan.num_held == 0


def test_c18_a_thousand_aborts_at_every_stage_leave_nothing_behind():
    rng = random.Random(18)
    plan = Plan(64, Lru(64), store_to=range(1))
    for number in range(1000):
        request = f"r{number}"
        plan.request_started(request)
        chunk = key(number)
        stage = rng.randrange(6)
        if stage and plan.lookup(chunk, request) is Presence.ABSENT:
            assert plan.promote(0, chunk, request)
        commands = plan.flush() if stage > 1 else []
        for command in commands if stage > 2 else []:
            plan.job_ended(done(command.job))
        if stage > 4:
            plan.prepare_load([chunk], request)
        if number % 10:
            plan.request_finished(request)
        for command in plan.flush() + (commands if stage == 2 else []):
            plan.job_ended(failed(command.job) if rng.random() < 0.3 else done(command.job))
        if stage > 4:
            plan.complete_load([chunk], request)
        plan.request_finished(request)
        plan.check()
    assert plan.num_requests == plan.num_jobs == plan.num_held == plan.num_arriving == 0
    assert plan.index.pool.num_pinned == plan.index.pool.num_quarantined == 0


def test_a_failed_promotion_is_a_miss_at_once(plan):
    command = promote(plan, "r", 1)
    plan.job_ended(failed(command.job))
    assert plan.lookup(key(1), "r") is Presence.ABSENT
    assert plan.source_of(key(1), "r") is None
    assert plan.index.pool.num_free == 8


def test_an_unsettled_promotion_keeps_its_slot_out_of_reach(plan):
    command = promote(plan, "r", 1)
    plan.job_ended(failed(command.job, settled=False))
    assert plan.index.pool.num_quarantined == 1
    _, reservation = plan.reserve_store([key(number) for number in range(10, 17)])
    assert command.job.slots[0] not in reservation.slots
    assert plan.reserve_store([key(20)]) is None
    plan.job_settled(Settled(command.job.job_id))
    assert plan.reserve_store([key(20)])[1].slots == list(command.job.slots)


def test_an_unsettled_store_keeps_its_chunk_in_place_and_readable(plan):
    (command,) = store(plan, 1)
    plan.job_ended(failed(command.job, settled=False))
    assert plan.index.find(key(1)) is Presence.READY
    assert plan.index.pool.num_pinned == 1
    plan.job_settled(Settled(command.job.job_id))
    assert plan.index.pool.num_pinned == 0


def test_a_failed_device_load_bars_its_request_and_no_other(plan):
    for command in store(plan, 1, 2):
        plan.job_ended(done(command.job))
    plan.prepare_load([key(1), key(2)], "r")
    plan.complete_load([key(1), key(2)], "r", failed=[key(1)])
    assert plan.is_barred("r")
    assert plan.index.find(key(1)) is plan.index.find(key(2)) is Presence.READY
    assert plan.counts.failed_device_loads == 1
    plan.request_started("other")
    assert not plan.is_barred("other")


def test_c26_waiting_requests_do_not_evict_each_others_chunks():
    """16 slots, 8 waiting requests of 4 chunks each, and a running one that stores."""
    rng = random.Random(26)
    plan = Plan(16, Lru(16), store_to=range(1))
    loads: dict[BlockKey, int] = {}
    waiting = {f"r{number}": [key(4 * number + i) for i in range(4)] for number in range(8)}
    stored = 0
    for request in waiting:
        plan.request_started(request)
    for step in range(200):
        for request in rng.sample(sorted(waiting), len(waiting)):
            missing = [k for k in waiting[request] if plan.lookup(k, request) is Presence.ABSENT]
            promoted = [k for k in missing if plan.promote(0, k, request)]
            ready = [k for k in waiting[request] if plan.index.find(k) is Presence.READY]
            if not promoted and not any(
                plan.index.find(k) is Presence.FILLING for k in waiting[request]
            ):
                # Everything that comes has come: it loads that much and computes the rest.
                plan.prepare_load(ready, request)
                plan.complete_load(ready, request)
                plan.request_finished(request)
                del waiting[request]
        for command in plan.flush():
            for each in command.job.keys:
                loads[each] = loads.get(each, 0) + 1
            plan.job_ended(done(command.job))
        reserved = plan.reserve_store([key(1000 + step)])
        if reserved is not None:
            stored += 1
            for command in plan.complete_store(reserved[0], lambda slot: True):
                plan.job_ended(done(command.job))
        plan.check()
    assert not waiting
    assert max(loads.values()) <= 2
    assert stored == 200, "the running request's stores starved"


def test_c22_a_slot_that_a_transfer_uses_is_not_reused_after_a_reset(plan):
    (saving,) = store(plan, 1)
    for command in store(plan, 2):
        plan.job_ended(done(command.job))
    arriving = promote(plan, "r", 3)
    plan.prepare_load([key(2)], "r")
    wanted, copying = plan.reserve_store([key(4)])
    in_use = {*saving.job.slots, *arriving.job.slots, plan.index.slot_of(key(2)), *copying.slots}
    plan.reset()
    plan.check()
    assert len(plan.index) == 0
    assert plan.index.pool.num_quarantined == 4
    reserved = plan.reserve_store([key(number) for number in range(10, 14)])
    assert not in_use & set(reserved[1].slots)
    plan.job_ended(done(saving.job))
    plan.job_ended(failed(arriving.job, settled=False))
    assert plan.index.pool.num_quarantined == 3
    plan.job_settled(Settled(arriving.job.job_id))
    plan.flushed()
    assert plan.index.pool.num_quarantined == 0
    # The copy's completion never comes after a reset; if it did, it would find nothing.
    assert plan.complete_store(wanted, lambda slot: True) == []


def test_c19_a_second_ending_of_a_job_is_misuse_and_changes_nothing(plan):
    (command,) = store(plan, 1)
    plan.job_ended(done(command.job))
    with pytest.raises(MisuseError, match=str(command.job.job_id)):
        plan.job_ended(done(command.job))
    with pytest.raises(MisuseError):
        plan.job_settled(Settled(command.job.job_id))


def test_chunks_are_stored_once_they_were_offered_often_enough():
    plan = Plan(8, Lru(8), store_threshold=2, max_tracker_size=3)
    assert plan.reserve_store([key(1)])[0] == []
    assert plan.reserve_store([key(1), key(2)])[0] == [key(1)]
    for number in range(3, 6):
        plan.reserve_store([key(number)])
    assert plan.reserve_store([key(2)])[0] == [], "the tracker forgets the oldest offers"
    assert plan.counts.stores_below_threshold == 6


def test_moves_tell_what_entered_and_what_left(plan):
    (command,) = store(plan, 1)
    assert plan.take_moves() == [Moved((key(1),), removed=False)]
    plan.job_ended(done(command.job))
    assert plan.take_moves() == [Moved((key(1),), removed=False, tier=0)]
    store(plan, *range(10, 17))
    plan.take_moves()
    plan.reserve_store([key(20)])
    assert plan.take_moves() == [Moved((key(1),), removed=True)]
    assert plan.take_moves() == []


def test_a_lookup_of_a_chunk_that_arrives_for_another_waits_with_it(plan):
    command = promote(plan, "r", 1)
    plan.request_started("s")
    assert plan.lookup(key(1), "s") is Presence.FILLING
    plan.job_ended(done(command.job))
    plan.prepare_load([key(1)], "r")
    plan.complete_load([key(1)], "r")
    plan.request_finished("r")
    assert plan.num_held == 1, "the second request's hold keeps the chunk"
    plan.request_finished("s")
    assert plan.num_held == 0


def test_a_tier_that_takes_no_stores_is_given_none():
    plan = Plan(8, Lru(8), store_to=[1])
    assert [command.tier for command in store(plan, 1)] == [1]
    assert store(Plan(8, Lru(8)), 1) == []


def test_a_promotion_is_for_the_request_that_asked_first(plan):
    assert promote(plan, "r", 1).job.request_id == "r"
    assert store(plan, 2)[0].job.request_id == ""


def test_a_tier_that_failed_a_chunk_is_not_asked_for_it_again_by_whoever_waited(plan):
    command = promote(plan, "r", 1)
    plan.request_started("s")
    plan.request_started("t")
    plan.lookup(key(1), "s")
    plan.job_ended(failed(command.job))
    assert [plan.has_failed(0, key(1), request) for request in "rst"] == [True, True, False]
    assert not plan.has_failed(1, key(1), "r")
    assert not plan.has_failed(0, key(2), "r")
    plan.reset()
    assert plan.has_failed(0, key(1), "r"), "a reset of the pool does not make the tier better"
    plan.request_finished("r")
    assert not plan.has_failed(0, key(1), "r")


def test_promotions_and_loans_share_what_may_be_held(plan):
    for command in store(plan, *range(8)):
        plan.job_ended(done(command.job))
    (held,) = plan.index.lend([key(0)]).slots
    lent = plan.index.lend([key(number) for number in range(1, 5)]).slots
    assert plan.promote(0, key(100), "r")
    assert plan.index.num_to_spare == 0
    assert not plan.promote(0, key(101), "r")
    assert plan.counts.promotions_refused == 1
    plan.index.give_back([held])
    assert plan.promote(0, key(101), "r")
    assert len(plan.reserve_store([key(200)])[0]) == 1, "stores find the rest"
    plan.index.give_back(lent)


def test_c22_a_slot_that_a_peer_reads_is_not_reused_after_a_reset(plan):
    (saving,) = store(plan, 1)
    (slot,) = plan.index.lend([key(1)]).slots
    plan.reset()
    plan.check()
    plan.job_ended(done(saving.job))
    assert plan.index.pool.num_quarantined == 1, "the peer still reads"
    reserved = plan.reserve_store([key(number) for number in range(10, 17)])
    assert slot not in reserved[1].slots
    plan.index.give_back([slot])
    assert plan.index.pool.num_quarantined == 0
