"""What an obj tier does beyond the contract: whole objects, deadlines, refusals, and who owns a slot when."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
import xxhash

from pdoffload.agent.driver import Verdict
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import Locality
from pdoffload.errors import CorruptChunk, DeadlineExceeded, NixlError, StorageError
from pdoffload.testing.agents import FakeDriver
from pdoffload.testing.obj_rig import FakeAgents, fake_config, open_obj
from pdoffload.testing.s3_server import S3Server
from pdoffload.testing.store_server import Reply, StoreServer
from pdoffload.testing.tier_rig import ShiftedClock, keys_of
from pdoffload.tiers.base import Lookup, Verify
from pdoffload.tiers.chunkfile import ChunkFormat
from pdoffload.tiers.health import SAME_REASON
from pdoffload.tiers.lookup import ABSENT_S
from pdoffload.tiers.obj.claims import Claims
from pdoffload.tiers.obj.diagnosis import Finding, Trouble, Why
from pdoffload.tiers.parts import Part

CHUNK = 8192
HIT, MISS = Lookup.HIT, Lookup.MISS
A, B, C, D = keys_of("a", "b", "c", "d")
LOST = NixlError("check_xfer_state", "NIXL_ERR_BACKEND")
FAILED = Verdict(TransferState.FAILED, LOST)


@pytest.fixture
def agents() -> FakeAgents:
    return FakeAgents(SYSTEM_CLOCK)


# --- objects ---


def test_an_object_is_the_chunk_and_its_trailer(agents: FakeAgents) -> None:
    with open_obj(fake_config(), make_agent=agents) as rig:
        rig.store((A,), (5,))
        content = agents.store.objects[rig.tier.key(A)]
        (chunk,) = rig.bytes_of(5)
        fingerprint = rig.tier._terms.format.fingerprint
        trailer = ChunkFormat(CHUNK, fingerprint).pack(A, xxhash.xxh3_128_digest(chunk))
        assert content == chunk + trailer


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 4095])
def test_c02_an_object_that_is_cut_is_never_loaded(agents: FakeAgents, length: int) -> None:
    with open_obj(fake_config(), make_agent=agents) as rig:
        rig.store((A, B), (0, 1))
        whole = agents.store.objects[rig.tier.key(A)]
        agents.store.objects[rig.tier.key(A)] = whole[:length]
        before = rig.bytes_of(10)
        loaded = rig.load((A, B), (10, 11))
        assert loaded.succeeded == (B,)
        assert isinstance(loaded.failed[0][1], StorageError)
        assert rig.bytes_of(10) == before, "wrong bytes reached a slot"
        assert rig.store((A,), (0,)).already_present == (1 if length == 0 else 0)


def test_an_object_without_a_trailer_is_for_those_who_ask_for_it(agents: FakeAgents) -> None:
    """As vLLM's own tier writes it."""
    with open_obj(fake_config(), make_agent=agents) as rig:
        rig.store((A,), (0,))
        name = rig.tier.key(A)
    bare = agents.store.objects[name][:CHUNK]
    for verify, taken in ((Verify.ALWAYS, ()), (Verify.IF_PRESENT, (A,)), (Verify.OFF, (A,))):
        agents.store.objects[name] = bare
        with open_obj(fake_config(), make_agent=agents, context={"verify": verify}) as rig:
            loaded = rig.load((A,), (7,))
            assert (loaded.succeeded, loaded.verified) == (taken, 0)
            if taken:
                assert rig.bytes_of(7) == rig.bytes_of(0)
            else:
                assert "carries no checksum" in str(loaded.failed[0][1])
        agents.store.objects[name] = bare[:-1]
        with open_obj(fake_config(), make_agent=agents, context={"verify": verify}) as rig:
            error = rig.load((A,), (7,)).failed[0][1]
            assert isinstance(error, CorruptChunk) or verify is Verify.ALWAYS


def test_events_and_locality_are_those_of_the_settings(agents: FakeAgents) -> None:
    config = fake_config(enable_kv_events=True, locality=Locality.REMOTE)
    with open_obj(config, make_agent=agents) as rig:
        assert (rig.tier.publishes_events, rig.tier.locality) == (True, Locality.REMOTE)


# --- deadlines: a store that is silent holds no slot ---


