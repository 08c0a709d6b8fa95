"""Consumers that say what they may not, or nothing that makes sense: it costs nobody else anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdoffload.p2p.messages import MAX_FRAME_BYTES
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.peer_engine import (
    Chunks,
    EngineOptions,
    PeerEngine,
    at_rest,
    open_fake_agent,
    pull,
    step_until,
)
from pdoffload.testing.raw_peer import RawConsumer, RawPeer, fetch, lookup

OPTIONS = EngineOptions(chunk_bytes=8192)
COUNT = 4
_numbers = itertools.count()


@pytest.fixture(scope="module")
def engine() -> Iterator[PeerEngine]:
    """Whom bad peers speak to."""
    made = PeerEngine(OPTIONS, open_agent=open_fake_agent)
    yield made
    made.close()


@pytest.fixture(scope="module")
def healthy() -> Iterator[PeerEngine]:
    made = PeerEngine(OPTIONS, open_agent=open_fake_agent)
    yield made
    made.close()


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    with RawPeer() as peer:
        yield peer


@pytest.fixture
def guest(raw: RawPeer, engine: PeerEngine) -> RawConsumer:
    consumer = RawConsumer(raw, engine, FakeAgent("raw"))
    consumer.introduce()
    return consumer


@pytest.fixture
def held(engine: PeerEngine) -> Chunks:
    """Chunks in the engine's pool."""
    chunks = Chunks(f"held {next(_numbers)}", COUNT)
    engine.hold(chunks)
    return chunks


@pytest.fixture(autouse=True)
def _others_are_served(engine: PeerEngine, healthy: PeerEngine) -> Iterator[None]:
    yield
    chunks = Chunks(f"others {next(_numbers)}", COUNT)
    engine.hold(chunks)
    assert pull(healthy, engine, chunks, "remote_kv_source") == COUNT
    at_rest(engine, healthy)
    engine.forget()
    healthy.forget()


# --- a right raw peer, to know that the wrong ones fail for their fault ---


def test_a_peer_written_to_the_table_alone_pulls_chunks(
    guest: RawConsumer, held: Chunks, engine: PeerEngine
) -> None:
    raw, keys = guest.raw, held.keys
    # Fields that nobody knows are no fault.
    raw.say(type="lookup", kv_request_id="a", keys=[*keys, b"absent"], round_seq=0, color="red")
    answer = raw.hear("lookup_resp")
    assert (answer["keys"], answer["hits"]) == ([*keys, b"absent"], [True] * COUNT + [False])
    indexes = [9, 3, 0, 15]
    raw.say(type="fetch", kv_request_id="a", keys=keys, block_indexes=indexes, round_seq=0, x={})
    done = raw.hear("transfer_done")
    assert (done["success"], done["round_seq"], len(done["checksums"])) == (True, 0, COUNT)
    for number, index in enumerate(indexes):
        chunk = bytes(guest.region.slot_view(index))
        assert chunk == held.bytes_of(number, 8192).tobytes()
    raw.say(type="fetch", kv_request_id="a", keys=[], block_indexes=[], round_seq=1)


def test_a_raw_peer_that_vanishes_costs_its_loans_until_its_connection_is_down(
    guest: RawConsumer, held: Chunks, engine: PeerEngine
) -> None:
    guest.raw.say(type="lookup", kv_request_id="a", keys=held.keys, round_seq=0)
    guest.raw.hear("lookup_resp")
    assert engine.look().num_lent == COUNT
    # Its listening socket goes: our line to it breaks.
    guest.raw.close()
    at_rest(engine)


# --- frames that are no messages ---

GARBAGE = {
    "empty": b"",
    "one byte": b"\xc1",
    "no map": b"\x93\x01\x02\x03",
    "a map of another kind": b"\x81\xa4type\xa5hello",
    "no type": b"\x81\xa1a\x01",
    "an array of 4 billion": b"\x83\xa4type\xa6lookup\xa4keys\xdd\xff\xff\xff\xff",
    "deep": b"\x82\xa4type\xaadisconnect\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "a megabyte of noise": bytes(range(256)) * 4096,
    "text that is no UTF-8": b"\x82\xa4type\xaadisconnect\xa6reason\xa2\xff\xfe",
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE)
def test_a_frame_that_is_no_message_is_counted_and_closes_nothing(
    frame: bytes, guest: RawConsumer, held: Chunks, engine: PeerEngine
) -> None:
    before = engine.look().peers.bad_messages
    guest.raw.say_bytes(frame)
    # Not even the session it came in.
    guest.raw.say(type="lookup", kv_request_id="a", keys=held.keys, round_seq=0)
    assert guest.raw.hear("lookup_resp")["hits"] == [True] * COUNT
    step_until(lambda: engine.look().peers.bad_messages == before + 1, "a count", engine)
    guest.raw.close()


