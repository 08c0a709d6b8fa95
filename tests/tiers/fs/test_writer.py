from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import RunConfig
from pdoffload.testing.clock import FakeClock
from pdoffload.tiers.fs.paths import Namespace, open_namespace
from pdoffload.tiers.fs.writer import FOREIGN_QUIET_S, LOCK_NAME, WriterDir, is_live, sweep

RUN = RunConfig(fields={"model_name": "m"})

WRITER = """
import sys
from pdoffload.layout import RunConfig
from pdoffload.tiers.fs.paths import open_namespace
from pdoffload.tiers.fs.writer import WriterDir
space = open_namespace(sys.argv[1], RunConfig(fields={"model_name": "m"}), 0, 0o600)
writer = WriterDir(space)
for size in (1000, 2000):
    with open(writer.temp_path(), "wb") as file:
        file.write(bytes(size))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return open_namespace(str(tmp_path), RUN, 0, 0o600)


@contextlib.contextmanager
def another_process(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A live process with two unfinished files, of 1,000 and 2,000 bytes."""
    command = [sys.executable, "-c", WRITER, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        try:
            yield child
        finally:
            child.kill()


def parts(space: Namespace) -> list[Path]:
    return sorted(Path(space.base, ".tmp").glob("*/*.part"))


def folder_of(path: str) -> Path:
    return Path(path).parent


def now() -> FakeClock:
    return FakeClock(wall_s=SYSTEM_CLOCK.wall_s())


def test_names_are_distinct_and_lie_in_one_folder_of_our_own(space: Namespace) -> None:
    writer = WriterDir(space)
    names = [writer.temp_path() for _ in range(5)]
    assert len(set(names)) == 5
    assert len({os.path.dirname(name) for name in names}) == 1
    other = WriterDir(space)
    assert folder_of(other.temp_path()) != folder_of(names[0])


def test_closing_removes_the_folder_and_what_is_left_in_it(space: Namespace) -> None:
    writer = WriterDir(space)
    Path(writer.temp_path()).write_bytes(b"left")
    writer.close()
    writer.close()
    assert os.listdir(f"{space.base}/.tmp") == []


def test_c05_the_leftovers_of_a_killed_writer_go_and_are_counted_in_the_log(
    tmp_path: Path, space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    with another_process(tmp_path) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert len(parts(space)) == 2
    with caplog.at_level(logging.INFO):
        assert sweep(space, SYSTEM_CLOCK) == (2, 3000)
    assert "2 unfinished files, 3000 bytes" in caplog.text
    assert os.listdir(f"{space.base}/.tmp") == []


def test_c05_a_live_writer_is_left_alone_however_old_its_files(
    tmp_path: Path, space: Namespace
) -> None:
    with another_process(tmp_path):
        clock = now()
        clock.advance(100 * FOREIGN_QUIET_S)
        assert sweep(space, clock) == (0, 0)
        assert len(parts(space)) == 2


def test_a_live_writer_of_this_process_is_left_alone(space: Namespace) -> None:
    writer = WriterDir(space)
    Path(writer.temp_path()).write_bytes(b"unfinished")
    assert sweep(space, SYSTEM_CLOCK) == (0, 0)
    assert len(parts(space)) == 1


def test_a_folder_of_another_host_goes_only_after_an_hour_of_quiet(space: Namespace) -> None:
    folder = Path(space.base, ".tmp", "elsewhere-1-abcdef01")
    folder.mkdir()
    (folder / LOCK_NAME).touch()
    (folder / "0.part").write_bytes(bytes(10))
    clock = now()
    clock.advance(FOREIGN_QUIET_S / 2)
    assert sweep(space, clock) == (0, 0)
    clock.advance(FOREIGN_QUIET_S)
    assert sweep(space, clock) == (1, 10)
    assert not folder.exists()


def test_a_folder_whose_owner_has_not_locked_it_yet_is_left_alone(space: Namespace) -> None:
    folder = Path(space.base, ".tmp", f"{os.uname().nodename}-1-abcdef01")
    folder.mkdir()
    assert sweep(space, now()) == (0, 0)
    assert folder.exists()


def test_a_writer_whose_folder_was_taken_away_makes_a_new_one(space: Namespace) -> None:
    writer = WriterDir(space)
    lost = writer.temp_path()
    (folder_of(lost) / LOCK_NAME).unlink()
    folder_of(lost).rmdir()
    fresh = writer.renew(lost)
    assert folder_of(fresh) != folder_of(lost)
    Path(fresh).write_bytes(b"")
    assert folder_of(writer.renew(lost)) == folder_of(fresh), "two threads that lost it agree"
    assert folder_of(writer.temp_path()) == folder_of(fresh)


def test_a_namespace_that_was_removed_is_made_again(space: Namespace, tmp_path: Path) -> None:
    writer = WriterDir(space)
    Path(space.base, ".tmp").rmdir()
    Path(space.base).rmdir()
    Path(writer.temp_path()).write_bytes(b"")
    assert len(parts(space)) == 1


def test_an_error_on_one_folder_does_not_stop_the_sweep_of_others(
    space: Namespace, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        folder = Path(space.base, ".tmp", f"{os.uname().nodename}-1-{name}")
        folder.mkdir()
        (folder / LOCK_NAME).touch()
        (folder / "0.part").write_bytes(bytes(10))
    # A folder in the place of a file cannot be unlinked.
    (Path(space.base, ".tmp", f"{os.uname().nodename}-1-a") / "sub").mkdir()
    files, _ = sweep(space, SYSTEM_CLOCK)
    assert files >= 1
    assert not Path(space.base, ".tmp", f"{os.uname().nodename}-1-b").exists()


def test_a_sweeper_that_holds_the_lock_is_waited_out_by_another_name(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    refused = []

    def flock(fd: int, operation: int) -> None:
        if not refused:
            refused.append(fd)
            raise BlockingIOError
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    writer = WriterDir(space)
    Path(writer.temp_path()).write_bytes(b"")
    assert len(refused) == 1
    assert len(parts(space)) == 1


def test_a_folder_that_cannot_be_removed_is_left_to_the_next_sweep(
    space: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = WriterDir(space)
    folder = Path(writer.temp_path()).parent

    def unlink(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink)
        writer.close()
    assert "left behind" in caplog.text
    assert not is_live(space, folder.name)
    sweep(space, SYSTEM_CLOCK)
    assert not folder.exists()


def test_an_owner_lives_as_long_as_its_folder_is_locked(space: Namespace) -> None:
    writer = WriterDir(space)
    owner = writer.owner()
    assert owner == writer.owner() == Path(writer.temp_path()).parent.name
    assert is_live(space, owner)
    writer.close()
    assert not is_live(space, owner)
    assert not is_live(space, "never-was-here")
