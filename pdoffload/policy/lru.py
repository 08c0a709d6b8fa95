"""Least recently used leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey
from pdoffload.policy.base import Policy, absent


class Lru(Policy):
    """One list from cold to warm. 105 to 180 bytes per resident, the key's own not counted."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # Not a plain dict: that walks over the holes of deleted keys to find its first one, which
        # makes taking from the cold end quadratic.
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def add(self, key: BlockKey) -> None:
        order = self._order
        if key in order or len(order) >= self.capacity:
            raise self._refusal(key)
        order[key] = None

    def touch(self, keys: Iterable[BlockKey]) -> None:
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)

    def remove(self, key: BlockKey) -> None:
        if key not in self._order:
            raise absent(key)
        del self._order[key]

    def victims(self, count: int, spare: Callable[[BlockKey], bool]) -> list[BlockKey] | None:
        if count < 0:
            raise MisuseError(f"cannot choose {count} victims")
        if count == 0:
            return []
        chosen: list[BlockKey] = []
        spared: list[BlockKey] = []
        for key in self._order:
            if spare(key):
                spared.append(key)
                continue
            chosen.append(key)
            if len(chosen) == count:
                break
        else:
            return None
        for key in spared:
            self._order.move_to_end(key)
        for key in chosen:
            del self._order[key]
        return chosen

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def check(self) -> None:
        assert len(self._order) <= self.capacity, f"{self!r} holds too many keys"
