from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import BlockKey, RunConfig
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.base import Lookup
from pdoffload.tiers.fs.lookup import file_lookup
from pdoffload.tiers.fs.paths import open_namespace
from pdoffload.tiers.lookup import ABSENT_S, MAX_PENDING

SIZE = 5000
TIMEOUT_S = 30.0
A, B, C = keys_of("a", "b", "c")
HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class Rig:
    """A lookup over real files, a fake clock, and a `stat` that can be held up and is recorded."""

    def __init__(self, root: Path) -> None:
        self.space = open_namespace(str(root), RunConfig(fields={"model_name": "m"}), 0, 0o600)
        self.clock = FakeClock()
        self.open = threading.Event()
        self.open.set()
        self.asked: list[str] = []
        self.threads: set[int] = set()
        self.lookup = file_lookup(
            self.space, (SIZE,), timeout_s=TIMEOUT_S, clock=self.clock, stat=self._stat
        )

    def _stat(self, path: str) -> os.stat_result:
        self.asked.append(path)
        self.threads.add(threading.get_ident())
        assert self.open.wait(60)
        return os.stat(path)

    def write(self, key: BlockKey, size_bytes: int = SIZE) -> Path:
        path = Path(self.space.path(key))
        self.space.make_parents(str(path))
        path.write_bytes(bytes(size_bytes))
        return path

    def answer(self, *keys: BlockKey) -> list[Lookup]:
        """Ask until there is an answer; the fake clock stands still meanwhile."""
        for _ in range(5000):
            answers = self.lookup.ask(keys)
            if PENDING not in answers:
                return answers
            SYSTEM_CLOCK.sleep(0.001)
        raise AssertionError("no answer")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.open.set()
    rig.lookup.close(timeout_s=10)


def test_an_unknown_key_is_pending_first_and_then_what_the_disk_says(rig: Rig) -> None:
    rig.write(A)
    rig.open.clear()
    assert rig.lookup.ask((A, B)) == [PENDING, PENDING]
    rig.open.set()
    assert rig.answer(A, B) == [HIT, MISS]


def test_the_asking_thread_never_touches_the_disk(rig: Rig) -> None:
    rig.write(A)
    rig.answer(A, B)
    assert threading.get_ident() not in rig.threads
    assert len(rig.threads) == 1


def test_a_key_is_asked_for_once_however_often_it_is_looked_up(rig: Rig) -> None:
    rig.open.clear()
    for _ in range(5):
        rig.lookup.ask((A,))
    rig.open.set()
    rig.answer(A)
    assert len(rig.asked) == 1


def test_what_is_known_to_be_there_is_not_asked_again(rig: Rig) -> None:
    rig.write(A)
    rig.answer(A)
    rig.clock.advance(3600)
    assert rig.lookup.ask((A,)) == [HIT]
    assert len(rig.asked) == 1


def test_absence_is_known_for_a_moment_only(rig: Rig) -> None:
    assert rig.answer(A) == [MISS]
    rig.write(A)
    assert rig.lookup.ask((A,)) == [MISS]
    rig.clock.advance(ABSENT_S + 0.01)
    assert rig.answer(A) == [HIT], "another process may have stored it"


@pytest.mark.parametrize("kind", ["too short", "too long", "a folder", "a fifo"])
def test_a_file_that_could_not_be_loaded_is_a_miss(rig: Rig, kind: str) -> None:
    path = rig.write(A, {"too short": SIZE - 1, "too long": SIZE + 1}.get(kind, SIZE))
    if kind == "a folder":
        path.unlink()
        path.mkdir()
    if kind == "a fifo":
        path.unlink()
        os.mkfifo(path)
    assert rig.answer(A) == [MISS]


def test_stored_keys_are_hits_without_a_question(rig: Rig) -> None:
    rig.lookup.stored((A,))
    assert rig.lookup.ask((A,)) == [HIT]
    assert rig.asked == []


def test_c03_a_key_whose_load_failed_is_a_miss_at_once_and_until_it_is_stored(rig: Rig) -> None:
    rig.write(A)
    assert rig.answer(A) == [HIT]
    rig.lookup.failed((A,))
    rig.clock.advance(3600)
    assert rig.lookup.ask((A,)) == [MISS]
    assert rig.lookup.barred((A, B)) == {A}
    rig.lookup.stored((A,))
    assert rig.lookup.ask((A,)) == [HIT]
    assert rig.lookup.barred((A,)) == frozenset()


def test_a_key_whose_file_is_gone_is_a_miss_at_once_but_may_come_back(rig: Rig) -> None:
    rig.lookup.stored((A,))
    rig.lookup.gone((A,))
    assert rig.lookup.ask((A,)) == [MISS]
    rig.write(A)
    rig.clock.advance(ABSENT_S + 0.01)
    assert rig.answer(A) == [HIT]


def test_an_answer_older_than_the_news_is_void(rig: Rig) -> None:
    rig.open.clear()
    rig.lookup.ask((A, B))
    rig.lookup.stored((A,))
    rig.lookup.gone((B,))
    rig.open.set()
    rig.answer(C)
    assert rig.lookup.ask((A,)) == [HIT], "the disk had said no before it was stored"
    rig.clock.advance(ABSENT_S + 0.01)
    rig.open.clear()
    assert rig.lookup.ask((B,)) == [PENDING], "asked anew"


def test_pending_turns_into_a_miss_at_the_deadline_and_nothing_new_is_asked(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.write(A)
    rig.open.clear()
    rig.lookup.ask((A, B))
    rig.clock.advance(TIMEOUT_S - 0.01)
    assert rig.lookup.ask((A,)) == [PENDING]
    rig.clock.advance(0.02)
    assert rig.lookup.ask((A, B)) == [MISS, MISS]
    assert rig.lookup.ask((C,)) == [MISS], "the disk hangs: no use in asking more"
    assert caplog.text.count("no answer from the file system") == 1
    assert "stalled" in repr(rig.lookup)
    rig.open.set()
    for _ in range(5000):
        if rig.lookup.ask((A,)) != [MISS]:
            break
        SYSTEM_CLOCK.sleep(0.001)
    assert rig.answer(A) == [HIT], "it came back"


def test_the_number_of_open_questions_has_a_bound(rig: Rig) -> None:
    rig.open.clear()
    keys = keys_of(*range(MAX_PENDING + 10))
    answers = rig.lookup.ask(keys)
    assert answers.count(PENDING) == MAX_PENDING
    assert answers.count(MISS) == 10


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOTDIR])
def test_an_error_of_the_disk_is_a_miss(tmp_path: Path, number: int) -> None:
    def refuse(path: str) -> os.stat_result:
        raise OSError(number, os.strerror(number), path)

    space = open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)
    lookup = file_lookup(space, (SIZE,), timeout_s=1, clock=FakeClock(), stat=refuse)
    try:
        lookup.ask((A,))
        for _ in range(5000):
            if lookup.ask((A,)) == [MISS]:
                break
            SYSTEM_CLOCK.sleep(0.001)
        assert lookup.ask((A,)) == [MISS]
    finally:
        lookup.close(timeout_s=10)


def test_a_thread_that_hangs_does_not_hold_closing_up(rig: Rig) -> None:
    rig.open.clear()
    rig.lookup.ask((A,))
    rig.lookup.close(timeout_s=0.01)
