"""What peers have promised each other, between real processes: kept chunks, parked demand, right bytes, and
that everything is let go of when a request or an engine ends.

As in `test_failures.py`, deadlines pass at a test's word only: what is not given that word happens at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.engine_process import ASK, PULL, Arrive, EngineProcess, Reserve, Stage
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import Chunks, EngineOptions

pytestmark = pytest.mark.nixl

# Over TCP a round of 8 MiB takes long enough to be met half way.
OPTIONS = EngineOptions(
    num_slots=64,
    chunk_bytes=1 << 20,
    num_threads=2,
    environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
)
COUNT = 12
DEADLINES = Deadlines()
_numbers = itertools.count()


@pytest.fixture(scope="module")
def producer(nursery: Nursery) -> Iterator[EngineProcess]:
    with EngineProcess(nursery, OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def consumer(nursery: Nursery, producer: EngineProcess) -> Iterator[EngineProcess]:
    with EngineProcess(nursery, OPTIONS) as engine:
        engine.works_with(producer)
        yield engine


@pytest.fixture(autouse=True)
def _nothing_is_left(producer: EngineProcess, consumer: EngineProcess) -> Iterator[None]:
    yield
    for engine in (producer, consumer):
        assert engine.at_rest().num_requests == 0
        engine.forget()
    consumer.works_with(producer)


@pytest.fixture
def chunks() -> Chunks:
    return Chunks(f"promise {next(_numbers)}", COUNT)


def part(chunks: Chunks, first: int, count: int) -> Chunks:
    return msgspec.structs.replace(chunks, first=first, count=count)


def decodes(chunks: Chunks) -> dict[str, dict[str, str]]:
    """The parameters of a request that computes for a decoder."""
    return {"remote_decoder": {"kv_request_id": chunks.name}}


def fetched(producer: EngineProcess, before: int) -> None:
    """Wait until a fetch has come to the producer after `before` of them."""
    producer.until(lambda: producer.look().received.get("Fetch", 0) > before, "a fetch")


def num_fetches(producer: EngineProcess) -> int:
    return producer.look().received.get("Fetch", 0)


# --- keeps and demand ---


def test_kept_chunks_outlive_the_producers_pool_and_are_let_go_when_fetched(
    producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    producer.keep(chunks.name, chunks)
    producer.until(lambda: producer.look().num_lent == COUNT, "chunks to be kept")
    producer.forget()
    assert consumer.pull(PULL, producer, chunks.name, chunks).num_right == COUNT


def test_kept_chunks_are_not_overwritten_by_those_that_want_room(
    producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    producer.keep(chunks.name, chunks)
    producer.until(lambda: producer.look().num_lent == COUNT, "chunks to be kept")
    producer.forget()
    producer.hold(Chunks(f"{chunks.name}, others", OPTIONS.num_slots - COUNT))
    assert consumer.pull(PULL, producer, chunks.name, chunks).num_right == COUNT


def test_two_consumers_may_fetch_under_one_id(
    nursery: Nursery, producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    producer.keep(chunks.name, chunks)
    with EngineProcess(nursery, OPTIONS) as other:
        assert other.pull(PULL, producer, chunks.name, chunks).num_right == COUNT
        assert consumer.pull(PULL, producer, chunks.name, chunks).num_right == COUNT
        other.at_rest()
        producer.at_rest()


def test_a_keep_that_nobody_fetches_expires_and_a_late_fetch_is_refused_at_once(
    producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    before = producer.look().peers
    producer.keep(chunks.name, chunks)
    producer.until(lambda: producer.look().num_lent == COUNT, "chunks to be kept")
    bound_s = DEADLINES.unbound_store_timeout_s
    passed_s = producer.let_pass(lambda: not producer.look().num_lent, "the end of a keep", bound_s)
    assert passed_s > bound_s - 5
    producer.forget()
    assert consumer.pull(PULL, producer, chunks.name, chunks).num_loaded == 0
    after = producer.at_rest().peers
    assert after.expired_keeps == before.expired_keeps + 1
    assert after.refused_fetches == before.refused_fetches + 2  # of 8 MiB each


def test_demand_may_come_before_the_request_and_is_served_chunk_by_chunk(
    producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    before = num_fetches(producer)
    consumer.want(PULL, producer, chunks.name, chunks)
    fetched(producer, before)
    producer.begin("computes", decodes(chunks))
    served = producer.look().peers.served_chunks
    for number in range(COUNT):
        producer.hold(part(chunks, number, 1), "computes")
        # It is sent before the next one is computed.
        producer.until(
            lambda: producer.look().peers.served_chunks == served + number + 1,  # noqa: B023
            "a chunk to be sent",
        )
        assert not consumer.tell(chunks.name).ended or number == COUNT - 1
    producer.finish("computes")
    assert consumer.pulled(chunks.name).num_right == COUNT


def test_demand_that_comes_while_the_chunks_come_from_the_device_waits_for_them(
    producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    producer.begin("computes", decodes(chunks))
    producer.ask(Reserve(chunks, "computes"))
    producer.finish("computes")
    before = num_fetches(producer)
    consumer.want(PULL, producer, chunks.name, chunks)
    fetched(producer, before)
    producer.ask(Arrive(chunks))
    assert consumer.pulled(chunks.name).num_right == COUNT


def test_demand_fails_at_once_when_the_device_delivers_nothing(
    producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    producer.begin("computes", decodes(chunks))
    producer.ask(Reserve(chunks, "computes"))
    producer.finish("computes")
    before = num_fetches(producer)
    consumer.want(PULL, producer, chunks.name, chunks)
    fetched(producer, before)
    producer.ask(Arrive(chunks, success=False))
    assert consumer.pulled(chunks.name).num_loaded == 0


@pytest.mark.parametrize("when", ["before the fetch", "after the fetch"])
def test_c18_a_producer_that_aborts_lets_its_consumer_compute_at_once(
    when: str, producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    before = num_fetches(producer)
    producer.begin("computes", decodes(chunks))
    if when == "before the fetch":
        producer.finish("computes")
    consumer.want(PULL, producer, chunks.name, chunks)
    fetched(producer, before)
    producer.finish("computes")
    assert consumer.pulled(chunks.name).num_loaded == 0


# --- aborts ---

ABORTED = {
    "before it was scheduled": None,
    "before the lookup is answered": Stage.LOOKUP_COMES,
    "between lookup and fetch": Stage.FETCH_COMES,
    "before the write": Stage.WRITE_BEGINS,
    "in the write": Stage.WRITE_RUNS,
    "after the write": Stage.WRITE_ENDED,
}


@pytest.mark.parametrize("stage", ABORTED.values(), ids=ABORTED)
def test_c18_a_request_that_is_aborted_leaves_nothing(
    stage: Stage | None, producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    producer.hold(chunks)
    if stage is not None:
        producer.halt_at(stage)
    consumer.want(ASK, producer, chunks.name, chunks)
    if stage is not None:
        producer.halted()
    for _ in range(2):
        consumer.finish(chunks.name)
    # Nothing is asked for it any more while the peer stands still.
    assert consumer.look().num_requests == 0
    producer.go_on()
    consumer.at_rest()
    producer.at_rest()


def test_c18_hundreds_of_aborts_leave_nothing_and_the_others_succeed(
    producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    producer.hold(chunks)
    sizes = []
    for number in range(200):
        name = f"{chunks.name} {number}"
        consumer.want(ASK if number % 3 else PULL, producer, name, part(chunks, 0, 1 + number % 5))
        if number % 10 == 9:
            assert consumer.pulled(name).num_right == 1 + number % 5
        else:
            consumer.finish(name)
        if number % 50 == 49:
            consumer.at_rest()
            consumer.forget()
            sizes.append(consumer.look().num_fds)
    assert sizes[-1] <= sizes[0]


@pytest.mark.parametrize("stage", [Stage.LOOKUP_COMES, Stage.WRITE_BEGINS, Stage.WRITE_RUNS])
def test_c22_a_pool_that_is_emptied_under_a_pull_gets_no_late_bytes(
    stage: Stage, producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    # The request, which waits still, wants its chunks once more: they take twice their room.
    others = Chunks(f"{chunks.name}, others", OPTIONS.num_slots - 2 * COUNT)
    producer.hold(chunks)
    producer.halt_at(stage)
    consumer.want(ASK, producer, chunks.name, chunks)
    producer.halted()
    consumer.forget()
    # The slots that are free have other bytes when those of the first pull come in.
    consumer.hold(others)
    producer.go_on()
    consumer.pulled(chunks.name)
    consumer.at_rest()
    assert consumer.pull(ASK, producer, f"{chunks.name}, proof", others).num_right == others.count


# --- bytes ---


def test_a_chunk_with_wrong_bytes_is_not_loaded_and_costs_no_other(
    producer: EngineProcess, consumer: EngineProcess, chunks: Chunks
) -> None:
    before = consumer.look().stats
    producer.hold(chunks)
    producer.flip(part(chunks, 5, 1))
    pulled = consumer.pull(ASK, producer, chunks.name, chunks)
    assert (pulled.num_loaded, pulled.num_right) == (5, 5)
    after = consumer.at_rest().stats
    assert after.corrupt_chunks == before.corrupt_chunks + 1
    assert after.loaded_chunks == after.verified_chunks == before.loaded_chunks + COUNT - 1
    # Nor is the same chunk tried again and again.
    again = f"{chunks.name} again"
    assert consumer.pull(ASK, producer, again, chunks).num_loaded == 5
    assert consumer.at_rest().stats.corrupt_chunks == before.corrupt_chunks + 2


def test_sixty_four_pulls_from_eight_peers_at_once_bring_the_right_bytes(nursery: Nursery) -> None:
    options = msgspec.structs.replace(OPTIONS, chunk_bytes=64 << 10, num_slots=512)
    with ExitStack() as stack:
        consumer = stack.enter_context(EngineProcess(nursery, options))
        producers = [stack.enter_context(EngineProcess(nursery, options)) for _ in range(8)]
        wanted = [
            (producer, role, Chunks(f"{producer.address} {number}", 4))
            for number, role in enumerate([ASK, PULL] * 4)
            for producer in producers
        ]
        for producer, role, chunks in wanted:
            if role == ASK:
                producer.hold(chunks)
            else:
                producer.keep(chunks.name, chunks)
        for producer, role, chunks in wanted:
            consumer.want(role, producer, chunks.name, chunks)
        for _, _, chunks in wanted:
            assert consumer.pulled(chunks.name).num_right == 4
        assert consumer.at_rest().stats.verified_chunks == 256
        for producer in producers:
            assert producer.at_rest().peers.served_chunks == 32


# --- the end of an engine ---


@pytest.mark.parametrize("who", ["consumer", "producer"])
def test_an_engine_closes_while_bytes_are_on_their_way_and_leaves_no_thread(
    who: str, nursery: Nursery, chunks: Chunks
) -> None:
    options = msgspec.structs.replace(OPTIONS, ends_at_once=False)
    with EngineProcess(nursery, options) as producer, EngineProcess(nursery, options) as consumer:
        producer.hold(chunks)
        producer.halt_at(Stage.WRITE_RUNS)
        consumer.want(ASK, producer, chunks.name, chunks)
        producer.halted()
        closes, stays = (consumer, producer) if who == "consumer" else (producer, consumer)
        if closes is producer:
            # It goes on with the write, and is told to close at once.
            producer.go_on()
        assert closes.close() == ["MainThread"]
        producer.go_on()
        stays.at_rest()
        if stays is consumer:
            pulled = consumer.pulled(chunks.name)
            assert pulled.num_loaded == pulled.num_right
        assert closes.end() == 0
        assert stays.close() == ["MainThread"]
        assert stays.end() == 0


@pytest.mark.parametrize("who", ["consumer", "producer"])
def test_an_engine_closes_in_time_though_its_peer_stands_still(
    who: str, nursery: Nursery, chunks: Chunks
) -> None:
    with EngineProcess(nursery, OPTIONS) as producer, EngineProcess(nursery, OPTIONS) as consumer:
        producer.hold(chunks)
        producer.halt_at(Stage.WRITE_BEGINS)
        consumer.want(ASK, producer, chunks.name, chunks)
        producer.halted()
        if who == "producer":
            consumer.stop()
            producer.go_on()
            assert producer.close() == ["MainThread"]
            consumer.go_on()
            consumer.at_rest()
        else:
            assert consumer.close() == ["MainThread"]
            producer.go_on()
            producer.at_rest()
