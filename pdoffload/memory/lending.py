"""Lending slots of the host pool to a thread that does not own it.

Peers are answered while the engine's scheduler is deep in a step, so the thread that serves them cannot ask
the scheduler. It borrows: a slot on loan keeps its bytes, whatever the owner evicts, stores or forgets in the
meantime, until it is given back. `pdoffload.tiering.index.Index` is the lender; this is what it is to
borrowers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from pdoffload.layout import BlockKey


class Presence(enum.Enum):
    """Where a key stands in the host pool."""

    ABSENT = "absent"
    FILLING = "filling"
    READY = "ready"


# Looking a member up in its class costs more than a whole dict access (Python 3.11), and lookups are
# the scheduler's most frequent call: the members are bound once.
ABSENT, FILLING, READY = Presence.ABSENT, Presence.FILLING, Presence.READY


class Loan(msgspec.Struct, frozen=True):
    """What `lend` or `watch` found, key by key, each at one moment."""

    slots: list[int | None]
    """The slot lent for each key, in the keys' order; None where the key is not ready."""
    filling: frozenset[BlockKey]
    """Keys without a slot whose bytes are on their way into the pool. The others are absent."""


class Arrival(msgspec.Struct, frozen=True):
    """How a watch ended: `key` is ready and `slot` is lent, or None: what was filling did not arrive."""

    key: BlockKey
    slot: int | None


Listener = Callable[[Sequence[Arrival]], None]


class Lender(Protocol):
    """What a borrower sees of the pool. Callable from any thread; no call waits but for a short lock.

    A borrower gives every slot back exactly once per loan, and closes with nothing borrowed.
    """

    @property
    def num_lent(self) -> int:
        """Distinct slots on loan."""

    @property
    def num_to_spare(self) -> int:
        """Slots that may still be lent, beside all that is promised; 0 or less: lend no more.

        A borrower keeps to it (the lender refuses nothing): promotions and stores need the rest. It
        moves under the borrower's feet, by as much as one step of the scheduler promises.
        """

    def find(self, key: BlockKey) -> Presence:
        """Where `key` stands; may be out of date on return. Takes no lock."""

    def lend(self, keys: Sequence[BlockKey]) -> Loan:
        """Borrow every key that is ready, once more each. A chunk that is lent counts as used."""

    def give_back(self, slots: Iterable[int]) -> None:
        """End one loan of each slot. `MisuseError` for a slot that is not on loan."""

    def watch(self, keys: Sequence[BlockKey]) -> Loan:
        """Borrow what is ready, as `lend` does, and watch the rest, absent or filling.

        A watched key that becomes ready is borrowed in the same moment and told to the listener. A
        watch ends with its one `Arrival`. Watching a key twice is watching it once.
        """

    def unwatch(self, keys: Iterable[BlockKey]) -> None:
        """End these watches. Where one has ended already, its `Arrival` may still be on its way to the
        listener, with a slot to give back."""

    def listen(self, listener: Listener) -> None:
        """Who hears of arrivals; once, before the first watch. `MisuseError` a second time.

        It is called on the owner's thread, outside of the lock. It must not raise, wait or call the
        lender: it hands the news to its own thread.
        """
