"""The host pool's memory: shared by processes, and gone with them however they end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import os
import random
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

import pdoffload
from pdoffload.errors import ConfigError, DeadlineExceeded, MisuseError, StorageError
from pdoffload.layout import PAGE_BYTES, Geometry
from pdoffload.memory import host, rendezvous
from pdoffload.memory.host import HostRegion, SlotStatus, region_bytes, sweep_dead
from pdoffload.testing.clock import FakeClock

GEOMETRY = Geometry(num_slots=4, worker_bytes=4096, num_copies=2)

CHILD = """
import sys
from pdoffload.layout import Geometry
from pdoffload.memory.host import HostRegion, SlotStatus
directory, member, members = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("imported", flush=True)
sys.stdin.readline()
region = HostRegion.open(
    "engine", Geometry(num_slots=4, worker_bytes=4096, num_copies=2),
    member=member, members=members, directory=directory,
)
region.slot_view(member)[:] = bytes([member + 1]) * 8192
region.status[member] = SlotStatus.STORED
print("created" if region.created else "joined", flush=True)
sys.stdin.readline()
"""

CHURN = """
import sys
from pdoffload.layout import Geometry
from pdoffload.memory.host import HostRegion
geometry = Geometry(num_slots=4, worker_bytes=4096, num_copies=2)
number = 0
while True:
    for member in range(3):
        HostRegion.open(
            f"churn {number}", geometry, member=member, members=4, directory=sys.argv[1]
        )
    print(number, flush=True)
    number += 1
"""


@pytest.fixture
def directory():
    """A directory of shared memory; whatever is left in it at the end is a leak."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield str(path)
    gc.collect()
    left = [one.name for one in path.iterdir()]
    for name in left:
        (path / name).unlink()
    path.rmdir()
    assert left == []


