"""I/O threads under faults: whatever happens to a batch becomes the result of its jobs, once."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from pdoffload.agent.agent import Agent
from pdoffload.agent.driver import Verdict
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import (
    DeadlineExceeded,
    NixlError,
    PdOffloadError,
    StorageError,
)
from pdoffload.memory.host import HostRegion
from pdoffload.testing.agents import FakeAgent, FakeCall, FakeDriver
from pdoffload.testing.fs_rig import Fakes, FsRig, open_fs
from pdoffload.testing.tier_rig import ShiftedClock, filled_region, keys_of
from pdoffload.tiers import io_threads as io_module
from pdoffload.tiers.base import Lookup
from pdoffload.tiers.io_threads import MAX_STUCK

TIMEOUT_S = 30.0
A, B, C, D = keys_of("a", "b", "c", "d")
LOST = NixlError("check_xfer_state", "lost")


def io_threads() -> set[threading.Thread]:
    """I/O threads of all fs tiers in this process."""
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("pdoffload-fs-read", "pdoffload-fs-write"))
    }


# --- C16: an exception is nobody's result ---

NIXL_FAULTS: list[tuple[FakeCall, NixlError | Verdict]] = [
    ("register", NixlError("register_memory", "no")),
    ("make", NixlError("initialize_xfer", "no")),
    ("start", NixlError("transfer", "no")),
    ("start", Verdict(TransferState.FAILED, LOST)),
    ("check", LOST),
    ("check", Verdict(TransferState.FAILED, LOST)),
]


@pytest.mark.parametrize("verb", ["store", "load"])
@pytest.mark.parametrize(("call", "fault"), NIXL_FAULTS)
def test_c16_a_fault_of_nixl_fails_its_job_once_and_the_next_succeeds(
    tmp_path: Path, call: FakeCall, fault: NixlError | Verdict, verb: str
) -> None:
    fakes = Fakes(ShiftedClock())
    with open_fs(
        tmp_path, make_agent=fakes, n_read_threads=1, n_write_threads=1, close_s=0.5
    ) as rig:
        rig.store((A, B), (0, 1))
        rig.load((A,), (10,))
        before = io_threads()
        fakes.driver.script(call, fault)
        run = rig.store if verb == "store" else rig.load
        keys = (C, D) if verb == "store" else (A, B)
        result = run(keys, (20, 21))
        assert {key for key, _ in result.failed} == set(keys)
        assert all(isinstance(error, PdOffloadError) for _, error in result.failed)
        assert rig.store((C, D), (2, 3)).failed == ()
        assert rig.load((C, D), (30, 31)).verified == 2
        # Where NIXL cannot tell what became of a request, one thread waits for it beside the others.
        assert len(io_threads()) <= len(before) + 1
        assert rig.temps() == []


def test_c16_a_request_nixl_lost_sight_of_does_not_cost_its_side_the_only_thread(
    tmp_path: Path,
) -> None:
    fakes = Fakes(ShiftedClock())
    settings = {"n_read_threads": 1, "n_write_threads": 1, "close_s": 0.1}
    with open_fs(tmp_path, make_agent=fakes, **settings) as rig:
        for number in range(5):
            fakes.driver.script("start", NixlError("transfer", "no"))
            result = rig.store(keys_of(number), (number,))
            assert not result.settled, "bytes may still be read out of the slot"
            assert rig.store(keys_of(("good", number)), (number,)).failed == ()
        assert rig.tier.stats().quarantined_slots == 5


@pytest.mark.parametrize("call", ["deregister", "release", "close"])
def test_c16_a_fault_while_giving_back_loses_no_result(tmp_path: Path, call: FakeCall) -> None:
    fakes = Fakes(ShiftedClock())
    with open_fs(tmp_path, make_agent=fakes) as rig:
        rig.store((A,), (0,))
        fakes.driver.script(call, NixlError(call, "no"))
        result = rig.store((B,), (1,))
        assert len(result.succeeded) + len(result.failed) == 1
        assert rig.store((C,), (2,)).failed == ()
        assert rig.load((A, C), (10, 12)).verified == 2


@pytest.mark.parametrize(
    "error",
    [OSError(5, "broken"), ValueError("odd"), MemoryError(), SystemExit(3), KeyboardInterrupt()],
)
def test_c16_any_exception_at_all_fails_its_job_once_and_the_next_succeeds(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [error]
    real = HostRegion.checksum

    def checksum(region: HostRegion, slot: int) -> bytes:
        if faults:
            raise faults.pop()
        return real(region, slot)

    monkeypatch.setattr(HostRegion, "checksum", checksum)
    with open_fs(tmp_path, make_agent=FakeAgent, n_write_threads=1) as rig:
        failed = rig.store((A, B), (0, 1))
        assert len(failed.failed) == 2
        assert isinstance(failed.failed[0][1], StorageError)
        before = io_threads()
        assert rig.store((A, B), (0, 1)).failed == ()
        assert rig.load((A, B), (10, 11)).verified == 2
        assert before <= io_threads()


def test_c16_an_agent_that_cannot_be_made_fails_jobs_until_it_can(tmp_path: Path) -> None:
    faults = [NixlError("create_backend", "out of contexts")] * 2

    def make_agent(name: str) -> Agent:
        if faults:
            raise faults.pop()
        return FakeAgent(name)

    with open_fs(tmp_path, make_agent=make_agent, n_write_threads=1) as rig:
        for _ in range(2):
            assert "out of contexts" in str(rig.store((A,), (0,)).failed[0][1])
        assert rig.store((A,), (0,)).failed == ()


def test_a_chunk_that_was_there_already_succeeds_whatever_happens_to_the_others(
    tmp_path: Path,
) -> None:
    fakes = Fakes(ShiftedClock())
    with open_fs(tmp_path, make_agent=fakes, close_s=0.1) as rig:
        rig.store((A,), (0,))
        fakes.driver.script("start", NixlError("transfer", "no"))
        mixed = rig.store((A, B), (0, 1))
        assert mixed.succeeded == (A,)
        assert [key for key, _ in mixed.failed] == [B]
        assert mixed.already_present == 1


def test_one_bad_read_does_not_fail_the_chunks_that_came_in_well(tmp_path: Path) -> None:
    class OneBadRead(FakeDriver):
        def check(self, handle: object) -> Verdict:
            verdict = super().check(handle)  # type: ignore[arg-type]
            return Verdict(TransferState.FAILED, LOST) if spoiling else verdict

    spoiling: list[bool] = []
    driver = OneBadRead()
    with open_fs(tmp_path, make_agent=lambda name: FakeAgent(name, driver=driver)) as rig:
        rig.store((A, B, C), (0, 1, 2))
        rig.flip(B, 100)
        spoiling.append(True)
        loaded = rig.load((A, B, C), (10, 11, 12))
        assert loaded.succeeded == (A, C), "their checksums match, so the bytes are right"
        assert "was not read" in str(loaded.failed[0][1])
        assert rig.path(B).exists(), "nothing is known against the file"
        assert rig.tier.lookup((B,)) == [Lookup.MISS]


@pytest.mark.parametrize("verb", ["store", "load"])
def test_c16_work_fails_where_no_thread_can_be_started_and_goes_on_when_one_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        run = rig.store if verb == "store" else rig.load
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", start)
            failed = run((A,), (0,))
            assert "no I/O thread can be started" in str(failed.failed[0][1])
            assert failed.settled
        assert rig.store((B,), (1,)).failed == ()
        assert rig.load((B,), (9,)).verified == 1


# --- deadlines ---


def test_a_transfer_that_hangs_fails_at_its_deadline_and_settles_later(tmp_path: Path) -> None:
    clock = ShiftedClock()
    fakes = Fakes(clock)
    with open_fs(tmp_path, make_agent=fakes, clock=clock, n_read_threads=1) as rig:
        rig.store((A, B), (0, 1))
        fakes.driver.hold(1)
        stuck = rig.submit_load((A, B), (10, 11))
        rig.until(lambda: fakes.driver.calls.count("start") == 2, "the transfer to begin")
        clock.shift_s += TIMEOUT_S + 1
        result = rig.result(stuck)
        assert not result.settled
        assert all(isinstance(error, DeadlineExceeded) for _, error in result.failed)
        assert rig.tier.stats().quarantined_slots == 2
        assert rig.tier.stats().deadlines_exceeded == 1
        assert stuck not in rig.settled
        assert rig.load((A, B), (20, 21)).verified == 2, "another thread has taken over"
        fakes.driver.let_go()
        rig.until(lambda: stuck in rig.settled, "the news that nothing moves any more")
        assert rig.tier.stats().quarantined_slots == 0


def test_the_deadline_does_not_run_in_the_queue(tmp_path: Path) -> None:
    clock = ShiftedClock()
    fakes = Fakes(clock)
    with open_fs(
        tmp_path, make_agent=fakes, clock=clock, n_read_threads=1, n_write_threads=1
    ) as rig:
        fakes.driver.hold()
        first = rig.submit_store(keys_of(*range(32)), range(32))
        rig.until(lambda: "start" in fakes.driver.calls, "the first to begin")
        waiting = rig.submit_store((A,), (40,))
        clock.shift_s += TIMEOUT_S / 2
        rig.poll()
        assert waiting not in rig.results
        fakes.driver.let_go()
        for job_id in (first, waiting):
            assert rig.result(job_id).failed == ()


class Hangs:
    """Makes the checksum of one slot hang, as a system call on a dead network mount does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slot: int = 63) -> None:
        self.released = threading.Event()
        self.hanging = 0
        real = HostRegion.forget_checksum

        def forget(region: HostRegion, number: int) -> None:
            if number == slot and not self.released.is_set():
                self.hanging += 1
                assert self.released.wait(60)
            real(region, number)

        monkeypatch.setattr(HostRegion, "forget_checksum", forget)


