"""How long the requests of a thread take, so that waiting for one costs few looks at it."""

from __future__ import annotations

from collections.abc import Callable

from pdoffload.clock import Clock

_FIRST_SLEEP_S = 50e-6
_LATER_SLEEP_S = 10e-3
_LONGEST_SLEEP_S = 50e-3


class Pace:
    """Of one I/O thread. A disk takes milliseconds, a store tens of them, and what it took lately is known:
    sleep through most of it, then look now and then. An agent's own `wait` spins first, which pays for
    copies between memories."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._chunk_s = 0.0
        """What a chunk took lately."""

    def __repr__(self) -> str:
        return f"<Pace {self._chunk_s * 1e3:.3g} ms a chunk>"

    def wait(self, is_over: Callable[[], bool], chunks: int) -> None:
        """Until `is_over` says that a request for so many chunks is; whoever answers bounds it."""
        clock = self._clock
        started_s = clock.monotonic_s()
        expected_s = self._chunk_s * chunks
        sleep_s = min(0.7 * expected_s, _LONGEST_SLEEP_S)
        while not is_over():
            clock.sleep(max(sleep_s, _FIRST_SLEEP_S))
            sleep_s = min(expected_s / 8, _LATER_SLEEP_S)
        took_s = (clock.monotonic_s() - started_s) / chunks
        # Falls at once and rises by steps, so that one late request does not make the next ones late.
        self._chunk_s = min(took_s, 2 * self._chunk_s) or took_s