@contextlib.contextmanager
def python(script, *arguments):
    """A child process that runs `script`; killed at the end of the block."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    root = Path(pdoffload.__file__).parents[1]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def said(child):
    return child.stdout.readline().strip()


def go_on(child):
    child.stdin.write("\n")
    child.stdin.flush()


@contextlib.contextmanager
def living(directory, member, members):
    """A child that has joined the region of "engine" and waits."""
    with python(CHILD, directory, member, members) as child:
        assert said(child) == "imported"
        go_on(child)
        assert said(child) in ("created", "joined")
        yield child


def kill(child):
    child.kill()
    child.wait()


def join(directory, member=0, members=2, **changes):
    terms = {"engine_id": "engine", "geometry": GEOMETRY, **changes}
    return HostRegion.open(**terms, member=member, members=members, directory=directory)


def region_file(directory):
    (name,) = os.listdir(directory)
    return os.path.join(directory, name)


# Sharing


def test_processes_see_each_others_bytes_and_status(directory):
    with living(directory, 1, 3), living(directory, 2, 3):
        region = join(directory, 0, 3)
        assert not region.created
        for member in (1, 2):
            assert bytes(region.slot_view(member)) == bytes([member + 1]) * 8192
            assert region.all_stored(member)
        assert not region.all_stored(0)
        assert not region.slot_view(3)[0]
        region.close()


def test_the_name_goes_when_the_last_process_joins(directory):
    first = join(directory, 0)
    assert len(os.listdir(directory)) == 1
    with living(directory, 1, 2):
        assert os.listdir(directory) == []
    first.close()


def test_only_this_user_may_open_it(directory):
    with contextlib.closing(join(directory)):
        assert stat.S_IMODE(os.stat(region_file(directory)).st_mode) == 0o600


def test_processes_that_start_at_once_agree_on_one_region(directory):
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(python(CHILD, directory, i, 4)) for i in range(3)]
        assert [said(child) for child in children] == ["imported"] * 3
        for child in children:
            go_on(child)
        region = join(directory, 3, 4)
        answers = [said(child) for child in children]
        assert answers.count("created") + region.created == 1
        assert os.listdir(directory) == []
        assert [region.slot_view(i)[0] for i in range(3)] == [1, 2, 3]
        region.close()


def test_whoever_is_last_is_the_only_one_to_find_so(directory):
    """Eight members at once, many times: one creates, all share, and no name survives."""
    for number in range(20):
        start, regions = threading.Barrier(8), []

        def member(index, start=start, regions=regions, number=number):
            start.wait()
            regions.append(join(directory, index, 8, engine_id=f"engine {number}"))

        threads = [threading.Thread(target=member, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(region.created for region in regions) == 1
        regions[0].array[0] = number + 1
        assert {int(region.array[0]) for region in regions} == {number + 1}
        assert os.listdir(directory) == []
        for region in regions:
            region.close()


def test_two_engines_have_two_regions(directory):
    with (
        contextlib.closing(join(directory, engine_id="one")) as one,
        contextlib.closing(join(directory, engine_id="two")) as two,
    ):
        assert one.created
        assert two.created
        one.array[:] = 1
        assert not two.array.any()


# Crashes


def test_c05_a_process_killed_before_all_have_joined_leaves_nothing_for_long(directory, caplog):
    with living(directory, 1, 3) as child, caplog.at_level(logging.INFO):
        kill(child)
        assert len(os.listdir(directory)) == 1
        files, freed_bytes = sweep_dead(directory)
    assert files == 1
    assert freed_bytes >= 8192
    assert os.listdir(directory) == []
    assert f"removed 1 dead regions, {freed_bytes} bytes" in caplog.text


def test_c05_a_process_killed_after_all_have_joined_leaves_nothing(directory):
    with living(directory, 0, 2) as one, living(directory, 1, 2) as two:
        assert os.listdir(directory) == []
        kill(one)
        kill(two)
    assert os.listdir(directory) == []


def test_a_name_that_goes_while_we_open_it_is_not_joined(directory, monkeypatch):
    """Others sweep, or join last, between our open and our lock: that file is nobody's any more."""
    first = join(directory)
    path, lock = region_file(directory), rendezvous._lock

    def too_late(fd, kind):
        if kind == fcntl.LOCK_SH:
            Path(path).unlink(missing_ok=True)
        return lock(fd, kind)

    monkeypatch.setattr(rendezvous, "_lock", too_late)
    with contextlib.closing(join(directory, 1)) as second:
        assert second.created
        first.array[:] = 1
        assert not second.array.any()
    first.close()


def test_those_who_live_keep_the_memory_of_those_who_died(directory):
    with living(directory, 1, 2) as child:
        region = join(directory, 0, 2)
        kill(child)
    assert bytes(region.slot_view(1)) == b"\2" * 8192
    region.close()


def test_the_next_engine_does_not_meet_a_dead_one(directory):
    """Same engine id, same member: the corpse of the last run must not refuse us, nor lend its bytes."""
    with living(directory, 1, 3) as child:
        kill(child)
    region = join(directory, 1, 3)
    assert region.created
    assert not region.array.any()
    region.close()


def test_c05_a_region_in_which_one_process_lives_is_left_alone(directory):
    with living(directory, 0, 3), living(directory, 1, 3) as other:
        kill(other)
        assert sweep_dead(directory) == (0, 0)
        third = join(directory, 2, 3)
        assert not third.created
        third.close()


def test_c05_killed_at_any_moment_again_and_again(directory):
    chance = random.Random(5)
    with contextlib.closing(join(directory)) as alive:
        for _ in range(5):
            with python(CHURN, directory) as child:
                for _ in range(chance.randrange(1, 40)):
                    assert said(child).isdigit()
                kill(child)
            sweep_dead(directory)
            assert len(os.listdir(directory)) == 1
        assert sweep_dead(directory) == (0, 0)
        alive.array[:] = 1


def test_closing_before_all_have_joined_leaves_nothing(directory):
    region = join(directory)
    region.close()
    assert os.listdir(directory) == []


def test_views_that_somebody_holds_do_not_keep_the_name(directory):
    region = join(directory)
    array = region.array
    region.close()
    assert os.listdir(directory) == []
    array[:] = 1