def hang(rig: FsRig, hangs: Hangs, clock: ShiftedClock) -> int:
    """A load that hangs outside of NIXL until its deadline has passed; its job."""
    before = hangs.hanging
    job_id = rig.submit_load((A,), (63,))
    rig.until(lambda: hangs.hanging > before, "the thread to hang")
    clock.shift_s += TIMEOUT_S + 1
    result = rig.result(job_id)
    assert not result.settled
    assert isinstance(result.failed[0][1], DeadlineExceeded)
    return job_id


def test_c25_a_stuck_thread_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ShiftedClock()
    hangs = Hangs(monkeypatch)
    with open_fs(
        tmp_path, make_agent=FakeAgent, clock=clock, n_read_threads=1, n_write_threads=1
    ) as rig:
        rig.store((A, B), (0, 1))
        stuck = [hang(rig, hangs, clock) for _ in range(3)]
        assert rig.load((B,), (11,)).verified == 1
        assert rig.tier.stats().quarantined_slots == 3
        hangs.released.set()
        rig.until(lambda: set(stuck) <= rig.settled, "the stuck threads to come back")
        assert rig.tier.stats().quarantined_slots == 0


def test_c25_what_waits_behind_stuck_threads_is_taken_over_without_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShiftedClock()
    hangs = Hangs(monkeypatch)
    with open_fs(
        tmp_path, make_agent=FakeAgent, clock=clock, n_read_threads=1, n_write_threads=1
    ) as rig:
        rig.store((A, B), (0, 1))
        for number in (1, 2):  # the reader, and the writer who helps
            rig.submit_load((A,), (63,))
            rig.until(lambda number=number: hangs.hanging == number, "a thread to hang")
        waiting = rig.submit_load((B,), (11,))
        clock.shift_s += TIMEOUT_S + 1
        assert rig.result(waiting).verified == 1
        hangs.released.set()


