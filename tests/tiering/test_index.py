"""The index: map, pool and policy agree, whatever order things happen in."""

from __future__ import annotations

import sys

import pytest

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey, make_key
from pdoffload.policy.lru import Lru
from pdoffload.tiering.index import Index, Presence


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
    for key in wanted:
        index.commit(key)
    return reservation.slots


def test_a_key_is_absent_then_filling_then_ready(index):
    (key,) = keys(1)
    assert index.find(key) is Presence.ABSENT
    index.reserve([key])
    assert index.find(key) is Presence.FILLING
    index.commit(key)
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
    index.abandon(wanted[0])
    assert index.find(wanted[0]) is Presence.ABSENT
    assert index.pool.num_free == 1


def test_a_quarantined_slot_is_nobodys_until_released(index):
    wanted = keys(4)
    fill(index, wanted)
    slot = index.quarantine(wanted[0])
    assert index.find(wanted[0]) is Presence.ABSENT
    reservation = index.reserve(keys(3, start=9))
    assert slot not in reservation.slots
    assert index.reserve(keys(1, start=20)) is None
    index.pool.release(slot)
    assert index.reserve(keys(1, start=20)).slots == [slot]


def test_clear_keeps_slots_in_use_out_of_reach(index):
    a, b, c = keys(3)
    fill(index, [a, b])
    index.reserve([c])
    index.pin([a])
    kept = index.clear([a, c])
    assert set(kept) == {a, c}
    assert len(index) == 0
    assert index.pool.num_quarantined == 2
    assert index.pool.num_free == 2


def test_unknown_keys_are_misuse(index):
    (key,) = keys(1)
    for call in (index.commit, index.abandon, index.quarantine, index.slot_of):
        with pytest.raises(MisuseError, match=key.hex()):
            call(key)


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
