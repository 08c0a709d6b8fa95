"""Where each chunk lies in the host pool.

The index joins three parts that must agree: the map from key to slot, the slot's state in the pool, and
the policy that chooses who leaves. A key is absent, filling (bytes are on their way into its slot) or
ready; only ready keys are known to the policy, and only unpinned ones leave. One owner thread.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence

import msgspec

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey
from pdoffload.memory.pool import SlotPool, SlotState
from pdoffload.policy.base import Policy


class Presence(enum.Enum):
    """Where a key stands in the host pool."""

    ABSENT = "absent"
    FILLING = "filling"
    READY = "ready"


# Looking a member up in its class costs more than a whole dict access (Python 3.11), and lookups are
# the scheduler's most frequent call: the members are bound once.
ABSENT, FILLING, READY = Presence.ABSENT, Presence.FILLING, Presence.READY


class Reservation(msgspec.Struct, frozen=True):
    """Slots taken for new keys, in the keys' order, and the keys that had to leave for them."""

    slots: list[int]
    evicted: list[BlockKey]


class Index:
    """Keys of the host pool, their slots and pins. Illegal steps raise `MisuseError`."""

    def __init__(self, num_slots: int, policy: Policy) -> None:
        self.pool = SlotPool(num_slots)
        self._policy = policy
        self._slots: dict[BlockKey, int] = {}

    def __repr__(self) -> str:
        return f"<Index {len(self._slots)} keys, {self.pool!r}>"

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

    def reserve(
        self, keys: Sequence[BlockKey], keep: Collection[BlockKey] = ()
    ) -> Reservation | None:
        """Take a slot for each of `keys` (absent, distinct), evicting as many as needed; all or nothing.

        Neither pinned chunks nor those of `keep` are evicted. None, with nothing changed, when that
        leaves too few.
        """
        pool, slots = self.pool, self._slots
        missing = len(keys) - pool.num_free
        evicted: list[BlockKey] = []
        if missing > 0:
            if missing > pool.num_ready - pool.num_pinned:
                return None
            kept = keep if isinstance(keep, (set, frozenset)) else frozenset(keep)
            chosen = self._policy.victims(
                missing, lambda key: bool(pool.pins(slots[BlockKey(key)])) or key in kept
            )
            if chosen is None:
                return None
            evicted = [BlockKey(key) for key in chosen]
            for key in evicted:
                pool.free(slots.pop(key))
        taken = pool.take(len(keys))
        if taken is None:
            raise MisuseError(f"{self!r} promised {len(keys)} slots and has fewer")
        slots.update(zip(keys, taken, strict=True))
        return Reservation(taken, evicted)

    def commit(self, key: BlockKey) -> None:
        """The bytes of `key` have arrived: filling -> ready."""
        self.pool.ready(self.slot_of(key))
        self._policy.add(key)

    def abandon(self, key: BlockKey) -> None:
        """The bytes of `key` did not arrive and none will: its slot is free again."""
        self.pool.abandon(self.slot_of(key))
        del self._slots[key]

    def quarantine(self, key: BlockKey) -> int:
        """Forget `key`; its slot, which bytes may still enter or leave, goes to nobody. Returns it."""
        slot = self.slot_of(key)
        if self.pool.state(slot) is SlotState.READY:
            self._policy.remove(key)
        self.pool.quarantine(slot)
        del self._slots[key]
        return slot

    def pin(self, keys: Iterable[BlockKey]) -> list[int]:
        """Protect ready chunks from eviction, one more time each; their slots in order."""
        slots = [self.slot_of(key) for key in keys]
        for slot in slots:
            self.pool.pin(slot)
        return slots

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.pool.unpin(self.slot_of(key))

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """These chunks were used. Absent ones are ignored."""
        self._policy.touch(keys)

    def clear(self, in_use: Collection[BlockKey]) -> dict[BlockKey, int]:
        """Forget every key. The slots of `in_use` are quarantined and returned; all others are free."""
        quarantined = {key: self.quarantine(key) for key in in_use if key in self._slots}
        for slot in self._slots.values():
            if self.pool.state(slot) is SlotState.FILLING:
                self.pool.abandon(slot)
                continue
            while self.pool.pins(slot):
                self.pool.unpin(slot)
            self.pool.free(slot)
        self._slots.clear()
        self._policy.clear()
        return quarantined

    def check(self) -> None:
        """Prove that map, pool and policy agree; raises `AssertionError` with what does not."""
        self.pool.check()
        self._policy.check()
        seen = list(self._slots.values())
        assert len(set(seen)) == len(seen), "two keys share a slot"
        ready = [k for k, s in self._slots.items() if self.pool.state(s) is SlotState.READY]
        filling = [s for s in seen if self.pool.state(s) is SlotState.FILLING]
        assert len(ready) + len(filling) == len(seen), "a key's slot is neither filling nor ready"
        assert len(ready) == self.pool.num_ready, "a ready slot has no key"
        assert len(filling) == self.pool.num_filling, "a filling slot has no key"
        assert len(ready) == len(self._policy), "policy and pool disagree on what is resident"
        assert all(key in self._policy for key in ready), "a resident key is unknown to the policy"
