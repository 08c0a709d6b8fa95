"""The worker's side in vLLM's own words, over real files and fake agents."""

from __future__ import annotations

import os
import pickle
import threading
import time
import warnings
from pathlib import Path

import pytest
from device_rig import RUN_CONFIG, Device

from pdoffload.config import FsTierConfig
from pdoffload.errors import MisuseError, TransferError
from pdoffload.testing.agents import FakeAgent, FakeDriver
from pdoffload.testing.tier_rig import ShiftedClock, keys_of
from pdoffload.tiers.fs.tier import FsTier

with warnings.catch_warnings():
    # vLLM and what it imports warn of one another; that is not ours to judge.
    warnings.simplefilter("ignore")
    base = pytest.importorskip("vllm.v1.kv_offload.base", reason="no vLLM here: make setup")
    from pdoffload.vllm.direct.jobs import DirectNews, DirectWorkerMetadata, KeysSpec
    from pdoffload.vllm.direct.worker import SETTLE_DEADLINES, NixlDirectWorker

pytestmark = pytest.mark.vllm

TIMEOUT_S = 5.0


class Bench:
    """A device of 12 blocks, two of them to a chunk."""

    def __init__(self, root: Path, **settings) -> None:
        self.root = root
        self.device = Device(2)
        self.driver = FakeDriver()
        self.clock = ShiftedClock()
        self.tier = FsTier(
            FsTierConfig(root_dir=str(root), min_free_bytes=0, **settings),
            self.device.context(clock=self.clock, transfer_timeout_s=TIMEOUT_S),
            make_agent=lambda name: FakeAgent(name, driver=self.driver, clock=self.clock),
        )
        self.worker = NixlDirectWorker(
            self.tier,
            self.device.memory,
            fingerprint=RUN_CONFIG.fingerprint,
            timeout_s=TIMEOUT_S,
            clock=self.clock,
        )
        self.worker.reports_load_errors = True

    def spec(self, names: str) -> KeysSpec:
        return KeysSpec(keys_of(*names), RUN_CONFIG.fingerprint)

    def store(self, job_id: int, names: str, blocks: list[int]) -> None:
        self.worker.submit_store(job_id, gpu(blocks), self.spec(names))

    def load(self, job_id: int, names: str, blocks: list[int], first: int = 0) -> None:
        self.worker.submit_load(job_id, self.spec(names), gpu(blocks, first))

    def path(self, name: str) -> Path:
        return Path(self.tier.path(keys_of(name)[0]))

    def ended(self, *job_ids: int) -> list[base.TransferResult]:
        """The results of these jobs, which end by themselves."""
        results: list[base.TransferResult] = []
        self.until(
            lambda: results.extend(self.worker.get_finished()) or len(results) >= len(job_ids)
        )
        assert sorted(result.job_id for result in results) == sorted(job_ids)
        return results

    def flushed(self, job_id: int) -> base.TransferResult:
        """The result of a job whose blocks the engine wants back."""
        self.worker.wait({job_id})
        (result,) = self.worker.get_finished()
        assert result.job_id == job_id
        return result

    def until(self, met) -> None:
        deadline_s = time.monotonic() + 30
        while not met():
            assert time.monotonic() < deadline_s, "waited in vain"
            time.sleep(0.001)

    def begun(self, job_id: int) -> None:
        """Wait until a request of the job is with the (holding) driver."""
        self.until(lambda: self.driver._requests)


def gpu(blocks: list[int], first: int = 0) -> base.GPULoadStoreSpec:
    return base.GPULoadStoreSpec(blocks, group_sizes=(len(blocks),), block_indices=(first,))


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.driver.let_go()
    bench.worker.shutdown()


def test_blocks_go_out_and_come_back_and_the_scheduler_hears_of_it(bench):
    tensor = bench.device.tensors[0]
    was = tensor.copy()
    bench.store(1, "ab", [4, 0, 7, 2])
    (result,) = bench.ended(1)
    assert result.success
    assert result.transfer_size == 2 * bench.device.memory.chunk_bytes
    bench.device.blank()
    bench.load(2, "ab", [1, 3, 5, 6])
    (result,) = bench.ended(2)
    assert result.success
    assert (tensor[[1, 3, 5, 6]] == was[[4, 0, 7, 2]]).all()
    assert bench.worker.take_failed_loads() == []
    stored, stats = bench.worker.take_news()
    assert stored == DirectNews(stored=keys_of("a", "b"))
    assert (stats.stats.stored_chunks, stats.stats.verified_chunks) == (2, 2)
    assert bench.worker.take_news() == []


