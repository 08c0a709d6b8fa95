"""The plan and its loans under every order of events; after each step the books balance."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdoffload.errors import StorageError
from pdoffload.layout import BlockKey, make_key
from pdoffload.memory.lending import Arrival, Loan, Presence
from pdoffload.policy.lru import Lru
from pdoffload.tiering.plan import Plan
from pdoffload.tiers.base import Job, JobResult, Settled

LOST = StorageError("/somewhere", "gone")


def key(number: int) -> BlockKey:
    return make_key(number.to_bytes(32, "big"), 0)


def done(job: Job) -> JobResult:
    return JobResult(job_id=job.job_id, succeeded=job.keys)


class AnyOrder(RuleBasedStateMachine):
    """Everything at once, in any order; after every step the books balance, and no slot on loan has been
    given to new bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan(6, Lru(6), store_to=range(2))
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
