"""Least recently used: the contract, and exactly the order of use."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.policy.lru import Lru
from pdoffload.testing.policy_contract import PolicyContract, keys, spare_none


class TestLru(PolicyContract):
    def make(self, capacity):
        return Lru(capacity)


@settings(deadline=None, database=None)
@given(uses=st.lists(st.integers(0, 15), max_size=80))
def test_whoever_was_used_longest_ago_leaves(uses):
    """The textbook cache of 6 entries: a use brings a key in, and a full cache drops the oldest."""
    names, policy, textbook = keys(0, 16), Lru(6), OrderedDict()
    for key in (names[number] for number in uses):
        if key in textbook:
            textbook.move_to_end(key)
            policy.touch([key])
            continue
        if len(textbook) == 6:
            expected, _ = textbook.popitem(last=False)
            assert policy.victims(1, spare_none) == [expected]
        textbook[key] = None
        policy.add(key)
    assert policy.victims(len(textbook), spare_none) == list(textbook)


def test_a_spared_key_counts_as_used():
    policy, (a, b, c) = Lru(3), keys(0, 3)
    for key in (a, b, c):
        policy.add(key)
    assert policy.victims(1, lambda key: key == a) == [b]
    assert policy.victims(2, spare_none) == [c, a]


def test_it_shows_how_full_it_is():
    policy = Lru(3)
    policy.add(keys(0, 1)[0])
    assert repr(policy) == "<Lru 1 of 3 keys>"