def test_one_that_closes_does_not_take_the_name_from_the_others(directory):
    first, second = join(directory, 0, 3), join(directory, 1, 3)
    second.close()
    third = join(directory, 2, 3)
    assert not third.created
    assert os.listdir(directory) == []
    first.close()
    third.close()


# Refusals


def test_two_engines_of_one_id_are_told_so(directory):
    with contextlib.closing(join(directory)) as first:
        with pytest.raises(
            ConfigError, match=r"engine_id: engine is used by two engines"
        ) as caught:
            join(directory)
        assert "member 0 of 2" in str(caught.value)
        first.array[:] = 1  # the first one is not disturbed
        second = join(directory, 1)
        assert second.array.all()
        second.close()


@pytest.mark.parametrize(
    ("field", "mine", "theirs"),
    [("num_slots", 5, 4), ("worker_bytes", 8192, 4096), ("num_copies", 1, 2)],
)
def test_processes_that_disagree_are_told_the_field_and_both_values(directory, field, mine, theirs):
    sizes = {"num_slots": 4, "worker_bytes": 4096, "num_copies": 2, field: mine}
    with (
        contextlib.closing(join(directory)),
        pytest.raises(ConfigError, match=f"{field}: {mine} here, {theirs} in the region"),
    ):
        join(directory, 1, geometry=Geometry(**sizes))


def test_processes_that_disagree_on_their_number_are_told(directory):
    with (
        contextlib.closing(join(directory, 0, 2)),
        pytest.raises(ConfigError, match="members: 3 here, 2 in the region"),
    ):
        join(directory, 1, 3)


@pytest.mark.parametrize(("member", "members"), [(-1, 2), (2, 2), (0, 0), (0, 10**6)])
def test_a_member_out_of_range_is_misuse(directory, member, members):
    with pytest.raises(MisuseError, match=f"member {member} of {members}"):
        join(directory, member, members)


@pytest.mark.parametrize("num_slots", [0, -1])
@pytest.mark.parametrize("make", [join, lambda _directory, geometry: HostRegion.private(geometry)])
def test_c12_a_budget_below_one_chunk_is_refused(directory, make, num_slots):
    small = Geometry(num_slots=num_slots, worker_bytes=4096, num_copies=2)
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: .* chunk of 8192"):
        make(directory, geometry=small)


def test_c12_a_budget_beyond_shared_memory_is_refused_before_any_is_taken(directory):
    huge = Geometry(num_slots=10**9, worker_bytes=1 << 20, num_copies=2)
    with pytest.raises(ConfigError, match="cpu_bytes_to_use") as caught:
        join(directory, geometry=huge)
    (line,) = caught.value.problems
    assert str(region_bytes(huge)) in line
    assert directory in line
    assert "--shm-size" in line
    assert os.listdir(directory) == []


def test_a_chunk_without_bytes_is_misuse():
    with pytest.raises(MisuseError, match="above 0"):
        HostRegion.private(Geometry(num_slots=1, worker_bytes=0, num_copies=1))


def test_a_directory_that_is_not_there_is_named():
    with pytest.raises(StorageError, match="ENOENT") as caught:
        join("/dev/shm/no-such-directory")
    assert caught.value.errno == errno.ENOENT


def test_a_link_in_place_of_the_region_is_not_followed(directory, tmp_path):
    target = tmp_path / "somebody's"
    target.write_bytes(b"untouched")
    name = Path(rendezvous.region_path(directory, "engine"))
    name.symlink_to(target)
    with pytest.raises(StorageError, match="ELOOP"):
        join(directory)
    assert target.read_bytes() == b"untouched"
    name.unlink()


def test_a_file_of_somebody_else_is_refused(directory, monkeypatch):
    with contextlib.closing(join(directory)):
        path = region_file(directory)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(rendezvous, "region_path", lambda *_: path)
        monkeypatch.setattr(host, "region_path", lambda *_: path)
        with pytest.raises(StorageError, match="belongs to user"):
            join(directory, 1)
        monkeypatch.undo()


