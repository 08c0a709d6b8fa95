"""The fs tier in several processes, in processes that are killed, and in processes with limits."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import BlockKey
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.fs_child import CHUNK_BYTES, SLOTS, FsChild
from pdoffload.testing.fs_rig import open_fs
from pdoffload.testing.tier_rig import ShiftedClock, context_of, filled_region, keys_of
from pdoffload.tiers.fs.paths import Namespace

FILE_BYTES = CHUNK_BYTES + 4096
SmallDisk = Callable[[int], Path]


def started(*children: FsChild) -> None:
    for child in children:
        assert child.answer() == {"ready": True}


def temps(root: Path) -> list[Path]:
    return list(root.glob("*/.tmp/*/*.part"))


def chunk_files(root: Path) -> list[Path]:
    return list(root.glob("*/*/*/*.bin"))


# --- C04: several writers ---


def test_c04_two_writers_of_the_same_keys_do_not_disturb_each_other(tmp_path: Path) -> None:
    with FsChild(tmp_path) as one, FsChild(tmp_path) as two:
        started(one, two)
        for number in range(50):
            for child in (one, two):
                child.send(f"store round{number} 32")
            answers = [child.answer() for child in (one, two)]
            assert [answer["succeeded"] for answer in answers] == [32, 32], answers
        assert temps(tmp_path) == []
        assert len(chunk_files(tmp_path)) == 32 * 50
        for number in range(0, 50, 7):
            loaded = one.ask(f"load round{number} 32")
            assert (loaded["succeeded"], loaded["same"]) == (32, True)


def test_c04_one_of_two_writers_is_killed_midway(tmp_path: Path) -> None:
    with FsChild(tmp_path) as one, FsChild(tmp_path) as two:
        started(one, two)
        for number in range(20):
            for child in (one, two) if number <= 10 else (one,):
                child.send(f"store round{number} 32")
            if number == 10:
                two.signal(signal.SIGKILL)
            elif number < 10:
                assert two.answer()["succeeded"] == 32
            assert one.answer()["succeeded"] == 32
        for number in range(20):
            loaded = one.ask(f"load round{number} 32")
            assert (loaded["succeeded"], loaded["same"]) == (32, True)
        with open_fs(tmp_path, make_agent=FakeAgent):
            assert temps(tmp_path) == [], "the dead one's remains are swept by the next to start"


def test_c04_a_writer_that_forks_goes_on_and_its_child_is_refused(tmp_path: Path) -> None:
    with FsChild(tmp_path) as child:
        started(child)
        assert child.ask("store before 8")["succeeded"] == 8
        assert child.ask("fork") == {"refused": 6}
        assert child.ask("store after 8")["succeeded"] == 8
        assert child.ask("load before 8")["same"]
    assert temps(tmp_path) == []
    assert list(tmp_path.glob("*/.tmp/*")) == []


# --- C05: crashes ---


def test_c05_no_crash_leaves_anything_and_live_writers_are_left_alone(tmp_path: Path) -> None:
    rng = random.Random(5)
    with FsChild(tmp_path) as bystander, FsChild(tmp_path) as parent:
        started(bystander, parent)
        for number in range(20):
            answers = [parent.ask(f"spawn victim{number}"), parent.answer()]
            (pid,) = (answer["pid"] for answer in answers if "pid" in answer)
            SYSTEM_CLOCK.sleep(rng.uniform(0.0, 0.03))  # the moment of death is the point here
            os.kill(pid, signal.SIGKILL)
            assert parent.ask(f"reap {pid}") == {"ended": pid}
            assert bystander.ask(f"store live{number} 8")["succeeded"] == 8
        alive = [p for p in tmp_path.glob("*/.tmp/*") if f"-{bystander.process.pid}-" in p.name]
        assert len(alive) == 1
        region = filled_region(SLOTS, CHUNK_BYTES)
        with open_fs(tmp_path, make_agent=FakeAgent, region=region) as rig:
            assert temps(tmp_path) == []
            assert all(folder.exists() for folder in alive)
            assert len(list(tmp_path.glob("*/.tmp/*"))) <= 3, "the three that live"
            sizes = {path.stat().st_size for path in chunk_files(tmp_path)}
            assert sizes == {FILE_BYTES}, "only whole files have final names"
            keys = keys_of(*(("live7", each) for each in range(8)))
            assert rig.load(keys, range(20, 28)).verified == 8
        assert bystander.ask("store last 8")["succeeded"] == 8


# --- limits ---

FILE_SIZE_LIMIT = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES - 2048}, resource.RLIM_INFINITY))
"""


