"""A neighbour that stands still in the middle of a write: nobody else gets the slots it may write into."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pdoffload.agent.ucx import allows_cma
from pdoffload.p2p import neighbours
from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.engine_process import ASK, EngineProcess, Stage
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import Chunks, EngineOptions

DEADLINES = Deadlines()
GIVEN_UP_S = DEADLINES.load_timeout_s + DEADLINES.abort_timeout_s + 5
COUNT = 12


def mark_of(pid: int) -> str:
    home = neighbours.own_mark().rsplit(":", 2)[0]
    return f"{home}:{pid}:{neighbours._state_and_start(pid)[1]}"


def test_a_process_may_write_until_it_has_ended_also_while_it_is_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mark = mark_of(child.pid)
        assert neighbours.may_still_write(mark)
        os.kill(child.pid, signal.SIGSTOP)
        assert neighbours.may_still_write(mark)
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not neighbours.may_still_write(mark), "a zombie writes nothing"
    finally:
        child.communicate()
    assert not neighbours.may_still_write(mark)


def test_who_is_no_neighbour_cannot_write_by_itself() -> None:
    mine = neighbours.own_mark()
    boot, namespace, pid, start = mine.split(":")
    assert neighbours.is_neighbour(mine)
    assert neighbours.may_still_write(mine)
    for other in ("", "x", ":::", f"{boot}:1:{pid}:{start}", f"other:{namespace}:{pid}:{start}"):
        assert not neighbours.is_neighbour(other)
    for ended in (f"{boot}:{namespace}:{pid}:1", f"{boot}:{namespace}:x:y"):
        assert not neighbours.may_still_write(ended)


@pytest.mark.parametrize(
    ("transports", "allowed"),
    [
        ("", True),
        ("all", True),
        ("tcp", False),
        ("tcp,self", False),
        ("cma,tcp", True),
        ("sm,tcp", True),
        ("^cma", False),
        ("^shm", False),
        ("^rc", True),
    ],
)
def test_what_ucx_tls_says_of_cma(transports: str, allowed: bool) -> None:
    assert allows_cma(transports) is allowed


@pytest.fixture
def pair(nursery: Nursery) -> tuple[EngineProcess, EngineProcess]:
    options = EngineOptions(
        num_slots=64, chunk_bytes=1 << 20, num_threads=1, environment={"UCX_TLS": "cma,tcp"}
    )
    return EngineProcess(nursery, options), EngineProcess(nursery, options)


@pytest.mark.nixl
@pytest.mark.parametrize("fate", [signal.SIGCONT, signal.SIGKILL])
def test_slots_stay_in_quarantine_until_a_stopped_neighbour_goes_on_or_ends(
    pair: tuple[EngineProcess, EngineProcess], fate: signal.Signals
) -> None:
    consumer, producer = pair
    with consumer, producer:
        consumer.works_with(producer)
        chunks = Chunks("prompt", COUNT)
        producer.hold(chunks)
        producer.halt_at(Stage.WRITE_BEGINS)
        consumer.want(ASK, producer, chunks.name, chunks)
        producer.halted()
        consumer.let_pass(lambda: consumer.tell(chunks.name).ended, "a pull's end", GIVEN_UP_S)
        consumer.pulled(chunks.name)
        consumer.until(
            lambda: any("receiving agent is replaced" in line for line in consumer.look().log),
            "another receiving agent",
        )
        for _ in range(20):
            consumer.advance(5.0)
            assert consumer.look().num_quarantined >= COUNT // 2
        if fate is signal.SIGKILL:
            producer.kill()
        else:
            producer.go_on()
        consumer.let_pass(lambda: not consumer.look().num_quarantined, "free slots", 60.0)
        consumer.at_rest()
        if fate is signal.SIGCONT:
            producer.at_rest()
            consumer.advance(60.0)
            consumer.works_with(producer)