def test_c25_the_other_side_is_called_to_help_where_nobody_may_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_module, "MAX_STUCK", 0)
    clock = ShiftedClock()
    hangs = Hangs(monkeypatch)
    settings = {"n_read_threads": 1, "n_write_threads": 1}
    with open_fs(tmp_path, make_agent=FakeAgent, **settings) as rig:
        rig.store((B,), (1,))
    with open_fs(tmp_path, make_agent=FakeAgent, clock=clock, **settings) as rig:
        rig.submit_load((A,), (63,))
        rig.until(lambda: hangs.hanging == 1, "the only reader to hang")
        waiting = rig.submit_load((B,), (11,))
        clock.shift_s += TIMEOUT_S + 1
        assert rig.result(waiting).verified == 1
        hangs.released.set()


def test_c25_when_every_thread_is_stuck_work_fails_at_once_until_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShiftedClock()
    hangs = Hangs(monkeypatch)
    with open_fs(
        tmp_path, make_agent=FakeAgent, clock=clock, n_read_threads=1, n_write_threads=1
    ) as rig:
        rig.store((B,), (1,))
        # Those that may be replaced, the last reader, and then the writer, who helps.
        for number in range(MAX_STUCK + 2):
            assert rig.tier.stats().degraded == "", number
            hang(rig, hangs, clock)
        refused = rig.load((B,), (11,))
        assert refused.settled
        assert "hang" in str(refused.failed[0][1])
        assert "stuck" in rig.tier.stats().degraded
        hangs.released.set()
        rig.until(lambda: not rig.tier.stats().degraded, "a thread to come back")
        rig.until(lambda: rig.load((B,), (11,)).verified == 1, "a load to succeed again")