@contextlib.contextmanager
def foreign_file(directory, lock):
    """A file under the region's name, locked by somebody."""
    path = rendezvous.region_path(directory, "engine")
    with open(path, "wb") as file:
        file.write(b"something else")
        file.flush()
        fcntl.flock(file, lock)
        yield path
    os.unlink(path)


def test_a_file_that_is_no_region_is_refused_and_left(directory):
    with foreign_file(directory, fcntl.LOCK_SH) as path:
        with pytest.raises(StorageError, match="is not a region"):
            join(directory)
        assert os.path.exists(path)


def test_a_name_that_somebody_keeps_locked_ends_by_deadline(directory):
    clock = FakeClock()
    with foreign_file(directory, fcntl.LOCK_EX), pytest.raises(DeadlineExceeded) as caught:
        join(directory, clock=clock, timeout_s=7)
    assert caught.value.timeout_s == 7
    assert "engine" not in caught.value.waited_for
    assert rendezvous.region_path(directory, "engine") in caught.value.waited_for
    assert clock.slept_s == pytest.approx(7, abs=0.1)


def test_a_process_that_stops_while_signing_in_stops_nobody_for_ever(directory):
    clock = FakeClock()
    with contextlib.closing(join(directory)), open(region_file(directory), "r+b") as stopped:
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(stopped, fcntl.F_OFD_SETLK, whole)
        with pytest.raises(DeadlineExceeded, match="list of members"):
            join(directory, 1, clock=clock, timeout_s=7)
        stopped.close()
        join(directory, 1).close()


def test_a_failed_join_can_be_tried_again(directory):
    with contextlib.closing(join(directory)):
        with pytest.raises(ConfigError):
            join(directory, 1, 3)
        join(directory, 1, 2).close()


# Memory


@pytest.fixture
def region():
    region = HostRegion.private(GEOMETRY)
    yield region
    region.close()


def test_slots_lie_side_by_side_and_page_aligned(region):
    assert region.geometry is GEOMETRY
    assert region.size_bytes == 4 * 8192
    assert region.address % PAGE_BYTES == 0
    assert [region.slot_address(i) - region.address for i in range(4)] == [0, 8192, 16384, 24576]
    assert region.array.shape == (4 * 8192,)
    for slot in range(4):
        region.slot_view(slot)[:] = bytes([slot + 1]) * 8192
    assert (region.array == np.repeat(np.arange(1, 5, dtype=np.uint8), 8192)).all()
    assert region.array.ctypes.data == region.address


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_does_not_exist_is_misuse(region, slot):
    calls = (
        region.slot_address,
        region.slot_view,
        region.checksum,
        region.forget_checksum,
        region.all_stored,
        lambda slot: region.failed_among([slot]),
        lambda slot: region.set_checksum(slot, bytes(16)),
        lambda slot: region.reset_status([0, slot]),
    )
    for call in calls:
        with pytest.raises(MisuseError, match=f"slot {slot} does not exist"):
            call(slot)


def test_a_slot_counts_as_stored_when_every_worker_has_stored(region):
    assert region.status.shape == (4, 2)
    assert not region.all_stored(1)
    region.status[1, 0] = SlotStatus.STORED
    assert not region.all_stored(1)
    region.status[1, 1] = SlotStatus.FAILED
    assert not region.all_stored(1)
    assert region.failed_among([1]) == [1]
    region.status[1, 1] = SlotStatus.STORED
    assert region.all_stored(1)
    assert region.failed_among([1]) == []
    assert not any(region.all_stored(slot) for slot in (0, 2, 3))


def test_a_reserved_slot_no_longer_counts_as_stored(region):
    region.status[:] = SlotStatus.STORED
    region.reset_status([0, 2])
    assert [region.all_stored(slot) for slot in range(4)] == [False, True, False, True]
    region.reset_status([])
    assert region.all_stored(1)


