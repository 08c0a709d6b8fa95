"""The processes of the peers' tests say how they ended, stop where they are told, and outlive nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.testing.engine_process import ASK, CHILD, EngineProcess, Stage
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import Chunks, EngineOptions

pytestmark = pytest.mark.nixl


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery(CHILD)
    yield made
    made.close()


def has_ended(pid: int) -> bool:
    """Zombies count: a pid 1 that reaps nobody keeps them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_processes_stop_go_on_end_and_die_as_they_are_told(nursery: Nursery) -> None:
    options = EngineOptions(chunk_bytes=8192)
    held = Chunks("held", 2)
    with EngineProcess(nursery, options) as producer, EngineProcess(nursery, options) as consumer:
        producer.hold(held)
        producer.halt_at(Stage.FETCH_COMES)
        consumer.want(ASK, producer, "r", held)
        producer.halted()
        assert not consumer.tell("r").ended
        producer.go_on()
        assert consumer.pulled("r").num_right == 2
        assert consumer.end() == 0
        producer.kill()
        with pytest.raises(AssertionError, match="ended with -9"):
            producer.look()


def test_a_port_that_is_taken_ends_a_process_and_not_the_test(nursery: Nursery) -> None:
    with EngineProcess(nursery, EngineOptions()) as first:
        with pytest.raises(AssertionError, match="ended with 1"):
            EngineProcess(nursery, EngineOptions(port=first.address.port))
        first.look()


def test_wrong_bytes_and_time_are_seen(nursery: Nursery) -> None:
    with EngineProcess(nursery, EngineOptions(chunk_bytes=8192)) as engine:
        held = Chunks("held", 3)
        engine.hold(held)
        engine.flip(Chunks("held", 1, first=1))
        engine.want(ASK, engine, "r", held)
        pulled = engine.pulled("r")
        assert (pulled.num_loaded, pulled.num_right) == (3, 2)
        assert engine.let_pass(lambda: not engine.look().num_jobs, "rest", 3.0) == 0


def test_processes_end_with_their_nursery_even_when_they_are_stopped() -> None:
    nursery = Nursery(CHILD)
    engine = EngineProcess(nursery, EngineOptions(chunk_bytes=8192))
    engine.stop()
    nursery.close()
    give_up_s = SYSTEM_CLOCK.monotonic_s() + 20
    while not has_ended(engine.pid):
        assert SYSTEM_CLOCK.monotonic_s() < give_up_s
        SYSTEM_CLOCK.sleep(0.01)
    engine.hang_up()