def test_c25_loads_end_while_every_store_hangs(tmp_path: Path) -> None:
    clock = ShiftedClock()
    drivers = {"read": FakeDriver(clock=clock), "write": FakeDriver(clock=clock)}

    def make_agent(name: str) -> Agent:
        return FakeAgent(name, driver=drivers["read" if "read" in name else "write"], clock=clock)

    with open_fs(
        tmp_path, make_agent=make_agent, clock=clock, n_read_threads=1, n_write_threads=2
    ) as rig:
        rig.store((A,), (0,))
        drivers["write"].hold()
        stores = [rig.submit_store(keys_of(number), (number,)) for number in range(1, 20)]
        for _ in range(5):
            assert rig.load((A,), (40,)).verified == 1
        drivers["write"].let_go()
        for job_id in stores:
            assert rig.result(job_id).failed == ()


def test_c25_stores_beyond_the_bound_are_dropped_with_their_keys(tmp_path: Path) -> None:
    clock = ShiftedClock()
    fakes = Fakes(clock)
    with open_fs(
        tmp_path, make_agent=fakes, clock=clock, n_read_threads=1, n_write_threads=1
    ) as rig:
        fakes.driver.hold()
        jobs = {}
        for number in range(20):
            keys = keys_of(*((number, each) for each in range(16)))
            jobs[rig.submit_store(keys, range(16))] = keys
        rig.poll()
        dropped = dict(rig.results)
        assert len(dropped) == rig.tier.stats().dropped_stores >= 14
        for job_id, result in dropped.items():
            assert tuple(key for key, _ in result.failed) == jobs[job_id]
            assert "wait" in str(result.failed[0][1])
        fakes.driver.let_go()
        for job_id in jobs.keys() - dropped.keys():
            assert rig.result(job_id).failed == ()


def test_c06_stores_stop_being_queued_after_the_same_failure_in_a_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ShiftedClock()
    fakes = Fakes(clock)
    with open_fs(tmp_path, make_agent=fakes, clock=clock) as rig:
        rig.store((A,), (0,))
        fakes.driver.script("make", NixlError("initialize_xfer", "EINVAL"), times=3)
        for number in range(3):
            assert rig.store(keys_of(number), (1,)).failed
        assert rig.tier.stats().degraded.startswith("failing")
        assert rig.store((B,), (1,)).failed, "not even tried"
        stats = rig.tier.stats()
        assert (stats.failed_stores, stats.dropped_stores) == (3, 1)
        warnings = [r.getMessage() for r in caplog.records if "stop" in r.getMessage()]
        assert len(warnings) == 1
        assert "EINVAL" in warnings[0]
        assert rig.load((A,), (10,)).verified == 1, "loads go on"
        clock.shift_s += 2
        assert rig.store((B,), (1,)).failed == ()
        assert rig.tier.stats().degraded == ""


# --- the end ---


def test_c25_closing_is_bounded_while_a_thread_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = Hangs(monkeypatch)
    with open_fs(tmp_path, make_agent=FakeAgent, n_read_threads=1, close_s=0.1) as rig:
        rig.store((A,), (0,))
        running = rig.submit_load((A,), (63,))
        rig.until(lambda: hangs.hanging == 1, "the thread to hang")
    result = rig.results[running]
    assert not result.settled
    assert isinstance(result.failed[0][1], DeadlineExceeded)
    assert "closing" in str(result.failed[0][1])
    assert "left behind" in caplog.text
    hangs.released.set()
    rig.until(lambda: running in rig.settled, "the settlement, which poll tells also afterwards")


