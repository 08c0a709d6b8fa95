"""Where each chunk lies in the host pool.

The index joins three parts that must agree: the map from key to slot, the slot's state in the pool, and
the policy that chooses who leaves. A key is absent, filling (bytes are on their way into its slot) or
ready; only ready keys are known to the policy, and only unpinned ones leave.

One owner thread, the scheduler's, and any number of borrowers (see `pdoffload.memory.lending`). Whatever
changes map, pool or policy holds one lock, for the length of one batch and never while waiting. `find`
takes none: the map is changed by the owner alone, and a borrower changes no state that `find` tells apart.

A slot on loan is pinned; the loan outlives the key:

    ready + pins + loans --clear--> quarantined, for reasons + loans --last one ends--> free

A slot is in quarantine as long as one reason (a tier's job or a device copy that may still move bytes) or
one loan is left.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey
from pdoffload.memory.lending import ABSENT, FILLING, READY, Arrival, Listener, Loan, Presence
from pdoffload.memory.pool import SlotPool, SlotState
from pdoffload.policy.base import Policy

HOLD_SHARE = 0.75
"""Holds, promotions and loans together take no more of the pool: stores find the rest."""

# A peer asks for as many keys as it likes; the owner never waits for more than these.
_KEYS_PER_LOCK = 64

_T = TypeVar("_T")


class Reservation(msgspec.Struct, frozen=True):
    """Slots taken for new keys, in the keys' order, and the keys that had to leave for them."""

    slots: list[int]
    evicted: list[BlockKey]


