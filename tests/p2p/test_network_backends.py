"""Engines that are real processes and exchange chunks by another backend than UCX, over TCP on the loopback.

LIBFABRIC runs in a Python of its own (`make fabric`); MOONCAKE is the Transfer Engine by its own package.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from pdoffload.p2p.terms import Deadlines
from pdoffload.testing import verbs
from pdoffload.testing.engine_process import ASK, CHILD, PULL, EngineProcess, Stage
from pdoffload.testing.interpreter import Interpreter, this_one
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import Chunks, EngineOptions

COUNT = 12
AFTER_BACKOFF_S = 1.0
DEADLINES = Deadlines()
GIVEN_UP_S = DEADLINES.load_timeout_s + DEADLINES.abort_timeout_s + 5
LET_GO_S = DEADLINES.store_timeout_s + 5

_numbers = itertools.count()


@pytest.fixture(
    scope="module", params=["LIBFABRIC", pytest.param("MOONCAKE", marks=pytest.mark.mooncake)]
)
def options(request: pytest.FixtureRequest) -> EngineOptions:
    return EngineOptions(
        num_slots=64, chunk_bytes=1 << 20, num_threads=1, backends=(request.param,)
    )


@pytest.fixture(scope="module")
def nursery(options: EngineOptions, request: pytest.FixtureRequest) -> Iterator[Nursery]:
    if "LIBFABRIC" in options.backends:
        interpreter: Interpreter = request.getfixturevalue("fabric")
    else:
        interpreter = this_one(**verbs.environment())
    made = Nursery(CHILD, interpreter)
    yield made
    made.close()


@pytest.fixture(scope="module")
def steady(options: EngineOptions, nursery: Nursery) -> Iterator[EngineProcess]:
    with EngineProcess(nursery, options) as engine:
        yield engine


@pytest.fixture
def victim(options: EngineOptions, nursery: Nursery) -> Iterator[EngineProcess]:
    with EngineProcess(nursery, options) as engine:
        yield engine


@pytest.fixture
def chunks() -> Chunks:
    return Chunks(f"prompt {next(_numbers)}", COUNT)


def test_chunks_go_both_ways_and_every_one_is_verified(
    options: EngineOptions, nursery: Nursery
) -> None:
    with EngineProcess(nursery, options) as one, EngineProcess(nursery, options) as other:
        for producer, consumer in ((one, other), (other, one)):
            chunks = Chunks(f"of {producer.address}", COUNT)
            producer.keep("kept", chunks)
            assert consumer.pull(PULL, producer, "kept", chunks).num_right == COUNT
            consumer.forget()
            assert consumer.pull(ASK, producer, "asked", chunks).num_right == COUNT
            assert consumer.at_rest().stats.verified_chunks == 2 * COUNT
            assert producer.at_rest().peers.transports == ((f"{options.backends[0]}/tcp", 1),)


def test_a_chunk_that_is_not_the_one_that_was_stored_is_a_miss(
    steady: EngineProcess, victim: EngineProcess, chunks: Chunks
) -> None:
    victim.hold(chunks)
    victim.flip(msgspec.structs.replace(chunks, first=5, count=1))
    pulled = steady.pull(ASK, victim, chunks.name, chunks)
    assert (pulled.num_loaded, pulled.num_right) == (5, 5)
    steady.at_rest()
    steady.forget()


PRODUCER_STAGES = {
    "before the write": Stage.WRITE_BEGINS,
    "in the write": Stage.WRITE_RUNS,
    "after the write": Stage.WRITE_ENDED,
}


@pytest.mark.parametrize("stage", PRODUCER_STAGES.values(), ids=PRODUCER_STAGES)
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_a_producer_is_killed_and_its_consumer_computes(
    is_known: bool, stage: Stage, steady: EngineProcess, victim: EngineProcess, chunks: Chunks
) -> None:
    if is_known:
        steady.works_with(victim)
    victim.hold(chunks)
    victim.halt_at(stage)
    steady.want(ASK, victim, chunks.name, chunks)
    victim.halted()
    victim.kill()
    pulled = steady.pulled(chunks.name)
    assert pulled.num_right == pulled.num_loaded < COUNT
    steady.at_rest()
    steady.forget()


@pytest.mark.parametrize("stage", PRODUCER_STAGES.values(), ids=PRODUCER_STAGES)
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_a_producer_stands_still_and_its_consumer_computes_and_has_its_slots_back(
    is_known: bool, stage: Stage, steady: EngineProcess, victim: EngineProcess, chunks: Chunks
) -> None:
    if is_known:
        steady.works_with(victim)
    victim.hold(chunks)
    victim.halt_at(stage)
    steady.want(ASK, victim, chunks.name, chunks)
    victim.halted()
    steady.let_pass(lambda: steady.tell(chunks.name).ended, "the end of a pull", GIVEN_UP_S)
    assert steady.pulled(chunks.name).num_loaded < COUNT
    steady.at_rest()
    victim.go_on()
    victim.at_rest()
    steady.advance(AFTER_BACKOFF_S)
    steady.works_with(victim)
    steady.at_rest()
    steady.forget()


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_a_consumer_is_killed_and_its_producer_serves_others(
    options: EngineOptions, is_known: bool, nursery: Nursery, victim: EngineProcess, chunks: Chunks
) -> None:
    with EngineProcess(nursery, options) as producer, EngineProcess(nursery, options) as other:
        if is_known:
            victim.works_with(producer)
        producer.hold(chunks)
        producer.halt_at(Stage.FETCH_COMES)
        victim.want(ASK, producer, chunks.name, chunks)
        producer.halted()
        victim.kill()
        producer.go_on()
        producer.at_rest()
        assert other.pull(ASK, producer, chunks.name, chunks).num_right == COUNT


def test_a_consumer_that_is_killed_holds_nobody_up(
    options: EngineOptions, nursery: Nursery, victim: EngineProcess, chunks: Chunks
) -> None:
    with EngineProcess(nursery, options) as producer, EngineProcess(nursery, options) as other:
        victim.works_with(producer)
        other.works_with(producer)
        producer.hold(chunks)
        producer.halt_at(Stage.WRITE_RUNS)
        victim.want(ASK, producer, chunks.name, chunks)
        producer.halted()
        other.want(ASK, producer, chunks.name, chunks)
        victim.kill()
        producer.go_on()
        # No deadline passes here. Its own writes may have ended with those to the victim.
        pulled = other.pulled(chunks.name)
        assert pulled.num_right == pulled.num_loaded
        producer.at_rest()
        other.at_rest()
        other.works_with(producer)


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_a_consumer_stands_still_and_gets_its_chunks_when_it_goes_on(
    options: EngineOptions, is_known: bool, nursery: Nursery, victim: EngineProcess, chunks: Chunks
) -> None:
    with EngineProcess(nursery, options) as producer:
        if is_known:
            victim.works_with(producer)
        producer.hold(chunks)
        producer.halt_at(Stage.FETCH_COMES)
        victim.want(ASK, producer, chunks.name, chunks)
        producer.halted()
        victim.stop()
        producer.go_on()
        producer.let_pass(lambda: not producer.look().num_lent, "the end of a loan", LET_GO_S)
        victim.go_on()
        pulled = victim.pulled(chunks.name)
        assert pulled.num_right == pulled.num_loaded
        victim.at_rest()
        victim.advance(AFTER_BACKOFF_S)
        victim.works_with(producer)
        producer.at_rest()


def test_c17_a_producer_restarts_under_its_address(
    options: EngineOptions, nursery: Nursery, steady: EngineProcess
) -> None:
    for number in range(4):
        chunks = Chunks(f"restart {next(_numbers)}", COUNT)
        # Half of the times with agents of the same names as before.
        options = msgspec.structs.replace(options, agent_name="again" if number < 2 else "")
        with EngineProcess(nursery, options) as producer:
            options = msgspec.structs.replace(options, port=producer.address.port)
            producer.hold(chunks)
            steady.advance(AFTER_BACKOFF_S)
            steady.works_with(producer)
            producer.halt_at(Stage.WRITE_RUNS)
            steady.want(ASK, producer, chunks.name, chunks)
            producer.halted()
            producer.kill()
        pulled = steady.pulled(chunks.name)
        assert pulled.num_loaded == pulled.num_right < COUNT
        steady.at_rest()
        steady.forget()


OPEN_A_TIER = """
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import P2pTierConfig, Verify
from pdoffload.layout import Geometry, RunConfig
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.address import Address
from pdoffload.tiers.base import TierContext
from pdoffload.tiers.peer import open_peer_tier

