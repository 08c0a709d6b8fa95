"""Waiting costs little: a few spins, then sleeps that grow to a millisecond and no further."""

from __future__ import annotations

from pdoffload.agent.completion import FIRST_SLEEP_S, LAST_SLEEP_S, SPINS, Patience
from pdoffload.testing.clock import FakeClock


def sleeps(patience: Patience, clock: FakeClock, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        before_s = clock.monotonic_s()
        patience.pause()
        taken.append(clock.monotonic_s() - before_s)
    return taken


def test_it_spins_then_sleeps_longer_and_longer_up_to_a_millisecond() -> None:
    clock = FakeClock(monotonic_s=0.0)
    taken = sleeps(Patience(clock), clock, SPINS + 40)
    assert taken[:SPINS] == [0.0] * SPINS
    rest = [round(each, 9) for each in taken[SPINS:]]
    assert rest[0] == FIRST_SLEEP_S
    assert rest == sorted(rest)
    assert rest[-1] == max(rest) == LAST_SLEEP_S == 1e-3


def test_news_make_it_expect_more_soon() -> None:
    clock = FakeClock(monotonic_s=0.0)
    patience = Patience(clock)
    sleeps(patience, clock, SPINS + 40)
    patience.reset()
    taken = sleeps(patience, clock, SPINS + 1)
    assert taken[:SPINS] == [0.0] * SPINS
    assert round(taken[SPINS], 9) == FIRST_SLEEP_S


def test_it_never_sleeps_past_a_deadline() -> None:
    clock = FakeClock(monotonic_s=0.0)
    patience = Patience(clock)
    sleeps(patience, clock, SPINS + 40)
    before_s = clock.monotonic_s()
    patience.pause(until_s=before_s + 1e-5)
    assert round(clock.monotonic_s() - before_s, 9) == 1e-5
    patience.pause(until_s=before_s - 1.0)
    assert round(clock.monotonic_s() - before_s, 9) == 1e-5
