"""vLLM's own p2p tier runs between two processes: the yardstick of the interop tests and the benchmark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from peer_process import (
    Forget,
    Forward,
    Peer,
    Pull,
    Request,
    SetForward,
    Who,
    for_decoder,
    from_prefiller,
    from_source,
    keys_of,
)

# Importing vLLM once takes most of it, and more where others have the processor.
pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

CHUNK_BYTES = 2 << 20


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Peer, Peer]]:
    with (
        Peer(Who.STOCK, chunk_bytes=CHUNK_BYTES, num_slots=40) as producer,
        Peer(Who.STOCK, chunk_bytes=CHUNK_BYTES, num_slots=40) as consumer,
    ):
        yield producer, consumer


def test_a_prefix_is_found_at_a_peer_and_pulled(pair: tuple[Peer, Peer]) -> None:
    producer, consumer = pair
    keys = keys_of("prefix", 16)
    stored = producer.fill(Request("stores", keys), seed=1)
    (pulled,) = consumer.pull(Request("asks", keys, from_source(producer, "asks")))
    assert (pulled.num_loaded, pulled.in_time) == (16, True)
    assert consumer.read(keys) == stored
    assert len(set(stored)) == 16, "all chunks differ"


def test_what_the_peer_lacks_ends_the_prefix(pair: tuple[Peer, Peer]) -> None:
    producer, consumer = pair
    keys = keys_of("short", 6)
    producer.fill(Request("stores short", keys[:4]), seed=2)
    (pulled,) = consumer.pull(Request("asks short", keys, from_source(producer, "asks short")))
    assert (pulled.num_loaded, pulled.in_time) == (4, True)
    assert consumer.read(keys)[4:] == [None, None]


def test_a_decoder_pulls_what_a_prefiller_keeps_for_it(pair: tuple[Peer, Peer]) -> None:
    producer, consumer = pair
    keys = keys_of("kept", 8)
    stored = producer.fill(Request("prefill", keys, for_decoder("kept")), seed=3)
    (pulled,) = consumer.pull(Request("decode", keys, from_prefiller(producer, "kept")))
    assert (pulled.num_loaded, pulled.in_time) == (8, True)
    assert consumer.read(keys) == stored


def test_a_decoder_may_ask_before_the_prefiller_has_stored(pair: tuple[Peer, Peer]) -> None:
    producer, consumer = pair
    keys = keys_of("early", 4)
    consumer.send(Pull([Request("decode early", keys, from_prefiller(producer, "early"))]))
    stored = producer.fill(Request("prefill early", keys, for_decoder("early")), seed=4)
    (pulled,) = consumer.answer()
    assert (pulled.num_loaded, pulled.in_time) == (4, True)
    assert consumer.read(keys) == stored


def test_a_busy_engine_serves_between_its_steps(pair: tuple[Peer, Peer]) -> None:
    producer, consumer = pair
    keys = keys_of("busy", 2)
    stored = producer.fill(Request("stores busy", keys), seed=5)
    consumer.ask(Forget())
    for forward in (Forward.SLEEP, Forward.SPIN):
        producer.ask(SetForward(forward, 0.02))
        request_id = f"asks {forward.value}"
        (pulled,) = consumer.pull(Request(request_id, keys, from_source(producer, request_id)))
        assert (pulled.num_loaded, pulled.in_time) == (2, True)
        assert consumer.read(keys) == stored
        consumer.ask(Forget())
    producer.ask(SetForward(Forward.IDLE))


def test_a_request_that_nobody_answers_ends_at_its_deadline(pair: tuple[Peer, Peer]) -> None:
    producer, consumer = pair
    keys = keys_of("unanswered", 1)
    producer.fill(Request("stores unanswered", keys), seed=6)
    producer.pause()
    try:
        asked = Request("asks unanswered", keys, from_source(producer, "asks unanswered"))
        (pulled,) = consumer.pull(asked, deadline_s=0.2)
    finally:
        producer.resume()
    assert (pulled.num_loaded, pulled.in_time) == (0, False)


def test_a_killed_process_is_told_from_a_slow_one_and_leaves_no_memory_behind() -> None:
    peer = Peer(Who.STOCK, chunk_bytes=4096, num_slots=4)
    with peer:
        assert peer.start_s > 0
        peer.process.kill()
        with pytest.raises(AssertionError, match="ended with -9"):
            peer.ask(SetForward(Forward.IDLE))
    assert not [name for name in os.listdir("/dev/shm") if f"peer-{peer.pid}" in name]
    assert not Path(f"/proc/{peer.pid}").exists()
