"""Peers that are real processes and fail: killed or frozen at every stage, restarted, cut off.

Deadlines are those a user gets by default. They pass at a test's word, and for one engine; what happens
without that word happens at once.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator

import msgspec
import pytest

from pdoffload.p2p.line import Heartbeat
from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.engine_process import ASK, PULL, EngineProcess, Stage
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import Chunks, EngineOptions, Seen

pytestmark = pytest.mark.nixl

# Over TCP a round of 8 MiB takes long enough to be met half way. One writer: it is held up by who fails.
OPTIONS = EngineOptions(
    num_slots=64,
    chunk_bytes=1 << 20,
    num_threads=1,
    environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
)
COUNT = 12
DEADLINES = Deadlines()
GIVEN_UP_S = DEADLINES.load_timeout_s + DEADLINES.abort_timeout_s + 5
"""By when a pull from a producer that stands still has ended, wherever it stands."""
LET_GO_S = DEADLINES.store_timeout_s + 5
"""By when a producer has let go of what it held for a consumer that stands still."""
SLACK_FDS = 2
"""A descriptor may be closed a moment after everything is at rest."""
AFTER_BACKOFF_S = 1.0
"""A peer that has failed once is spoken to again after 0.5 s."""

_numbers = itertools.count()


class Way(enum.Enum):
    """How a process fails."""

    KILLED = "killed"
    FROZEN = "frozen until all deadlines have passed"
    PAUSED = "frozen for a moment"


@pytest.fixture(scope="module")
def steady(nursery: Nursery) -> Iterator[EngineProcess]:
    """The engine that everybody else's failures happen to."""
    with EngineProcess(nursery, OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def healthy(nursery: Nursery) -> Iterator[EngineProcess]:
    """A third one, to which nothing happens."""
    with EngineProcess(nursery, OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def at_first(steady: EngineProcess, healthy: EngineProcess) -> Seen:
    """The steady engine once everything has been in use that lasts."""
    steady.works_with(healthy)
    healthy.works_with(steady)
    return steady.at_rest()


@pytest.fixture(autouse=True)
def _nothing_is_left(
    steady: EngineProcess, healthy: EngineProcess, at_first: Seen
) -> Iterator[None]:
    yield
    assert steady.at_rest().num_requests == 0
    steady.works_with(healthy)
    healthy.works_with(steady)
    for engine in (steady, healthy):
        engine.at_rest()
        engine.forget()
    steady.until(lambda: steady.look().num_threads <= at_first.num_threads, "threads to end")
    assert steady.look().num_fds <= at_first.num_fds + SLACK_FDS


@pytest.fixture
def victim(nursery: Nursery) -> Iterator[EngineProcess]:
    with EngineProcess(nursery, OPTIONS) as engine:
        yield engine


@pytest.fixture
def chunks() -> Chunks:
    return Chunks(f"prompt {next(_numbers)}", COUNT)


def parked(producer: EngineProcess, consumer: EngineProcess, chunks: Chunks) -> None:
    """Have the producer wait for chunks that a consumer has fetched."""
    before = producer.look().received.get("Fetch", 0)
    consumer.want(PULL, producer, chunks.name, chunks)
    producer.until(lambda: producer.look().received.get("Fetch", 0) > before, "a fetch")


PRODUCER_STAGES = {
    "before connect": None,
    "before connect_ack": Stage.CONNECT_COMES,
    "after the handshake": Stage.LOOKUP_COMES,
    "after the lookup": Stage.FETCH_COMES,
    "before the write": Stage.WRITE_BEGINS,
    "in the write": Stage.WRITE_RUNS,
    "after the write": Stage.WRITE_ENDED,
}
ways = pytest.mark.parametrize("way", Way, ids=lambda way: way.value)


@ways
@pytest.mark.parametrize("stage", PRODUCER_STAGES.values(), ids=PRODUCER_STAGES)
def test_a_producer_fails_and_its_consumer_computes(
    stage: Stage | None, way: Way, steady: EngineProcess, victim: EngineProcess, chunks: Chunks
) -> None:
    victim.hold(chunks)
    if stage is None:
        victim.stop()
    else:
        victim.halt_at(stage)
    steady.want(ASK, victim, chunks.name, chunks)
    victim.halted()
    fail(way, victim, steady, chunks)


@ways
def test_a_producer_fails_while_demand_is_parked_there(
    way: Way, steady: EngineProcess, victim: EngineProcess, chunks: Chunks
) -> None:
    parked(victim, steady, chunks)
    victim.stop()
    if way is Way.PAUSED:
        victim.go_on()
        victim.keep(chunks.name, chunks)
    fail(way, victim, steady, chunks)


def fail(way: Way, victim: EngineProcess, steady: EngineProcess, chunks: Chunks) -> None:
    """The victim, which has stopped, fails; what the steady engine wants of it ends as it should."""
    if way is Way.KILLED:
        victim.kill()
    elif way is Way.FROZEN:
        steady.let_pass(lambda: steady.tell(chunks.name).ended, "the end of a pull", GIVEN_UP_S)
    else:
        victim.go_on()
    pulled = steady.pulled(chunks.name)
    assert pulled.num_right == pulled.num_loaded
    assert (pulled.num_right == COUNT) == (way is Way.PAUSED)
    steady.at_rest()
    if way is not Way.KILLED:
        victim.go_on()
        victim.at_rest()
        steady.advance(AFTER_BACKOFF_S)
        steady.works_with(victim)


def test_a_producer_is_gone_when_it_is_asked_again(
    steady: EngineProcess, victim: EngineProcess, chunks: Chunks
) -> None:
    steady.works_with(victim)
    victim.kill()
    for role in (ASK, PULL):
        assert steady.pull(role, victim, f"{chunks.name} {role}", chunks).num_loaded == 0


CONSUMER_STAGES = {
    "after the handshake": Stage.ACK_COMES,
    "after the lookup": Stage.ANSWER_COMES,
    "in the write": Stage.WRITE_RUNS,
    "after the write": Stage.DONE_COMES,
}


@ways
@pytest.mark.parametrize("stage", CONSUMER_STAGES.values(), ids=CONSUMER_STAGES)
def test_a_consumer_fails_and_its_producer_lets_go(
    stage: Stage, way: Way, steady: EngineProcess, victim: EngineProcess, chunks: Chunks
) -> None:
    steady.hold(chunks)
    stops_first = steady if stage is Stage.WRITE_RUNS else victim
    stops_first.halt_at(stage)
    victim.want(ASK, steady, chunks.name, chunks)
    stops_first.halted()
    victim.stop()
    if way is Way.KILLED:
        victim.kill()
    steady.go_on()
    if way is Way.FROZEN:
        steady.let_pass(lambda: not steady.look().num_lent, "the end of a loan", LET_GO_S)
    if way is not Way.KILLED:
        victim.go_on()
        pulled = victim.pulled(chunks.name)
        assert pulled.num_right == pulled.num_loaded
        assert pulled.num_right == COUNT or way is Way.FROZEN
        victim.at_rest()
        victim.advance(AFTER_BACKOFF_S)
        victim.works_with(steady)
    steady.at_rest()


@ways
def test_a_consumer_fails_while_its_demand_is_parked(
    way: Way, steady: EngineProcess, victim: EngineProcess, chunks: Chunks
) -> None:
    expired = steady.look().peers.store_deadlines
    parked(steady, victim, chunks)
    victim.stop()
    if way is Way.KILLED:
        victim.kill()
    elif way is Way.FROZEN:
        steady.let_pass(
            lambda: steady.look().peers.store_deadlines > expired, "a deadline", LET_GO_S
        )
    steady.keep(chunks.name, chunks)
    if way is Way.KILLED:
        # Kept for whoever comes in its place, but not for ever.
        bound_s = DEADLINES.unbound_store_timeout_s
        steady.let_pass(lambda: not steady.look().num_lent, "the end of a keep", bound_s)
        return
    victim.go_on()
    assert victim.pulled(chunks.name).num_right == (COUNT if way is Way.PAUSED else 0)
    victim.at_rest()
    steady.let_pass(lambda: not steady.look().num_lent, "the end of a keep", 60)


def test_c17_a_producer_restarts_ten_times_under_its_address(
    nursery: Nursery, steady: EngineProcess
) -> None:
    options, seen = OPTIONS, []
    for number in range(10):
        chunks = Chunks(f"restart {next(_numbers)}", COUNT)
        # Half of the times with agents of the same names as before.
        options = msgspec.structs.replace(options, agent_name="again" if number < 5 else "")
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
        seen.append(steady.at_rest())
    assert seen[-1].num_fds <= seen[1].num_fds + SLACK_FDS
    steady.until(lambda: steady.look().num_threads <= seen[1].num_threads, "threads to end")


def test_c17_a_consumer_restarts_ten_times_under_the_write(
    nursery: Nursery, steady: EngineProcess
) -> None:
    options, seen = OPTIONS, []
    chunks = Chunks(f"restart {next(_numbers)}", COUNT)
    steady.hold(chunks)
    for number in range(11):
        options = msgspec.structs.replace(options, agent_name="again" if number < 5 else "")
        with EngineProcess(nursery, options) as consumer:
            options = msgspec.structs.replace(options, port=consumer.address.port)
            # The write to the one before it is still under way.
            consumer.want(ASK, steady, chunks.name, chunks)
            steady.go_on()
            assert consumer.pulled(chunks.name).num_right == COUNT
            seen.append(steady.at_rest())
            consumer.forget()
            steady.halt_at(Stage.WRITE_RUNS)
            consumer.want(ASK, steady, chunks.name, chunks)
            steady.halted()
            consumer.kill()
    steady.go_on()
    assert seen[-1].num_fds <= seen[1].num_fds + SLACK_FDS
    steady.until(lambda: steady.look().num_threads <= seen[1].num_threads, "threads to end")


def test_c17_two_peers_that_lost_each_other_reconnect_at_once(nursery: Nursery) -> None:
    options = msgspec.structs.replace(OPTIONS, heartbeat=Heartbeat(interval_s=0.1, timeout_s=0.5))
    with EngineProcess(nursery, options) as one, EngineProcess(nursery, options) as other:
        for number in range(3):
            one.works_with(other)
            other.works_with(one)
            wanted = [Chunks(f"{number} of {each.address}", COUNT) for each in (one, other)]
            one.hold(wanted[0])
            other.hold(wanted[1])
            lost = one.look().peers.peers_lost
            other.stop()
            one.until(lambda: one.look().peers.peers_lost > lost, "a missed heartbeat")  # noqa: B023
            one.advance(AFTER_BACKOFF_S)
            one.want(ASK, other, "one's", wanted[1])
            other.go_on()
            other.advance(AFTER_BACKOFF_S)
            other.want(ASK, one, "other's", wanted[0])
            # The other may not know yet that it was given up: then it computes, and knows.
            assert one.pulled("one's").num_right == COUNT
            assert other.pulled("other's").num_right in (0, COUNT)
            for each in (one, other):
                each.at_rest()
                each.forget()
            other.works_with(one)
            one.works_with(other)


def test_c17_a_peer_that_stands_still_is_noticed_by_its_silence(
    nursery: Nursery, chunks: Chunks
) -> None:
    options = msgspec.structs.replace(OPTIONS, heartbeat=Heartbeat(interval_s=0.1, timeout_s=0.5))
    with EngineProcess(nursery, options) as producer, EngineProcess(nursery, options) as consumer:
        producer.hold(chunks)
        consumer.works_with(producer)
        producer.halt_at(Stage.FETCH_COMES)
        consumer.want(ASK, producer, chunks.name, chunks)
        producer.halted()
        # No deadline passes here.
        assert consumer.pulled(chunks.name).num_loaded == 0
        assert consumer.at_rest().peers.load_deadlines == 0
        producer.go_on()
        producer.let_pass(lambda: not producer.look().num_lent, "what it held", LET_GO_S)
        producer.at_rest()
        consumer.advance(AFTER_BACKOFF_S)
        consumer.works_with(producer)
