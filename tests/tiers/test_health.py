from __future__ import annotations

import errno
import itertools

import pytest

from pdoffload.errors import StorageError, StorageFull
from pdoffload.tiers.health import FIRST_RETRY_S, LAST_RETRY_S, SAME_REASON, StoreHealth

FULL = StorageFull("/root", "no space", errno.ENOSPC)
BROKEN = StorageError("/root/a", "broken", errno.EIO)
BROKEN_ELSEWHERE = StorageError("/root/b", "broken", errno.EIO)
DENIED = StorageError("/root", "denied", errno.EACCES)


def test_a_full_disk_stops_stores_at_once_and_is_told_once() -> None:
    health = StoreHealth()
    assert health.admits(0)
    assert health.failed(FULL, 0)
    assert not health.failed(FULL, 0.1), "not a new state"
    assert health.refusing.startswith("full")
    assert "/root" in health.refusing
    assert not health.admits(0.5)
    assert isinstance(health.refusal(), StorageFull)


def test_one_trial_is_let_in_at_each_end_of_a_back_off_that_doubles() -> None:
    health = StoreHealth()
    health.failed(FULL, 0)
    trials = []
    now_s = 0.0
    while now_s < 400:
        now_s += 0.5
        if health.admits(now_s):
            trials.append(now_s)
            health.failed(FULL, now_s)
    waits = [later - earlier for earlier, later in itertools.pairwise(trials)]
    assert trials[0] == FIRST_RETRY_S
    assert waits == sorted(waits)
    assert waits[-1] <= 2 * LAST_RETRY_S
    assert waits[0] >= FIRST_RETRY_S


def test_a_store_that_went_through_opens_everything_again() -> None:
    health = StoreHealth()
    health.failed(FULL, 0)
    assert health.admits(FIRST_RETRY_S)
    assert health.succeeded()
    assert health.refusing == ""
    assert health.admits(FIRST_RETRY_S + 0.001)
    assert not health.succeeded(), "nothing new"
    health.failed(FULL, 2)
    assert health.admits(2 + FIRST_RETRY_S), "the back-off begins anew"


def test_c06_stores_stop_after_some_in_a_row_fail_alike() -> None:
    health = StoreHealth()
    told = [health.failed(error, 0) for error in [BROKEN, BROKEN_ELSEWHERE] * 2]
    assert told == [False] * (SAME_REASON - 1) + [True] + [False] * (4 - SAME_REASON)
    assert "EIO" in health.refusing
    assert not health.admits(0.1)


@pytest.mark.parametrize("between", ["another reason", "a success"])
def test_failures_that_are_not_in_a_row_or_not_alike_stop_nothing(between: str) -> None:
    health = StoreHealth()
    for _ in range(5):
        health.failed(BROKEN, 0)
        if between == "a success":
            health.succeeded()
        else:
            health.failed(DENIED, 0)
    assert health.admits(0)
    assert health.refusing == ""


def test_a_disk_that_breaks_while_it_is_full_is_a_new_state() -> None:
    health = StoreHealth()
    health.failed(FULL, 0)
    told = [health.failed(BROKEN, second) for second in range(SAME_REASON)]
    assert told == [False] * (SAME_REASON - 1) + [True]
    assert health.refusing.startswith("failing")