def test_status_words_do_not_touch_the_pool(region):
    region.status[:] = 0xFFFFFFFF
    assert not region.array.any()
    region.array[:] = 0
    assert (region.status == 0xFFFFFFFF).all()


def test_the_checksum_is_the_xxh3_128_of_the_slot(region):
    region.slot_view(2)[:] = random.Random(1).randbytes(8192)
    assert region.checksum(2) == xxhash.xxh3_128(bytes(region.slot_view(2))).digest()


def test_a_checksum_is_kept_until_forgotten(region):
    first = region.checksum(0)
    region.slot_view(0)[5] = 1
    assert region.checksum(0) == first
    region.forget_checksum(0)
    assert region.checksum(0) != first
    assert region.checksum(1) == first


def test_a_checksum_from_elsewhere_is_believed(region):
    region.set_checksum(3, b"0123456789abcdef")
    assert region.checksum(3) == b"0123456789abcdef"
    with pytest.raises(MisuseError, match="16 bytes, not 4"):
        region.set_checksum(3, b"0123")


def test_checksums_of_many_threads_agree(region):
    region.array[:] = np.arange(4 * 8192) % 251
    expected = [xxhash.xxh3_128(bytes(region.slot_view(slot))).digest() for slot in range(4)]
    found, start = [], threading.Barrier(4)

    def compute():
        start.wait()
        found.append([region.checksum(slot) for slot in range(4)])

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.parametrize("madvise", [host._MADV_POPULATE_WRITE, 9999])
def test_populate_takes_every_page_and_changes_no_byte(directory, monkeypatch, madvise):
    """Also on a kernel that knows no MADV_POPULATE_WRITE, played by advice no kernel knows."""
    monkeypatch.setattr(host, "_MADV_POPULATE_WRITE", madvise)
    geometry = Geometry(num_slots=300, worker_bytes=4096, num_copies=2)
    with contextlib.closing(join(directory, geometry=geometry)) as region:
        region.slot_view(7)[:] = b"\7" * 8192
        before = os.stat(region_file(directory)).st_blocks * 512
        region.populate()
        after = os.stat(region_file(directory)).st_blocks * 512
        assert before < 300 * 8192 < region_bytes(geometry) <= after
        assert int(region.array.sum()) == 7 * 8192
        region.populate()


def test_populate_of_a_private_region(region):
    region.slot_view(1)[:] = b"\7" * 8192
    region.populate()
    assert int(region.array.sum()) == 7 * 8192


def test_populate_says_when_memory_runs_out(directory):
    """A file cut short answers a page fault exactly as a full /dev/shm does."""
    with contextlib.closing(join(directory)) as region:
        os.truncate(region_file(directory), PAGE_BYTES)
        with pytest.raises(ConfigError, match="cpu_bytes_to_use") as caught:
            region.populate()
        assert str(region_bytes(GEOMETRY)) in str(caught.value)


def test_close_is_idempotent_and_use_after_it_is_misuse(region):
    region.close()
    region.close()
    assert "closed" in repr(region)
    calls = (
        lambda: region.array,
        lambda: region.status,
        lambda: region.slot_view(0),
        lambda: region.checksum(0),
        lambda: region.all_stored(0),
        region.populate,
    )
    for call in calls:
        with pytest.raises(MisuseError, match="closed"):
            call()


def test_views_outlive_close(directory):
    """Numpy arrays that somebody still holds must not turn into a crash."""
    region = join(directory, 0, 1)
    array, view = region.array, region.slot_view(3)
    region.close()
    array[:] = 9
    assert view[0] == 9


def test_it_shows_its_state(region):
    region.checksum(0)
    assert repr(region) == "<HostRegion open, 4 slots of 8192 bytes, 1 checksums>"


def test_a_pool_larger_than_all_shared_memory_is_known_before_any_is_taken() -> None:
    (problem,) = rendezvous.size_problems(1 << 60)
    assert problem.startswith("cpu_bytes_to_use: the host pool needs ")
    assert "/dev/shm" in problem
    assert rendezvous.size_problems(4096) == []
