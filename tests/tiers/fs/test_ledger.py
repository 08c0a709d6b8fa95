"""The ledger: its verbs one by one, any order of them against a model, and processes killed in the middle."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import BlockKey, RunConfig, make_key
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.fs.ledger import Claim, Ledger, Row, Usage
from pdoffload.tiers.fs.paths import Namespace, open_namespace

SIZE = 100
KEYS = keys_of(*range(30))
A, B, C, D = KEYS[:4]


def space_in(folder: Path) -> Namespace:
    return open_namespace(str(folder), RunConfig(fields={"model_name": "m"}), 0, 0o600)


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return space_in(tmp_path)


@pytest.fixture
def ledger(space: Namespace) -> Iterator[Ledger]:
    made = Ledger(space)
    made.open()
    yield made
    made.close()


def rows(*keys: BlockKey, used_us: int = 1) -> list[Row]:
    """Used one microsecond after the other."""
    return [Row(key, SIZE, used_us + number) for number, key in enumerate(keys)]


def oldest(
    ledger: Ledger, goal_bytes: int, spared: tuple[BlockKey, ...] = (), most: int = 99
) -> list[BlockKey]:
    taken = ledger.take_oldest("me", goal_bytes, spared=spared, before_us=10**9, most=most)
    return [row.key for row in taken[1]] if taken else []


def test_room_is_claimed_up_to_the_last_byte(ledger: Ledger) -> None:
    ledger.settle((), rows(A, B))
    assert ledger.claim(Claim.new("me", SIZE, (C,)), 3 * SIZE)
    assert not ledger.claim(Claim.new("me", 1, (D,)), 3 * SIZE)
    assert ledger.usage() == Usage(2 * SIZE, SIZE, 0)


def test_a_claim_becomes_the_rows_of_what_was_written(ledger: Ledger) -> None:
    claim = Claim.new("me", 3 * SIZE, (A, B, C))
    ledger.claim(claim, 99 * SIZE)
    assert ledger.claims() == [claim]
    ledger.settle((claim.id,), rows(A, B))
    assert ledger.usage() == Usage(2 * SIZE, 0, 0)
    ledger.settle((claim.id,), rows(A, B))
    assert ledger.usage() == Usage(2 * SIZE, 0, 0), "settled twice is settled once"


def test_the_least_recently_used_are_taken_and_count_until_they_are_gone(ledger: Ledger) -> None:
    ledger.settle((), rows(A, B, C, D))
    ledger.mark_used([A], 50)
    assert oldest(ledger, 2 * SIZE) == [B, C]
    assert ledger.usage() == Usage(2 * SIZE, 2 * SIZE, 0)


def test_nothing_is_taken_within_the_goal_and_no_more_than_asked_for(ledger: Ledger) -> None:
    ledger.settle((), rows(A, B, C, D))
    assert oldest(ledger, 4 * SIZE) == []
    assert oldest(ledger, 4 * SIZE - 1) == [A]
    assert oldest(ledger, 0, most=2) == [B, C]


def test_what_is_spared_or_claimed_is_not_taken_and_not_met_again(ledger: Ledger) -> None:
    ledger.settle((), rows(A, B, C, D))
    ledger.claim(Claim.new("you", SIZE, (B,)), 99 * SIZE)
    assert oldest(ledger, 0, spared=(A,)) == [C, D]
    assert oldest(ledger, 0) == [], "used as of the last time"


def test_keys_are_taken_by_name_unless_somebody_claims_them(ledger: Ledger) -> None:
    ledger.settle((), rows(A, B))
    ledger.claim(Claim.new("you", SIZE, (B,)), 99 * SIZE)
    taken = ledger.take("me", (A, B, C))
    assert taken is not None
    assert [row.key for row in taken[1]] == [A]
    assert ledger.take("me", (C,)) is None


def test_a_use_never_goes_back_in_time_and_tells_what_was_known(ledger: Ledger) -> None:
    ledger.settle((), rows(A, used_us=10))
    assert ledger.mark_used([A, B], 5) == [Row(A, SIZE, 10)]
    assert ledger.mark_used([A], 20) == [Row(A, SIZE, 10)]
    assert ledger.mark_used([A], 30) == [Row(A, SIZE, 20)]


def test_what_was_stored_after_it_was_missed_is_not_forgotten(ledger: Ledger) -> None:
    ledger.settle((), rows(A, used_us=10))
    ledger.settle((), rows(B, used_us=10))
    ledger.forget((A,), 9)
    ledger.forget((B,), 10)
    assert ledger.usage().used_bytes == SIZE


def test_folders_cover_every_hash(ledger: Ledger) -> None:
    low = make_key(b"\x00" * 32, 0)
    high = make_key(b"\xff" * 32, 2**32 - 1)
    middle = make_key(bytes.fromhex("abcf" + "ff" * 30), 3)
    ledger.settle((), rows(low, middle, high))
    assert set(ledger.between("000", "fff")[0]) == {low, middle, high}
    assert set(ledger.between("000", "000")[0]) == {low}
    assert set(ledger.between("abc", "abc")[0]) == {middle}
    assert set(ledger.between("abd", "ffe")[0]) == set()
    assert set(ledger.between("fff", "fff")[0]) == {high}


def test_the_file_has_the_mode_of_the_others(space: Namespace, ledger: Ledger) -> None:
    assert os.path.basename(ledger.path).startswith(".")
    assert os.stat(ledger.path).st_mode & 0o777 == 0o600


# --- any order of events, against a model ---


class LedgerModel(RuleBasedStateMachine):
    """Two processes on one ledger; a plain dict says what has to stand in it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.space = space_in(Path(self.folder.name))
        self.ledgers = [Ledger(self.space), Ledger(self.space)]
        for each in self.ledgers:
            each.open()
        self.chunks: dict[BlockKey, tuple[int, int]] = {}
        self.claims: dict[int, Claim] = {}
        self.now_us = 1

    def teardown(self) -> None:
        for each in self.ledgers:
            each.close()
        self.folder.cleanup()

    def total(self) -> int:
        claimed = sum(claim.size_bytes for claim in self.claims.values())
        return claimed + sum(size for size, _ in self.chunks.values())

    def claimed_keys(self) -> set[BlockKey]:
        return {key for claim in self.claims.values() for key in claim.keys}

    some = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
    who = st.integers(0, 1)

    @rule(who=who, keys=some, limit=st.integers(0, 40))
    def claims_room(self, who: int, keys: list[BlockKey], limit: int) -> None:
        claim = Claim.new(f"p{who}", len(keys) * SIZE, keys)
        fits = self.total() + claim.size_bytes <= limit * SIZE
        assert self.ledgers[who].claim(claim, limit * SIZE) is fits
        if fits:
            self.claims[claim.id] = claim

    @precondition(lambda self: self.claims)
    @rule(who=who, data=st.data())
    def settles(self, who: int, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(list(self.claims.values())))
        stored = data.draw(st.lists(st.sampled_from(claim.keys), unique=True))
        self.now_us += 1
        size = data.draw(st.sampled_from([SIZE, SIZE // 2]))
        self.ledgers[who].settle((claim.id,), [Row(key, size, self.now_us) for key in stored])
        del self.claims[claim.id]
        self.chunks |= dict.fromkeys(stored, (size, self.now_us))

    @rule(who=who, keys=some)
    def uses(self, who: int, keys: list[BlockKey]) -> None:
        self.now_us += 1
        self.ledgers[who].mark_used(keys, self.now_us)
        for key in keys:
            if key in self.chunks:
                self.chunks[key] = (self.chunks[key][0], self.now_us)

    @rule(who=who, goal=st.integers(0, 30), spared=some, most=st.integers(1, 6))
    def takes(self, who: int, goal: int, spared: list[BlockKey], most: int) -> None:
        self.now_us += 1
        before_us, self.now_us = self.now_us, self.now_us + 1
        excess = self.total() - goal * SIZE
        busy = self.claimed_keys()
        expected: list[BlockKey] = []
        passed: list[BlockKey] = []
        # Of equal age in either order; ages differ from event to event, and within one by key.
        for key in sorted(self.chunks, key=lambda each: (self.chunks[each][1], each)):
            if excess <= 0 or len(expected) >= most:
                break
            if key in spared or key in busy:
                passed.append(key)
                continue
            expected.append(key)
            excess -= self.chunks[key][0]
        taken = self.ledgers[who].take_oldest(
            f"p{who}", goal * SIZE, spared=spared, before_us=before_us, most=most
        )
        assert [row.key for row in (taken[1] if taken else [])] == expected
        for key in passed:
            self.chunks[key] = (self.chunks[key][0], before_us)
        if taken:
            self.claims[taken[0].id] = taken[0]
            for key in expected:
                del self.chunks[key]

    @rule(who=who)
    def opens_again(self, who: int) -> None:
        self.ledgers[who].close()
        self.ledgers[who].open()

    @invariant()
    def counts_agree(self) -> None:
        for ledger in self.ledgers:
            assert ledger.usage().total_bytes == self.total()
            found, claimed = ledger.between("000", "fff")
            assert {key: tuple(row[1:]) for key, row in found.items()} == self.chunks
            assert claimed == self.claimed_keys()


LedgerModel.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # files are slow on a busy machine
)
TestLedgerModel = LedgerModel.TestCase


# --- processes that are killed ---

CHILD = """
import itertools, random, sys
from pdoffload.layout import RunConfig
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.fs.ledger import Claim, Ledger, LedgerBusy, Row
from pdoffload.tiers.fs.paths import open_namespace

def patiently(work, *args, **more):
    while True:
        try:
            return work(*args, **more)
        except LedgerBusy:
            pass

space = open_namespace(sys.argv[1], RunConfig(fields={"model_name": "m"}), 0, 0o600)
ledger = Ledger(space)
patiently(ledger.open)
rng = random.Random(int(sys.argv[2]))
print("begun", flush=True)
for number in itertools.count():
    keys = keys_of(*((sys.argv[2], number, each) for each in range(20)))
    claim = Claim.new("child", 20 * 100, keys)
    patiently(ledger.claim, claim, 10**9)
    stored = [Row(key, rng.choice((100, 50)), number + 1) for key in keys]
    patiently(ledger.settle, (claim.id,), stored)
    taken = patiently(ledger.take_oldest, "child", 8000, spared=(), before_us=10**9, most=30)
    if taken:
        patiently(ledger.settle, (taken[0].id,), taken[1][:3])
"""


@contextlib.contextmanager
def child(root_dir: str, number: int) -> Iterator[None]:
    """A process that works on the ledger without end; it is killed at the end, wherever it is."""
    command = [sys.executable, "-c", CHILD, root_dir, str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            yield
        finally:
            process.kill()


def test_whoever_is_killed_the_sum_is_that_of_the_rows(space: Namespace) -> None:
    """SIGKILL in the middle of whatever it does; what it wrote down is whole, and others go on."""
    with child(space.root_dir, 0):
        for number in range(1, 9):
            with child(space.root_dir, number):
                SYSTEM_CLOCK.sleep(0.013 * number)  # the moment of death is the point here
    ledger = Ledger(space)
    ledger.open()
    found, claimed = ledger.between("000", "fff")
    used, claimed_bytes, _ = ledger.usage()
    assert found
    assert used == sum(row.size_bytes for row in found.values())
    assert claimed_bytes == sum(claim.size_bytes for claim in ledger.claims())
    assert not claimed & set(found), "a key is written, removed or there"
    ledger.close()
