from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdoffload.config import FsTierConfig
from pdoffload.errors import ConfigError
from pdoffload.layout import RunConfig
from pdoffload.memory.host import HostRegion
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.tier_rig import context_of, filled_region
from pdoffload.tiers.base import TierContext, Verify
from pdoffload.tiers.fs import start as start_module
from pdoffload.tiers.fs.paths import open_namespace
from pdoffload.tiers.fs.start import Start, prepare, probe_files, request_limits
from pdoffload.tiers.fs.writer import WriterDir

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = filled_region(8)
    yield region
    region.close()


def start(folder: Path, context: TierContext, **settings: Any) -> Start:
    config = FsTierConfig(root_dir=str(folder), **settings)
    return prepare(config, context, rank=0, make_agent=FakeAgent)


def problem(folder: Path, context: TierContext, **settings: Any) -> str:
    config = FsTierConfig(root_dir=str(folder), **settings)
    with pytest.raises(ConfigError) as caught:
        prepare(config, context, rank=0, make_agent=None)
    (text,) = caught.value.problems
    return text


def refuse_direct(monkeypatch: pytest.MonkeyPatch, number: int, call: str = "open") -> None:
    """Make direct I/O fail with `number` as file systems without it do: at the open, or at the write."""
    real_open, real_pwrite = os.open, os.pwrite
    direct: set[int] = set()

    def open_(path: str, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT and call == "open":
            raise OSError(number, os.strerror(number), path)
        fd = real_open(path, flags, mode, **more)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if fd in direct:
            raise OSError(number, os.strerror(number))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "open", open_)
    if call == "write":
        monkeypatch.setattr(os, "pwrite", pwrite)


# --- direct I/O ---


@pytest.mark.parametrize("call", ["open", "write"])
def test_c06_direct_forced_on_and_refused_goes_on_buffered_with_one_warning(
    tmp_path: Path,
    region: HostRegion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    refuse_direct(monkeypatch, errno.EINVAL, call)
    terms = start(tmp_path, context_of(region), direct="on").terms
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    for word in (terms.space.base, "EINVAL", "buffered"):
        assert word in warning.getMessage()
    assert terms.open_flags == 0
    assert terms.shows_holes


def test_direct_auto_picks_silently(
    tmp_path: Path,
    region: HostRegion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse_direct(monkeypatch, errno.EINVAL)
    assert start(tmp_path, context_of(region)).terms.open_flags == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_direct_off_is_not_tried(tmp_path: Path, region: HostRegion) -> None:
    assert start(tmp_path, context_of(region), direct="off").terms.open_flags == 0


def test_c06_a_pool_that_does_not_begin_on_a_page_is_moved_buffered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)
    config = FsTierConfig(root_dir=str(tmp_path), direct="on")
    assert probe_files(config, space, WriterDir(space), "0x40040 is not on a page").open_flags == 0
    assert "not on a page" in caplog.text


def test_nothing_of_the_trial_stays(tmp_path: Path, region: HostRegion) -> None:
    terms = start(tmp_path, context_of(region)).terms
    assert list(tmp_path.rglob("*.part")) == []
    terms.writer.close()
    assert os.listdir(f"{terms.space.base}/.tmp") == []


# --- settings that cannot work ---


def test_a_root_that_takes_no_file_is_refused_and_leaves_no_folder_of_a_writer(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_(path: str, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".part"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", open_)
    told = problem(tmp_path, context_of(region))
    assert told.startswith("root_dir:")
    assert str(tmp_path) in told
    assert "Read-only" in told
    assert list(tmp_path.glob("*/.tmp/*")) == []


@pytest.mark.nixl
def test_an_unusable_queue_is_told_with_the_reason(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_module, "probe", lambda backend: f"no {backend.queue} here")
    told = problem(tmp_path, context_of(region), io="uring")
    assert told == "io: 'uring' is not usable here: uring: no uring here"
    told = problem(tmp_path, context_of(region), io="auto")
    for queue in ("uring", "aio", "posix_aio"):
        assert f"{queue}: no {queue} here" in told


def test_the_next_queue_is_taken_and_said_once(
    tmp_path: Path,
    region: HostRegion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usable = {"posix_aio"}
    monkeypatch.setattr(
        start_module, "probe", lambda backend: None if backend.queue in usable else "forbidden"
    )
    config = FsTierConfig(root_dir=str(tmp_path))
    with caplog.at_level(logging.INFO):
        prepare(config, context_of(region), rank=0, make_agent=None)
    (said,) = [r.getMessage() for r in caplog.records if "POSIX" in r.getMessage()]
    assert "posix_aio" in said
    assert "uring: forbidden" in said


# --- limits ---


@pytest.mark.parametrize(
    ("soft", "chunk_bytes", "chunks", "threads"),
    [
        (20_000, 256 << 10, 32, 16),
        (20_000, 2 * MIB, 16, 16),
        (20_000, GIB, 1, 16),
        (1024, 256 << 10, 16, 16),
        (256, 256 << 10, 4, 16),
        (64, 256 << 10, 1, 16),
        (16, 256 << 10, 1, 4),
    ],
)
def test_c08_all_threads_together_use_at_most_half_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, soft: int, chunk_bytes: int, chunks: int, threads: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert request_limits(chunk_bytes, 16) == (chunks, threads)
    assert 2 * chunks * threads <= max(soft // 2, 2)


def test_bare_files_are_sound_unless_a_checksum_is_demanded(
    tmp_path: Path, region: HostRegion
) -> None:
    chunk_bytes = region.geometry.chunk_bytes
    sizes = {
        verify: start(tmp_path, context_of(region, verify=verify)).terms.sound_sizes
        for verify in Verify
    }
    assert sizes[Verify.ALWAYS] == (chunk_bytes + 4096,)
    assert set(sizes[Verify.IF_PRESENT]) == {chunk_bytes, chunk_bytes + 4096}
    assert set(sizes[Verify.OFF]) == {chunk_bytes, chunk_bytes + 4096}
