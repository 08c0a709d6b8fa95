"""A disk that is full, read-only, gone or hanging, without and with a quota: stores stop, loads go on."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdoffload.errors import StorageError, StorageFull
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.fs_rig import FsRig, open_fs
from pdoffload.testing.tier_rig import ShiftedClock, keys_of
from pdoffload.tiers.base import JobResult, Lookup

SmallDisk = Callable[[int], Path]
FILE_BYTES = 8192 + 4096
KEYS = keys_of(*range(64))
NO_QUOTA: dict[str, Any] = {}
ROOMY: dict[str, Any] = {"max_bytes": 1 << 30}
TIGHT: dict[str, Any] = {"max_bytes": 10 * FILE_BYTES}

with_and_without = pytest.mark.parametrize(
    "settings", [NO_QUOTA, ROOMY], ids=["no quota", "a quota"]
)


def errnos(result: JobResult) -> set[int | None]:
    return {error.errno for _, error in result.failed if isinstance(error, StorageError)}


def warnings_of(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING" and words in record.getMessage()
    ]


def fill(disk: Path) -> Path:
    """Whatever space is left."""
    stone = disk / "stone"
    with open(stone, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    status = os.statvfs(disk)
    assert status.f_bavail == 0
    return stone


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Whoever opens something under `disk` by name meets a read-only file system."""
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def stores_again(rig: FsRig, clock: ShiftedClock) -> None:
    """Trials are let in with growing pauses; one of them goes through."""

    def goes_through() -> bool:
        clock.shift_s += 61
        return not rig.store(KEYS[40:41], (40,)).failed

    rig.until(goes_through, "a store that goes through")


