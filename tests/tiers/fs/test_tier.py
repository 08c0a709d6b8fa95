from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
import xxhash

from pdoffload.agent.agent import Agent
from pdoffload.config import FsTierConfig, Locality
from pdoffload.errors import ConfigError, CorruptChunk, MisuseError, StorageError, StorageFull
from pdoffload.layout import BlockKey, RunConfig
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.fs_rig import Fakes, FsRig, open_fs
from pdoffload.testing.tier_contract import TierContract
from pdoffload.testing.tier_rig import ShiftedClock, context_of, filled_region, keys_of
from pdoffload.tiers.base import Lookup, Tier, TierContext, Verify
from pdoffload.tiers.chunkfile import ChunkFormat
from pdoffload.tiers.fs.tier import FsTier

CHUNK = 8192
HIT, MISS = Lookup.HIT, Lookup.MISS
A, B, C, D = keys_of("a", "b", "c", "d")


class FilesContract(TierContract):
    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, FsTier)
        FsRig(tier, filled_region(1), Path()).flip(key, CHUNK // 2)

    def remove(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, FsTier)
        os.unlink(tier.path(key))


@pytest.mark.nixl
class TestFsTierOverNixl(FilesContract):
    def open(self, context: TierContext, folder: Path) -> Tier:
        return FsTier(FsTierConfig(root_dir=str(folder), min_free_bytes=0), context)


class TestFsTierOverAFakeAgent(FilesContract):
    def open(self, context: TierContext, folder: Path) -> Tier:
        config = FsTierConfig(root_dir=str(folder), min_free_bytes=0)
        return FsTier(config, context, make_agent=FakeAgent)


class TestFsTierWithAQuota(FilesContract):
    def open(self, context: TierContext, folder: Path) -> Tier:
        config = FsTierConfig(root_dir=str(folder), min_free_bytes=0, max_bytes=1 << 30)
        return FsTier(config, context, make_agent=FakeAgent)


# --- files ---


def test_a_file_is_the_chunk_and_its_trailer_and_nobody_elses_business(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        rig.store((A,), (5,))
        path = rig.path(A)
        content = path.read_bytes()
        chunk = rig.bytes_of(5)[0]
        run_config = context_of(rig.region).run_config
        digest = xxhash.xxh3_128_digest(chunk)
        assert content == chunk + ChunkFormat(CHUNK, run_config.fingerprint).pack(A, digest)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert rig.temps() == []


def test_the_file_mode_is_the_one_asked_for_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        with open_fs(tmp_path, make_agent=FakeAgent, file_mode=0o640) as rig:
            rig.store((A,), (0,))
            assert stat.S_IMODE(rig.path(A).stat().st_mode) == 0o640
            assert stat.S_IMODE(rig.path(A).parent.stat().st_mode) == 0o750
    finally:
        os.umask(old)


def test_c09_another_configuration_misses_everything(tmp_path: Path) -> None:
    fields = {"model_name": "org/model", "dtype": "float8"}
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        rig.store((A,), (0,))
    other = {"run_config": RunConfig(fields=fields)}
    with open_fs(tmp_path, make_agent=FakeAgent, context=other) as rig:
        assert rig.lookup(A) == [MISS]
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        assert rig.lookup(A) == [HIT]


def test_c10_ranks_keep_their_own_bytes_under_one_root(tmp_path: Path) -> None:
    keys = keys_of(*range(8))
    kept = {}
    for rank in range(4):
        region = filled_region(seed=rank)
        with open_fs(tmp_path, make_agent=FakeAgent, region=region, rank=rank) as rig:
            rig.store(keys, range(8))
            kept[rank] = rig.bytes_of(*range(8))
    for rank in range(4):
        with open_fs(tmp_path, make_agent=FakeAgent, rank=rank) as rig:
            assert rig.load(keys, range(20, 28)).verified == 8
            assert rig.bytes_of(*range(20, 28)) == kept[rank]


def test_c15_another_hash_seed_stops_the_tier_before_any_thread(tmp_path: Path) -> None:
    def seeded(seed: str) -> dict[str, object]:
        return {"run_config": RunConfig(fields={"model_name": "m"}, guards={"hash_seed": seed})}

    with open_fs(tmp_path, make_agent=FakeAgent, context=seeded("0")) as rig:
        rig.store((A,), (0,))
        before = threading.active_count()
        with (
            pytest.raises(ConfigError, match="hash_seed"),
            open_fs(tmp_path, make_agent=FakeAgent, context=seeded("1"), max_bytes=10**6),
        ):
            pass
        assert threading.active_count() == before
    with open_fs(tmp_path, make_agent=FakeAgent, context=seeded("0")) as rig:
        assert rig.lookup(A) == [HIT]


def test_events_and_locality_are_stated_not_inferred(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        assert (rig.tier.publishes_events, rig.tier.locality) == (False, None)
    settings = {"enable_kv_events": True, "locality": Locality.REMOTE}
    with open_fs(tmp_path, make_agent=FakeAgent, **settings) as rig:
        assert (rig.tier.publishes_events, rig.tier.locality) == (True, Locality.REMOTE)


def test_a_root_that_is_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with open_fs(root, make_agent=FakeAgent) as rig:
        rig.store((A,), (0,))
        os.rename(root, tmp_path / "gone")
        assert rig.store((B,), (1,)).failed == ()
        assert rig.load((B,), (9,)).verified == 1


# --- what others wrote ---


def bare_file(rig: FsRig, key: BlockKey, chunk: bytes) -> None:
    """A chunk file as vLLM's own fs tier leaves it."""
    path = rig.path(key)
    path.parent.mkdir(parents=True)
    path.write_bytes(chunk)


@pytest.mark.parametrize("verify", [Verify.IF_PRESENT, Verify.OFF])
def test_a_bare_file_is_loaded_unverified_where_that_is_allowed(
    tmp_path: Path, verify: Verify
) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent, context={"verify": verify}) as rig:
        bare_file(rig, A, rig.bytes_of(0)[0])
        rig.store((B,), (1,))
        assert rig.lookup(A) == [HIT]
        loaded = rig.load((A, B), (9, 10))
        assert loaded.succeeded == (A, B)
        assert loaded.verified == (verify is Verify.IF_PRESENT)
        assert rig.bytes_of(9, 10) == rig.bytes_of(0, 1)


def test_a_bare_file_is_a_miss_where_a_checksum_is_demanded_and_a_store_mends_it(
    tmp_path: Path,
) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        bare_file(rig, A, bytes(CHUNK))
        assert rig.lookup(A) == [MISS]
        loaded = rig.load((A,), (9,))
        assert not isinstance(loaded.failed[0][1], CorruptChunk)
        assert rig.path(A).read_bytes() == bytes(CHUNK), "nobody's file is removed"
        assert rig.store((A,), (0,)).moved_bytes == CHUNK
        assert rig.load((A,), (9,)).verified == 1
        assert rig.bytes_of(9) == rig.bytes_of(0)


def test_a_chunk_stored_without_a_checksum_is_not_loaded_where_one_is_demanded(
    tmp_path: Path,
) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent, context={"verify": Verify.OFF}) as rig:
        rig.store((A,), (0,))
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        loaded = rig.load((A,), (9,))
        assert "carries no checksum" in str(loaded.failed[0][1])
        assert rig.path(A).exists()
        assert rig.tier.lookup((A,)) == [MISS]
        assert rig.store((A,), (0,)).moved_bytes == CHUNK
        assert rig.load((A,), (9,)).verified == 1


@pytest.mark.nixl
@pytest.mark.parametrize("worker_bytes", [4096, 3 * 4096 + 512, 511])
@pytest.mark.parametrize("direct", ["on", "off"])
def test_c06_padding_never_changes_the_bytes(
    tmp_path: Path, worker_bytes: int, direct: str
) -> None:
    with open_fs(tmp_path, region=filled_region(16, worker_bytes), direct=direct) as rig:
        rig.store((A, B), (0, 1))
        assert rig.load((A, B), (10, 11)).verified == 2
        assert rig.bytes_of(10, 11) == rig.bytes_of(0, 1)


# --- corruption ---


@pytest.mark.nixl
def test_c02_right_length_or_not_wrong_bytes_are_never_loaded(tmp_path: Path) -> None:
    with open_fs(tmp_path) as rig:
        rig.store((A, B, C, D), (0, 1, 2, 3))
        rig.flip(B, CHUNK // 2)
        with open(rig.path(C), "ab") as file:
            file.write(bytes(100))
        with open(rig.path(D), "r+b") as file:
            file.seek(4096)
            file.write(bytes(4096))
        loaded = rig.load((A, B, C, D), (10, 11, 12, 13))
        assert loaded.succeeded == (A,)
        assert {key for key, _ in loaded.failed} == {B, C, D}
        assert all(isinstance(error, CorruptChunk) for _, error in loaded.failed)
        assert rig.tier.stats().corrupt_chunks == 3
        assert rig.lookup(A, B, C, D) == [HIT, MISS, MISS, MISS]
        assert [rig.path(key).exists() for key in (A, B, C, D)] == [True, False, False, False]
        assert rig.load((A,), (20,)).verified == 1


@pytest.mark.parametrize("size", [0, 100, CHUNK - 1, CHUNK + 1, CHUNK + 4095, CHUNK + 4097])
def test_c02_a_file_of_a_wrong_length_fails_also_with_checksums_off(
    tmp_path: Path, size: int
) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent, context={"verify": Verify.OFF}) as rig:
        rig.store((A,), (0,))
        os.truncate(rig.path(A), size)
        loaded = rig.load((A,), (9,))
        assert isinstance(loaded.failed[0][1], CorruptChunk)
        assert str(size) in str(loaded.failed[0][1])
        assert not rig.path(A).exists()


@pytest.mark.parametrize("at", [CHUNK, CHUNK + 60, CHUNK + 80, CHUNK + 2000, CHUNK + 4095])
def test_c02_a_flipped_bit_in_the_trailer_is_a_miss(tmp_path: Path, at: int) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        rig.store((A,), (0,))
        rig.flip(A, at)
        assert isinstance(rig.load((A,), (9,)).failed[0][1], CorruptChunk)
        assert not rig.path(A).exists()


def test_c02_the_whole_file_of_another_chunk_is_not_served(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        rig.store((A, B), (0, 1))
        rig.path(A).write_bytes(rig.path(B).read_bytes())
        error = rig.load((A,), (9,)).failed[0][1]
        assert isinstance(error, CorruptChunk)
        assert B.hex() in str(error)


@pytest.mark.nixl
def test_c03_cut_and_deleted_files_are_misses_after_one_attempt(tmp_path: Path) -> None:
    with open_fs(tmp_path) as rig:
        rig.store((A, B, C, D), (0, 1, 2, 3))
        assert rig.lookup(A, B, C, D) == [HIT] * 4
        os.truncate(rig.path(C), CHUNK // 2)
        os.unlink(rig.path(D))
        jobs = [rig.submit_load((A, B, C, D), range(at, at + 4)) for at in (10, 20)]
        for job_id in jobs:
            result = rig.result(job_id)
            assert result.succeeded == (A, B)
            assert {key for key, _ in result.failed} == {C, D}
        assert rig.tier.lookup((A, B, C, D)) == [HIT, HIT, MISS, MISS]
        assert not rig.path(C).exists()


def test_c03_a_file_that_may_not_be_read_stays_and_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        rig.store((A, B), (0, 1))
        assert rig.lookup(A, B) == [HIT, HIT]
        denied = str(rig.path(A))
        attempts = []
        real = os.open

        def open_(path: str, flags: int, *rest: int, **more: int) -> int:
            if path == denied:
                attempts.append(path)
                raise PermissionError(13, "Permission denied", path)
            return real(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", open_)
        loaded = rig.load((A, B), (10, 11))
        assert loaded.succeeded == (B,)
        assert "EACCES" in str(loaded.failed[0][1])
        for _ in range(3):
            assert rig.tier.lookup((A, B)) == [MISS, HIT]
        assert len(attempts) == 1
        assert os.path.exists(denied)
        monkeypatch.undo()
        assert rig.store((A,), (0,)).moved_bytes == CHUNK, "what could not be read is written anew"
        assert rig.load((A,), (12,)).verified == 1


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to a file", "link to a device"])
def test_c25_what_is_no_file_fails_and_never_hangs(tmp_path: Path, kind: str) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        rig.store((A, B), (0, 1))
        path = rig.path(A)
        content = path.read_bytes()
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link to a file":
            # A sound file of this very chunk, but somewhere else.
            path.with_suffix(".kept").write_bytes(content)
            path.symlink_to(path.with_suffix(".kept"))
        else:
            os.symlink("/dev/zero", path)
        loaded = rig.load((A, B), (10, 11))
        assert loaded.succeeded == (B,)
        assert isinstance(loaded.failed[0][1], StorageError)
        assert os.path.lexists(path)


# --- space ---


class Disk:
    """A `statvfs` that says what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        real = os.statvfs

        def statvfs(path: str) -> os.statvfs_result:
            fields = list(real(path))
            fields[1], fields[4] = 1, self.free_bytes
            return os.statvfs_result(fields)

        monkeypatch.setattr(os, "statvfs", statvfs)


def test_c01_a_store_stops_at_the_free_space_floor_and_goes_on_when_space_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ShiftedClock()
    disk = Disk(monkeypatch, free_bytes=10 * 12288)
    with open_fs(tmp_path, make_agent=FakeAgent, clock=clock, min_free_bytes=8 * 12288) as rig:
        first = rig.store((A, B, C), (0, 1, 2))
        assert first.succeeded == (A, B)
        assert isinstance(first.failed[0][1], StorageFull)
        for number in range(5):
            dropped = rig.store(keys_of(("dropped", number)), (3,))
            assert isinstance(dropped.failed[0][1], StorageFull)
        stats = rig.tier.stats()
        assert (stats.failed_stores, stats.dropped_stores) == (1, 5)
        assert stats.degraded.startswith("full")
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == 1
        for word in (str(tmp_path), "ENOSPC", str(10 * 12288)):
            assert word in warnings[0]
        assert rig.lookup(A, B, C) == [HIT, HIT, MISS]
        assert rig.load((A, B), (10, 11)).verified == 2, "loads go on"
        disk.free_bytes = 100 * 12288
        clock.shift_s += 2
        assert rig.store((C,), (2,)).succeeded == (C,)
        assert rig.tier.stats().degraded == ""
        assert rig.store((D,), (3,)).succeeded == (D,)


def test_c01_no_file_and_no_remains_of_a_store_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        real = os.pwrite
        full = []

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            if full and len(data) == CHUNK:
                return real(fd, data[: CHUNK // 2], offset)
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        full.append(True)
        stored = rig.store((A, B), (0, 1))
        assert {key for key, _ in stored.failed} == {A, B}
        assert rig.temps() == []
        assert rig.lookup(A, B) == [MISS, MISS]
        assert not rig.path(A).exists()
        assert rig.tier.stats().failed_stores == 1
        assert rig.tier.stats().bytes_written == 0
        full.clear()
        assert rig.store((A, B), (0, 1)).failed == ()


def test_a_quota_is_kept_and_evicted_chunks_are_misses(tmp_path: Path) -> None:
    file_bytes = CHUNK + 4096
    keys = keys_of(*range(40))
    with open_fs(tmp_path, make_agent=FakeAgent, max_bytes=10 * file_bytes) as rig:
        for slot, key in enumerate(keys):
            assert rig.store((key,), (slot,)).failed == ()
            files = list(tmp_path.rglob("*.bin"))
            assert len(files) <= 10
        answers = rig.lookup(*keys)
        assert answers.count(HIT) == len(list(tmp_path.rglob("*.bin")))
        assert answers[-1] is HIT
        assert answers[0] is MISS
        hits = tuple(key for key, answer in zip(keys, answers, strict=True) if answer is HIT)
        assert rig.load(hits, range(50, 50 + len(hits))).failed == ()


def test_chunks_of_a_load_in_the_queue_are_not_evicted(tmp_path: Path) -> None:
    clock = ShiftedClock()
    fakes = {"read": Fakes(clock), "write": Fakes(clock)}

    def make_agent(name: str) -> Agent:
        return fakes["read" if "read" in name else "write"](name)

    # Two readers hang, a third is not started so soon, and writers do not help before it is.
    settings = {"n_read_threads": 3, "n_write_threads": 1, "max_bytes": 10 * (CHUNK + 4096)}
    with open_fs(tmp_path, make_agent=make_agent, clock=clock, **settings) as rig:
        rig.store((A, B), (0, 1))
        for key in (A, B):
            os.utime(rig.path(key), (1, 1))
        fakes["read"].driver.hold()
        busy = [rig.submit_load((A,), (40,)), rig.submit_load((A,), (41,))]
        rig.until(lambda: fakes["read"].driver.calls.count("start") == 2, "readers to be busy")
        queued = rig.submit_load((B,), (42,))
        for number in range(20):
            assert rig.store(keys_of(number), (number,)).failed == ()
        assert rig.path(A).exists()
        assert rig.path(B).exists()
        fakes["read"].driver.let_go()
        assert [rig.result(job_id).verified for job_id in (*busy, queued)] == [1, 1, 1]
        for number in range(20, 40):
            assert rig.store(keys_of(number), (number,)).failed == ()
        assert not rig.path(B).exists(), "read, and then the least recently used again"


def test_a_job_bigger_than_the_quota_fails_and_says_so(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=FakeAgent, max_bytes=CHUNK) as rig:
        stored = rig.store((A,), (0,))
        assert isinstance(stored.failed[0][1], StorageFull)
        assert "quota" in str(stored.failed[0][1]).lower()


# --- the process ---


def test_a_forked_child_is_refused_and_leaves_the_files_alone(tmp_path: Path) -> None:
    with open_fs(tmp_path, make_agent=Fakes(ShiftedClock())) as rig:
        rig.store((A,), (0,))
        child = os.fork()
        if child == 0:
            refused = 0
            for verb in (
                lambda: rig.tier.lookup((A,)),
                lambda: rig.submit_store((B,), (1,)),
                lambda: rig.submit_load((A,), (1,)),
                lambda: rig.tier.poll(),
                lambda: rig.tier.close(timeout_s=1),
            ):
                try:
                    verb()
                except MisuseError:
                    refused += 1
            os._exit(refused)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 5
        assert rig.store((B,), (1,)).failed == ()
        assert rig.load((A, B), (10, 11)).verified == 2
