from __future__ import annotations

from collections.abc import Callable

from pdoffload.tiers.growth import AT_ONCE, PAUSE_S, Growth


def threads_after(seconds: float, pace: Callable[[int], float], most: int = 64) -> int:
    """Threads after a steady backlog, on a disk that moves `pace(threads)` chunks per second."""
    growth, count, now_s, step_s = Growth(), 0, 100.0, 0.01
    moved = 0.0
    while now_s < 100 + seconds:
        if count < most and growth.one_more(count, now_s):
            count += 1
        moved += pace(count) * step_s
        growth.moved(int(moved))
        moved -= int(moved)
        now_s += step_s
    return count


def test_two_threads_start_at_once() -> None:
    growth = Growth()
    assert growth.one_more(0, 10.0)
    assert growth.one_more(1, 10.0)
    assert not growth.one_more(2, 10.0)
    assert AT_ONCE == 2


def test_a_near_disk_is_left_to_a_few_threads() -> None:
    assert threads_after(60, lambda count: 1000) <= 4


def test_a_far_disk_gets_as_many_as_it_takes() -> None:
    assert threads_after(60, lambda count: 50 * count, most=16) == 16


def test_adding_stops_where_it_no_longer_helps() -> None:
    assert 6 <= threads_after(120, lambda count: 100 * min(count, 6)) <= 9


def test_a_backlog_that_ended_does_not_count_against_the_next() -> None:
    growth = Growth()
    growth.one_more(2, 10.0)
    growth.moved(1000)
    later_s = 10.0 + PAUSE_S + 100
    assert not growth.one_more(2, later_s), "the idle time between is no pace"
    growth.moved(1000)
    assert growth.one_more(2, later_s + 0.4)
