"""The only way to ask the time.

Rooms take a `Clock` and never import `time`: tests hand them `pdoffload.testing.FakeClock`, and a step
of the wall clock cannot move a deadline. Durations are float seconds; instants are monotonic seconds
that mean nothing outside the process.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can also sleep. Any thread may call it."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Give up the processor for at least `duration_s` (>= 0)."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch; may step. For names and ages of files, never for deadlines."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def wall_s(self) -> float:
        return time.time()


SYSTEM_CLOCK = SystemClock()