class Index:
    """Keys of the host pool, their slots, pins and loans. Illegal steps raise `MisuseError`.

    `promised` tells how many slots the owner's promotions and holds take; called on any thread. The
    verbs of `Lender` are for any thread, all others for the owner.
    """

    def __init__(
        self, num_slots: int, policy: Policy, promised: Callable[[], int] = lambda: 0
    ) -> None:
        self.pool = SlotPool(num_slots)
        self._policy = policy
        self._promised = promised
        self._hold_limit = max(1, int(num_slots * HOLD_SHARE))
        self._slots: dict[BlockKey, int] = {}
        self._lock = threading.Lock()
        self._loans: dict[int, int] = {}
        self._reasons: Counter[int] = Counter()
        self._watched: set[BlockKey] = set()
        self._listener: Listener | None = None

    def __repr__(self) -> str:
        return f"<Index {len(self._slots)} keys, {self.pool!r}, {len(self._loans)} lent>"

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def find(self, key: BlockKey) -> Presence:
        slot = self._slots.get(key)
        if slot is None:
            return ABSENT
        return READY if self.pool.is_ready(slot) else FILLING

    def slot_of(self, key: BlockKey) -> int:
        try:
            return self._slots[key]
        except KeyError:
            raise MisuseError(f"chunk {key.hex()} is not in the host pool") from None

    # --- the owner's steps ---

    def reserve(
        self, keys: Sequence[BlockKey], keep: Collection[BlockKey] = ()
    ) -> Reservation | None:
        """Take a slot for each of `keys` (absent, distinct), evicting as many as needed; all or nothing.

        Neither pinned chunks nor those of `keep` are evicted. None, with nothing changed, when that
        leaves too few.
        """
        kept = keep if isinstance(keep, (set, frozenset)) else frozenset(keep)
        with self._lock:
            evicted = self._make_room(len(keys), kept)
            if evicted is None:
                return None
            taken = self.pool.take(len(keys))
            if taken is None:
                raise MisuseError(f"{self!r} promised {len(keys)} slots and has fewer")
            self._slots.update(zip(keys, taken, strict=True))
        return Reservation(taken, evicted)

    def commit(self, keys: Sequence[BlockKey]) -> None:
        """The bytes of `keys` have arrived: filling -> ready. Watched ones are lent and told."""
        with self._lock:
            for key in keys:
                self.pool.ready(self.slot_of(key))
                self._policy.add(key)
            arrivals = [
                Arrival(key, self._lend(self._slots[key])) for key in self._end_watches(keys)
            ]
        self._tell(arrivals)

    def abandon(self, keys: Sequence[BlockKey]) -> None:
        """The bytes of `keys` did not arrive and none will: their slots are free again."""
        with self._lock:
            for key in keys:
                self.pool.abandon(self.slot_of(key))
                del self._slots[key]
            lost = self._end_watches(keys)
        self._tell([Arrival(key, None) for key in lost])

    def quarantine(self, keys: Sequence[BlockKey]) -> list[int]:
        """Forget `keys`. Their slots, which bytes may still enter or leave, go to nobody until
        `release`: one reason each. Returns the slots."""
        with self._lock:
            slots = [self.slot_of(key) for key in keys]
            for key, slot in zip(keys, slots, strict=True):
                if self.pool.state(slot) is SlotState.READY:
                    self._policy.remove(key)
                self.pool.quarantine(slot)
                del self._slots[key]
            self._reasons.update(slots)
            lost = self._end_watches(keys)
        self._tell([Arrival(key, None) for key in lost])
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """One reason of each slot's quarantine has gone."""
        with self._lock:
            for slot in slots:
                if not self._reasons[slot]:
                    raise MisuseError(f"slot {slot} is in quarantine for no such reason")
                self._reasons[slot] -= 1
                if not self._reasons[slot]:
                    del self._reasons[slot]
                    self._leave_quarantine(slot)

    def pin(self, keys: Iterable[BlockKey]) -> list[int]:
        """Protect ready chunks from eviction, one more time each; their slots in order."""
        slots = [self.slot_of(key) for key in keys]
        with self._lock:
            for slot in slots:
                self.pool.pin(slot)
        return slots

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        slots = [self.slot_of(key) for key in keys]
        with self._lock:
            for slot in slots:
                self.pool.unpin(slot)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """These chunks were used. Absent ones are ignored."""
        with self._lock:
            self._policy.touch(keys)

    def clear(self, in_use: Iterable[BlockKey]) -> None:
        """Forget every key.

        Slots of `in_use` go to quarantine, for one reason per mention, and lent ones until they are
        given back; all others are free. Watches of absent keys stay: those may still come.
        """
        pool, slots = self.pool, self._slots
        with self._lock:
            self._reasons.update([self.slot_of(key) for key in in_use])
            for slot in slots.values():
                if slot in self._reasons or slot in self._loans:
                    pool.quarantine(slot)
                elif pool.is_ready(slot):
                    for _ in range(pool.pins(slot)):
                        pool.unpin(slot)
                    pool.free(slot)
                else:
                    pool.abandon(slot)
            lost = self._end_watches(slots)
            slots.clear()
            self._policy.clear()
        self._tell([Arrival(key, None) for key in lost])

    # --- lending: any thread ---

    @property
    def num_lent(self) -> int:
        return len(self._loans)

    @property
    def num_to_spare(self) -> int:
        """Slots that may still be promised or lent. A chunk both held and lent counts twice."""
        return self._hold_limit - self._promised() - len(self._loans)

    def lend(self, keys: Sequence[BlockKey]) -> Loan:
        return self._borrow(keys, watch=False)

    def give_back(self, slots: Iterable[int]) -> None:
        for batch in _batches(list(slots)):
            with self._lock:
                for slot in batch:
                    self._give_back(slot)

    def watch(self, keys: Sequence[BlockKey]) -> Loan:
        if self._listener is None:
            raise MisuseError("nobody listens for the arrival of watched chunks")
        return self._borrow(keys, watch=True)

    def unwatch(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            self._watched.difference_update(keys)

    def listen(self, listener: Listener) -> None:
        if self._listener is not None:
            raise MisuseError("arrivals have a listener already")
        self._listener = listener

    # --- under the lock ---

    def _make_room(self, count: int, keep: Collection[BlockKey]) -> list[BlockKey] | None:
        """Evict until `count` slots are free: who left, or None, with nothing changed."""
        pool, slots = self.pool, self._slots
        missing = count - pool.num_free
        if missing <= 0:
            return []
        if missing > pool.num_ready - pool.num_pinned:
            return None
        evicted = self._policy.victims(
            missing, lambda key: bool(pool.pins(slots[key])) or key in keep
        )
        for key in evicted or ():
            pool.free(slots.pop(key))
        return evicted

    def _borrow(self, keys: Sequence[BlockKey], *, watch: bool) -> Loan:
        lent: list[int | None] = []
        filling: set[BlockKey] = set()
        for batch in _batches(keys):
            ready: list[BlockKey] = []
            with self._lock:
                for key in batch:
                    slot = self._slots.get(key)
                    if slot is not None and self.pool.is_ready(slot):
                        lent.append(self._lend(slot))
                        ready.append(key)
                        continue
                    lent.append(None)
                    if slot is not None:
                        filling.add(key)
                    if watch:
                        self._watched.add(key)
                self._policy.touch(ready)
        return Loan(lent, frozenset(filling))

    def _lend(self, slot: int) -> int:
        self.pool.pin(slot)
        self._loans[slot] = self._loans.get(slot, 0) + 1
        return slot

    def _give_back(self, slot: int) -> None:
        loans = self._loans.get(slot)
        if loans is None:
            raise MisuseError(f"slot {slot} is not on loan")
        if loans > 1:
            self._loans[slot] = loans - 1
        else:
            del self._loans[slot]
        if self.pool.is_ready(slot):
            self.pool.unpin(slot)
        else:
            self._leave_quarantine(slot)

    def _leave_quarantine(self, slot: int) -> None:
        """A reason or loan of a quarantined slot has ended: free it if that was the last one."""
        if slot not in self._reasons and slot not in self._loans:
            self.pool.release(slot)

    def _end_watches(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of `keys` that were watched; they are watched no longer."""
        if not self._watched:
            return []
        ended = [key for key in keys if key in self._watched]
        self._watched.difference_update(ended)
        return ended

    # --- outside of it ---

    def _tell(self, arrivals: Sequence[Arrival]) -> None:
        if arrivals and self._listener is not None:
            self._listener(arrivals)

    def check(
        self,
        pins: Mapping[BlockKey, int] | None = None,
        reasons: Mapping[int, int] | None = None,
    ) -> None:
        """Prove that map, pool, policy and loans agree; raises `AssertionError` with what does not.

        `pins` by key and `reasons` by slot are what the owner accounts for; None: not compared.
        """
        with self._lock:
            self.pool.check()
            self._policy.check()
            self._check_keys()
            self._check_loans(pins)
            if reasons is not None:
                assert self._reasons == Counter(reasons), "reasons of quarantine and books disagree"

    def _check_keys(self) -> None:
        seen = list(self._slots.values())
        assert len(set(seen)) == len(seen), "two keys share a slot"
        ready = [key for key, slot in self._slots.items() if self.pool.is_ready(slot)]
        filling = [s for s in seen if self.pool.state(s) is SlotState.FILLING]
        assert len(ready) + len(filling) == len(seen), "a key's slot is neither filling nor ready"
        assert len(ready) == self.pool.num_ready, "a ready slot has no key"
        assert len(filling) == self.pool.num_filling, "a filling slot has no key"
        assert len(ready) == len(self._policy), "policy and pool disagree on what is resident"
        assert all(key in self._policy for key in ready), "a resident key is unknown to the policy"
        assert not self._watched.intersection(ready), "a ready key is still watched"

    def _check_loans(self, pins: Mapping[BlockKey, int] | None) -> None:
        pool = self.pool
        assert all(count > 0 for count in self._loans.values()), "a loan that is none is kept"
        gone = {slot for slot in self._loans if not pool.is_ready(slot)}.union(self._reasons)
        assert pool.num_quarantined == len(gone), "a quarantined slot has no reason"
        assert all(pool.state(slot) is SlotState.QUARANTINED for slot in gone), (
            "a lent slot is free"
        )
        if pins is None:
            return
        for key, slot in self._slots.items():
            expected = pins.get(key, 0) + self._loans.get(slot, 0)
            assert pool.pins(slot) == expected, (
                f"{key.hex()} has {pool.pins(slot)} pins, {expected} are accounted for"
            )
        assert not pins.keys() - self._slots.keys(), "a pin of a key that is not there"


def _batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), _KEYS_PER_LOCK):
        yield items[start : start + _KEYS_PER_LOCK]
