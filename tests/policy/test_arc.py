"""Adaptive replacement: the contract, and what the paper promises beyond LRU."""

from __future__ import annotations

import random

import pytest

from pdoffload.policy.arc import Arc
from pdoffload.policy.lru import Lru
from pdoffload.testing.policy_contract import PolicyContract, keys, spare_none


class TestArc(PolicyContract):
    def make(self, capacity):
        return Arc(capacity)


def use(policy, key):
    """One access, as the host pool makes it; whether it was a hit."""
    if key in policy:
        policy.touch([key])
        return True
    if len(policy) == policy.capacity:
        policy.victims(1, spare_none)
    policy.add(key)
    return False


def replay(policy, trace):
    """Hits per access of `trace`."""
    return sum(use(policy, key) for key in trace) / len(trace)


@pytest.mark.parametrize(("make", "survivors"), [(Arc, 50), (Lru, 0)])
def test_a_scan_does_not_wash_out_what_is_used_again_and_again(make, survivors):
    policy, hot = make(100), keys(0, 50)
    for key in hot * 2:
        use(policy, key)
    for key in keys(1000, 6000):
        use(policy, key)
    policy.check()
    assert sum(key in policy for key in hot) == survivors


def test_it_gives_up_frequent_keys_that_nobody_uses_any_more():
    """The working set moves on: its ghosts come back, and the old favourites make room."""
    policy, old, new = Arc(100), keys(0, 100), keys(1000, 1080)
    for key in old * 2:
        use(policy, key)
    rounds = [replay(policy, new) for _ in range(20)]
    assert rounds[0] == 0
    assert rounds[-1] == 1
    assert sum(key in policy for key in old) <= 20


def test_it_favours_the_frequent_again_once_their_ghosts_come_back():
    """The favourites return among keys that come once, and win back what the others had taken."""
    policy, hot = Arc(40), keys(0, 20)
    for key in hot * 2:
        use(policy, key)
    for _ in range(10):
        replay(policy, keys(1000, 1036))
    taken_over = sum(key in policy for key in hot)
    for key, one_off in zip(hot * 10, keys(10_000, 10_200), strict=True):
        use(policy, key)
        use(policy, one_off)
    assert taken_over < 10
    assert all(key in policy for key in hot)


def test_it_beats_lru_on_a_mix_of_favourites_and_scans():
    """200 of 1,000 keys get most uses; long runs of keys used once come in between."""
    chance = random.Random(7)
    favourites, trace = keys(0, 200), []
    for number in range(40):
        trace += chance.choices(favourites, k=300)
        trace += keys(10_000 + number * 300, 10_300 + number * 300)
    arc, lru = replay(Arc(200), trace), replay(Lru(200), trace)
    assert arc > 0.45 > 0.35 > lru


def test_ghosts_are_bounded_by_the_capacity():
    policy = Arc(10)
    for number, key in enumerate(keys(0, 500)):
        use(policy, key)
        if number % 3 == 0:
            use(policy, key)
        policy.check()
    policy.victims(10, spare_none)
    policy.check()


def test_a_removed_key_leaves_no_ghost():
    """What was dropped because its bytes were bad must come back as a key never seen."""
    policy, (a, b, c) = Arc(3), keys(0, 3)
    for key in (a, b, c):
        policy.add(key)
    policy.remove(a)
    policy.add(a)
    assert policy.victims(3, spare_none) == [b, c, a]
    assert repr(policy).startswith("<Arc 0 of 3 keys: 0 recent (target 0.0), 0 frequent;")


def test_a_key_that_comes_back_soon_counts_as_frequent_and_moves_the_target():
    policy, (a, b) = Arc(2), keys(0, 2)
    policy.add(a)
    policy.add(b)
    assert policy.victims(1, spare_none) == [a]
    policy.add(a)
    assert repr(policy) == "<Arc 2 of 2 keys: 1 recent (target 1.0), 1 frequent; ghosts 0 and 0>"


class PaperArc:
    """The paper's own pseudo-code (figure 4), one access at a time and with no pins."""

    def __init__(self, capacity):
        self.c, self.p = capacity, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []  # coldest first

    def replace(self, x):
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def use(self, x):
        for part in (self.t1, self.t2):
            if x in part:
                part.remove(x)
                self.t2.append(x)
                return True
        if x in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            self.make_room_for_a_new_key(x)
            self.t1.append(x)
        return False

    def make_room_for_a_new_key(self, x):
        recent = len(self.t1) + len(self.b1)
        total = recent + len(self.t2) + len(self.b2)
        if recent == self.c:
            if len(self.t1) == self.c:
                self.t1.pop(0)
            else:
                self.b1.pop(0)
                self.replace(x)
        elif total >= self.c:
            if total == 2 * self.c:
                self.b2.pop(0)
            self.replace(x)


@pytest.mark.parametrize("seed", range(4))
def test_it_hits_as_often_as_the_paper_does(seed):
    """Favourites that drift, loops and one-offs. It may differ by the batch that it adapts later."""
    chance = random.Random(seed)
    trace = []
    for phase in range(30):
        favourites = keys(phase * 20, phase * 20 + 60)
        trace += chance.choices(favourites, k=150)
        trace += keys(5000, 5000 + chance.randrange(20, 120)) * 2
        trace += keys(10_000 + phase * 100, 10_000 + phase * 100 + chance.randrange(100))
    paper = PaperArc(80)
    expected = sum(paper.use(key) for key in trace) / len(trace)
    assert replay(Arc(80), trace) == pytest.approx(expected, abs=0.02)
