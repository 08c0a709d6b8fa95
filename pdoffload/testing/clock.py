"""A clock that stands still until a test moves it."""

from __future__ import annotations

from pdoffload.errors import MisuseError


class FakeClock:
    """A `pdoffload.clock.Clock` whose time passes only in `sleep` and `advance`. Not thread-safe."""

    def __init__(self, *, monotonic_s: float = 1000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self.slept_s = 0.0
        """Seconds spent in `sleep` so far."""

    def __repr__(self) -> str:
        return f"<FakeClock at {self._monotonic_s:g} s>"

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def sleep(self, duration_s: float) -> None:
        """Return at once, `duration_s` later."""
        self.advance(duration_s)
        self.slept_s += duration_s

    def advance(self, duration_s: float) -> None:
        """Let time pass, on both clocks. `MisuseError` if `duration_s` is negative."""
        if duration_s < 0:
            raise MisuseError(f"a monotonic clock cannot go back by {-duration_s:g} s")
        self._monotonic_s += duration_s
        self._wall_s += duration_s

    def step_wall(self, step_s: float) -> None:
        """Set the wall clock forward or back, as an operator or a time server does."""
        self._wall_s += step_s
