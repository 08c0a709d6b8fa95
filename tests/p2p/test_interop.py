"""Our p2p tier and vLLM's own pull from each other; every byte is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from peer_process import (
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
NUM_SLOTS = 64


class Trio(msgspec.Struct, frozen=True):
    """vLLM's own peer, one of ours that shares with it, and one that wants checksums."""

    stock: Peer
    ours: Peer
    strict: Peer


def started(who: Who, **extra_config: str) -> Peer:
    return Peer(who, chunk_bytes=CHUNK_BYTES, num_slots=NUM_SLOTS, extra_config=extra_config)


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    with (
        started(Who.STOCK) as stock,
        started(Who.OURS, verify="if_present") as ours,
        started(Who.OURS) as strict,
    ):
        yield Trio(stock, ours, strict)


@pytest.fixture(params=["stock pulls from ours", "ours pulls from stock"])
def ends(request: pytest.FixtureRequest, trio: Trio) -> Iterator[tuple[str, Peer, Peer]]:
    """(a name, the producer, the consumer); our books are proved when the test ends."""
    trio.ours.look(), trio.strict.look()
    if request.param == "stock pulls from ours":
        # Also from one that insists on checksums: what it gives has them.
        yield request.param, trio.strict, trio.stock
    else:
        yield request.param, trio.stock, trio.ours
    assert trio.ours.look().warnings == []
    assert trio.strict.look().warnings == []


def test_a_prefix_is_found_at_a_peer_and_pulled(ends: tuple[str, Peer, Peer]) -> None:
    name, producer, consumer = ends
    keys = keys_of(f"prefix {name}", 16)
    stored = producer.fill(Request(f"stores {name}", keys), seed=1)
    (pulled,) = consumer.pull(Request(f"asks {name}", keys, from_source(producer, f"asks {name}")))
    assert (pulled.num_loaded, pulled.in_time) == (16, True)
    assert consumer.read(keys) == stored
    assert producer.read(keys) == stored, "the producer still has them"


def test_what_the_peer_lacks_ends_the_prefix(ends: tuple[str, Peer, Peer]) -> None:
    name, producer, consumer = ends
    keys = keys_of(f"short {name}", 6)
    stored = producer.fill(Request(f"fills {name}", keys[:4]), seed=2)
    (pulled,) = consumer.pull(Request(f"short {name}", keys, from_source(producer, f"sh {name}")))
    assert (pulled.num_loaded, pulled.in_time) == (4, True)
    assert consumer.read(keys) == [*stored, None, None]


def test_a_peer_that_has_nothing_says_so_at_once(ends: tuple[str, Peer, Peer]) -> None:
    name, producer, consumer = ends
    keys = keys_of(f"nothing {name}", 3)
    (pulled,) = consumer.pull(Request(f"nothing {name}", keys, from_source(producer, f"no {name}")))
    assert (pulled.num_loaded, pulled.in_time) == (0, True)


def test_a_decoder_pulls_what_a_prefiller_keeps_for_it(ends: tuple[str, Peer, Peer]) -> None:
    name, producer, consumer = ends
    keys, role = keys_of(f"kept {name}", 16), f"kept {name}"
    stored = producer.fill(Request(f"prefill {name}", keys, for_decoder(role)), seed=3)
    (pulled,) = consumer.pull(Request(f"decode {name}", keys, from_prefiller(producer, role)))
    assert (pulled.num_loaded, pulled.in_time) == (16, True)
    assert consumer.read(keys) == stored


def test_a_decoder_may_ask_before_the_prefiller_has_stored(ends: tuple[str, Peer, Peer]) -> None:
    name, producer, consumer = ends
    keys, role = keys_of(f"early {name}", 4), f"early {name}"
    consumer.send(Pull([Request(f"decode early {name}", keys, from_prefiller(producer, role))]))
    stored = producer.fill(Request(f"prefill early {name}", keys, for_decoder(role)), seed=4)
    (pulled,) = consumer.answer()
    assert (pulled.num_loaded, pulled.in_time) == (4, True)
    assert consumer.read(keys) == stored


def test_a_prefiller_stores_in_pieces_and_the_decoder_gets_them_all(
    ends: tuple[str, Peer, Peer],
) -> None:
    name, producer, consumer = ends
    keys, role = keys_of(f"pieces {name}", 6), f"pieces {name}"
    stored = []
    for first in (0, 2, 4):
        piece = Request(f"piece {first} {name}", keys[first : first + 2], for_decoder(role))
        stored += producer.fill(piece, seed=first)
    (pulled,) = consumer.pull(Request(f"decode p {name}", keys, from_prefiller(producer, role)))
    assert (pulled.num_loaded, pulled.in_time) == (6, True)
    assert consumer.read(keys) == stored


@pytest.mark.parametrize("role", [from_source, from_prefiller])
def test_many_rounds_over_one_connection(
    ends: tuple[str, Peer, Peer], role: Callable[[Peer, str], dict[str, Any]]
) -> None:
    name, producer, consumer = ends
    for number in range(10):
        each = f"{name} {role.__name__} {number}"
        keys = keys_of(each, 4)
        params = for_decoder(each) if role is from_prefiller else None
        stored = producer.fill(Request(f"stores {each}", keys, params), seed=number)
        (pulled,) = consumer.pull(Request(each, keys, role(producer, each)))
        assert (pulled.num_loaded, pulled.in_time) == (4, True)
        assert consumer.read(keys) == stored


