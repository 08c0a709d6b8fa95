"""Slots lent to other threads while the scheduler evicts, stores and resets: the bytes stay what they are."""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pdoffload.layout import BlockKey, make_key
from pdoffload.memory.lending import Arrival
from pdoffload.policy.arc import Arc
from pdoffload.policy.base import Policy
from pdoffload.policy.lru import Lru
from pdoffload.tiering.plan import Plan
from pdoffload.tiers.base import JobResult

SLOTS = 48
CHUNKS = 96
STEPS = 4000
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    """Threads take turns every 20 us: what can come between two lines does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(20e-6)
    yield
    sys.setswitchinterval(before)


def key(number: int) -> BlockKey:
    return make_key(number.to_bytes(32, "big"), 0)


def number_of(chunk: BlockKey) -> int:
    return int.from_bytes(chunk[:32], "big")


class Scheduler:
    """Stores at random, at once into the slots it is given, and resets now and then."""

    def __init__(self, policy: Policy) -> None:
        self.plan = Plan(SLOTS, policy, store_to=[0])
        self.pool = np.full((SLOTS, 16), -1, dtype=np.int64)
        self._random = random.Random(1)

    def run(self) -> None:
        for step in range(STEPS):
            first = self._random.randrange(CHUNKS)
            wanted = [key((first + at) % CHUNKS) for at in range(self._random.randrange(1, 9))]
            reserved = self.plan.reserve_store(wanted)
            if reserved is not None:
                stored, reservation = reserved
                for each, slot in zip(stored, reservation.slots, strict=True):
                    self.pool[slot] = number_of(each)
                self._complete(stored, abandoned=step % 17 == 0)
            if step % 250 == 249:
                self.plan.reset()

    def _complete(self, stored: list[BlockKey], *, abandoned: bool) -> None:
        for command in self.plan.complete_store(stored, lambda slot: not abandoned):
            self.plan.job_ended(JobResult(job_id=command.job.job_id, succeeded=command.job.keys))


class Borrower:
    """Lends and watches at random, looks at the bytes when it borrows and when it gives back."""

    def __init__(self, scheduler: Scheduler, seed: int, arrivals: deque[Arrival] | None) -> None:
        self.num_borrowed = 0
        self._index = scheduler.plan.index
        self._pool = scheduler.pool
        self._random = random.Random(seed)
        self._arrivals = arrivals
        self._held: list[tuple[BlockKey, int]] = []

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._borrow()
            while len(self._held) > self._random.randrange(20):
                self._return_one()
        while self._held:
            self._return_one()

    def take_arrivals(self) -> None:
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if arrival.slot is not None:
                self._take(arrival.key, arrival.slot)

    def _borrow(self) -> None:
        first = self._random.randrange(CHUNKS)
        wanted = [key((first + at) % CHUNKS) for at in range(6)]
        if self._arrivals is None:
            loan = self._index.lend(wanted)
        else:
            self.take_arrivals()
            loan = self._index.watch(wanted)
            self._index.unwatch(wanted[:2])
        for each, slot in zip(wanted, loan.slots, strict=True):
            if slot is not None:
                self._take(each, slot)

    def _take(self, chunk: BlockKey, slot: int) -> None:
        self._look(chunk, slot)
        self._held.append((chunk, slot))
        self.num_borrowed += 1

    def _return_one(self) -> None:
        chunk, slot = self._held.pop(self._random.randrange(len(self._held)))
        self._look(chunk, slot)
        self._index.give_back([slot])

    def _look(self, chunk: BlockKey, slot: int) -> None:
        found = self._pool[slot]
        assert (found == number_of(chunk)).all(), f"{found} under a loan of {number_of(chunk)}"


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_c20_bytes_never_change_under_a_loan(policy: type[Policy]) -> None:
    scheduler = Scheduler(policy(SLOTS))
    arrivals: deque[Arrival] = deque()
    scheduler.plan.index.listen(arrivals.extend)
    borrowers = [Borrower(scheduler, 2, None), Borrower(scheduler, 3, arrivals)]
    stop = threading.Event()
    with ThreadPoolExecutor(len(borrowers)) as threads:
        ended = [threads.submit(borrower.run, stop) for borrower in borrowers]
        try:
            scheduler.run()
        finally:
            stop.set()
        for each in ended:
            each.result(PATIENCE_S)
    assert all(borrower.num_borrowed > 0 for borrower in borrowers)
    borrowers[1].take_arrivals()
    borrowers[1].run(stop)
    scheduler.plan.check()
    index = scheduler.plan.index
    assert index.num_lent == index.pool.num_pinned == index.pool.num_quarantined == 0
