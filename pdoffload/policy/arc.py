"""Adaptive replacement cache: a scan does not wash out what is used again and again.

After Nimrod Megiddo and Dharmendra S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
USENIX FAST 2003. Their names stand in brackets:

    recent   [T1] used once                 frequent   [T2] used more than once
    left early from recent [B1]             left early from frequent [B2]          "ghosts": no bytes

A key that comes back while its ghost is remembered says which list was too small, and `target` [p], the
size that `recent` should have, moves by that. Bounds: recent + its ghosts <= capacity, and all ghosts
<= capacity.

It differs from the paper in one place. There, a key coming back moves `target` before room is made for
it. Here room is made for a whole batch of keys before they arrive, so `target` moves one batch later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey
from pdoffload.policy.base import Policy, absent

_Order = OrderedDict[BlockKey, None]


class Arc(Policy):
    """Two lists from cold to warm, costing what `Lru` costs, and 85 to 140 bytes per ghost."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent: _Order = OrderedDict()
        self._frequent: _Order = OrderedDict()
        self._recent_ghosts = _Ghosts()
        self._frequent_ghosts = _Ghosts()
        self._target = 0.0

    def __repr__(self) -> str:
        return (
            f"<Arc {len(self)} of {self.capacity} keys: {len(self._recent)} recent "
            f"(target {self._target:.1f}), {len(self._frequent)} frequent; ghosts "
            f"{len(self._recent_ghosts)} and {len(self._frequent_ghosts)}>"
        )

    def add(self, key: BlockKey) -> None:
        recent, frequent = self._recent, self._frequent
        if key in recent or key in frequent or len(recent) + len(frequent) >= self.capacity:
            raise self._refusal(key)
        ghost = hash(key)
        num_recent, num_frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if ghost in self._recent_ghosts:
            step = max(1.0, num_frequent / num_recent)
            self._target = min(float(self.capacity), self._target + step)
            del self._recent_ghosts[ghost]
            frequent[key] = None
        elif ghost in self._frequent_ghosts:
            step = max(1.0, num_recent / num_frequent)
            self._target = max(0.0, self._target - step)
            del self._frequent_ghosts[ghost]
            frequent[key] = None
        else:
            recent[key] = None
            self._recent_ghosts.trim(self.capacity - len(recent))

    def touch(self, keys: Iterable[BlockKey]) -> None:
        recent, frequent = self._recent, self._frequent
        for key in keys:
            if key in frequent:
                frequent.move_to_end(key)
            elif key in recent:
                del recent[key]
                frequent[key] = None

    def remove(self, key: BlockKey) -> None:
        if key in self._recent:
            del self._recent[key]
        elif key in self._frequent:
            del self._frequent[key]
        else:
            raise absent(key)

    def victims(self, count: int, spare: Callable[[BlockKey], bool]) -> list[BlockKey] | None:
        if count < 0:
            raise MisuseError(f"cannot choose {count} victims")
        recent = _Search(self._recent, spare)
        frequent = _Search(self._frequent, spare)
        chosen: list[BlockKey] = []
        while len(chosen) < count:
            left = len(self._recent) - len(recent.chosen)
            first, second = (recent, frequent) if left > self._target else (frequent, recent)
            key = first.choose()
            if key is None:
                key = second.choose()
            if key is None:
                return None
            chosen.append(key)
        recent.apply(self._recent_ghosts)
        frequent.apply(self._frequent_ghosts)
        self._frequent_ghosts.trim(self.capacity - len(self._recent_ghosts))
        return chosen

    def clear(self) -> None:
        for part in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            part.clear()
        self._target = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __contains__(self, key: object) -> bool:
        return key in self._frequent or key in self._recent

    def check(self) -> None:
        recent, frequent = self._recent.keys(), self._frequent.keys()
        assert not recent & frequent, "a key is in both lists"
        assert len(self) <= self.capacity, f"{self!r} holds too many keys"
        assert 0 <= self._target <= self.capacity
        assert len(recent) + len(self._recent_ghosts) <= self.capacity
        assert len(self._recent_ghosts) + len(self._frequent_ghosts) <= self.capacity
        for key in (*recent, *frequent):
            assert hash(key) not in self._recent_ghosts, f"{key.hex()} is resident and a ghost"
            assert hash(key) not in self._frequent_ghosts, f"{key.hex()} is resident and a ghost"


class _Search:
    """Looks for victims from the cold end of one list, and changes it only when told to."""

    def __init__(self, order: _Order, spare: Callable[[BlockKey], bool]) -> None:
        self.chosen: list[BlockKey] = []
        self._order = order
        self._spare = spare
        self._spared: list[BlockKey] = []
        self._rest: Iterator[BlockKey] = iter(order)

    def choose(self) -> BlockKey | None:
        """The coldest key not yet looked at that may leave; None when there is none."""
        for key in self._rest:
            if not self._spare(key):
                self.chosen.append(key)
                return key
            self._spared.append(key)
        return None

    def apply(self, ghosts: _Ghosts) -> None:
        for key in self._spared:
            self._order.move_to_end(key)
        for key in self.chosen:
            del self._order[key]
            ghosts[hash(key)] = None


class _Ghosts(dict[int, None]):
    """Keys that left, oldest first, each remembered by its 64-bit hash alone.

    A ghost only steers `target`, so that two keys of one hash, once in many lifetimes of a pool, cost
    nothing but one wrong step; and a hash takes half the memory of a key.
    """

    def trim(self, most: int) -> None:
        """Forget the oldest until at most `most` are left, and some more at once.

        The first key of a dict is found by walking over the holes of those deleted before it, so
        forgetting one at a time would be quadratic.
        """
        surplus = len(self) - most
        if surplus > 0:
            for oldest in list(islice(self, surplus + most // 64)):
                del self[oldest]
