"""Slots: every legal step, every illegal one, and the counts between them."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdoffload.errors import MisuseError
from pdoffload.layout import make_key
from pdoffload.memory.pool import SlotPool, SlotState
from pdoffload.policy import make_policy

FREE, FILLING, READY, QUARANTINED = SlotState


@pytest.fixture
def pool():
    pool = SlotPool(4)
    yield pool
    pool.check()


def in_state(pool, state, pins=0):
    """A slot of `pool` brought into `state`."""
    if state is FREE:
        return 3
    (slot,) = pool.take(1)
    if state is READY:
        pool.ready(slot)
        for _ in range(pins):
            pool.pin(slot)
    elif state is QUARANTINED:
        pool.quarantine(slot)
    return slot


def test_a_fresh_pool_hands_out_neighbours_in_rising_order(pool):
    assert pool.take(3) == [0, 1, 2]
    assert (pool.num_free, pool.num_filling) == (1, 3)


def test_take_is_all_or_nothing(pool):
    assert pool.take(5) is None
    assert pool.num_free == 4
    assert pool.take(4) == [0, 1, 2, 3]
    assert pool.take(1) is None
    assert pool.take(0) == []


def test_the_slot_freed_last_is_taken_first(pool):
    pool.take(4)
    for slot in (1, 3):
        pool.abandon(slot)
    assert pool.take(1) == [3]


@pytest.mark.parametrize("count", [-1, -5])
def test_a_negative_count_is_misuse(pool, count):
    with pytest.raises(MisuseError, match=str(count)):
        pool.take(count)


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_pool_without_slots_is_misuse(num_slots):
    with pytest.raises(MisuseError, match=str(num_slots)):
        SlotPool(num_slots)


def test_a_slot_lives_through_all_its_states(pool):
    (slot,) = pool.take(1)
    assert pool.state(slot) is FILLING
    pool.ready(slot)
    assert (pool.state(slot), pool.num_ready, pool.num_pinned) == (READY, 1, 0)
    pool.pin(slot)
    pool.pin(slot)
    assert (pool.pins(slot), pool.num_pinned) == (2, 1)
    pool.unpin(slot)
    assert (pool.pins(slot), pool.num_pinned) == (1, 1)
    pool.unpin(slot)
    assert (pool.pins(slot), pool.num_pinned) == (0, 0)
    pool.free(slot)
    assert (pool.state(slot), pool.num_free) == (FREE, 4)


def test_a_pinned_slot_is_never_freed(pool):
    slot = in_state(pool, READY, pins=2)
    with pytest.raises(MisuseError, match=f"slot {slot} is ready with 2 pins and cannot be freed"):
        pool.free(slot)
    assert pool.pins(slot) == 2


@pytest.mark.parametrize(("state", "pins"), [(FILLING, 0), (READY, 0), (READY, 3)])
def test_a_quarantined_slot_belongs_to_nobody_until_released(pool, state, pins):
    slot = in_state(pool, state, pins)
    pool.quarantine(slot)
    assert (pool.state(slot), pool.pins(slot)) == (QUARANTINED, 0)
    assert (pool.num_quarantined, pool.num_pinned, pool.num_filling, pool.num_ready) == (1, 0, 0, 0)
    assert slot not in pool.take(3)
    assert pool.take(1) is None
    pool.release(slot)
    assert pool.take(1) == [slot]


LEGAL = {
    "ready": {FILLING},
    "abandon": {FILLING},
    "pin": {READY},
    "unpin": set(),  # a ready slot without pins has none to give back
    "free": {READY},
    "quarantine": {FILLING, READY},
    "release": {QUARANTINED},
}


@pytest.mark.parametrize("state", list(SlotState))
@pytest.mark.parametrize("step", list(LEGAL))
def test_every_step_from_every_state(pool, step, state):
    slot = in_state(pool, state)
    before = repr(pool)
    if state in LEGAL[step]:
        getattr(pool, step)(slot)
        assert repr(pool) != before
        return
    with pytest.raises(MisuseError, match=f"slot {slot} is {state.value}"):
        getattr(pool, step)(slot)
    assert repr(pool) == before


@pytest.mark.parametrize("slot", [-1, 4, 10**12])
@pytest.mark.parametrize("step", [*LEGAL, "state", "pins"])
def test_a_slot_that_does_not_exist_is_misuse(pool, step, slot):
    pool.take(4)
    with pytest.raises(MisuseError, match=f"slot {slot} does not exist"):
        getattr(pool, step)(slot)


def test_it_shows_its_state(pool):
    pool.take(1)
    pool.quarantine(in_state(pool, READY, pins=1))
    assert repr(pool) == (
        "<SlotPool 4 slots: 2 free, 1 filling, 0 ready (0 pinned), 1 quarantined>"
    )


@pytest.mark.parametrize("counter", ["num_filling", "num_pinned", "num_quarantined"])
def test_check_finds_a_wrong_count(counter):
    pool = SlotPool(4)
    setattr(pool, counter, 1)
    with pytest.raises(AssertionError):
        pool.check()


def test_check_finds_a_slot_that_is_free_and_in_use():
    pool = SlotPool(4)
    pool._words[0] = 0
    with pytest.raises(AssertionError, match="disagree"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random legal steps beside a plain dict of slot -> state and pins."""

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(6)
        self.model = {}

    def those(self, state):
        return sorted(slot for slot, (its, _) in self.model.items() if its is state)

    @rule(count=st.integers(0, 7))
    def take(self, count):
        taken = self.pool.take(count)
        if count > 6 - len(self.model):
            assert taken is None
            return
        assert len(taken) == len(set(taken)) == count
        assert not set(taken) & set(self.model)
        self.model.update(dict.fromkeys(taken, (FILLING, 0)))

    @precondition(lambda self: self.those(FILLING))
    @rule(data=st.data(), arrived=st.booleans())
    def end_filling(self, data, arrived):
        slot = data.draw(st.sampled_from(self.those(FILLING)))
        if arrived:
            self.pool.ready(slot)
            self.model[slot] = (READY, 0)
        else:
            self.pool.abandon(slot)
            del self.model[slot]

    @precondition(lambda self: self.those(READY))
    @rule(data=st.data(), pin=st.booleans())
    def use(self, data, pin):
        slot = data.draw(st.sampled_from(self.those(READY)))
        pins = self.model[slot][1]
        if pin:
            self.pool.pin(slot)
            self.model[slot] = (READY, pins + 1)
        elif pins:
            self.pool.unpin(slot)
            self.model[slot] = (READY, pins - 1)
        else:
            self.pool.free(slot)
            del self.model[slot]

    @precondition(lambda self: self.those(FILLING) or self.those(READY))
    @rule(data=st.data())
    def quarantine(self, data):
        slot = data.draw(st.sampled_from(self.those(FILLING) + self.those(READY)))
        self.pool.quarantine(slot)
        self.model[slot] = (QUARANTINED, 0)

    @precondition(lambda self: self.those(QUARANTINED))
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(self.those(QUARANTINED)))
        self.pool.release(slot)
        del self.model[slot]

    @invariant()
    def agrees(self):
        self.pool.check()
        for slot in range(6):
            state, pins = self.model.get(slot, (FREE, 0))
            assert (self.pool.state(slot), self.pool.pins(slot)) == (state, pins)
        assert self.pool.num_free == 6 - len(self.model)


TestPoolAgainstAModel = PoolMachine.TestCase
TestPoolAgainstAModel.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, database=None
)


@pytest.mark.parametrize(("policy_name", "budget_bytes"), [("lru", 400), ("arc", 540)])
def test_a_resident_chunk_costs_little_state(policy_name, budget_bytes):
    """Key, index, policy and slot, after each chunk was used and replaced twice: the worst moment.

    25,000 chunks fill Python's tables exactly as far as 100,000 do, and are quicker to trace.
    """
    count = 25_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        pool, policy, index = SlotPool(count), make_policy(policy_name, count), {}
        for number in range(3 * count):
            key = make_key(number.to_bytes(32, "big"), 0)
            if pool.num_free == 0:
                for victim in policy.victims(256, lambda _key: False):
                    pool.free(index.pop(victim))
            (slot,) = pool.take(1)
            pool.ready(slot)
            index[key] = slot
            policy.add(key)
            policy.touch([key])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(index) < budget_bytes
