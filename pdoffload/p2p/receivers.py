"""Which of our receiving agents is told to peers, and which are on their way out. The service's thread.

current --somebody's slots are in quarantine because of it--> retiring --nothing under way--> closed
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable
from typing import Protocol

from pdoffload.clock import Clock
from pdoffload.errors import PdOffloadError
from pdoffload.p2p.asking import Asker
from pdoffload.p2p.receiving import Stage


class Receiving(Protocol):
    """A receiving agent: `pdoffload.p2p.receiving.Receiver`."""

    @property
    def incarnation(self) -> str: ...

    @property
    def metadata(self) -> bytes: ...

    @property
    def open_to_cma(self) -> bool: ...

    @property
    def stage(self) -> Stage: ...

    @property
    def error(self) -> PdOffloadError | None: ...

    def expect(self, transfers: int) -> None:
        """How many transfers may bring bytes from now on."""

    def retire(self) -> None:
        """Close the agent; idempotent."""

    def join(self, timeout_s: float) -> bool:
        """After `retire`: whether it has ended within `timeout_s`."""


class Receivers:
    """One current receiver, opened at the first need; those before it until they are closed."""

    def __init__(self, begin: Callable[[str], Receiving], *, clock: Clock) -> None:
        """`begin` opens a receiver for an incarnation, and has `ended` called when it is closed or failed."""
        self._begin = begin
        self._clock = clock
        self._process = uuid.uuid4().hex
        self._serial = itertools.count(1)
        self._current: Receiving | None = None
        self._retiring: list[Receiving] = []

    def __repr__(self) -> str:
        return f"<Receivers current={self._current!r}, {len(self._retiring)} retiring>"

    @property
    def num_retiring(self) -> int:
        return len(self._retiring)

    @property
    def available(self) -> Receiving | None:
        """The receiver to introduce to peers, if there is one; it may still be opening."""
        lives = self._current is not None and self._current.stage in (Stage.OPENING, Stage.OPEN)
        return self._current if lives else None

    def current(self) -> Receiving:
        """The receiver to introduce to peers. One is opened if there is none, or if the last has failed."""
        receiver = self.available
        if receiver is None:
            receiver = self._current = self._begin(f"{self._process}.{next(self._serial)}")
        return receiver

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
        for receiver in self._all():
            under_way = sum(asker.under_way(receiver) for asker in askers)
            receiver.expect(under_way)
            if receiver is not self._current and not under_way:
                receiver.retire()
        return replaced

    def ended(self, receiver: Receiving) -> None:
        """A receiver's agent is closed."""
        if receiver in self._retiring:
            self._retiring.remove(receiver)
        if receiver is self._current:
            self._current = None

    def close(self, timeout_s: float) -> bool:
        """Close all agents, within `timeout_s` together; whether every thread has ended."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        receivers = self._all()
        for receiver in receivers:
            receiver.retire()
        ended = [
            receiver.join(max(0.0, deadline_s - self._clock.monotonic_s()))
            for receiver in receivers
        ]
        return all(ended)

    def _all(self) -> list[Receiving]:
        return [*self._retiring, *([self._current] if self._current else [])]


def same_process(incarnation: str, other: str) -> bool:
    """Whether two incarnations are receiving agents of one process, one after the other."""
    return bool(incarnation) and incarnation.rpartition(".")[0] == other.rpartition(".")[0]