class Holding(FakeAgents):
    """Transfers of agents that move chunks hang until `let_go`."""

    hold = False

    def prepare(self, name: str, driver: FakeDriver) -> None:
        if self.hold and ("read" in name or "write" in name):
            driver.hold()

    def let_go(self) -> None:
        self.hold = False
        for driver in self.drivers.values():
            driver.let_go()


@pytest.mark.parametrize("is_load", [True, False])
def test_c24_a_job_ends_by_our_deadline_and_its_slots_are_free_at_once(is_load: bool) -> None:
    clock = ShiftedClock()
    agents = Holding(clock)
    with open_obj(
        fake_config(), make_agent=agents, clock=clock, context={"transfer_timeout_s": 5.0}
    ) as rig:
        rig.store((A,), (0,))
    agents.hold = True
    with open_obj(
        fake_config(), make_agent=agents, clock=clock, context={"transfer_timeout_s": 5.0}
    ) as rig:
        job = rig.submit_load((A,), (9,)) if is_load else rig.submit_store((B,), (9,))
        rig.until(lambda: any(d._requests for d in agents.drivers.values()), "a request")
        before = rig.bytes_of(9)
        clock.shift_s += 6
        result = rig.result(job)
        assert result.settled
        assert isinstance(result.failed[0][1], DeadlineExceeded)
        assert rig.tier.stats().deadlines_exceeded == 1
        assert rig.tier.stats().quarantined_slots == 0
        agents.let_go()
        assert rig.store((C,), (3,)).succeeded == (C,), "another thread has its place"
        assert rig.bytes_of(9) == before, "a late answer reached a slot"
        rig.poll()
        assert rig.settled == set()


def test_a_slot_that_is_being_copied_is_not_given_up_and_one_given_up_is_not_copied() -> None:
    claims, part = Claims(), Part(1, True, (A,), (0,))
    assert claims.take(part)
    assert not claims.give_up(part)
    assert not part.expired
    claims.drop(part)
    assert claims.give_up(part)
    assert part.expired
    assert not claims.take(part)


# --- what the store refuses ---


class Says(Why):
    """Tells what a test says."""

    def __init__(self, finding: Finding | None) -> None:
        self.finding = finding

    def of_read(self, name: str) -> Finding | None:
        return self.finding

    def of_write(self) -> Finding | None:
        return self.finding


class Failing(FakeAgents):
    """Every transfer of a chunk fails while `broken`, and every question."""

    broken = False

    def prepare(self, name: str, driver: FakeDriver) -> None:
        agents = self
        move, query = driver.check, driver.query

        def check(handle: Any) -> Verdict:
            return FAILED if agents.broken and "probe" not in name else move(handle)

        def ask(names: Sequence[str]) -> list[bool]:
            if agents.broken:
                raise NixlError("query_memory", "NIXL_ERR_BACKEND")
            return query(names)

        driver.check, driver.query = check, ask  # type: ignore[method-assign]


