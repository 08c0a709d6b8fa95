"""The fake clock: time passes only when told to, and the wall clock may step without it."""

from __future__ import annotations

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.errors import MisuseError
from pdoffload.testing.clock import FakeClock


def test_it_stands_still():
    clock = FakeClock()
    assert clock.monotonic_s() == clock.monotonic_s()
    assert clock.wall_s() == clock.wall_s()


def test_sleeping_moves_both_clocks_and_is_counted():
    clock = FakeClock(monotonic_s=5.0, wall_s=100.0)
    clock.sleep(2.5)
    clock.advance(1.0)
    assert (clock.monotonic_s(), clock.wall_s(), clock.slept_s) == (8.5, 103.5, 2.5)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_moves_no_deadline(step_s):
    clock = FakeClock(monotonic_s=5.0, wall_s=10_000.0)
    clock.step_wall(step_s)
    assert (clock.monotonic_s(), clock.wall_s()) == (5.0, 10_000.0 + step_s)


def test_time_does_not_go_back():
    clock = FakeClock()
    with pytest.raises(MisuseError):
        clock.sleep(-1)


def test_it_offers_what_the_machines_clock_offers():
    for verb in ("monotonic_s", "wall_s", "sleep"):
        assert callable(getattr(FakeClock(), verb))
        assert callable(getattr(SYSTEM_CLOCK, verb))
