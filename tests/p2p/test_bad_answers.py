"""Producers that answer wrongly, late, twice or never: a pull ends all the same, and loads no wrong byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import Verify
from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.peer_engine import (
    Chunks,
    EngineOptions,
    PeerEngine,
    at_rest,
    open_fake_agent,
    source,
    step_until,
)
from pdoffload.testing.raw_peer import RawPeer
from pdoffload.testing.tier_rig import filled_region

CHUNK_BYTES = 8192
COUNT = 4
DEADLINES = Deadlines()
AFTER_BACKOFF_S = 1.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def engine() -> Iterator[PeerEngine]:
    """Who asks."""
    made = PeerEngine(EngineOptions(chunk_bytes=CHUNK_BYTES), open_agent=open_fake_agent)
    yield made
    made.close()


class RawProducer:
    """A raw peer that has been asked for chunks, and can really write."""

    def __init__(self, raw: RawPeer, engine: PeerEngine, role: str) -> None:
        self.raw = raw
        self.engine = engine
        self.chunks = Chunks(f"wanted {next(_numbers)}", COUNT)
        self.region: HostRegion = filled_region(COUNT, CHUNK_BYTES)
        for number in range(COUNT):
            self.region.slot_view(number)[:] = self.chunks.bytes_of(number, CHUNK_BYTES).data
        self.agent = FakeAgent("raw")
        self.agent.register_memory(self.region.address, self.region.size_bytes)
        engine.want(self.id, {role: source(raw.address, self.id)}, self.chunks)
        raw.dial(engine.address)
        self.connect: dict[str, Any] = self.hear("connect")
        self.peer = self.agent.add_peer(self.connect["agent_metadata"])

    @property
    def id(self) -> str:
        return self.chunks.name

    def admit(self, **changes: Any) -> None:
        incarnation = {"incarnation": self.connect["incarnation"]}
        name = str(self.raw.address)
        self.raw.say(**{"type": "connect_ack", "peer_id": name, **incarnation, **changes})

    def hear(self, kind: str, **fields: Any) -> dict[str, Any]:
        """What the engine says, which is stepped meanwhile."""
        message: dict[str, Any] | None = None

        def comes() -> bool:
            nonlocal message
            message = self.raw.next(kind, **fields)
            return message is not None

        step_until(comes, kind, self.engine)
        assert message is not None
        return message

    def write(self, fetch: dict[str, Any]) -> list[bytes]:
        """Do what a fetch asks for; the checksums."""
        base, chunk_bytes = self.connect["base_addr"], self.connect["block_len"]
        theirs = [base + index * chunk_bytes for index in fetch["block_indexes"]]
        ours = [self.region.address + number * chunk_bytes for number in range(len(theirs))]
        transfer = self.agent.submit(
            Op.WRITE,
            pieces(MemoryKind.DRAM, ours, chunk_bytes),
            pieces(MemoryKind.DRAM, theirs, chunk_bytes),
            timeout_s=5,
            what="the raw write",
            peer=self.peer,
        )
        self.agent.wait(transfer)
        assert transfer.error is None
        return [xxhash.xxh3_128_digest(self.region.slot_view(n)) for n in range(len(theirs))]

    def done(self, fetch: dict[str, Any], **changes: Any) -> None:
        message = {
            "type": "transfer_done",
            "kv_request_id": self.id,
            "success": True,
            "round_seq": fetch["round_seq"],
        }
        self.raw.say(**{**message, **changes})

    def ended(self) -> int:
        """How many chunks the engine took in the end; they are right."""
        step_until(lambda: self.engine.pulled(self.id).ended, "the end of a pull", self.engine)
        pulled = self.engine.pulled(self.id)
        assert pulled.num_right == pulled.num_loaded
        self.engine.finish(self.id)
        return pulled.num_loaded

    def let_pass(self, limit_s: float) -> None:
        """Let time pass for the engine until its pull has ended, at most so much."""
        passed_s = 0.0
        while passed_s < limit_s and not self.engine.pulled(self.id).ended:
            self.engine.advance(1.0)
            self.engine.step()
            SYSTEM_CLOCK.sleep(0.005)
            passed_s += 1.0


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    with RawPeer() as peer:
        yield peer


@pytest.fixture
def asked(raw: RawPeer, engine: PeerEngine) -> Iterator[RawProducer]:
    yield RawProducer(raw, engine, "remote_kv_source")
    raw.close()
    (seen,) = at_rest(engine)
    assert seen.num_requests == 0
    engine.forget()


@pytest.fixture
def fetched(raw: RawPeer, engine: PeerEngine) -> Iterator[tuple[RawProducer, dict[str, Any]]]:
    """A producer of which a fetch is under way, and the fetch."""
    producer = RawProducer(raw, engine, "remote_prefiller")
    producer.admit()
    yield producer, producer.hear("fetch")
    raw.close()
    (seen,) = at_rest(engine)
    assert seen.num_requests == 0
    engine.forget()


# --- right ones first ---


def test_a_raw_producer_that_does_as_it_should_is_believed(asked: RawProducer) -> None:
    asked.admit(color="red")
    keys = asked.hear("lookup")["keys"]
    hits = [True] * COUNT
    # In two parts, with an answer to what nobody asked, and in another order.
    for part in (keys[2:], [b"nobody asked"], keys[:2]):
        asked.raw.say(
            type="lookup_resp", kv_request_id=asked.id, keys=part, hits=hits[: len(part)], x=1
        )
    fetch = asked.hear("fetch")
    asked.done(fetch, checksums=asked.write(fetch))
    assert asked.ended() == COUNT
    # It is told that this request wants nothing more.
    assert asked.hear("fetch", keys=[])["kv_request_id"] == asked.id


def test_c19_what_is_told_twice_counts_once(
    fetched: tuple[RawProducer, dict[str, Any]], engine: PeerEngine
) -> None:
    producer, fetch = fetched
    before = engine.look().stats.loaded_chunks
    checksums = producer.write(fetch)
    for _ in range(3):
        producer.done(fetch, checksums=checksums)
        producer.raw.say(type="abort_ack", kv_request_id=producer.id, round_seq=fetch["round_seq"])
    producer.done(fetch, success=False)
    assert producer.ended() == COUNT
    assert engine.look().stats.loaded_chunks == before + COUNT


# --- handshakes ---


def test_an_answer_to_an_introduction_that_was_never_made_admits_nobody(asked: RawProducer) -> None:
    asked.admit(incarnation="somebody else's")
    asked.admit()
    asked.hear("lookup")
    assert len(asked.raw.of("lookup")) == 1
    asked.raw.say(type="disconnect")
    assert asked.ended() == 0


@pytest.mark.parametrize(
    "message",
    [
        {"type": "lookup_resp", "keys": [b"12345"], "hits": [True]},
        {"type": "transfer_done", "success": True, "round_seq": 0},
        {"type": "abort_ack", "round_seq": 0},
    ],
    ids=lambda message: message["type"],
)
def test_answers_before_the_handshake_are_late_ones_and_ignored(
    message: dict[str, Any], asked: RawProducer
) -> None:
    asked.raw.say(**message, kv_request_id=asked.id)
    asked.admit()
    keys = asked.hear("lookup")["keys"]
    asked.raw.say(type="lookup_resp", kv_request_id=asked.id, keys=keys, hits=[False] * COUNT)
    assert asked.ended() == 0


def test_a_producer_that_never_admits_costs_a_deadline(
    asked: RawProducer, engine: PeerEngine
) -> None:
    asked.let_pass(DEADLINES.lookup_timeout_s + 1)
    assert asked.ended() == 0


# --- lookups ---


def test_hits_for_other_keys_are_not_taken_for_answers(asked: RawProducer) -> None:
    asked.admit()
    keys = asked.hear("lookup")["keys"]
    asked.raw.say(
        type="lookup_resp", kv_request_id=asked.id, keys=[b"other"] * COUNT, hits=[True] * COUNT
    )
    asked.raw.say(type="lookup_resp", kv_request_id="other", keys=keys, hits=[True] * COUNT)
    asked.raw.say(
        type="lookup_resp", kv_request_id=asked.id, keys=keys, hits=[True, False, True, True]
    )
    # The prefix ends at the first miss; as vLLM asks, what lies behind it is not pulled.
    fetch = asked.hear("fetch")
    assert fetch["keys"] == keys[:1]
    asked.done(fetch, checksums=asked.write(fetch))
    assert asked.ended() == 1


def test_a_lookup_that_is_never_answered_is_a_miss_in_time(asked: RawProducer) -> None:
    asked.admit()
    asked.hear("lookup")
    asked.let_pass(DEADLINES.lookup_timeout_s + 1)
    assert asked.ended() == 0


# --- fetches ---

LIES: dict[str, dict[str, Any]] = {
    "a failure": {"success": False},
    "no checksums": {},
    "too few checksums": {"checksums": [bytes(16)]},
    "wrong checksums": {"checksums": [bytes(16)] * COUNT},
    "checksums of a wrong length": {"checksums": [bytes(15)] * COUNT},
    "a number for a truth": {"success": 1},
}
NO_MESSAGE = ("checksums of a wrong length", "a number for a truth")


@pytest.mark.parametrize("lie", LIES)
def test_what_is_said_of_bytes_that_never_came_is_not_believed(
    lie: str, fetched: tuple[RawProducer, dict[str, Any]], engine: PeerEngine
) -> None:
    producer, fetch = fetched
    producer.done(fetch, **LIES[lie])
    if lie in NO_MESSAGE:
        # As if nothing had been said.
        producer.raw.say(type="disconnect")
    assert producer.ended() == 0


def test_one_wrong_checksum_costs_one_chunk(
    fetched: tuple[RawProducer, dict[str, Any]], engine: PeerEngine
) -> None:
    producer, fetch = fetched
    before = engine.look().stats
    checksums = producer.write(fetch)
    producer.done(fetch, checksums=[*checksums[:2], bytes(16), *checksums[3:]])
    assert producer.ended() == 2
    after = engine.look().stats
    assert after.corrupt_chunks == before.corrupt_chunks + 1
    assert after.loaded_chunks == before.loaded_chunks + 3


@pytest.mark.parametrize("answer", ["abort_ack", "transfer_done", "nothing"])
def test_c19_bytes_that_land_after_the_deadline_are_no_chunks(
    answer: str, fetched: tuple[RawProducer, dict[str, Any]], engine: PeerEngine
) -> None:
    producer, fetch = fetched
    round_ = {"kv_request_id": producer.id, "round_seq": fetch["round_seq"]}
    engine.advance(DEADLINES.load_timeout_s + 1)
    producer.hear("abort_fetch", **round_)
    checksums = producer.write(fetch)
    if answer == "abort_ack":
        producer.raw.say(type="abort_ack", **round_)
        assert producer.ended() == 0
    elif answer == "transfer_done":
        # It had been on its way when the abort came: the bytes are there, in slots that are still ours.
        producer.done(fetch, checksums=checksums)
        assert producer.ended() == COUNT
    else:
        before = producer.connect["incarnation"]
        producer.let_pass(DEADLINES.abort_timeout_s + 1)
        assert producer.ended() == 0
        # Somebody else may get those slots only when nothing can land there: by another agent.
        assert producer.hear("connect")["incarnation"] != before
    producer.done(fetch, checksums=checksums)


def test_bytes_that_the_producer_cannot_call_back_keep_their_slots_until_the_agent_is_replaced(
    fetched: tuple[RawProducer, dict[str, Any]], engine: PeerEngine
) -> None:
    producer, fetch = fetched
    producer.done(fetch, success=False, settled=False)
    assert producer.ended() == 0
    assert producer.hear("connect")["incarnation"] != producer.connect["incarnation"]
    at_rest(engine)
    # What it still writes does not get there: the agent it knew is closed.
    base = producer.connect["base_addr"]
    transfer = producer.agent.submit(
        Op.WRITE,
        pieces(MemoryKind.DRAM, [producer.region.address], CHUNK_BYTES),
        pieces(MemoryKind.DRAM, [base], CHUNK_BYTES),
        timeout_s=5,
        what="a late write",
        peer=producer.peer,
    )
    assert producer.agent.wait(transfer).error is not None


def test_stock_vllm_hears_of_another_receiving_agent_in_a_new_session(engine: PeerEngine) -> None:
    options = EngineOptions(chunk_bytes=CHUNK_BYTES, verify=Verify.IF_PRESENT)
    consumer = PeerEngine(options, open_agent=open_fake_agent)
    with RawPeer(handover=False) as raw:
        stock = RawProducer(raw, consumer, "remote_prefiller")
        raw.say(type="connect_ack", peer_id=str(raw.address))
        stock.hear("fetch")
        # It does not answer: what it may still write is kept away from the slots by another agent.
        stock.let_pass(DEADLINES.load_timeout_s + DEADLINES.abort_timeout_s + 2)
        assert stock.ended() == 0
        at_rest(consumer)
        # It reads that the session is over some time later, as a busy engine does.
        stock.hear("disconnect")
        consumer.advance(AFTER_BACKOFF_S)
        consumer.want("next", {"remote_prefiller": source(raw.address, "next")}, stock.chunks)
        stock.hear("connect")
    consumer.close()


def test_a_producer_that_does_not_read_what_it_is_asked_costs_deadlines_and_no_memory(
    engine: PeerEngine,
) -> None:
    with RawPeer() as raw:
        role = {"remote_kv_source": source(raw.address, "id")}
        for number in range(30):
            engine.want(f"r{number}", role, Chunks(f"unread {number}", COUNT))
        for number in range(30):
            engine.step()
            engine.finish(f"r{number}")
    at_rest(engine)


def test_wrong_bytes_are_not_in_the_pool_afterwards(
    fetched: tuple[RawProducer, dict[str, Any]], engine: PeerEngine
) -> None:
    producer, fetch = fetched
    np.frombuffer(producer.region.slot_view(0), np.uint8)[:] ^= 1
    right = [
        xxhash.xxh3_128_digest(producer.chunks.bytes_of(number, CHUNK_BYTES))
        for number in range(COUNT)
    ]
    producer.write(fetch)
    producer.done(fetch, checksums=right)
    assert producer.ended() == 0
    key: BlockKey = producer.chunks.keys[0]
    assert key not in engine.tiering.plan.index
