from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.errors import ConfigError
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.fs_rig import FsRig, open_fs
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.fs import gc_removal
from pdoffload.tiers.fs.evict import LOCK_NAME, lock_for_reading
from pdoffload.tiers.fs.gc import EMPTY_QUIET_S, FsCollector
from pdoffload.tiers.fs.ledger import Ledger
from pdoffload.tiers.gc import Amount, GcPolicy, GcReport, NamespaceReport

CHUNK = 8192
FILE_BYTES = CHUNK + 4096
KEYS = keys_of(*range(20))
DAY_S = 86_400


@pytest.fixture(params=[None, 1 << 30], ids=["no quota", "a quota"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FsRig]:
    """An engine that has stored ten chunks, the first ten days ago, the next nine days ago, ..."""
    with open_fs(tmp_path, make_agent=FakeAgent, max_bytes=request.param) as rig:
        assert rig.store(KEYS[:10], range(10)).failed == ()
        for number, key in enumerate(KEYS[:10]):
            used_s = SYSTEM_CLOCK.wall_s() - (10 - number) * DAY_S
            os.utime(rig.path(key), (used_s, used_s))
        if request.param:
            age_ledger(rig)
        yield rig


def age_ledger(rig: FsRig) -> None:
    """The ledger says as the files do."""
    ledger = Ledger(rig.tier._terms.space)

    def is_known() -> bool:
        ledger.open()
        known = ledger.between("000", "fff")[0]
        ledger.close()
        return len(known) == 10

    rig.until(is_known, "all files to be known")
    db = sqlite3.connect(ledger.path, isolation_level=None, timeout=30)
    for key in KEYS[:10]:
        used_us = int(rig.path(key).stat().st_mtime * 1e6)
        db.execute("UPDATE chunks SET used_us = ? WHERE key = ?", (used_us, key))
    db.close()


def collect(root: Path, *, delete: bool = False, **policy: object) -> GcReport:
    asked = GcPolicy(**policy)  # type: ignore[arg-type]
    return FsCollector(str(root))(asked, delete=delete, clock=SYSTEM_CLOCK)


def only(report: GcReport) -> NamespaceReport:
    assert report.problems == []
    (found,) = report.namespaces
    return found


def left(rig: FsRig) -> set[object]:
    return {key for key in KEYS if rig.path(key).exists()}


def tree(root: Path) -> dict[str, int]:
    """Everything there is, but for what the engine may change by itself."""
    return {
        str(path): path.lstat().st_size for path in root.rglob("*") if ".ledger" not in path.name
    }


def test_a_dry_run_tells_all_and_changes_nothing(rig: FsRig) -> None:
    before = tree(rig.root)
    found = only(collect(rig.root, older_than_s=4.5 * DAY_S, max_bytes=2 * FILE_BYTES))
    assert found.name == Path(rig.tier._base).name
    assert found.chunks == Amount(files=10, size_bytes=10 * FILE_BYTES)
    assert found.oldest_use_s == pytest.approx(SYSTEM_CLOCK.wall_s() - 10 * DAY_S, abs=100)
    assert found.newest_use_s == pytest.approx(SYSTEM_CLOCK.wall_s() - DAY_S, abs=100)
    assert found.to_go == {
        "older_than": Amount(files=6, size_bytes=6 * FILE_BYTES),
        "max_bytes": Amount(files=2, size_bytes=2 * FILE_BYTES),
    }
    assert found.due().files == 8
    assert found.removed == Amount()
    assert tree(rig.root) == before


def test_the_oldest_go_and_the_engine_misses_them(rig: FsRig) -> None:
    found = only(collect(rig.root, delete=True, max_bytes=4 * FILE_BYTES))
    assert found.removed == Amount(files=6, size_bytes=6 * FILE_BYTES)
    assert left(rig) == set(KEYS[6:10])
    assert rig.load(KEYS[6:10], range(20, 24)).verified == 4
    assert len(rig.load(KEYS[:6], range(30, 36)).failed) == 6
    assert rig.store(KEYS[:6], range(6)).failed == ()


def test_a_file_that_is_only_read_counts_as_used_by_its_access_time(rig: FsRig) -> None:
    now_s = SYSTEM_CLOCK.wall_s()
    os.utime(rig.path(KEYS[0]), (now_s, now_s - 10 * DAY_S))
    only(collect(rig.root, delete=True, older_than_s=DAY_S / 2))
    assert left(rig) == {KEYS[0]}


def test_the_ledger_counts_what_is_left(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent, max_bytes=12 * FILE_BYTES) as rig:
        assert rig.store(KEYS[:10], range(10)).failed == ()
        only(collect(tmp_path, delete=True, max_bytes=3 * FILE_BYTES))
        assert rig.store(KEYS[10:18], range(8)).failed == ()
        ledger = Ledger(rig.tier._terms.space)

        def agrees() -> bool:
            ledger.open()
            used, claimed, _ = ledger.usage()
            ledger.close()
            return (used, claimed) == (11 * FILE_BYTES, 0)

        rig.until(agrees, "the ledger to agree")
        assert len(left(rig)) == 11, "there was room, so the engine evicted none"


def test_a_file_that_is_being_read_or_was_used_meanwhile_stays(
    rig: FsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gc_removal.Remover.remove

    def remove(self: gc_removal.Remover, used_s: dict[object, float]) -> None:
        os.utime(rig.path(KEYS[1]))
        real(self, used_s)  # type: ignore[arg-type]

    monkeypatch.setattr(gc_removal.Remover, "remove", remove)
    with open(rig.path(KEYS[0]), "rb") as reader:
        lock_for_reading(reader.fileno())
        found = only(collect(rig.root, delete=True, max_bytes=0))
    assert left(rig) == {KEYS[0], KEYS[1]}
    assert (found.kept_in_use, found.removed.files) == (2, 8)


def test_a_chunk_that_an_engine_writes_anew_at_this_moment_stays(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent, max_bytes=1 << 30) as rig:
        assert rig.store(KEYS[:2], range(2)).failed == ()
        quota = rig.tier._terms.quota
        assert quota is not None
        claim = quota.reserve(KEYS[:1], FILE_BYTES, timeout_s=30)
        found = only(collect(tmp_path, delete=True, max_bytes=0))
        assert (found.kept_in_use, left(rig)) == (1, {KEYS[0]})
        quota.wrote(claim, KEYS[:1], FILE_BYTES)


def test_leftovers_of_dead_writers_go_and_those_of_the_living_stay(rig: FsRig) -> None:
    base = Path(rig.tier._base)
    dead = base / ".tmp" / f"{os.uname().nodename}-1-deadbeef"
    dead.mkdir()
    (dead / ".lock").touch()
    (dead / "0.part").write_bytes(bytes(700))
    (own,) = (each for each in (base / ".tmp").iterdir() if each != dead)
    (own / "9.part").write_bytes(bytes(30))
    found = only(collect(rig.root))
    assert found.unfinished == Amount(files=1, size_bytes=700)
    assert found.being_written == Amount(files=1, size_bytes=30)
    assert found.to_go == {"unfinished": Amount(files=1, size_bytes=700)}
    found = only(collect(rig.root, delete=True))
    assert found.removed == Amount(files=1, size_bytes=700)
    assert not dead.exists()
    assert (own / "9.part").exists()
    (own / "9.part").unlink()


def test_files_no_engine_would_load_go_and_vllms_own_stay(rig: FsRig) -> None:
    os.truncate(rig.path(KEYS[0]), 100)
    os.truncate(rig.path(KEYS[1]), FILE_BYTES + 1)
    os.truncate(rig.path(KEYS[2]), CHUNK)
    found = only(collect(rig.root, delete=True))
    assert found.wrong_size == Amount(files=2, size_bytes=100 + FILE_BYTES + 1)
    assert found.unverified == Amount(files=1, size_bytes=CHUNK)
    assert left(rig) == set(KEYS[2:10])


def test_where_no_trailer_tells_the_length_no_size_is_wrong(rig: FsRig) -> None:
    for number, key in enumerate(KEYS[:10]):
        os.truncate(rig.path(key), 100 + number)
    found = only(collect(rig.root, delete=True))
    assert (found.wrong_size, found.removed) == (Amount(), Amount())


def test_nothing_but_our_own_layout_is_touched(rig: FsRig, tmp_path: Path) -> None:
    base = Path(rig.tier._base)
    precious = tmp_path.parent / f"{tmp_path.name}-precious"
    precious.mkdir()
    (precious / "data.bin").write_bytes(b"mine")
    strangers = [
        tmp_path / "notes.txt",
        tmp_path / "other_0123456789ab_r0" / "abc" / "de_g0" / ("abcde0" + "0" * 58 + ".bin"),
        base / "README",
        rig.path(KEYS[0]).parent / "notes.bin",
        rig.path(KEYS[0]).with_suffix(".bin.tmp"),
        base / "zzz" / "00_g0" / ("00" * 32 + ".bin"),
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (1, 1))
    links = [
        (base / "fff", precious),
        (base / "eee", base / rig.path(KEYS[0]).parent.parent.name),
        (tmp_path / "link_0123456789ab_r0", precious),
        (rig.path(KEYS[15]), precious / "data.bin"),
    ]
    for link, target in links:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    report = collect(tmp_path, delete=True, max_bytes=0)
    assert [line.partition(":")[0] for line in report.skipped] == ["other_0123456789ab_r0"]
    assert only(report).removed.files == 10
    assert all(path.exists() for path in strangers)
    assert all(link.is_symlink() for link, _ in links)
    assert (precious / "data.bin").read_bytes() == b"mine"


def test_one_namespace_can_be_chosen_and_a_wrong_name_is_met_with_the_nearest(
    tmp_path: Path,
) -> None:
    with (
        open_fs(tmp_path, make_agent=FakeAgent) as one,
        open_fs(tmp_path, make_agent=FakeAgent, rank=1) as two,
    ):
        one.store(KEYS[:2], range(2))
        two.store(KEYS[:3], range(3))
        name = Path(two.tier._base).name
        with pytest.raises(ConfigError, match=f"nearest: {name}"):
            collect(tmp_path, namespace=f"{name[:-2]}r1x")
        assert only(collect(tmp_path, delete=True, namespace=name, max_bytes=0)).removed.files == 3
        assert (left(one), left(two)) == (set(KEYS[:2]), set())
        together = collect(tmp_path, max_bytes=0)
        assert [each.due().files for each in together.namespaces] == [2, 0]


def test_a_limit_is_of_all_namespaces_together(tmp_path: Path) -> None:
    with (
        open_fs(tmp_path, make_agent=FakeAgent) as one,
        open_fs(tmp_path, make_agent=FakeAgent, rank=1) as two,
    ):
        one.store(KEYS[:4], range(4))
        two.store(KEYS[:4], range(4))
        for number in range(4):
            for age, each in ((2 * number, one), (2 * number + 1, two)):
                used_s = SYSTEM_CLOCK.wall_s() - DAY_S + age
                os.utime(each.path(KEYS[number]), (used_s, used_s))
        collect(tmp_path, delete=True, max_bytes=3 * FILE_BYTES)
        assert (left(one), left(two)) == ({KEYS[3]}, {KEYS[2], KEYS[3]})


def test_folders_that_have_been_empty_for_a_while_go(
    rig: FsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in KEYS[:2]:
        rig.path(key).unlink()
    old_s = SYSTEM_CLOCK.wall_s() - EMPTY_QUIET_S - 60
    os.utime(rig.path(KEYS[0]).parent, (old_s, old_s))
    assert only(collect(rig.root, delete=True)).empty_folders == 1
    assert not rig.path(KEYS[0]).parent.exists()
    assert rig.path(KEYS[1]).parent.exists()
    assert rig.store(KEYS[:2], range(2)).failed == ()


def test_a_root_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        collect(tmp_path / "nowhere")


def test_an_empty_root_is_no_problem(tmp_path: Path) -> None:
    report = collect(tmp_path, delete=True)
    assert (report.namespaces, report.skipped, report.problems) == ([], [], [])


@contextlib.contextmanager
def evicting(rig: FsRig) -> Iterator[None]:
    fd = os.open(f"{rig.tier._base}/{LOCK_NAME}", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def test_an_evictor_that_keeps_its_lock_is_a_problem_and_nothing_is_removed(
    rig: FsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_removal, "_PATIENCE_S", 0.1)
    with evicting(rig):
        report = collect(rig.root, delete=True, max_bytes=0)
    assert "evicts" in report.problems[0]
    assert len(left(rig)) == 10


def test_a_ledger_that_cannot_be_written_is_a_problem_and_files_go_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_removal, "_PATIENCE_S", 0.1)
    with open_fs(tmp_path, make_agent=FakeAgent, max_bytes=1 << 30) as rig:
        assert rig.store(KEYS[:10], range(10)).failed == ()
        path = Ledger(rig.tier._terms.space).path
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    report = collect(tmp_path, delete=True, max_bytes=0)
    holder.close()
    assert "next count" in report.problems[0]
    assert report.namespaces[0].removed.files == 10


def test_what_cannot_be_removed_is_a_problem(rig: FsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.unlink

    def unlink(path: str, **how: int) -> None:
        if str(path) == str(rig.path(KEYS[0])):
            raise PermissionError(1, "Operation not permitted", path)
        real(path, **how)

    monkeypatch.setattr(os, "unlink", unlink)
    report = collect(rig.root, delete=True, max_bytes=0)
    assert "1 files cannot be removed" in report.problems[0]
    assert report.namespaces[0].removed.files == 9


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_leaves_a_lock_that_the_engines_can_use(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        rig.store(KEYS[:2], range(2))
        base = Path(rig.tier._base)
    os.chown(base, 1234, 1234)
    collect(tmp_path, delete=True, max_bytes=0)
    status = (base / LOCK_NAME).stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (1234, 0o600)
