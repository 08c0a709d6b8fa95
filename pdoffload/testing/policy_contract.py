"""What every eviction policy must do. Inherit `PolicyContract`, and say how yours is made:

class TestMine(PolicyContract):
    def make(self, capacity: int) -> Policy:
        return Mine(capacity)

Needs pytest and hypothesis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey, make_key
from pdoffload.policy.base import Policy


def keys(first: int, end: int) -> list[BlockKey]:
    """Distinct keys, one per number from `first` to `end` - 1."""
    return [make_key(number.to_bytes(8, "big"), 0) for number in range(first, end)]


def spare_none(_key: BlockKey) -> bool:
    return False


class PolicyContract(ABC):
    """Tests of the contract of `Policy`; each uses a policy of its own."""

    @abstractmethod
    def make(self, capacity: int) -> Policy:
        """A new, empty policy."""

    def filled(self, count: int) -> tuple[Policy, list[BlockKey]]:
        policy, added = self.make(count), keys(0, count)
        for key in added:
            policy.add(key)
        return policy, added

    def test_a_new_policy_is_empty(self) -> None:
        policy = self.make(4)
        assert len(policy) == 0
        assert policy.victims(0, spare_none) == []
        assert policy.victims(1, spare_none) is None
        policy.check()

    @pytest.mark.parametrize("capacity", [0, -1])
    def test_a_capacity_below_one_is_misuse(self, capacity: int) -> None:
        with pytest.raises(MisuseError, match=str(capacity)):
            self.make(capacity)

    def test_what_was_added_is_resident(self) -> None:
        policy, added = self.filled(4)
        assert all(key in policy for key in added)
        assert make_key(b"other", 0) not in policy
        assert len(policy) == 4

    def test_a_key_is_added_once(self) -> None:
        policy = self.make(4)
        policy.add(make_key(b"k", 0))
        with pytest.raises(MisuseError, match="resident already"):
            policy.add(make_key(b"k", 0))
        assert len(policy) == 1
        policy.check()

    def test_a_full_policy_takes_no_more(self) -> None:
        policy, added = self.filled(4)
        with pytest.raises(MisuseError, match="full"):
            policy.add(make_key(b"one more", 0))
        assert len(policy) == len(added)
        policy.check()

    def test_untouched_keys_leave_in_the_order_they_came(self) -> None:
        policy, added = self.filled(6)
        assert policy.victims(2, spare_none) == added[:2]
        assert policy.victims(4, spare_none) == added[2:]
        assert len(policy) == 0

    def test_a_touched_key_leaves_after_the_untouched_ones(self) -> None:
        policy, added = self.filled(4)
        policy.touch([added[0]])
        assert policy.victims(3, spare_none) == added[1:]
        assert added[0] in policy

    def test_the_last_key_of_a_touch_is_the_warmest(self) -> None:
        policy, (a, b, c) = self.filled(3)
        policy.touch(iter((c, a, b)))
        assert policy.victims(3, spare_none) == [c, a, b]

    def test_touching_an_absent_key_changes_nothing(self) -> None:
        policy, added = self.filled(2)
        policy.touch([make_key(b"absent", 0)])
        assert make_key(b"absent", 0) not in policy
        assert policy.victims(2, spare_none) == added
        policy.touch(added)
        assert len(policy) == 0

    def test_spared_keys_stay(self) -> None:
        policy, added = self.filled(4)
        assert policy.victims(2, {added[0], added[2]}.__contains__) == [added[1], added[3]]
        assert len(policy) == 2

    def test_too_few_victims_change_nothing(self) -> None:
        policy, added = self.filled(4)
        assert policy.victims(4, {added[1]}.__contains__) is None
        assert policy.victims(5, spare_none) is None
        assert policy.victims(4, spare_none) == added

    def test_a_spare_that_raises_changes_nothing(self) -> None:
        policy, added = self.filled(4)
        asked: list[BlockKey] = []

        def spare(key: BlockKey) -> bool:
            asked.append(key)
            if len(asked) == 3:
                raise LookupError("no such slot")
            return False

        with pytest.raises(LookupError):
            policy.victims(4, spare)
        assert policy.victims(4, spare_none) == added

    def test_a_negative_count_is_misuse(self) -> None:
        policy, _ = self.filled(2)
        with pytest.raises(MisuseError, match="-1"):
            policy.victims(-1, spare_none)

    def test_a_crowd_of_spared_keys_is_walked_over_once(self) -> None:
        """50,000 pinned chunks at the cold end must not cost 50,000 questions at every eviction."""
        policy, added = self.filled(51_000)
        spared = set(added[:50_000])
        asked = 0

        def spare(key: BlockKey) -> bool:
            nonlocal asked
            asked += 1
            return key in spared

        for number in range(0, 1000, 10):
            assert policy.victims(10, spare) == added[50_000 + number : 50_010 + number]
        assert asked <= 52_000
        assert len(policy) == 50_000

    def test_a_removed_key_is_gone(self) -> None:
        policy, added = self.filled(3)
        policy.remove(added[0])
        assert added[0] not in policy
        with pytest.raises(MisuseError, match=added[0].hex()):
            policy.remove(added[0])
        assert policy.victims(2, spare_none) == added[1:]
        policy.check()

    def test_a_cleared_policy_is_as_new(self) -> None:
        policy, added = self.filled(4)
        policy.touch(added[:2])
        policy.victims(3, spare_none)
        policy.clear()
        assert len(policy) == 0
        policy.check()
        for key in added:
            policy.add(key)
        assert policy.victims(4, spare_none) == added

    def test_it_agrees_with_a_model_whatever_happens(self) -> None:
        run_state_machine_as_test(
            _machine(self.make),
            settings=settings(
                max_examples=40, stateful_step_count=40, deadline=None, database=None
            ),
        )


_ANY_KEY = st.sampled_from(keys(0, 24))
_CAPACITY = 8


def _machine(make: Callable[[int], Policy]) -> type[RuleBasedStateMachine]:
    """Drives a policy as the host pool does, beside a plain set of the keys that are resident."""

    class PolicyMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.policy = make(_CAPACITY)
            self.resident: set[BlockKey] = set()

        @rule(batch=st.lists(_ANY_KEY, unique=True, max_size=5), pinned=st.sets(_ANY_KEY))
        def store(self, batch: list[BlockKey], pinned: set[BlockKey]) -> None:
            new = [key for key in batch if key not in self.resident]
            missing = len(new) + len(self.resident) - _CAPACITY
            if missing > 0 and not self.evict(missing, pinned):
                return
            for key in new:
                self.policy.add(key)
            self.resident.update(new)

        @rule(count=st.integers(0, _CAPACITY + 1), pinned=st.sets(_ANY_KEY))
        def make_room(self, count: int, pinned: set[BlockKey]) -> None:
            self.evict(count, pinned)

        def evict(self, count: int, pinned: set[BlockKey]) -> bool:
            victims = self.policy.victims(count, pinned.__contains__)
            if victims is None:
                assert len(self.resident - pinned) < count
                return False
            assert len(victims) == len(set(victims)) == count
            assert set(victims) <= self.resident - pinned
            self.resident.difference_update(victims)
            return True

        @rule(batch=st.lists(_ANY_KEY, max_size=6))
        def touch(self, batch: list[BlockKey]) -> None:
            self.policy.touch(batch)

        @rule(key=_ANY_KEY)
        def remove(self, key: BlockKey) -> None:
            if key in self.resident:
                self.policy.remove(key)
                self.resident.remove(key)

        @rule()
        def clear(self) -> None:
            self.policy.clear()
            self.resident.clear()

        @invariant()
        def residents_agree(self) -> None:
            self.policy.check()
            assert len(self.policy) == len(self.resident)
            assert {key for key in keys(0, 24) if key in self.policy} == self.resident

    return PolicyMachine