def test_what_is_there_is_not_written_again_and_counts_as_stored(bench):
    bench.store(1, "a", [0, 1])
    bench.ended(1)
    inode = bench.path("a").stat().st_ino
    bench.store(2, "a", [0, 1])
    (result,) = bench.ended(2)
    assert (result.success, result.transfer_size) == (True, 0)
    assert bench.path("a").stat().st_ino == inode
    assert bench.worker.take_news()[1].stored == keys_of("a")


def test_c03_only_the_blocks_of_chunks_that_failed_are_told(bench):
    bench.store(1, "abcd", [0, 1, 2, 3, 4, 5, 6, 7])
    bench.ended(1)
    bench.worker.take_news()
    body = bytearray(bench.path("b").read_bytes())
    body[10] ^= 1
    bench.path("b").write_bytes(body)
    bench.path("d").unlink()
    # The first block of chunk a is there already: its second alone is loaded.
    bench.load(2, "abcd", [11, 8, 9, 10, 1, 2, 3], first=1)
    (result,) = bench.ended(2)
    assert result.success, "the connector tells the engine which blocks are wrong"
    (failed,) = bench.worker.take_failed_loads()
    assert (failed.job_id, failed.block_ids) == (2, {8, 9, 2, 3})
    news = bench.worker.take_news()[0]
    assert (news.gone, news.unusable) == (keys_of("d"), keys_of("b"))
    assert not bench.path("b").exists()
    # Stored anew, it is loaded again.
    bench.store(3, "b", [2, 3])
    bench.ended(3)
    bench.load(4, "b", [8, 9])
    bench.ended(4)
    assert bench.worker.take_failed_loads() == []


def test_a_file_that_may_not_be_read_is_unusable_and_written_anew_when_it_is_stored(bench):
    bench.store(1, "a", [0, 1])
    bench.ended(1)
    path = bench.path("a")
    path.unlink()
    path.mkdir()
    bench.worker.take_news()
    bench.load(2, "a", [2, 3])
    bench.ended(2)
    assert bench.worker.take_news()[0].unusable == keys_of("a")
    path.rmdir()
    path.write_bytes(b"12345")
    bench.store(3, "a", [0, 1])
    bench.ended(3)
    assert path.stat().st_size == bench.device.memory.chunk_bytes + 4096


def test_under_another_connector_a_failed_load_is_a_failed_job(bench):
    bench.worker.reports_load_errors = False
    bench.load(1, "a", [0, 1])
    (result,) = bench.ended(1)
    assert not result.success


def test_a_store_that_fails_is_no_failed_job_and_no_news_of_a_file(bench):
    bench.path("a").parent.parent.write_text("a file where a folder is wanted")
    bench.store(1, "a", [0, 1])
    (result,) = bench.ended(1)
    assert (result.success, result.transfer_size) == (True, 0)
    news, told = bench.worker.take_news()
    assert news == DirectNews()
    assert told.stats.failed_stores == 1


# --- deadlines ---


def test_c22_a_wait_returns_when_the_blocks_may_change(bench):
    """The store ends by its deadline; what its I/O then still reads never gets a name."""
    bench.driver.hold()
    bench.store(1, "a", [0, 1])
    bench.begun(1)
    bench.clock.shift_s += TIMEOUT_S
    assert bench.flushed(1).success
    bench.device.blank()
    bench.driver.let_go()
    bench.until(lambda: not bench.worker._late or bench.worker.get_finished())
    assert not bench.path("a").exists()
    assert bench.worker.take_news()[0] == DirectNews()


def test_c22_bytes_that_were_read_after_the_deadline_get_no_name(bench):
    """The job is told as failed by then, and its blocks may hold another request's tokens."""
    check = bench.driver.check

    def late(handle):
        bench.clock.shift_s += TIMEOUT_S
        return check(handle)

    bench.driver.check = late
    bench.store(1, "a", [0, 1])
    bench.ended(1)
    bench.until(lambda: not bench.worker._late or bench.worker.get_finished())
    assert not bench.path("a").exists()
    assert bench.worker.take_news()[0] == DirectNews()