@pytest.mark.parametrize("frames", [[b"x", b"y"], [b""] * 9, []], ids=["two", "nine", "none"])
def test_a_message_of_more_frames_than_one_is_dropped(
    frames: list[bytes], guest: RawConsumer, held: Chunks, engine: PeerEngine
) -> None:
    before = engine.look().peers.bad_messages
    guest.raw.say_bytes(b"", *frames)
    guest.raw.say(type="lookup", kv_request_id="a", keys=held.keys, round_seq=0)
    guest.raw.hear("lookup_resp")
    step_until(lambda: engine.look().peers.bad_messages == before + 1, "a count", engine)
    guest.raw.close()


def test_a_frame_longer_than_any_message_ends_its_connection_and_no_other(
    guest: RawConsumer, engine: PeerEngine, healthy: PeerEngine
) -> None:
    guest.raw.say_bytes(bytes(MAX_FRAME_BYTES + 1000))
    chunks = Chunks("meanwhile", COUNT)
    engine.hold(chunks)
    assert pull(healthy, engine, chunks, "remote_kv_source") == COUNT
    guest.raw.close()
    at_rest(engine)


# --- messages out of turn ---


STRANGERS = {
    "lookup": lookup(),
    "fetch": fetch([b"12345"], [0]),
    "the end of a request": fetch([], []),
    "abort_fetch": {"type": "abort_fetch", "kv_request_id": "a", "round_seq": 0},
}


