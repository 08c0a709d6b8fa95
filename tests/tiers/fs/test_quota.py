from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import BlockKey, RunConfig
from pdoffload.testing.tier_rig import ShiftedClock, keys_of
from pdoffload.tiers.fs import quota as quota_module
from pdoffload.tiers.fs.paths import Namespace, open_namespace
from pdoffload.tiers.fs.quota import LOCK_NAME, LOW_WATER, WALK_EVERY_S, Quota

SIZE = 1000
KEYS = keys_of(*range(40))


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)


@contextlib.contextmanager
def quota_of(space: Namespace, chunks: float, clock: ShiftedClock | None = None) -> Iterator[Quota]:
    quota = Quota(space, int(chunks * SIZE), clock or ShiftedClock())
    try:
        yield quota
    finally:
        quota.close(timeout_s=10)


def write(space: Namespace, keys: tuple[BlockKey, ...], first_age_s: int = 10_000) -> None:
    """A file per key, each used a second after the one before."""
    for number, key in enumerate(keys):
        path = space.path(key)
        space.make_parents(path)
        Path(path).write_bytes(bytes(SIZE))
        used_s = SYSTEM_CLOCK.wall_s() - first_age_s + number
        os.utime(path, (used_s, used_s))


def left(space: Namespace) -> set[BlockKey]:
    return {key for key in KEYS if os.path.exists(space.path(key))}


def settled(quota: Quota) -> None:
    """Wait for the first walk."""
    assert quota.reserve(0, timeout_s=10)


def test_the_least_recently_used_files_go_first_down_to_the_low_water_mark(
    space: Namespace,
) -> None:
    write(space, KEYS[:20])
    with quota_of(space, 20) as quota:
        assert quota.reserve(SIZE, timeout_s=10)
        kept = left(space)
        assert len(kept) == int(20 * LOW_WATER)
        assert kept == set(KEYS[20 - len(kept) : 20])
        assert set(quota.evicted) == set(KEYS[:20]) - kept


def test_there_is_room_for_what_was_asked_even_beyond_the_low_water_mark(
    space: Namespace,
) -> None:
    write(space, KEYS[:20])
    with quota_of(space, 20) as quota:
        assert quota.reserve(8 * SIZE, timeout_s=10)
        assert left(space) == set(KEYS[8:20])


def test_nothing_is_evicted_while_there_is_room(space: Namespace) -> None:
    write(space, KEYS[:10])
    with quota_of(space, 20) as quota:
        assert quota.reserve(10 * SIZE, timeout_s=10)
        assert len(left(space)) == 10
        assert "10000 of 20000" in repr(quota)


def test_a_quota_that_is_passed_when_the_tier_opens_is_kept_from_then_on(space: Namespace) -> None:
    write(space, KEYS[:30])
    with quota_of(space, 10) as quota:
        assert quota.reserve(SIZE, timeout_s=10)
        assert len(left(space)) == 9


def test_what_can_never_fit_is_refused_at_once(space: Namespace) -> None:
    write(space, KEYS[:5])
    with quota_of(space, 10) as quota:
        assert not quota.reserve(11 * SIZE, timeout_s=10)
        assert len(left(space)) == 5


def test_reservations_count_until_they_are_written_or_void(space: Namespace) -> None:
    with quota_of(space, 10) as quota:
        assert quota.reserve(6 * SIZE, timeout_s=10)
        assert not quota.reserve(6 * SIZE, timeout_s=0.05), "nothing can be evicted for it"
        quota.wrote(0, reserved_bytes=6 * SIZE)
        assert quota.reserve(6 * SIZE, timeout_s=10)
        quota.wrote(6 * SIZE, reserved_bytes=6 * SIZE)
        assert "6000 of" in repr(quota)


