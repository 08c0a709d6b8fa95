"""The contract of an eviction policy: which chunk leaves the host pool when room is needed.

A policy sees keys and nothing else: no slot, byte, clock or lock. Calls come one at a time, not always
from the same thread. A custom one (keys
`eviction_policy` and `cache_policy_module_path`) derives from `Policy` and proves itself by inheriting
`pdoffload.testing.policy_contract.PolicyContract` in its tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey


class Policy(ABC):
    """Orders at most `capacity` resident keys by how soon they should leave."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise MisuseError(f"a policy needs a capacity of at least 1, got {capacity}")
        self.capacity = capacity

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self)} of {self.capacity} keys>"

    @abstractmethod
    def add(self, key: BlockKey) -> None:
        """`key` is resident from now on. `MisuseError` if it already is, or if the policy is full."""

    @abstractmethod
    def touch(self, keys: Iterable[BlockKey]) -> None:
        """These keys were used, the last of them most recently. Absent ones are ignored."""

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """`key` left for a reason of its own; leave no memory of it. `MisuseError` if it is absent."""

    @abstractmethod
    def victims(self, count: int, spare: Callable[[BlockKey], bool]) -> list[BlockKey] | None:
        """Choose `count` (>= 0) residents for which `spare` is false, and forget them, coldest first.

        None, with nothing changed, when there are fewer. `spare` is asked at most once per key and must
        not call the policy; if it raises, nothing has changed. A spared key counts as used, so a crowd
        of spared keys is walked over once and not at every call. A call that finds too few has asked
        for every resident: whoever knows how many can leave compares first.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, learnt weights included."""

    @abstractmethod
    def __len__(self) -> int:
        """Residents."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether `key` is resident."""

    @abstractmethod
    def check(self) -> None:
        """Prove the policy's own invariants; reads everything. Raises `AssertionError`."""

    def _refusal(self, key: BlockKey) -> MisuseError:
        """Why `key` cannot be added: it is resident, or the policy is full."""
        if key in self:
            return MisuseError(f"{key.hex()} is resident already")
        return MisuseError(f"{self!r} is full: choose victims before adding {key.hex()}")


def absent(key: BlockKey) -> MisuseError:
    """The error of removing `key`, which is not resident."""
    return MisuseError(f"{key.hex()} is not resident")
