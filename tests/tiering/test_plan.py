"""The plan: every story a chunk can go through, and random ones; the proof after each is `check`."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdoffload.errors import MisuseError, StorageError
from pdoffload.layout import BlockKey, make_key
from pdoffload.memory.lending import Arrival, Loan, Presence
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


class AnyOrder(RuleBasedStateMachine):
    """Everything at once, in any order; after every step the books balance, and no slot on loan has been
    given to new bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan(6, Lru(6), store_to=range(2))
        self.rng = random.Random(0)
        self.copies: list[list[BlockKey]] = []
        self.reads: list[tuple[str, list[BlockKey]]] = []
        self.jobs: list[Job] = []
        self.unsettled: list[Job] = []
        # How often each slot was given to new bytes, and what that number was when it was lent.
        self.uses: Counter[int] = Counter()
        self.loans: list[tuple[int, int]] = []
        self.watched: set[BlockKey] = set()
        self.plan.index.listen(self.arrived)

    def arrived(self, arrivals):
        for arrival in arrivals:
            assert isinstance(arrival, Arrival)
            self.watched.remove(arrival.key)
            if arrival.slot is not None:
                assert self.plan.index.slot_of(arrival.key) == arrival.slot
                self.loans.append((arrival.slot, self.uses[arrival.slot]))

    def borrowed(self, wanted: list[BlockKey], loan: Loan):
        find = self.plan.index.find
        for each, slot in zip(wanted, loan.slots, strict=True):
            assert (slot is not None) == (find(each) is Presence.READY)
            assert (each in loan.filling) == (find(each) is Presence.FILLING)
            if slot is not None:
                self.loans.append((slot, self.uses[slot]))

    numbers = st.integers(0, 9)
    requests = st.sampled_from(["a", "b", "c"])

    @rule(request=requests)
    def start(self, request):
        self.plan.request_started(request)

    @rule(request=requests)
    def finish(self, request):
        self.plan.request_finished(request)

    @rule(request=requests)
    def schedule(self, request):
        self.plan.request_scheduled(request)

    @rule(request=requests, number=numbers, tier=st.integers(0, 1))
    def look_up(self, request, number, tier):
        if self.plan.lookup(key(number), request) is Presence.ABSENT:
            spare = self.plan.index.num_to_spare
            if self.plan.promote(tier, key(number), request):
                assert spare > 0
                self.uses[self.plan.index.slot_of(key(number))] += 1

    @rule(wanted=st.lists(numbers, max_size=4))
    def lend(self, wanted):
        wanted = [key(number) for number in wanted]
        self.borrowed(wanted, self.plan.index.lend(wanted))

    @rule(wanted=st.lists(numbers, max_size=4))
    def watch(self, wanted):
        wanted = [key(number) for number in wanted]
        loan = self.plan.index.watch(wanted)
        self.watched.update(k for k, s in zip(wanted, loan.slots, strict=True) if s is None)
        self.borrowed(wanted, loan)

    @rule(unwanted=st.lists(numbers, max_size=4))
    def unwatch(self, unwanted):
        self.plan.index.unwatch([key(number) for number in unwanted])
        self.watched.difference_update(key(number) for number in unwanted)

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def give_back(self, data):
        slot, _ = self.loans.pop(data.draw(st.integers(0, len(self.loans) - 1)))
        self.plan.index.give_back([slot])

    @rule()
    def flush(self):
        self.jobs += [command.job for command in self.plan.flush()]

    @rule(offered=st.lists(numbers, min_size=1, max_size=4, unique=True))
    def offer(self, offered):
        reserved = self.plan.reserve_store([key(number) for number in offered])
        if reserved is not None and reserved[0]:
            self.copies.append(reserved[0])
            self.uses.update(reserved[1].slots)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), good=st.booleans())
    def copy_ends(self, data, good):
        copied = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        self.jobs += [c.job for c in self.plan.complete_store(copied, lambda slot: good)]

    @rule(request=requests, number=numbers)
    def read(self, request, number):
        if self.plan.index.find(key(number)) is Presence.READY:
            self.plan.prepare_load([key(number)], request)
            self.reads.append((request, [key(number)]))

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), good=st.booleans())
    def read_ends(self, data, good):
        request, read = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        self.plan.complete_load(read, request, () if good else read)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), ending=st.sampled_from(["done", "failed", "unsettled", "half"]))
    def job_ends(self, data, ending):
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        half = len(job.keys) // 2
        good = {"done": job.keys, "half": job.keys[:half]}.get(ending, ())
        bad = tuple((each, LOST) for each in job.keys if each not in good)
        settled = ending in ("done", "failed")
        self.plan.job_ended(
            JobResult(job_id=job.job_id, succeeded=tuple(good), failed=bad, settled=settled)
        )
        if not settled:
            self.unsettled.append(job)

    @precondition(lambda self: self.unsettled)
    @rule(data=st.data())
    def settle(self, data):
        job = self.unsettled.pop(data.draw(st.integers(0, len(self.unsettled) - 1)))
        self.plan.job_settled(Settled(job.job_id))

    @rule()
    def reset(self):
        self.plan.reset()
        self.copies.clear()
        self.reads.clear()

    @rule()
    def flushed(self):
        self.plan.flushed()

    @invariant()
    def books_balance(self):
        self.plan.check()
        assert all(self.uses[slot] == uses for slot, uses in self.loans), "a lent slot was reused"
        assert self.plan.index.num_lent == len({slot for slot, _ in self.loans})
        for each in self.watched:
            assert self.plan.index.find(each) is not Presence.READY, "an arrival was not told"

    def teardown(self):
        for request in ("a", "b", "c"):
            self.plan.request_finished(request)
        self.jobs += [command.job for command in self.plan.flush()]
        for copied in self.copies:
            self.jobs += [c.job for c in self.plan.complete_store(copied, lambda slot: True)]
        for request, read in self.reads:
            self.plan.complete_load(read, request)
        for job in self.jobs:
            self.plan.job_ended(done(job))
        for job in self.unsettled:
            self.plan.job_settled(Settled(job.job_id))
        self.plan.flushed()
        self.plan.index.give_back([slot for slot, _ in self.loans])
        self.plan.check()
        assert self.plan.num_jobs == self.plan.num_held == self.plan.num_arriving == 0
        assert self.plan.index.pool.num_pinned == self.plan.index.pool.num_quarantined == 0
        assert self.plan.index.pool.num_filling == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
