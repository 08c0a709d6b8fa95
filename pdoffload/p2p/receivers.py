"""Which of our receiving agents is told to peers, and which are on their way out. The service's thread.

current --somebody's slots are in quarantine because of it--> retiring --nothing under way--> closed
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable

from pdoffload.clock import Clock
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.asking import Asker
from pdoffload.p2p.receiving import OpenAgent, Receiver, Stage


class Receivers:
    """One current receiver, opened at the first need; those before it until they are closed."""

    def __init__(
        self,
        open_agent: OpenAgent,
        region: HostRegion,
        changed: Callable[[Receiver], None],
        *,
        clock: Clock,
    ) -> None:
        self._open_agent = open_agent
        self._region = region
        self._changed = changed
        self._clock = clock
        self._process = uuid.uuid4().hex
        self._serial = itertools.count(1)
        self._current: Receiver | None = None
        self._retiring: list[Receiver] = []

    def __repr__(self) -> str:
        return f"<Receivers current={self._current!r}, {len(self._retiring)} retiring>"

    @property
    def num_retiring(self) -> int:
        return len(self._retiring)

    def current(self) -> Receiver:
        """The receiver to introduce to peers; it may still be opening. A failed one is tried again."""
        if self._current is None or self._current.stage in (Stage.FAILED, Stage.CLOSED):
            self._current = Receiver(
                f"{self._process}.{next(self._serial)}",
                self._open_agent,
                self._region,
                self._changed,
                clock=self._clock,
            )
        return self._current

    def is_current(self, receiver: object) -> bool:
        return receiver is self._current

    def balance(self, askers: Iterable[Asker]) -> bool:
        """Replace the current receiver if it must be, close the old ones that may be.

        Tell each how much is expected. True if there is a new one for the peers to know.
        """
        askers = tuple(askers)
        current, replaced = self._current, False
        if current is not None and any(asker.unsettled(current) for asker in askers):
            self._retiring.append(current)
            self._current = None
            self.current()
            replaced = True
        for receiver in (*self._retiring, *([self._current] if self._current else [])):
            under_way = sum(asker.under_way(receiver) for asker in askers)
            receiver.expect(under_way)
            if receiver is not self._current and not under_way:
                receiver.retire()
        return replaced

    def ended(self, receiver: Receiver) -> None:
        """A receiver's agent is closed."""
        if receiver in self._retiring:
            self._retiring.remove(receiver)
        if receiver is self._current:
            self._current = None

    def close(self, timeout_s: float) -> bool:
        """Close all agents; whether every thread has ended."""
        receivers = [*self._retiring, *([self._current] if self._current else [])]
        for receiver in receivers:
            receiver.retire()
        ended = [receiver.join(timeout_s) for receiver in receivers]
        return all(ended)


def same_process(incarnation: str, other: str) -> bool:
    """Whether two incarnations are receiving agents of one process, one after the other."""
    return bool(incarnation) and incarnation.rpartition(".")[0] == other.rpartition(".")[0]
