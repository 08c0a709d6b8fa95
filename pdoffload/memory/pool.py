"""Fixed slots of the host pool: who may use each one now.

State, announced once. A slot is in exactly one of four states; every other step raises `MisuseError`:

    free --take--> filling --ready--> ready(0 pins) <--pin/unpin--> ready(1, 2, .. pins)
    filling --abandon--> free         ready(0 pins) --free--> free
    filling, ready --quarantine--> quarantined --release--> free

A pinned slot is never freed. A quarantined slot belongs to nobody: bytes may still enter or leave it.
"""

from __future__ import annotations

import enum
from array import array

from pdoffload.errors import MisuseError


class SlotState(enum.Enum):
    """The state of one slot; see the drawing at the top of this file."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    QUARANTINED = "quarantined"


# One 4-byte integer per slot holds state and pins together: a number from 0 up is "ready" with so
# many pins. Eight bytes per slot in all, because every resident chunk pays them.
_FREE, _FILLING, _QUARANTINED = -1, -2, -3
_READY = SlotState.READY
_STATES = {
    _FREE: SlotState.FREE,
    _FILLING: SlotState.FILLING,
    _QUARANTINED: SlotState.QUARANTINED,
}


class SlotPool:
    """`num_slots` slots, numbered from 0, all free at first. Calls that change it come one at
    a time; a reader on another thread sees one slot's state, not how two agree. No memory is touched.

    Every call that names a slot raises `MisuseError`, and changes nothing, when the slot does not exist
    or is in the wrong state.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise MisuseError(f"a pool needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self.num_filling = 0
        self.num_pinned = 0
        """Ready slots with at least one pin."""
        self.num_quarantined = 0
        self._words = array("i", [_FREE]) * num_slots
        # A stack: the slot freed last is taken first, while its bytes are still in the processor's
        # caches. It starts reversed so that a fresh pool hands out neighbours in rising order.
        self._stack = array("i", range(num_slots - 1, -1, -1))

    def __repr__(self) -> str:
        return (
            f"<SlotPool {self.num_slots} slots: {self.num_free} free, {self.num_filling} filling, "
            f"{self.num_ready} ready ({self.num_pinned} pinned), {self.num_quarantined} quarantined>"
        )

    @property
    def num_free(self) -> int:
        return len(self._stack)

    @property
    def num_ready(self) -> int:
        """Ready slots, pinned or not."""
        return self.num_slots - len(self._stack) - self.num_filling - self.num_quarantined

    def take(self, count: int) -> list[int] | None:
        """`count` (>= 0) free slots, now filling; None, with nothing changed, when fewer are free."""
        if count < 0:
            raise MisuseError(f"cannot take {count} slots")
        kept = len(self._stack) - count
        if kept < 0:
            return None
        taken = self._stack[kept:].tolist()
        del self._stack[kept:]
        taken.reverse()
        words = self._words
        for slot in taken:
            words[slot] = _FILLING
        self.num_filling += count
        return taken

    def ready(self, slot: int) -> None:
        """The bytes of `slot` have arrived: filling -> ready without pins."""
        if self._word(slot) != _FILLING:
            raise self._misuse(slot, "made ready")
        self._words[slot] = 0
        self.num_filling -= 1

    def abandon(self, slot: int) -> None:
        """The bytes of `slot` did not arrive, and none will: filling -> free."""
        if self._word(slot) != _FILLING:
            raise self._misuse(slot, "abandoned")
        self.num_filling -= 1
        self._let_go(slot)

    def pin(self, slot: int) -> None:
        """Protect a ready slot, one more time."""
        pins = self._word(slot)
        if pins < 0:
            raise self._misuse(slot, "pinned")
        self._words[slot] = pins + 1
        if pins == 0:
            self.num_pinned += 1

    def unpin(self, slot: int) -> None:
        """Take back one pin."""
        pins = self._word(slot)
        if pins < 1:
            raise self._misuse(slot, "unpinned")
        self._words[slot] = pins - 1
        if pins == 1:
            self.num_pinned -= 1

    def free(self, slot: int) -> None:
        """Give up a ready slot without pins: ready(0) -> free."""
        if self._word(slot) != 0:
            raise self._misuse(slot, "freed")
        self._let_go(slot)

    def quarantine(self, slot: int) -> None:
        """Bytes may still enter or leave `slot`: filling or ready -> quarantined. Its pins are gone."""
        word = self._word(slot)
        if word == _FILLING:
            self.num_filling -= 1
        elif word < 0:
            raise self._misuse(slot, "quarantined")
        elif word > 0:
            self.num_pinned -= 1
        self._words[slot] = _QUARANTINED
        self.num_quarantined += 1

    def release(self, slot: int) -> None:
        """No byte enters or leaves `slot` any more: quarantined -> free."""
        if self._word(slot) != _QUARANTINED:
            raise self._misuse(slot, "released")
        self.num_quarantined -= 1
        self._let_go(slot)

    def state(self, slot: int) -> SlotState:
        """The state of `slot`, whatever it is."""
        return _STATES.get(self._word(slot), _READY)

    def is_ready(self, slot: int) -> bool:
        """Whether `slot` is ready; `state` without the price of an enum, for every lookup."""
        return self._word(slot) >= 0

    def pins(self, slot: int) -> int:
        """Pins of `slot`; 0 where it is not ready."""
        word = self._word(slot)
        return word if word > 0 else 0

    def check(self) -> None:
        """Prove that every slot is in exactly one state and that all counts agree with that.

        Reads every slot: for tests and for looking into a fault. Raises `AssertionError`.
        """
        words = self._words
        free = sorted(self._stack)
        assert free == [slot for slot, word in enumerate(words) if word == _FREE], (
            "the stack of free slots and the slots' own states disagree"
        )
        assert len(words) == self.num_slots
        assert self.num_filling == sum(word == _FILLING for word in words)
        assert self.num_quarantined == sum(word == _QUARANTINED for word in words)
        assert self.num_ready == sum(word >= 0 for word in words)
        assert self.num_pinned == sum(word > 0 for word in words)
        assert min(words) >= _QUARANTINED, "a slot holds a number that is no state"

    def _let_go(self, slot: int) -> None:
        self._words[slot] = _FREE
        self._stack.append(slot)

    def _word(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise MisuseError(f"slot {slot} does not exist: the pool has {self.num_slots}")
        return self._words[slot]

    def _misuse(self, slot: int, verb: str) -> MisuseError:
        state = self.state(slot)
        pins = f" with {self.pins(slot)} pins" if state is _READY else ""
        return MisuseError(f"slot {slot} is {state.value}{pins} and cannot be {verb}")
