"""The index: map, pool and policy agree, whatever order things happen in."""

from __future__ import annotations

import sys

import pytest

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey, make_key
from pdoffload.memory.lending import Arrival, Loan, Presence
from pdoffload.policy.lru import Lru
from pdoffload.tiering.index import Index


def keys(count: int, start: int = 0) -> list[BlockKey]:
    return [make_key(number.to_bytes(32, "big"), 0) for number in range(start, start + count)]


@pytest.fixture
def index():
    index = Index(4, Lru(4))
    yield index
    index.check()


def fill(index: Index, wanted: list[BlockKey]) -> list[int]:
    reservation = index.reserve(wanted)
    assert reservation is not None
    index.commit(wanted)
    return reservation.slots


def test_a_key_is_absent_then_filling_then_ready(index):
    (key,) = keys(1)
    assert index.find(key) is Presence.ABSENT
    index.reserve([key])
    assert index.find(key) is Presence.FILLING
    index.commit([key])
    assert index.find(key) is Presence.READY


def test_least_recently_used_leaves_first(index):
    a, b, c, d = keys(4)
    fill(index, [a, b, c, d])
    index.touch([a])
    reservation = index.reserve(keys(1, start=9))
    assert reservation.evicted == [b]
    assert index.find(b) is Presence.ABSENT


def test_pinned_and_kept_chunks_stay(index):
    a, b, c, d = keys(4)
    fill(index, [a, b, c, d])
    index.pin([a])
    reservation = index.reserve(keys(1, start=9), keep={b})
    assert reservation.evicted == [c]
    assert index.find(a) is index.find(b) is index.find(d) is Presence.READY


def test_a_reservation_that_cannot_be_met_changes_nothing(index):
    a, b, c, d = keys(4)
    fill(index, [a, b, c, d])
    index.pin([a, b])
    before = repr(index)
    assert index.reserve(keys(3, start=9)) is None
    assert repr(index) == before
    assert all(index.find(key) is Presence.READY for key in (a, b, c, d))


def test_an_abandoned_key_gives_its_slot_back(index):
    wanted = keys(4)
    index.reserve(wanted)
    index.abandon(wanted[:1])
    assert index.find(wanted[0]) is Presence.ABSENT
    assert index.pool.num_free == 1


def test_a_quarantined_slot_is_nobodys_until_released(index):
    wanted = keys(4)
    fill(index, wanted)
    (slot,) = index.quarantine(wanted[:1])
    assert index.find(wanted[0]) is Presence.ABSENT
    reservation = index.reserve(keys(3, start=9))
    assert slot not in reservation.slots
    assert index.reserve(keys(1, start=20)) is None
    index.release([slot])
    assert index.reserve(keys(1, start=20)).slots == [slot]


def test_clear_keeps_slots_in_use_out_of_reach(index):
    a, b, c = keys(3)
    fill(index, [a, b])
    index.reserve([c])
    index.pin([a])
    index.clear([a, c])
    assert len(index) == 0
    assert index.pool.num_quarantined == 2
    assert index.pool.num_free == 2


# --- lending ---


def test_a_lent_chunk_stays_until_it_is_given_back(index):
    a, b, c, d = keys(4)
    slots = fill(index, [a, b, c, d])
    (absent,) = keys(1, start=50)
    assert index.lend([a, absent, b]) == Loan([slots[0], None, slots[1]], frozenset())
    index.lend([a])
    assert index.num_lent == 2
    assert index.reserve(keys(3, start=9)) is None
    index.give_back(slots[:2])
    assert index.num_lent == 1
    assert index.reserve(keys(3, start=9)).evicted == [c, d, b]
    index.give_back(slots[:1])
    assert index.num_lent == index.pool.num_pinned == 0


def test_a_loan_tells_filling_from_absent(index):
    ready, filling, absent = keys(3)
    (slot,) = fill(index, [ready])
    index.reserve([filling])
    assert index.lend([absent, filling, ready]) == Loan([None, None, slot], frozenset({filling}))
    index.give_back([slot])


def test_lending_counts_as_use(index):
    a, b, c, d = keys(4)
    index.give_back([fill(index, [a, b, c, d])[0], *index.lend([a, a]).slots][1:])
    assert index.reserve(keys(1, start=9)).evicted == [b]


