"""Copy threads: every copy ends once, with an error or with all its bytes, and none writes later."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.agent.driver import Verdict
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import DeadlineExceeded, MisuseError, NixlError, PdOffloadError
from pdoffload.testing.agents import FakeAgent
from pdoffload.vllm.transfers import Copy, CopyThreads, Memory

PAGE = 4096
REFUSED = Verdict(TransferState.FAILED, NixlError("postXferReq", "no"))


class Bench:
    """A device and a host of 16 pages, and the agents that the threads have opened."""

    def __init__(self, **options) -> None:
        self.device = np.arange(16 * PAGE, dtype=np.uint64).astype(np.uint8)
        self.host = np.zeros(16 * PAGE, dtype=np.uint8)
        self.agents: list[FakeAgent] = []
        self.prepare = lambda agent: None
        settings = {"num_threads": 1, "timeout_s": 5.0, **options}
        self.threads = CopyThreads(
            self.open,
            [Memory(self.device.ctypes.data, 16 * PAGE), Memory(self.host.ctypes.data, 16 * PAGE)],
            **settings,
        )

    def open(self, name: str) -> FakeAgent:
        agent = FakeAgent(name)
        self.agents.append(agent)
        if len(self.agents) > 1:
            self.prepare(agent)
        return agent

    def copy(self, number: int, pages=range(16), op: Op = Op.WRITE, ready=lambda: None) -> None:
        offsets = np.array(list(pages)) * PAGE
        self.threads.submit(
            Copy(
                copy_id=number,
                op=op,
                describe=lambda: (
                    pieces(MemoryKind.DRAM, self.device.ctypes.data + offsets, PAGE),
                    pieces(MemoryKind.DRAM, self.host.ctypes.data + offsets, PAGE),
                ),
                ready=ready,
                what=f"copy {number}",
            )
        )

    def end(self, *numbers: int):
        self.threads.wait(numbers)
        return {result.copy_id: result for result in self.threads.finished()}


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(**options) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        each.threads.close(timeout_s=10)
        assert all(agent.driver.open_handles == 0 for agent in each.agents), "a handle leaked"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_bytes_arrive_by_as_many_threads(bench, num_threads):
    it = bench(num_threads=num_threads)
    it.copy(1)
    (result,) = it.end(1).values()
    assert result.error is None
    assert result.size_bytes == 16 * PAGE
    np.testing.assert_array_equal(it.host, it.device)
    assert it.threads.finished() == [], "an end is reported once"


def test_more_threads_than_pieces_still_end(bench):
    it = bench(num_threads=4)
    it.copy(1, pages=[3])
    assert it.end(1)[1].error is None


@pytest.mark.parametrize("call", ["make", "start", "release"])
def test_c16_one_fault_ends_its_copy_and_the_next_one_works(bench, call):
    it = bench()
    it.agents[0].driver.script(call, NixlError(call, "scripted"))
    it.copy(1)
    first = it.end(1)[1]
    assert isinstance(first.error, PdOffloadError) or call == "release"
    it.copy(2)
    assert it.end(2)[2].error is None
    np.testing.assert_array_equal(it.host, it.device)


def test_c16_arithmetic_that_raises_fails_its_copy_alone(bench):
    it = bench()
    it.threads.submit(
        Copy(copy_id=1, op=Op.READ, describe=lambda: 1 / 0, ready=lambda: None, what="copy 1")
    )
    assert "ZeroDivisionError" in str(it.end(1)[1].error)
    it.copy(2)
    assert it.end(2)[2].error is None


def test_a_copy_is_tried_again_as_often_as_asked(bench):
    it = bench(retries=1)
    it.agents[0].driver.script("start", REFUSED)
    it.copy(1)
    assert it.end(1)[1].error is None
    it.agents[0].driver.script("start", REFUSED, times=2)
    it.copy(2)
    assert "no" in str(it.end(2)[2].error)


def test_a_copy_past_its_deadline_never_writes_later(bench):
    it = bench(timeout_s=0.05)
    stuck = it.agents[0]
    stuck.driver.hold()
    it.copy(1, op=Op.WRITE)
    assert isinstance(it.end(1)[1].error, DeadlineExceeded)
    stuck.driver.let_go()
    it.copy(2, pages=[0])
    assert it.end(2)[2].error is None
    assert len(it.agents) == 2, "a new agent took the place of the one that was closed"
    np.testing.assert_array_equal(it.host[PAGE:], 0)


def test_a_copy_waits_for_the_device(bench):
    it = bench()
    gate = threading.Event()
    it.copy(1, ready=lambda: gate.wait(10))
    assert it.threads.finished() == []
    gate.set()
    assert it.end(1)[1].error is None


def test_close_finishes_what_is_queued(bench):
    it = bench()
    for number in range(5):
        it.copy(number, pages=[number])
    it.threads.close(timeout_s=10)
    assert [result.copy_id for result in it.threads.finished()] == list(range(5))


def test_an_agent_that_cannot_be_opened_is_an_error_at_once():
    def refuse(name: str) -> FakeAgent:
        raise NixlError("create_backend", "no such plugin")

    before = threading.active_count()
    with pytest.raises(NixlError, match="no such plugin"):
        CopyThreads(refuse, [], num_threads=2, timeout_s=1)
    assert threading.active_count() == before


def test_a_thread_that_cannot_start_is_an_error_and_no_hang():
    def no_gpu() -> None:
        raise RuntimeError("invalid device ordinal")

    with pytest.raises(PdOffloadError, match="invalid device ordinal"):
        CopyThreads(FakeAgent, [], num_threads=2, timeout_s=1, enter_thread=no_gpu)


def test_overlapping_memory_is_an_error_at_once():
    memory = Memory(4096, 4096)
    with pytest.raises(MisuseError):
        CopyThreads(FakeAgent, [memory, memory], num_threads=1, timeout_s=1)
