"""A thread that knows how long its requests take looks at them seldom, and is not late."""

from __future__ import annotations

from pdoffload.testing.clock import FakeClock
from pdoffload.tiers.pace import Pace


def looks(pace: Pace, clock: FakeClock, took_s: float, chunks: int = 1) -> tuple[int, float]:
    """How often a request that takes so long is looked at, and how late its end is seen."""
    end_s = clock.monotonic_s() + took_s
    asked = 0

    def is_over() -> bool:
        nonlocal asked
        asked += 1
        return clock.monotonic_s() >= end_s

    pace.wait(is_over, chunks)
    return asked, clock.monotonic_s() - end_s


def test_requests_of_a_known_length_are_looked_at_a_few_times() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    for _ in range(8):
        looks(pace, clock, 0.02)
    asked, late_s = looks(pace, clock, 0.02)
    assert asked <= 6
    assert late_s <= 0.02 / 8 + 1e-6
    asked, _ = looks(pace, clock, 0.08, chunks=4)
    assert asked <= 6, "it is known by the chunk"


def test_one_slow_request_makes_no_other_late() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    for _ in range(8):
        looks(pace, clock, 0.002)
    looks(pace, clock, 1.0)
    _, late_s = looks(pace, clock, 0.002)
    assert late_s <= 0.001


def test_a_medium_that_has_become_slow_is_known_after_a_few_requests() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    looks(pace, clock, 0.001)
    for _ in range(6):
        looks(pace, clock, 0.04)
    asked, _ = looks(pace, clock, 0.04)
    assert asked <= 6


def test_what_is_over_at_once_costs_one_look_and_no_sleep() -> None:
    clock = FakeClock()
    assert looks(Pace(clock), clock, 0.0) == (1, 0.0)
    assert clock.slept_s == 0