def test_what_is_not_on_loan_cannot_be_given_back(index):
    (slot,) = fill(index, keys(1))
    index.lend(keys(1))
    index.give_back([slot])
    with pytest.raises(MisuseError, match=f"slot {slot} is not on loan"):
        index.give_back([slot])
    index.pin(keys(1))
    with pytest.raises(MisuseError, match="not on loan"):
        index.give_back([slot])
    index.check(pins={keys(1)[0]: 1})


def test_more_keys_than_one_batch_are_lent_in_their_order():
    big = Index(1000, Lru(1000))
    wanted = keys(1000)
    slots = fill(big, wanted[:600])
    assert big.lend(wanted).slots == slots + [None] * 400
    big.give_back(slots)
    big.check(pins={}, reasons={})


def test_c22_a_loan_outlives_the_key_it_was_lent_for(index):
    a, b, c = keys(3)
    slots = fill(index, [a, b, c])
    index.lend([a, a, b])
    index.pin([b, c])
    index.clear([b, b, c])
    assert len(index) == 0
    assert index.pool.num_quarantined == 3
    index.check(pins={}, reasons={slots[1]: 2, slots[2]: 1})
    index.give_back([slots[0], slots[1]])
    index.release(slots[1:])
    assert index.pool.num_quarantined == 2, "one loan of the first, one reason of the second"
    assert not set(slots[:2]) & set(index.reserve(keys(2, start=9)).slots)
    index.give_back([slots[0]])
    index.release([slots[1]])
    assert index.num_lent == index.pool.num_quarantined == 0
    with pytest.raises(MisuseError, match="no such reason"):
        index.release([slots[1]])


def test_loans_and_promises_leave_a_share_for_stores():
    promised = [0]
    index = Index(8, Lru(8), promised=lambda: promised[0])
    fill(index, keys(8))
    assert index.num_to_spare == 6
    index.lend(keys(4))
    promised[0] = 2
    assert index.num_to_spare == 0


# --- watching ---


@pytest.fixture
def told(index):
    news: list[Arrival] = []
    index.listen(news.extend)
    return news


def test_a_watched_key_is_lent_in_its_commit(index, told):
    soon, later, ready, other = keys(4)
    (slot,) = fill(index, [ready])
    index.reserve([soon])
    assert index.watch([soon, ready, later]) == Loan([None, slot, None], frozenset({soon}))
    index.give_back([slot])
    fill(index, [other])
    assert told == []
    index.commit([soon])
    fill(index, [later])
    assert told == [Arrival(soon, index.slot_of(soon)), Arrival(later, index.slot_of(later))]
    assert index.reserve(keys(2, start=9)).evicted == [ready, other], "the arrivals stay"
    index.give_back(each.slot for each in told)


@pytest.mark.parametrize("ending", ["abandon", "quarantine", "clear"])
def test_a_watched_key_that_does_not_arrive_is_told_once(index, told, ending):
    filling, absent = keys(2)
    (slot,) = index.reserve([filling]).slots
    index.watch([filling, filling, absent])
    getattr(index, ending)([filling])
    assert told == [Arrival(filling, None)]
    if ending != "abandon":
        index.release([slot])
    fill(index, [filling, absent])
    assert told[1:] == [Arrival(absent, index.slot_of(absent))], "the other watch goes on"
    index.give_back([told[1].slot])


def test_a_key_that_is_watched_no_longer_arrives_unheard(index, told):
    a, b = keys(2)
    index.watch([a, b])
    index.unwatch([a, *keys(1, start=50)])
    fill(index, [a, b])
    assert told == [Arrival(b, index.slot_of(b))]
    index.unwatch([b])
    index.give_back([told[0].slot])


def test_arrivals_have_one_listener(index):
    with pytest.raises(MisuseError, match="nobody listens"):
        index.watch(keys(1))
    index.listen(list)
    with pytest.raises(MisuseError, match="listener already"):
        index.listen(list)


def test_unknown_keys_are_misuse(index):
    (key,) = keys(1)
    for call in (
        index.commit,
        index.abandon,
        index.quarantine,
        index.pin,
        index.unpin,
        index.clear,
    ):
        with pytest.raises(MisuseError, match=key.hex()):
            call([key])


def test_python_state_per_resident_chunk_stays_below_400_bytes():
    """What 100,000 resident chunks cost beside their bytes; keys included, as hashed by vLLM."""
    import tracemalloc

    count = 100_000
    tracemalloc.start()
    index = Index(count, Lru(count))
    fill(index, keys(count))
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used_bytes / count < 400, f"{used_bytes / count:.0f} bytes per chunk"
    assert sys.getsizeof(keys(1)[0]) > 36  # the key itself is part of the figure
