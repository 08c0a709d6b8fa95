"""The one waiting discipline: spin briefly while something is expected, then sleep with growing steps.

Copies between memories end within the spin, file I/O and peers within a few sleeps. Spinning longer
would take the processor from the very thread or peer that is waited for.
"""

from __future__ import annotations

from pdoffload.clock import SYSTEM_CLOCK, Clock

SPINS = 20
FIRST_SLEEP_S = 50e-6
LAST_SLEEP_S = 1e-3
GROWTH = 2.0


class Patience:
    """Paces one loop that asks again and again whether something has happened.

        patience = Patience(clock)
        while not happened():
            patience.pause()

    Call `reset` when something did happen and more is expected. One thread.
    """

    __slots__ = ("_clock", "_sleep_s", "_spins")

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._spins = 0
        self._sleep_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Expect the next event soon: spin first, then start from the shortest sleep."""
        self._spins = SPINS
        self._sleep_s = FIRST_SLEEP_S

    def pause(self, *, until_s: float | None = None) -> None:
        """Return at once while spinning, else after one sleep; not later than `until_s` (an instant)."""
        if self._spins:
            # Counted, not timed: asking costs some microseconds, and a fake clock stands still here.
            self._spins -= 1
            return
        sleep_s = self._sleep_s
        if until_s is not None:
            sleep_s = min(sleep_s, max(until_s - self._clock.monotonic_s(), 0.0))
        self._clock.sleep(sleep_s)
        self._sleep_s = min(self._sleep_s * GROWTH, LAST_SLEEP_S)
