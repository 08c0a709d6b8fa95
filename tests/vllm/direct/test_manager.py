"""The scheduler's side in vLLM's own words, over files that the test puts there and takes away."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest
from device_rig import RUN_CONFIG

from pdoffload.config import Locality
from pdoffload.testing.tier_rig import ShiftedClock, keys_of
from pdoffload.tiers.base import TierStats
from pdoffload.tiers.fs.lookup import file_lookup
from pdoffload.tiers.fs.paths import open_namespace
from pdoffload.tiers.lookup import ABSENT_S

with warnings.catch_warnings():
    # vLLM and what it imports warn of one another; that is not ours to judge.
    warnings.simplefilter("ignore")
    base = pytest.importorskip("vllm.v1.kv_offload.base", reason="no vLLM here: make setup")
    from pdoffload.vllm import metrics
    from pdoffload.vllm.direct import manager as manager_module
    from pdoffload.vllm.direct.jobs import DirectNews
    from pdoffload.vllm.direct.manager import NixlDirectManager

pytestmark = pytest.mark.vllm

FILE_BYTES = 8192
HIT, MISS, RETRY = base.LookupResult.HIT, base.LookupResult.MISS, base.LookupResult.RETRY
A, B, C = keys_of("a", "b", "c")


class Bench:
    def __init__(self, root: Path, **options) -> None:
        self.space = open_namespace(str(root), RUN_CONFIG, 0, 0o600)
        self.clock = ShiftedClock()
        self.lookup = file_lookup(self.space, (FILE_BYTES,), timeout_s=5, clock=self.clock)
        self.manager = NixlDirectManager(self.lookup, fingerprint=RUN_CONFIG.fingerprint, **options)
        self.request = base.ReqContext(req_id="r")
        assert self.manager.on_new_request(self.request).policy is base.OffloadPolicy.CHUNK_LEVEL

    def put(self, key) -> Path:
        path = Path(self.space.path(key))
        self.space.make_parents(str(path))
        path.write_bytes(bytes(FILE_BYTES))
        return path

    def ask(self, key, request=None) -> base.LookupResult:
        """The answer when the file system has spoken."""
        deadline_s = time.monotonic() + 30
        while (answer := self.manager.lookup(key, request or self.request)) is RETRY:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        return answer

    def reserve(self, *keys):
        output = self.manager.prepare_store(keys, self.request)
        assert output is not None
        assert output.store_spec.keys == tuple(output.keys_to_store)
        assert output.store_spec.fingerprint == RUN_CONFIG.fingerprint
        assert output.evicted_keys == []
        return output.keys_to_store


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.manager.shutdown()


def test_a_file_is_a_hit_and_the_first_question_does_not_wait(bench):
    bench.put(A)
    assert bench.manager.lookup(A, bench.request) is RETRY
    assert (bench.ask(A), bench.ask(B)) == (HIT, MISS)
    assert bench.manager.get_load_source(A, bench.request).name == "DISK"
    spec = bench.manager.prepare_load([A], bench.request)
    assert (spec.keys, spec.fingerprint) == ((A,), RUN_CONFIG.fingerprint)
    bench.manager.complete_load([A], bench.request)


def test_what_is_there_or_under_way_is_not_stored(bench):
    bench.put(A)
    assert bench.ask(A) is HIT
    assert bench.reserve(A, B, B, C) == [B, C]
    assert bench.reserve(A, B) == []
    assert bench.manager.lookup(B, bench.request) is MISS, "computing it is quicker than to wait"


def test_the_workers_word_makes_a_chunk_loadable_at_once(bench):
    bench.reserve(A, B)
    bench.manager.on_news(DirectNews(stored=(A,)))
    bench.manager.complete_store([A, B], bench.request)
    assert bench.manager.lookup(A, bench.request) is HIT
    assert bench.ask(B) is MISS
    assert bench.reserve(A, B) == [B], "what was not stored is offered again"


def test_without_the_workers_word_the_files_are_asked(bench):
    bench.reserve(A)
    bench.put(A)
    bench.manager.complete_store([A], bench.request)
    assert bench.ask(A) is HIT


def test_an_absence_known_before_a_store_is_forgotten_with_it(bench):
    assert bench.ask(A) is MISS
    bench.reserve(A)
    bench.put(A)
    bench.manager.complete_store([A], bench.request)
    assert bench.ask(A) is HIT


def test_c03_a_chunk_that_could_not_be_loaded_is_not_tried_again_until_it_is_stored_anew(bench):
    for key in (A, B):
        bench.put(key)
        assert bench.ask(key) is HIT
    bench.manager.prepare_load([A, B], bench.request)
    bench.manager.on_news(DirectNews(gone=(A,), unusable=(B,)))
    bench.manager.complete_load([A, B], bench.request)
    assert (bench.ask(A), bench.ask(B)) == (MISS, MISS)
    bench.clock.shift_s += ABSENT_S
    assert bench.ask(A) is HIT, "somebody has stored it again"
    assert bench.ask(B) is MISS, "its file is still of no use"
    assert bench.reserve(B) == [B]
    bench.manager.on_news(DirectNews(stored=(B,)))
    bench.manager.complete_store([B], bench.request)
    assert bench.ask(B) is HIT


def test_what_is_under_way_is_bounded(bench, monkeypatch):
    monkeypatch.setattr(manager_module, "MAX_STORING", 2)
    assert bench.reserve(*keys_of(1, 2, 3)), "one job of any size"
    assert bench.manager.prepare_store([A], bench.request) is None
    bench.manager.complete_store(keys_of(1, 2, 3), bench.request)
    assert bench.reserve(A) == [A]
    stats = bench.manager.get_stats()
    assert stats is not None
    assert "stores_refused" in repr(stats.data)


def test_a_reset_keeps_the_files_and_forgets_what_runs(bench):
    bench.reserve(A)
    bench.manager.reset_cache()
    assert bench.reserve(A) == [A], "vLLM tells nothing of the jobs before"
    bench.manager.on_news(DirectNews(stored=(A,)))
    assert bench.ask(A) is HIT


def test_a_request_that_takes_nothing_from_storage_gets_nothing(bench):
    bench.put(A)
    assert bench.ask(A) is HIT
    cpu_only = base.TierFilter((base.TierMatcher(medium=base.Medium.CPU),))
    request = base.ReqContext(req_id="s", load_tier_filter=cpu_only)
    bench.manager.on_new_request(request)
    assert bench.ask(A, request) is MISS
    bench.manager.on_request_finished(request)
    assert not bench.manager._excluded


def test_events_name_medium_and_locality_and_only_what_was_stored(tmp_path):
    bench = Bench(tmp_path, locality=Locality.REMOTE, publishes_events=True)
    bench.reserve(A, B)
    bench.manager.on_news(DirectNews(stored=(A,)))
    (event,) = bench.manager.take_events()
    assert (event.keys, event.medium, event.removed) == ([A], base.Medium.STORAGE, False)
    assert event.locality is base.Locality.REMOTE
    assert list(bench.manager.take_events()) == []
    bench.manager.shutdown()


def test_c23_counters_are_told_once_and_only_those_that_were_declared(bench):
    bench.ask(A)
    bench.manager.on_news(DirectNews(gone=(A,), stats=TierStats(loaded_chunks=3, degraded="full")))
    told = bench.manager.get_stats()
    assert told is not None
    names = repr(told.data)
    declared = metrics.direct_definitions()
    for name in ("lookups", "failed_device_loads", "tier_loaded_chunks", "tier_degraded"):
        assert f"vllm:pdoffload_{name}" in names
        assert f"vllm:pdoffload_{name}" in declared
    assert "peer_" not in "".join(declared)
    assert "host_" not in "".join(declared)
    assert bench.manager.get_stats() is None