@pytest.mark.parametrize("message", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_who_asks_is_told_to_introduce_itself(
    message: dict[str, Any], raw: RawPeer, engine: PeerEngine
) -> None:
    raw.dial(engine.address)
    raw.say(**message)
    assert "introduce yourself" in raw.hear("disconnect")["reason"]


ANSWERS = {
    "connect_ack": {"type": "connect_ack", "peer_id": "somebody"},
    "lookup_resp": {
        "type": "lookup_resp",
        "kv_request_id": "a",
        "keys": [b"12345"],
        "hits": [True],
    },
    "transfer_done": {
        "type": "transfer_done",
        "kv_request_id": "a",
        "success": True,
        "round_seq": 0,
    },
    "abort_ack": {"type": "abort_ack", "kv_request_id": "a", "round_seq": 0},
    "disconnect": {"type": "disconnect"},
}


@pytest.mark.parametrize("message", ANSWERS.values(), ids=ANSWERS)
def test_c19_answers_to_what_nobody_asked_are_ignored(
    message: dict[str, Any], raw: RawPeer, engine: PeerEngine
) -> None:
    raw.dial(engine.address)
    for _ in range(3):
        raw.say(**message)
    raw.say(**lookup())
    # Nothing was answered before this.
    assert "introduce yourself" in raw.hear("disconnect")["reason"]
    assert len(raw.heard) == 1


BROKEN: dict[str, Callable[[Chunks], list[dict[str, Any]]]] = {
    "a slot it has not": lambda held: [fetch(held.keys, [0, 1, 2, 16])],
    "a slot far away": lambda held: [fetch(held.keys, [0, 1, 2, 2**62])],
    "one slot for two fetches": lambda held: [
        fetch([b"not here"], [5]),
        fetch(held.keys, [5, 6, 7, 8], kv_request_id="b"),
    ],
    "one round twice": lambda held: [fetch([b"not here"], [5]), fetch([b"nor here"], [6])],
    "one key twice": lambda held: [fetch([held.keys[0]] * 2, [0, 1])],
    "an answer to no question": lambda held: [{"type": "connect_ack", "peer_id": "me"}],
}


@pytest.mark.parametrize("messages", BROKEN.values(), ids=BROKEN)
def test_a_guest_who_breaks_a_rule_is_told_which_and_is_no_guest_any_more(
    messages: Callable[[Chunks], list[dict[str, Any]]],
    guest: RawConsumer,
    held: Chunks,
    engine: PeerEngine,
) -> None:
    untouched = bytes(guest.region.slot_view(5))
    guest.raw.say(**lookup(keys=held.keys, kv_request_id="reserved"))
    guest.raw.hear("lookup_resp")
    for message in messages(held):
        guest.raw.say(**message)
    assert guest.raw.hear("disconnect")["reason"]
    # What was reserved for it is free, and it may come again.
    at_rest(engine)
    assert bytes(guest.region.slot_view(5)) == untouched
    guest.introduce(incarnation="raw.2")
    guest.raw.say(**lookup(keys=held.keys))
    assert guest.raw.hear("lookup_resp")["hits"] == [True] * COUNT
    guest.raw.close()


def test_a_slot_twice_in_one_fetch_is_no_message(
    guest: RawConsumer, held: Chunks, engine: PeerEngine
) -> None:
    guest.raw.say(**fetch(held.keys[:2], [3, 3]))
    guest.raw.say(type="abort_fetch", kv_request_id="a", round_seq=0)
    guest.raw.hear("abort_ack")
    assert not [each for each in guest.raw.heard if each["type"] == "transfer_done"]


def test_c18_aborts_of_what_is_not_known_are_answered_and_repeated_ends_are_not(
    guest: RawConsumer, held: Chunks, engine: PeerEngine
) -> None:
    for number in range(3):
        guest.raw.say(type="abort_fetch", kv_request_id="never seen", round_seq=number)
        assert guest.raw.hear("abort_ack")["round_seq"] == number
    for _ in range(3):
        guest.raw.say(**fetch([], [], kv_request_id="never seen"))
    guest.raw.say(**fetch(held.keys, [0, 1, 2, 3]))
    assert guest.raw.hear("transfer_done")["success"]


# --- whatever they say ---

some_ids = st.sampled_from(["a", "b"])
rounds = st.integers(0, 2)
words = st.one_of(
    st.builds(lookup, kv_request_id=some_ids, round_seq=rounds),
    st.builds(lambda n, i, r, k: ("fetch", n, i, r, k), rounds, some_ids, rounds, st.booleans()),
    st.builds(
        lambda kind, i, r: {"type": kind, "kv_request_id": i, "round_seq": r},
        st.sampled_from(["abort_fetch", "abort_ack"]),
        some_ids,
        rounds,
    ),
    st.sampled_from([*ANSWERS.values(), {"type": "connect"}, fetch([], [])]),
    st.binary(max_size=30),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(talk=st.lists(words, max_size=15))
def test_whatever_a_peer_says_it_leaves_nothing(talk: list[Any], engine: PeerEngine) -> None:
    engine.forget()
    held = Chunks(f"held {next(_numbers)}", COUNT)
    engine.hold(held)
    with RawPeer() as raw:
        consumer = RawConsumer(raw, engine, FakeAgent("raw"))
        consumer.introduce()
        for word in talk:
            if isinstance(word, bytes):
                raw.say_bytes(word)
            elif isinstance(word, tuple):
                _, number, kv_request_id, round_seq, exists = word
                keys = held.keys if exists else [b"absent"]
                indexes = [number * COUNT + each for each in range(len(keys))]
                raw.say(**fetch(keys, indexes, kv_request_id=kv_request_id, round_seq=round_seq))
            elif word == {"type": "connect"}:
                raw.say(**consumer.introduction(incarnation=f"raw.{next(_numbers)}"))
            elif word["type"] == "lookup":
                raw.say(**{**word, "keys": held.keys})
            else:
                raw.say(**word)
        # All of it has been heard when the engine has answered this.
        raw.say(**consumer.introduction(incarnation="raw.last"))
        raw.say(type="abort_fetch", kv_request_id="last", round_seq=0)
        raw.hear("abort_ack", kv_request_id="last")
    at_rest(engine)


def test_who_was_turned_away_again_and_again_may_introduce_itself_right_after(
    engine: PeerEngine, held: Chunks
) -> None:
    for number in range(20):
        with RawPeer() as raw:
            consumer = RawConsumer(raw, engine, FakeAgent("raw"))
            raw.dial(engine.address)
            for _ in range(10):
                raw.say(**lookup())
            raw.say(**consumer.introduction(incarnation=f"raw{number}.1"))
            raw.say(**lookup(keys=held.keys, kv_request_id="last"))
            assert raw.hear("lookup_resp", kv_request_id="last")["hits"] == [True] * COUNT
    at_rest(engine)