def test_requests_at_once_over_one_connection(ends: tuple[str, Peer, Peer]) -> None:
    name, producer, consumer = ends
    wanted = {f"{name} crowd {number}": keys_of(f"{name} c {number}", 2) for number in range(6)}
    stored = {
        each: producer.fill(Request(f"stores {each}", keys), seed=seed)
        for seed, (each, keys) in enumerate(wanted.items())
    }
    pulled = consumer.pull(
        *(Request(each, keys, from_source(producer, each)) for each, keys in wanted.items())
    )
    assert [(each.num_loaded, each.in_time) for each in pulled] == [(2, True)] * 6
    for each, keys in wanted.items():
        assert consumer.read(keys) == stored[each]


def test_both_pull_from_each_other_at_once(trio: Trio) -> None:
    """One pair of sockets each way: both are consumer and producer of the other."""
    ends = ((trio.stock, trio.ours), (trio.ours, trio.stock))
    keys = [keys_of(f"cross {number}", 8) for number in range(2)]
    stored = [
        producer.fill(Request(f"stores cross {number}", keys[number]), seed=number)
        for number, (producer, _) in enumerate(ends)
    ]
    for number, (producer, consumer) in enumerate(ends):
        asked = Request(f"crosses {number}", keys[number], from_source(producer, f"x {number}"))
        consumer.send(Pull([asked]))
    for number, (_, consumer) in enumerate(ends):
        (pulled,) = consumer.answer()
        assert (pulled.num_loaded, pulled.in_time) == (8, True)
        assert consumer.read(keys[number]) == stored[number]


def test_ours_serves_while_its_engine_computes(trio: Trio) -> None:
    keys = keys_of("deep", 4)
    stored = trio.strict.fill(Request("stores deep", keys), seed=5)
    trio.strict.ask(SetForward(Forward.SPIN, 0.5))
    try:
        (pulled,) = trio.stock.pull(Request("deep", keys, from_source(trio.strict, "deep")))
        assert (pulled.num_loaded, pulled.in_time) == (4, True)
        assert trio.stock.read(keys) == stored
    finally:
        trio.strict.ask(SetForward(Forward.IDLE))


def test_a_peer_that_was_asked_first_may_ask_back(trio: Trio) -> None:
    with started(Who.OURS, verify="if_present") as ours:
        for number, (producer, consumer) in enumerate(((ours, trio.stock), (trio.stock, ours))):
            keys = keys_of(f"back {number}", 4)
            stored = producer.fill(Request(f"stores back {number}", keys), seed=number)
            asked = Request(f"back {number}", keys, from_source(producer, f"back {number}"))
            (pulled,) = consumer.pull(asked)
            assert (pulled.num_loaded, pulled.in_time) == (4, True)
            assert consumer.read(keys) == stored


def test_chunks_without_checksums_are_not_loaded_where_they_are_wanted_and_it_is_said_once(
    trio: Trio,
) -> None:
    with started(Who.OURS) as strict:
        for number in range(3):
            keys = keys_of(f"unverified {number}", 4)
            stored = trio.stock.fill(Request(f"stores unverified {number}", keys), seed=number)
            asked = Request(f"u {number}", keys, from_source(trio.stock, f"u {number}"))
            (pulled,) = strict.pull(asked)
            assert (pulled.num_loaded, pulled.in_time) == (0, True), "recompute, do not wait"
            assert strict.read(keys) == [None] * 4
            assert trio.stock.read(keys) == stored
        (warning,) = strict.look().warnings
    assert "checksum" in warning
    assert "Set verify to if_present" in warning


def test_a_decoder_does_not_wait_for_chunks_that_it_would_not_take(trio: Trio) -> None:
    with started(Who.OURS) as strict:
        keys = keys_of("refused", 4)
        trio.stock.fill(Request("prefill refused", keys, for_decoder("refused")), seed=8)
        asked = Request("decode refused", keys, from_prefiller(trio.stock, "refused"))
        (pulled,) = strict.pull(asked, deadline_s=20.0)
        assert (pulled.num_loaded, pulled.in_time) == (0, True)
        assert strict.read(keys) == [None] * 4


def test_what_the_producer_has_evicted_is_a_miss_and_the_next_request_works(
    ends: tuple[str, Peer, Peer],
) -> None:
    name, producer, consumer = ends
    keys = keys_of(f"gone {name}", 4)
    producer.fill(Request(f"stores gone {name}", keys), seed=6)
    for number in range(4):
        others = keys_of(f"others {number} {name}", NUM_SLOTS // 4)
        producer.fill(Request(f"stores others {number} {name}", others), seed=number)
    assert producer.read(keys) == [None] * 4
    (pulled,) = consumer.pull(Request(f"late {name}", keys, from_source(producer, f"late {name}")))
    assert (pulled.num_loaded, pulled.in_time) == (0, True)
    (pulled,) = consumer.pull(Request(f"new {name}", others, from_source(producer, f"new {name}")))
    assert (pulled.num_loaded, pulled.in_time) == (NUM_SLOTS // 4, True)
    assert consumer.read(others) == producer.read(others)
