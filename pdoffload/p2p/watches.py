"""Who waits for which chunk to become ready in the host pool. One thread, the service's.

The pool tells of each watched chunk once; several may wait for it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pdoffload.layout import BlockKey
from pdoffload.memory.lending import Arrival, Lender


class Waiter(Protocol):
    """Hears once of every chunk it waits for, unless it drops it first."""

    def arrived(self, key: BlockKey, slot: int | None) -> None:
        """`key` is lent to the waiter in `slot`, or None: it is not on its way any more."""


class Watches:
    """Waiters by chunk."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._waiters: dict[BlockKey, list[Waiter]] = {}

    def __repr__(self) -> str:
        return f"<Watches of {len(self._waiters)} chunks>"

    def __len__(self) -> int:
        return len(self._waiters)

    def wait(self, keys: Sequence[BlockKey], waiter: Waiter) -> dict[BlockKey, int]:
        """Those of `keys` that are ready are lent at once, with their slots; the others are waited for."""
        loan = self._lender.watch(keys)
        ready: dict[BlockKey, int] = {}
        for key, slot in zip(keys, loan.slots, strict=True):
            if slot is not None:
                ready[key] = slot
            else:
                self._waiters.setdefault(key, []).append(waiter)
        return ready

    def drop(self, keys: Iterable[BlockKey], waiter: Waiter) -> None:
        """`waiter` waits for none of `keys` any more."""
        nobody = []
        for key in keys:
            waiting = self._waiters.get(key, [])
            if waiter in waiting:
                waiting.remove(waiter)
                if not waiting:
                    del self._waiters[key]
                    nobody.append(key)
        if nobody:
            self._lender.unwatch(nobody)

    def arrived(self, arrival: Arrival) -> None:
        """The pool's news of one chunk, to everybody who waits for it."""
        waiting = self._waiters.pop(arrival.key, [])
        slots: list[int | None] = [arrival.slot]
        if arrival.slot is None:
            slots = [None] * len(waiting)
        elif not waiting:
            self._lender.give_back([arrival.slot])
        else:
            # The first takes the pool's loan; while that lasts the chunk is ready for the others.
            slots += (self._lender.lend([arrival.key]).slots[0] for _ in waiting[1:])
        for waiter, slot in zip(waiting, slots, strict=False):
            waiter.arrived(arrival.key, slot)