def test_files_about_to_be_read_are_never_evicted(space: Namespace) -> None:
    write(space, KEYS[:10])
    with quota_of(space, 10) as quota:
        quota.hold(KEYS[:3])
        quota.hold(KEYS[:1])
        assert quota.reserve(7 * SIZE, timeout_s=10)
        assert left(space) == set(KEYS[:3])
        quota.let_go(KEYS[:3])
        assert quota.reserve(2 * SIZE, timeout_s=10)
        assert left(space) == set(KEYS[:1]), "held twice, let go once"


def test_a_touched_file_is_used_again(space: Namespace) -> None:
    write(space, KEYS[:10])
    with quota_of(space, 10) as quota:
        quota.touch(KEYS[:2])
        quota.touch(keys_of("absent"))
        assert quota.reserve(8 * SIZE, timeout_s=10)
        assert left(space) == set(KEYS[:2])


def test_a_walk_from_time_to_time_sees_what_other_processes_wrote(space: Namespace) -> None:
    clock = ShiftedClock()
    with quota_of(space, 100, clock) as quota:
        settled(quota)
        write(space, KEYS[:10])
        quota.wrote(0, reserved_bytes=0)
        assert "0 of" in repr(quota)
        clock.shift_s = WALK_EVERY_S + 1
        quota.wrote(0, reserved_bytes=0)
        settled(quota)
        assert quota.reserve(0, timeout_s=10)
        done = threading.Event()
        for _ in range(1000):
            if "10000 of" in repr(quota):
                done.set()
                break
            clock.sleep(0.01)
        assert done.is_set()


def test_only_chunk_files_are_counted_and_evicted(space: Namespace) -> None:
    write(space, KEYS[:4])
    folder = os.path.dirname(space.path(KEYS[0]))
    strangers = [
        Path(folder, "notes.txt"),
        Path(folder, "abc.bin.1.tmp"),
        Path(space.base, "README"),
        Path(space.base, ".tmp", "0.part"),
        Path(space.config_dir, "config.json"),
    ]
    for path in strangers:
        path.write_bytes(bytes(10 * SIZE))
        os.utime(path, (1, 1))
    with quota_of(space, 4) as quota:
        assert quota.reserve(4 * SIZE, timeout_s=10)
        assert left(space) == set()
        assert all(path.exists() for path in strangers)


def test_only_one_process_evicts_at_a_time(space: Namespace) -> None:
    write(space, KEYS[:10])
    clock = ShiftedClock()
    fd = os.open(f"{space.base}/{LOCK_NAME}", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with quota_of(space, 10, clock) as quota:
        assert not quota.reserve(SIZE, timeout_s=0.2)
        assert len(left(space)) == 10, "another process is at it"
        os.close(fd)
        assert quota.reserve(SIZE, timeout_s=10)
        assert len(left(space)) == 9


def test_an_evictor_that_hangs_holds_nobody_up_for_ever(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_module, "LOCK_PATIENCE_S", 0.1)
    write(space, KEYS[:10])
    fd = os.open(f"{space.base}/{LOCK_NAME}", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with quota_of(space, 20) as quota:
            assert quota.reserve(SIZE, timeout_s=10), "there is room: it only had to be counted"
    finally:
        os.close(fd)


def test_closing_lets_writers_go(space: Namespace) -> None:
    write(space, KEYS[:10])
    fd = os.open(f"{space.base}/{LOCK_NAME}", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    answers: list[bool] = []
    try:
        with quota_of(space, 10) as quota:
            writer = threading.Thread(
                target=lambda: answers.append(quota.reserve(SIZE, timeout_s=60))
            )
            writer.start()
        writer.join(10)
    finally:
        os.close(fd)
    assert answers == [False]


def test_a_reader_elsewhere_keeps_what_it_has_open(space: Namespace) -> None:
    write(space, KEYS[:1])
    with open(space.path(KEYS[0]), "rb") as reader, quota_of(space, 1) as quota:
        assert quota.reserve(SIZE, timeout_s=10)
        assert left(space) == set()
        assert reader.read() == bytes(SIZE)