region = HostRegion.private(Geometry(num_slots=2, worker_bytes=4096, num_copies=1))
context = TierContext(
    region=region, run_config=RunConfig(fields={}, guards={}), verify=Verify.ALWAYS, clock=SYSTEM_CLOCK
)
table = P2pTierConfig(backends=("LIBFABRIC",), port=0)
open_peer_tier(table, Address("127.0.0.1", 0), context, lambda: "0").close(timeout_s=5)
region.close()
"""


def test_a_tier_whose_table_names_libfabric_opens(fabric: Interpreter) -> None:
    done = subprocess.run(
        [fabric.python, "-c", OPEN_A_TIER],
        env=fabric.environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_tier_says_why_libfabric_cannot_start(fabric: Interpreter) -> None:
    without_network = {**fabric.environ(), "LD_PRELOAD": ""}
    done = subprocess.run(
        [fabric.python, "-c", OPEN_A_TIER],
        env=without_network,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = "LIBFABRIC cannot be used: it loads, and refuses to start"
    assert said in done.stderr.splitlines()[-1], done.stderr


def test_peers_by_ucx_and_by_another_refuse_each_other_and_compute(
    options: EngineOptions, nursery: Nursery, steady: EngineProcess, chunks: Chunks
) -> None:
    by_ucx = msgspec.structs.replace(options, backends=("UCX",))
    with EngineProcess(nursery, by_ucx) as other:
        for producer, consumer in ((steady, other), (other, steady)):
            producer.hold(chunks)
            refused = consumer.look().peers.handshakes_refused
            assert consumer.pull(ASK, producer, f"of {producer.address}", chunks).num_loaded == 0
            assert consumer.at_rest().peers.handshakes_refused > refused
            ours, theirs = producer.options.backends[0], consumer.options.backends[0]
            said = f"backends: {ours} here, {theirs} there"
            producer.at_rest()
            assert any(said in line for line in producer.logged), producer.logged
            assert any(said in line for line in consumer.logged), consumer.logged
            producer.forget()


def test_peers_with_a_backend_in_common_use_it(
    options: EngineOptions, nursery: Nursery, steady: EngineProcess
) -> None:
    if "MOONCAKE" in options.backends:
        pytest.skip("the Transfer Engine's own package goes with no other backend")
    both = msgspec.structs.replace(options, backends=("UCX", "LIBFABRIC"))
    with EngineProcess(nursery, both) as other, EngineProcess(nursery, both) as third:
        for producer, consumer, transport in (
            (other, steady, "LIBFABRIC/tcp"),
            (steady, other, "LIBFABRIC/tcp"),
            (third, other, ""),
        ):
            consumer.works_with(producer)
            ((name, _),) = producer.at_rest().peers.transports
            # How UCX goes cannot be read from the UCX of this NIXL.
            assert name == transport or (not transport and "LIBFABRIC" not in name)
