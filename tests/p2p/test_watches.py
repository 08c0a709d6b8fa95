"""Who waits for which chunk, over a real index."""

from __future__ import annotations

import pytest

from pdoffload.layout import BlockKey
from pdoffload.memory.lending import FILLING
from pdoffload.testing.pool_rig import LendingPool
from pdoffload.testing.tier_rig import keys_of

A, B, C = keys_of("a", "b", "c")


class Waiter:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[BlockKey, int | None]] = []

    def arrived(self, key: BlockKey, slot: int | None) -> None:
        self.heard.append((key, slot))


@pytest.fixture
def pool() -> LendingPool:
    return LendingPool()


@pytest.fixture
def waiter() -> Waiter:
    return Waiter()


def give_back(pool: LendingPool, *waiters: Waiter) -> None:
    for waiter in waiters:
        pool.index.give_back([slot for _, slot in waiter.heard if slot is not None])


def test_what_is_ready_is_lent_at_once_and_the_rest_when_it_comes(
    pool: LendingPool, waiter: Waiter
) -> None:
    pool.hold([A])
    pool.fill([B])
    assert pool.watches.wait([A, B, C], waiter) == {A: pool.slot_of(A)}
    assert len(pool.watches) == 2
    pool.ready([B])
    pool.hold([C])
    pool.tell()
    assert waiter.heard == [(B, pool.slot_of(B)), (C, pool.slot_of(C))]
    assert [pool.loans(key) for key in (A, B, C)] == [1, 1, 1]
    assert len(pool.watches) == 0


def test_several_wait_for_one_chunk_and_each_gets_a_loan(pool: LendingPool) -> None:
    waiters = [Waiter(), Waiter(), Waiter()]
    pool.fill([A])
    for each in waiters:
        assert pool.watches.wait([A], each) == {}
    pool.ready([A])
    assert [each.heard for each in waiters] == [[(A, pool.slot_of(A))]] * 3
    assert pool.loans(A) == 3
    give_back(pool, *waiters)
    assert pool.is_at_rest


def test_what_does_not_come_after_all_is_told_to_everybody(pool: LendingPool) -> None:
    waiters = [Waiter(), Waiter()]
    pool.fill([A])
    for each in waiters:
        pool.watches.wait([A], each)
    pool.index.abandon([A])
    pool.tell()
    assert [each.heard for each in waiters] == [[(A, None)]] * 2
    assert pool.is_at_rest
    pool.hold([A])
    assert not pool.arrivals, "nobody watches any more"


def test_who_has_dropped_it_hears_nothing(pool: LendingPool, waiter: Waiter) -> None:
    other = Waiter()
    pool.watches.wait([A, B], waiter)
    pool.watches.wait([A], other)
    pool.watches.drop([A, B, C], waiter)
    pool.watches.drop([A], waiter)
    assert len(pool.watches) == 1
    pool.hold([A, B])
    pool.tell()
    assert waiter.heard == []
    assert other.heard == [(A, pool.slot_of(A))]
    give_back(pool, other)
    assert pool.is_at_rest


def test_an_arrival_that_nobody_waits_for_any_more_is_given_back(
    pool: LendingPool, waiter: Waiter
) -> None:
    pool.watches.wait([A], waiter)
    pool.hold([A])  # its arrival is on its way
    pool.watches.drop([A], waiter)
    assert pool.loans(A) == 1
    pool.tell()
    assert pool.is_at_rest
    assert waiter.heard == []


def test_whoever_comes_between_the_arrival_and_its_news_is_served_at_once(
    pool: LendingPool, waiter: Waiter
) -> None:
    other = Waiter()
    pool.watches.wait([A], waiter)
    pool.hold([A])
    assert pool.watches.wait([A], other) == {A: pool.slot_of(A)}
    pool.tell()
    assert waiter.heard == [(A, pool.slot_of(A))]
    assert other.heard == []
    assert pool.loans(A) == 2


def test_old_news_of_a_loss_end_no_younger_wait(pool: LendingPool, waiter: Waiter) -> None:
    pool.fill([A])
    pool.watches.wait([A], waiter)
    pool.index.abandon([A])
    pool.fill([A])  # the next store, before the news of the first have been heard
    pool.tell()
    assert waiter.heard == []
    assert pool.index.find(A) is FILLING
    pool.ready([A])
    assert waiter.heard == [(A, pool.slot_of(A))]
    give_back(pool, waiter)
    assert pool.is_at_rest


def test_a_reset_between_the_arrival_and_its_news_leaves_nothing_behind(
    pool: LendingPool,
) -> None:
    first, second = Waiter(), Waiter()
    pool.watches.wait([A], first)
    pool.hold([A])
    slot = pool.slot_of(A)
    pool.index.clear([])
    pool.watches.wait([A], second)
    pool.tell()
    assert first.heard == [(A, slot)], "lent, its bytes stay what they are"
    assert second.heard == [(A, None)]
    give_back(pool, first)
    assert pool.is_at_rest
    pool.hold([A])
    assert not pool.arrivals, "nobody watches any more"
    pool.index.check()