@pytest.mark.parametrize("trouble", [Trouble.FORBIDDEN, Trouble.REFUSED, Trouble.FAILING])
def test_c24_a_lookup_that_is_refused_is_a_miss_counted_apart_and_not_a_storm(
    trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ShiftedClock()
    agents = Failing(clock)
    says = Says(Finding(trouble, "as the test says"))
    with open_obj(fake_config(), make_agent=agents, why=says, clock=clock) as rig:
        rig.store((A,), (0,))
        agents.broken = True
        for number in range(SAME_REASON + 3):
            assert rig.lookup(*keys_of(number)) == [MISS]
        asked = agents.drivers["pdoffload-obj-lookup"].calls.count("query")
        assert rig.tier.stats().failed_lookups == SAME_REASON + 3
        assert "lookups failing" in rig.tier.stats().degraded
        assert asked == 0, "the fake counts what reaches it"
        assert caplog.text.count("lookups in ") == 1
        assert "as the test says" in caplog.text
        agents.broken = False
        clock.shift_s += 3600
        assert rig.lookup(*keys_of("new")) == [MISS]
        assert rig.tier.stats().degraded == ""
        failed = rig.tier.stats().failed_lookups
        assert rig.lookup(A) == [HIT]
        assert rig.tier.stats().failed_lookups == failed


def test_c24_stores_stop_after_the_same_failure_and_go_on_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ShiftedClock()
    agents = Failing(clock)
    says = Says(Finding(Trouble.FORBIDDEN, "403 AccessDenied"))
    caplog.set_level(logging.INFO)
    with open_obj(fake_config(), make_agent=agents, why=says, clock=clock) as rig:
        agents.broken = True
        for number in range(SAME_REASON + 3):
            failed = rig.store(keys_of(number), (number,)).failed
            assert "403 AccessDenied" in str(failed[0][1])
        stats = rig.tier.stats()
        assert (stats.failed_stores, stats.dropped_stores) == (SAME_REASON, 3)
        assert caplog.text.count("stores to ") == 1
        agents.broken = False
        clock.shift_s += 3600
        assert rig.store((A,), (0,)).succeeded == (A,)
        assert rig.tier.stats().degraded == ""
        assert "go on" in caplog.text


def test_c24_a_load_that_the_store_refused_may_be_tried_again(agents: FakeAgents) -> None:
    """Wrong bytes stay wrong; a store that was down has its objects still."""
    clock = ShiftedClock()
    failing = Failing(clock)
    says = Says(Finding(Trouble.REFUSED, "nobody listens"))
    with open_obj(fake_config(), make_agent=failing, why=says, clock=clock) as rig:
        rig.store((A,), (0,))
        failing.broken = True
        (lost,) = rig.load((A,), (1,)).failed
        assert "nobody listens" in str(lost[1])
        assert rig.tier.lookup((A,)) == [MISS], "at once"
        assert rig.tier.stats().vanished_chunks == 0
        failing.broken = False
        clock.shift_s += ABSENT_S + 0.1
        assert rig.lookup(A) == [HIT]
        assert rig.load((A,), (1,)).succeeded == (A,)


def test_one_chunk_that_fails_takes_no_other_with_it(agents: FakeAgents) -> None:
    with open_obj(fake_config(), make_agent=agents) as rig:
        rig.store((A, B, C), (0, 1, 2))
        del agents.store.objects[rig.tier.key(B)]
        loaded = rig.load((A, B, C), (10, 11, 12))
        assert loaded.succeeded == (A, C)
        assert rig.tier.stats().vanished_chunks == 1


@pytest.mark.parametrize("call", ["register", "make", "start", "check", "release", "deregister"])
def test_c16_whatever_raises_is_one_failed_job_and_the_next_is_good(call: Any) -> None:
    class Raising(FakeAgents):
        armed = False

        def prepare(self, name: str, driver: FakeDriver) -> None:
            if self.armed and "write" in name:
                self.armed = False
                driver.script(call, LOST)

    agents = Raising(SYSTEM_CLOCK)
    with open_obj(fake_config(io_threads=1), make_agent=agents, close_s=0.5) as rig:
        agents.armed = True
        first = rig.store((A,), (0,))
        assert first.settled
        assert rig.store((B,), (1,)).succeeded == (B,)
        assert rig.load((B,), (9,)).succeeded == (B,)
        assert rig.bytes_of(9) == rig.bytes_of(1)


def test_c08_nothing_is_kept_of_many_jobs_good_and_bad(agents: FakeAgents) -> None:
    with open_obj(fake_config(io_threads=2), make_agent=agents) as rig:
        for number in range(100):
            keys = keys_of(*(f"{number}.{each}" for each in range(4)))
            rig.store(keys, range(4))
            if number % 5 == 0:
                rig.load(keys_of(f"absent {number}"), (9,))
            rig.load(keys, range(20, 24))
    left = {name: driver.open_handles for name, driver in agents.drivers.items()}
    # The lookup thread ends with its question; its agent had nothing.
    assert set(left.values()) == {0}, left


# --- real stores ---

real = [pytest.mark.nixl, pytest.mark.s3]


class TestRealStores:
    pytestmark = real

    def test_c07_a_job_larger_than_the_staging_memory_moves_in_rounds(
        self, s3_server: S3Server
    ) -> None:
        config = s3_server.tier("chunks", prefix=uuid.uuid4().hex, io_threads=1)
        with open_obj(config) as rig:
            keys = keys_of(*range(2 * rig.tier._terms.most_chunks + 1))
            slots = range(len(keys))
            assert rig.store(keys, slots).moved_bytes == len(keys) * CHUNK
            moved = [slot + 30 for slot in slots]
            assert rig.load(keys, moved).verified == len(keys)
            assert rig.bytes_of(*moved) == rig.bytes_of(*slots)

    def test_two_tiers_share_what_they_store(self, s3_server: S3Server) -> None:
        config = s3_server.tier("chunks", prefix=uuid.uuid4().hex)
        with open_obj(config) as one, open_obj(config) as other:
            one.store((A, B), (0, 1))
            assert other.lookup(A, B, C) == [HIT, HIT, MISS]
            assert other.load((A, B), (10, 11)).verified == 2
            assert other.bytes_of(10, 11) == one.bytes_of(0, 1)

    def test_c24_during_service_the_reasons_are_told_apart(self) -> None:
        with StoreServer() as server, open_obj(server.tier()) as rig:
            rig.store((A,), (0,))
            server.script = lambda *_: Reply(403, "AccessDenied")
            assert rig.lookup(B) == [MISS]
            assert rig.tier.stats().failed_lookups == 1
            (failure,) = rig.load((A,), (9,)).failed
            assert "403 AccessDenied" in str(failure[1])
            (failure,) = rig.store((C,), (2,)).failed
            assert "403 AccessDenied" in str(failure[1])
            server.script = lambda *_: None
            assert rig.lookup(D) == [MISS]
            assert rig.tier.stats().failed_lookups == 1
            assert rig.load((A,), (9,)).succeeded == (A,)

    def test_c24_two_failures_in_a_row_are_ridden_out(self) -> None:
        with StoreServer() as server, open_obj(server.tier()) as rig:
            asked: dict[str, int] = {}

            def script(method: str, path: str) -> Reply | None:
                asked[f"{method}{path}"] = asked.get(f"{method}{path}", 0) + 1
                return Reply(503) if asked[f"{method}{path}"] <= 2 else None

            server.script = script
            assert rig.store((A,), (0,)).succeeded == (A,)
            asked.clear()
            assert rig.load((A,), (9,)).verified == 1

    def test_c24_a_store_that_goes_away_costs_misses_and_comes_back(
        self, s3_server: S3Server, tmp_path: Any
    ) -> None:
        clock = ShiftedClock()
        with S3Server(tmp_path) as server:
            server.create_bucket("chunks")
            with open_obj(server.tier("chunks"), clock=clock) as rig:
                rig.store((A,), (0,))
                server.stop()
                (failure,) = rig.load((A,), (9,)).failed
                assert "nobody listens" in str(failure[1])
                assert rig.lookup(B) == [MISS]
                assert rig.store((C,), (1,)).succeeded == ()
                assert rig.tier.stats().failed_lookups == 1
                server.start()
                server.create_bucket("chunks")
                clock.shift_s += 10
                assert rig.store((C,), (1,)).succeeded == (C,)
                assert rig.lookup(A, C) == [MISS, HIT]

    def test_c24_lookups_and_jobs_end_by_our_deadline_when_the_store_is_silent(self) -> None:
        never = threading.Event()
        with (
            StoreServer() as server,
            open_obj(server.tier(), context={"transfer_timeout_s": 2.0}, close_s=30.0) as rig,
        ):
            rig.store((A,), (0,))
            server.script = lambda *_: Reply(wait=never)
            started_s = SYSTEM_CLOCK.monotonic_s()
            stored, loaded = rig.submit_store((B,), (1,)), rig.submit_load((A,), (9,))
            for job in (stored, loaded):
                result = rig.result(job)
                assert result.settled
                assert isinstance(result.failed[0][1], DeadlineExceeded)
            assert rig.lookup(C) == [MISS]
            waited_s = SYSTEM_CLOCK.monotonic_s() - started_s
            assert waited_s < 15, "the SDK alone takes 17 s for each"
            never.set()
            server.script = lambda *_: None
            assert rig.load((A,), (9,)).succeeded == (A,)

    def test_c08_no_descriptor_is_kept(self, s3_server: S3Server) -> None:
        config = s3_server.tier("chunks", prefix=uuid.uuid4().hex, io_threads=1)
        with open_obj(config) as rig:

            def work(rounds: range) -> int:
                for number in rounds:
                    keys = keys_of(*(f"{number}.{each}" for each in range(4)))
                    rig.store(keys, range(4))
                    rig.load((*keys, *keys_of(f"absent {number}")), range(20, 25))
                    rig.lookup(*keys_of(f"other {number}"))
                return len(os.listdir("/proc/self/fd"))

            before = work(range(5))
            assert work(range(5, 30)) <= before + 2
