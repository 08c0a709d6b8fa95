"""What a lookup does beyond asking file by file: many keys at once, and threads that are left behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import BlockKey
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.base import Lookup
from pdoffload.tiers.lookup import ChunkLookup

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING
TIMEOUT_S = 5.0
A, B, C, D = keys_of("a", "b", "c", "d")


class Store:
    """Answers, or hangs until `open`; a question that hung is told apart by its thread."""

    def __init__(self) -> None:
        self.there = {A, B}
        self.asked: list[tuple[BlockKey, ...]] = []
        self.open = threading.Event()
        self.threads: set[int] = set()

    def __call__(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.threads.add(threading.get_ident())
        self.asked.append(tuple(keys))
        assert self.open.wait(60)
        return [key in self.there for key in keys]


def answer(lookup: ChunkLookup, *keys: BlockKey) -> list[Lookup]:
    for _ in range(5000):
        answers = lookup.ask(keys)
        if PENDING not in answers:
            return answers
        SYSTEM_CLOCK.sleep(0.001)
    raise AssertionError("no answer")


def lookup_in(store: Store, clock: FakeClock, **terms: int) -> ChunkLookup:
    return ChunkLookup(
        lambda: nullcontext(store),
        medium="the store",
        thread_name="test-lookup",
        timeout_s=TIMEOUT_S,
        clock=clock,
        **terms,
    )


def test_what_waits_is_asked_for_together_up_to_a_bound() -> None:
    store, clock = Store(), FakeClock()
    lookup = lookup_in(store, clock, most_keys=2)
    lookup.ask((A,))
    while not store.asked:
        SYSTEM_CLOCK.sleep(0.001)
    lookup.ask((B, C, D))
    store.open.set()
    assert answer(lookup, A, B, C, D) == [HIT, HIT, MISS, MISS]
    assert store.asked == [(A,), (B, C), (D,)]
    lookup.close(timeout_s=10)


def test_c24_a_thread_that_hangs_is_left_behind_and_another_one_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hung, fresh, clock = Store(), Store(), FakeClock()
    fresh.open.set()
    stores = iter((hung, fresh))
    lookup = ChunkLookup(
        lambda: nullcontext(next(stores)),
        medium="the store",
        thread_name="test-lookup",
        timeout_s=TIMEOUT_S,
        clock=clock,
        spare_threads=1,
    )
    lookup.ask((A, B))
    clock.advance(TIMEOUT_S + 1)
    assert lookup.ask((A, B)) == [MISS, MISS]
    assert caplog.text.count("no answer from the store") == 1
    assert answer(lookup, A, C) == [HIT, MISS]
    hung.there = set()
    hung.open.set()
    SYSTEM_CLOCK.sleep(0)
    assert answer(lookup, A) == [HIT], "what the thread that was left behind says is not heard"
    assert all(len(keys) == 1 for keys in hung.asked)
    lookup.close(timeout_s=10)


def test_without_spare_threads_nothing_is_asked_until_it_comes_back() -> None:
    store, clock = Store(), FakeClock()
    lookup = lookup_in(store, clock)
    lookup.ask((A,))
    clock.advance(TIMEOUT_S + 1)
    assert lookup.ask((A, B)) == [MISS, MISS]
    store.open.set()
    for _ in range(5000):
        if lookup.ask((B,)) != [MISS]:
            break
        SYSTEM_CLOCK.sleep(0.001)
    assert answer(lookup, A, B) == [HIT, HIT]
    assert len(store.threads) == 1
    lookup.close(timeout_s=10)


def test_a_question_that_raises_is_a_miss_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, clock = Store(), FakeClock()
    store.open.set()
    broken = [True]

    def ask(keys: Sequence[BlockKey]) -> list[bool]:
        if broken.pop() if broken else False:
            raise ValueError("as the test says")
        return store(keys)

    lookup = ChunkLookup(
        lambda: nullcontext(ask),
        medium="the store",
        thread_name="t",
        timeout_s=TIMEOUT_S,
        clock=clock,
    )
    assert answer(lookup, A) == [MISS]
    assert answer(lookup, B) == [HIT]
    assert "as the test says" in caplog.text
    lookup.close(timeout_s=10)