def test_a_load_past_its_deadline_keeps_its_blocks_until_it_is_over(bench):
    bench.store(1, "a", [0, 1])
    bench.ended(1)
    bench.driver.hold()
    bench.load(2, "a", [2, 3])
    bench.begun(2)
    bench.clock.shift_s += TIMEOUT_S
    bench.until(lambda: bench.worker.get_finished() == [] and bench.worker._running[2].result)
    assert bench.worker.take_failed_loads() == []
    bench.driver.let_go()
    (result,) = bench.ended(2)
    assert result.success
    (failed,) = bench.worker.take_failed_loads()
    assert failed.block_ids == {2, 3}


def test_a_load_that_is_never_over_stops_the_engine(bench):
    bench.store(1, "a", [0, 1])
    bench.ended(1)
    bench.driver.hold()
    bench.load(2, "a", [2, 3])
    bench.begun(2)
    bench.clock.shift_s += TIMEOUT_S
    bench.until(lambda: bench.worker.get_finished() == [] and bench.worker._running[2].result)
    bench.clock.shift_s += (SETTLE_DEADLINES - 1) * TIMEOUT_S + 1
    with pytest.raises(TransferError, match="the engine stops rather than serve wrong bytes"):
        bench.worker.get_finished()
    with pytest.raises(TransferError, match="may still write into device"):
        bench.worker.wait({2})


def test_c25_a_load_that_hangs_before_anything_was_asked_ends_at_its_deadline(bench, monkeypatch):
    """A mount that hangs in `open`: no byte can land, and what comes of the thread moves none."""
    bench.store(1, "a", [0, 1])
    bench.ended(1)
    hanging, released = threading.Event(), threading.Event()
    real = os.open

    def hang(path, flags, *more, **named):
        if str(path).endswith(".bin"):
            hanging.set()
            assert released.wait(30)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", hang)
    bench.device.blank()
    bench.load(2, "a", [2, 3])
    assert hanging.wait(30)
    bench.clock.shift_s += TIMEOUT_S
    (result,) = bench.ended(2)
    assert result.success
    (failed,) = bench.worker.take_failed_loads()
    assert failed.block_ids == {2, 3}
    released.set()
    bench.until(lambda: not bench.worker._late or bench.worker.get_finished())
    assert not bench.device.tensors[0].any(), "the thread came back and wrote into blocks in use"


def test_c25_a_flush_gives_up_stores_that_have_not_begun(tmp_path):
    """One thread a side is busy; what waits behind them is dropped, not waited for."""
    bench = Bench(tmp_path, n_read_threads=1, n_write_threads=1)
    bench.driver.hold()
    bench.store(0, "a", [0, 1])
    bench.begun(0)
    for number, name in enumerate("bcd", 1):
        bench.store(number, name, [0, 1])
    assert bench.flushed(3).success
    assert bench.worker.take_news()[-1].stats.dropped_stores == 1
    bench.driver.let_go()
    bench.ended(0, 1, 2)
    assert bench.path("a").exists()
    assert not bench.path("d").exists()
    assert not bench.tier.stats().degraded
    bench.worker.shutdown()


# --- misuse ---


def test_a_job_of_another_configuration_is_refused(bench):
    spec = KeysSpec(keys_of("a"), b"\0" * 32)
    with pytest.raises(MisuseError, match="run configuration is 0000000000000000, this worker's"):
        bench.worker.submit_store(1, gpu([0, 1]), spec)


def test_counts_that_do_not_fit_are_refused(bench):
    with pytest.raises(MisuseError, match="the blocks cover 1 chunks, 2 are named"):
        bench.store(1, "ab", [0, 1])
    with pytest.raises(MisuseError, match="GPULoadStoreSpec does not name chunks"):
        bench.worker.submit_store(1, gpu([0, 1]), gpu([0, 1]))


def test_what_crosses_to_the_other_process_survives_it():
    spec = pickle.loads(pickle.dumps(KeysSpec(keys_of("a"), b"f" * 32)))
    assert (spec.keys, spec.fingerprint) == (keys_of("a"), b"f" * 32)
    mine = DirectWorkerMetadata({1: 1}, news=[DirectNews(stored=keys_of("a"))])
    both = pickle.loads(pickle.dumps(mine)).aggregate(
        DirectWorkerMetadata({1: 1, 2: 1}, news=[DirectNews(gone=keys_of("b"))])
    )
    assert both.completed_jobs == {1: 2, 2: 1}
    assert both.news == [DirectNews(stored=keys_of("a")), DirectNews(gone=keys_of("b"))]