def test_closing_fails_what_is_queued_and_finishes_what_runs(tmp_path: Path) -> None:
    clock = ShiftedClock()
    fakes = Fakes(clock)
    before = io_threads()
    with open_fs(
        tmp_path, make_agent=fakes, clock=clock, n_read_threads=1, n_write_threads=1
    ) as rig:
        rig.load((A,), (40,))
        fakes.driver.hold()
        running = [rig.submit_store(keys_of(("r", n)), (n,)) for n in range(2)]
        rig.until(lambda: fakes.driver.calls.count("start") == 2, "both threads to be busy")
        queued = [rig.submit_store(keys_of(("q", n)), (n,)) for n in range(3)]
        timer = threading.Timer(0.2, fakes.driver.let_go)
        timer.start()
        rig.take(rig.tier.close(timeout_s=30))
        timer.join()
        assert all(rig.results[job_id].failed == () for job_id in running)
        assert all("closed" in str(rig.results[job_id].failed[0][1]) for job_id in queued)
        assert rig.temps() == []
    assert io_threads() <= before


def test_c08_everything_that_was_made_is_given_back(tmp_path: Path) -> None:
    fakes = Fakes(ShiftedClock())
    with open_fs(tmp_path, make_agent=fakes) as rig:
        for number in range(10):
            rig.store(keys_of(number), (number,))
            rig.load(keys_of(number, "absent"), (40, 41))
        fakes.driver.script("check", Verdict(TransferState.FAILED, LOST))
        rig.store(keys_of("fails"), (0,))
    assert fakes.driver.open_handles == 0


def test_threads_are_started_only_when_there_is_work(tmp_path: Path) -> None:
    before = io_threads()
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        assert io_threads() <= before
        rig.store((A,), (0,))
        assert len(io_threads() - before) == 1


@pytest.mark.parametrize("times", [100])
def test_c20_random_overlaps_bring_the_right_bytes(tmp_path: Path, times: int) -> None:

    rng = random.Random(20)
    keys = keys_of(*range(12))
    with open_fs(tmp_path, make_agent=FakeAgent, region=filled_region(512)) as rig:
        jobs: dict[int, tuple[tuple[int, ...], int]] = {}
        first = 12
        for _ in range(times):
            chosen = tuple(rng.sample(range(12), rng.randint(1, 4)))
            picked = [keys[number] for number in chosen]
            if rng.random() < 0.5:
                rig.submit_store(picked, chosen)
            else:
                jobs[rig.submit_load(picked, range(first, first + len(chosen)))] = (chosen, first)
                first += len(chosen)
        for job_id, (chosen, start) in jobs.items():
            result = rig.result(job_id)
            for place, number in enumerate(chosen):
                if keys[number] in result.succeeded:
                    assert rig.bytes_of(start + place) == rig.bytes_of(number)
            assert all(isinstance(error, StorageError) for _, error in result.failed)


def test_an_unexpected_error_is_logged_with_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def checksum(region: HostRegion, slot: int) -> bytes:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(HostRegion, "checksum", checksum)
    with open_fs(tmp_path, make_agent=FakeAgent) as rig:
        assert "ZeroDivisionError" in str(rig.store((A,), (0,)).failed[0][1])
    assert "a bug of ours" in caplog.text


def test_a_store_that_has_not_begun_can_be_given_up(tmp_path: Path) -> None:
    fakes = Fakes(ShiftedClock())
    settings = {"n_read_threads": 1, "n_write_threads": 1}
    with open_fs(tmp_path, make_agent=fakes, **settings) as rig:
        fakes.driver.hold()
        running = rig.submit_store((A,), (0,))
        rig.until(lambda: bool(fakes.driver._requests), "the first store to be with the driver")
        # The reader may take one of the stores meanwhile; the last one waits.
        others = [rig.submit_store(keys_of(number), (number,)) for number in (1, 2, 3)]
        assert rig.tier.withdraw(others[-1])
        result = rig.result(others[-1])
        assert (len(result.failed), result.settled) == (1, True)
        assert not rig.tier.withdraw(others[-1]), "it has ended"
        assert not rig.tier.withdraw(running), "it has begun"
        fakes.driver.let_go()
        assert all(not rig.result(job).failed for job in (running, *others[:-1]))
        stats = rig.tier.stats()
        assert (stats.dropped_stores, stats.failed_stores, stats.degraded) == (1, 0, "")
        assert not rig.path(keys_of(3)[0]).exists()