@pytest.mark.nixl
def test_c01_a_file_that_may_not_grow_fails_with_its_errno_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    with FsChild(tmp_path, nixl=True, set_up=FILE_SIZE_LIMIT) as child:
        started(child)
        answer = child.ask("store big 3")
        assert (answer["succeeded"], answer["failed"]) == (0, 3)
        assert set(answer["errnos"]) == {errno.EFBIG}
        assert temps(tmp_path) == []
        assert chunk_files(tmp_path) == []
        assert child.ask("lookup big 3") == {"hits": 0}
        stats = child.ask("stats")
        assert (stats["failed_stores"], stats["bytes_written"]) == (1, 0)


@pytest.mark.nixl
def test_c01_a_disk_that_fills_up_keeps_what_is_whole_and_takes_more_when_space_is_freed(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    chunk_bytes = 512 << 10
    keys = keys_of(*range(4))
    clock = ShiftedClock()
    disk = small_disk(1 << 20)
    with open_fs(disk / "root", region=filled_region(8, chunk_bytes), clock=clock) as rig:
        stored = rig.store(keys[:3], (0, 1, 2))
        assert stored.succeeded == keys[:1]
        assert [key for key, _ in stored.failed] == list(keys[1:3])
        assert len(chunk_files(disk / "root")) == 1
        assert temps(disk / "root") == []
        assert rig.store(keys[3:], (3,)).failed, "the next one as well"
        assert caplog.text.count("stop") == 1
        assert rig.load(keys[:1], (7,)).verified == 1
        rig.path(keys[0]).unlink()
        clock.shift_s += 2
        assert rig.store(keys[3:], (3,)).succeeded == keys[3:]


@pytest.mark.nixl
def test_c01_a_write_that_the_disk_refuses_midway_is_not_published(
    small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, but the free space is not known beforehand: NIXL meets the full disk."""
    chunk_bytes = 512 << 10
    keys = keys_of(*range(3))
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        fields = list(real(path))
        fields[4] = 1 << 40
        return os.statvfs_result(fields)

    disk = small_disk(1 << 20)
    with open_fs(disk / "root", region=filled_region(8, chunk_bytes)) as rig:
        monkeypatch.setattr(os, "statvfs", statvfs)
        stored = rig.store(keys, (0, 1, 2))
        assert len(stored.succeeded) <= 1
        assert {error.errno for _, error in stored.failed} == {errno.ENOSPC}  # type: ignore[attr-defined]
        assert temps(disk / "root") == []
        assert len(chunk_files(disk / "root")) == len(stored.succeeded)
        loaded = rig.load(stored.succeeded, range(4, 4 + len(stored.succeeded)))
        assert loaded.verified == len(stored.succeeded)


def block_folders(root: Path, keys: list[BlockKey]) -> None:
    """A file where the folder of each of `keys` should be."""
    space = Namespace(str(root), context_of(filled_region(1)).run_config, 0, 0o600)
    for key in keys:
        folder = Path(space.path(key)).parent
        folder.parent.mkdir(exist_ok=True)
        folder.touch()


DESCRIPTOR_LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
"""


@pytest.mark.nixl
def test_c08_descriptors_do_not_leak(tmp_path: Path) -> None:
    with FsChild(tmp_path, nixl=True, set_up=DESCRIPTOR_LIMIT) as child:
        started(child)
        assert child.ask("store warm 16")["succeeded"] == 16
        assert child.ask("load warm 16")["succeeded"] == 16
        base = child.ask("fds")["fds"]
        blocked = [keys_of((f"job{number}", 0))[0] for number in range(0, 200, 5)]
        block_folders(tmp_path, blocked)
        for number in range(200):
            answer = child.ask(f"store job{number} 16")
            if number % 5:
                assert answer["succeeded"] == 16
            else:
                assert answer["errnos"] == [errno.ENOTDIR]
            if number % 10 == 0:
                assert child.ask(f"load absent{number} 16")["failed"] == 16
        assert child.ask("load job199 16")["same"]
        assert abs(child.ask("fds")["fds"] - base) <= 2 * 4, "a few threads more, each with a queue"


def test_c08_running_out_of_descriptors_fails_the_job_and_later_ones_succeed(
    tmp_path: Path,
) -> None:
    with FsChild(tmp_path, set_up=DESCRIPTOR_LIMIT) as child:
        started(child)
        assert child.ask("store before 8")["succeeded"] == 8
        exhausted = child.ask("exhaust")
        assert exhausted["fds"] >= 250
        failed = child.ask("store during 8")
        assert failed["failed"] == 8
        assert set(failed["errnos"]) == {errno.EMFILE}
        child.ask("relent")
        assert child.ask("store after 8")["succeeded"] == 8
        assert child.ask("load before 8")["same"]
