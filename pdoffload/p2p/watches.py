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
    """Waiters by chunk. A chunk that has waiters is watched in the pool, or its arrival is on its way."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._waiters: dict[BlockKey, list[Waiter]] = {}

    def __repr__(self) -> str:
        return f"<Watches of {len(self._waiters)} chunks>"

    def __len__(self) -> int:
        return len(self._waiters)

    def wait(self, keys: Sequence[BlockKey], waiter: Waiter) -> dict[BlockKey, int]:
        """Those of `keys`, which are distinct, that are ready are lent at once, with their slots; the
        others are waited for."""
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
        key, slot = arrival.key, arrival.slot
        waiting = self._waiters.pop(key, [])
        if slot is not None:
            if not waiting:
                self._lender.give_back([slot])
                return
            # The first takes the pool's loan. While that lasts nothing but a reset takes the chunk away.
            waiting.pop(0).arrived(key, slot)
        self._look_again(key, waiting)

    def _look_again(self, key: BlockKey, waiting: Sequence[Waiter]) -> None:
        """What becomes of those who are left: news may be older than the wait of some of them."""
        for waiter in waiting:
            loan = self._lender.watch([key])
            slot = loan.slots[0]
            if slot is None and loan.filling:
                self._waiters.setdefault(key, []).append(waiter)
                continue
            if slot is None:
                self._lender.unwatch([key])
            waiter.arrived(key, slot)