@with_and_without
def test_c01_a_full_disk_stops_stores_with_one_warning_and_loads_go_on(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    disk, clock = small_disk(1 << 20), ShiftedClock()
    with open_fs(disk / "root", make_agent=FakeAgent, clock=clock, **settings) as rig:
        assert rig.store(KEYS[:8], range(8)).failed == ()
        stone = fill(disk)
        for number in range(8, 16):
            failed = rig.store(KEYS[number : number + 1], (number,))
            assert isinstance(failed.failed[0][1], StorageFull)
        assert len(warnings_of(caplog, "stop")) == 1
        assert rig.tier.stats().degraded.startswith("full")
        assert rig.temps() == []
        assert rig.lookup(*KEYS[:9]) == [Lookup.HIT] * 8 + [Lookup.MISS]
        assert rig.load(KEYS[:8], range(50, 58)).verified == 8
        stone.unlink()
        stores_again(rig, clock)
        assert rig.tier.stats().degraded == ""


@with_and_without
def test_a_disk_that_turns_read_only_stops_stores_with_one_warning_and_loads_go_on(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    disk, clock = small_disk(1 << 20), ShiftedClock()
    with open_fs(disk / "root", make_agent=FakeAgent, clock=clock, **settings) as rig:
        assert rig.store(KEYS[:8], range(8)).failed == ()
        with read_only(disk):
            for number in range(8, 16):
                failed = rig.store(KEYS[number : number + 1], (number,))
                assert errnos(failed) <= {errno.EROFS, None}
                assert "Read-only" in str(failed.failed[0][1])
            assert len(warnings_of(caplog, "stop")) == 1
            assert rig.tier.stats().degraded.startswith("failing")
            assert rig.load(KEYS[:8], range(50, 58)).verified == 8
            rig.tier.touch(KEYS[:8])
        stores_again(rig, clock)
        assert rig.load(KEYS[:8], range(50, 58)).verified == 8


@with_and_without
def test_a_root_that_vanishes_is_a_miss_for_loads_and_made_again_by_stores(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    clock = ShiftedClock()
    with open_fs(tmp_path / "root", make_agent=FakeAgent, clock=clock, **settings) as rig:
        assert rig.store(KEYS[:8], range(8)).failed == ()
        shutil.rmtree(tmp_path / "root")
        assert errnos(rig.load(KEYS[:8], range(50, 58))) == {errno.ENOENT}
        assert rig.lookup(*KEYS[:8]) == [Lookup.MISS] * 8
        stores_again(rig, clock)
        assert rig.load(KEYS[40:41], (50,)).verified == 1


def test_c01_a_quota_on_a_full_disk_evicts_nothing_before_it_is_reached(
    small_disk: SmallDisk,
) -> None:
    """Space that others take is not made up for with what is stored."""
    disk = small_disk(1 << 20)
    with open_fs(disk / "root", make_agent=FakeAgent, **ROOMY, min_free_bytes=1 << 19) as rig:
        assert rig.store(KEYS[:8], range(8)).failed == ()
        fill(disk)
        assert errnos(rig.store(KEYS[8:9], (8,))) == {errno.ENOSPC}
        assert all(rig.path(key).exists() for key in KEYS[:8])


def test_c25_an_eviction_that_hangs_costs_stores_their_deadline_and_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hangs, let_go = os.unlink, threading.Event(), threading.Event()

    def unlink(path: str, **how: int) -> None:
        if str(path).endswith(".bin"):
            hangs.set()
            let_go.wait(60)
        real(path, **how)

    short = {"transfer_timeout_s": 1.0}
    with open_fs(tmp_path, make_agent=FakeAgent, context=short, **TIGHT) as rig:
        assert rig.store(KEYS[:10], range(10)).failed == ()
        monkeypatch.setattr(os, "unlink", unlink)
        failed = rig.store(KEYS[20:21], (20,))
        assert hangs.is_set()
        assert [key for key, _ in failed.failed] == [KEYS[20]]
        assert "room" in str(failed.failed[0][1])
        there = [key for key in KEYS[:10] if rig.path(key).exists()]
        assert rig.load(there[:5], range(50, 55)).verified == 5
        let_go.set()
        rig.until(lambda: not rig.store(KEYS[21:22], (21,)).failed, "a store that goes through")


def test_c25_closing_is_bounded_while_an_eviction_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hangs, let_go = os.unlink, threading.Event(), threading.Event()

    def unlink(path: str, **how: int) -> None:
        if str(path).endswith(".bin"):
            hangs.set()
            let_go.wait(60)
        real(path, **how)

    with open_fs(tmp_path, make_agent=FakeAgent, **TIGHT) as rig:
        assert rig.store(KEYS[:10], range(10)).failed == ()
        monkeypatch.setattr(os, "unlink", unlink)
        waiting = rig.submit_store(KEYS[20:21], (20,))
        rig.until(hangs.is_set, "the eviction")
        rig.take(rig.tier.close(timeout_s=2))
        assert rig.result(waiting).failed
        let_go.set()


def test_c12_a_quota_of_less_than_a_file_fails_each_store_and_hangs_none(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent, max_bytes=1) as rig:
        for number in range(3):
            failed = rig.store(KEYS[number : number + 1], (number,)).failed
            assert isinstance(failed[0][1], StorageFull)
            assert "12288 bytes at once are more than the quota, 1" in str(failed[0][1])


def test_c20_overlapping_jobs_under_a_tight_quota_bring_the_right_bytes(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent, **TIGHT) as rig:
        expected = dict(zip(KEYS, rig.bytes_of(*range(64)), strict=True))
        for number in range(60):
            keys = KEYS[number % 12 : number % 12 + 4]
            first = rig.submit_store(keys, range(number % 12, number % 12 + 4))
            loads = [rig.submit_load(keys, range(56, 60)), rig.submit_load(keys, range(60, 64))]
            for job_id, slots in zip(loads, (range(56, 60), range(60, 64)), strict=True):
                result = rig.result(job_id)
                for key, slot in zip(keys, slots, strict=True):
                    if key in result.succeeded:
                        assert rig.bytes_of(slot) == [expected[key]]
            assert rig.result(first).failed == ()
            assert len(list(tmp_path.rglob("*.bin"))) <= 10


def test_c23_no_figure_is_impossible_under_a_quota(tmp_path: Path) -> None:
    """The rig checks at every poll that no counter falls or is negative."""
    with open_fs(tmp_path, make_agent=FakeAgent, **TIGHT) as rig:
        for number in range(40):
            rig.store(KEYS[number : number + 4], range(4))
        first = rig.tier.stats()
        there = [key for key in KEYS if rig.path(key).exists()][:4]
        again = rig.store(there, range(4))
        assert (again.moved_bytes, again.already_present) == (0, 4)
        assert rig.tier.stats().bytes_written == first.bytes_written
        assert rig.tier.stats().already_present == first.already_present + 4
