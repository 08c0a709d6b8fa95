"""C15 and C21: peers that cannot share chunks find out in the handshake, and say so once, on both sides."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.nixl import NixlAgent
from pdoffload.p2p.line import Heartbeat
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.peer_engine import (
    Chunks,
    EngineOptions,
    PeerEngine,
    at_rest,
    open_fake_agent,
    pull,
)
from pdoffload.testing.raw_peer import RawConsumer, RawPeer, fetch

FIELDS = {"model_name": "org/model", "dtype": "bfloat16", "tp_size": 1, "rope": {"factor": 2}}
GUARDS = {"hash_algo": "sha256", "layout": ["a", 64], "groups": 1}
OPTIONS = EngineOptions(chunk_bytes=8192, fields=FIELDS, guards=GUARDS)
COUNT = 3
_numbers = itertools.count()


@pytest.fixture(scope="module")
def producer() -> Iterator[PeerEngine]:
    engine = PeerEngine(OPTIONS, open_agent=open_fake_agent)
    yield engine
    engine.close()


@pytest.fixture
def chunks(producer: PeerEngine) -> Iterator[Chunks]:
    made = Chunks(f"held {next(_numbers)}", COUNT)
    producer.hold(made)
    yield made
    at_rest(producer)
    producer.forget()


# What differs at the consumer, the name that the log gives it, and both values as they stand there.
MISMATCHES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "model": (
        {"fields": {**FIELDS, "model_name": "org/other"}},
        "model_name",
        '"org/model"',
        '"org/other"',
    ),
    "dtype": ({"fields": {**FIELDS, "dtype": "float16"}}, "dtype", '"bfloat16"', '"float16"'),
    "tp 2": ({"fields": {**FIELDS, "tp_size": 2}}, "tp_size", "1", "2"),
    "tp 4": ({"fields": {**FIELDS, "tp_size": 4}}, "tp_size", "1", "4"),
    "a nested setting": (
        {"fields": {**FIELDS, "rope": {"factor": 4}}},
        "rope",
        '{"factor":2}',
        '{"factor":4}',
    ),
    "block length": ({"chunk_bytes": 16384}, "block_len", "8192", "16384"),
    "shorter blocks": ({"chunk_bytes": 4096}, "block_len", "8192", "4096"),
    "layout": ({"guards": {**GUARDS, "layout": ["b", 64]}}, "layout", '["a",64]', '["b",64]'),
    "group count": ({"guards": {**GUARDS, "groups": 2}}, "groups", "1", "2"),
    "hash function": (
        {"guards": {**GUARDS, "hash_algo": "xxhash"}},
        "hash_algo",
        '"sha256"',
        '"xxhash"',
    ),
    "hash seed": ({"hash_seed": "42"}, "hash_seed", "'0'", "'42'"),
    "everything": (
        {"hash_seed": "42", "chunk_bytes": 4096, "fields": {**FIELDS, "dtype": "fp8"}},
        "dtype",
        '"bfloat16"',
        '"fp8"',
    ),
}


@pytest.mark.parametrize("role", ["remote_kv_source", "remote_prefiller"])
@pytest.mark.parametrize("case", MISMATCHES)
def test_what_differs_is_named_with_both_values_on_both_sides_and_asked_once(
    case: str,
    role: str,
    producer: PeerEngine,
    chunks: Chunks,
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes, name, ours, theirs = MISMATCHES[case]
    before = producer.look().peers.handshakes_refused
    consumer = PeerEngine(msgspec.structs.replace(OPTIONS, **changes), open_agent=open_fake_agent)
    for _ in range(20):
        assert pull(consumer, producer, chunks, role) == 0
    assert consumer.look().peers.handshakes_refused == 1
    assert producer.look().peers.handshakes_refused == before + 1
    consumer.close()
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    (refused,) = [line for line in errors if f"peer {consumer.address} is refused" in line]
    (refuses,) = [line for line in errors if f"peer {producer.address} refuses us" in line]
    for line in (refused, refuses):
        assert f"{name}: {ours} here, {theirs} there" in line
    # Nor does every request leave a line of its own.
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) < 8


def test_a_refused_peer_is_tried_again_now_and_then_and_no_more(
    producer: PeerEngine, chunks: Chunks
) -> None:
    before = producer.look().peers.handshakes_refused
    consumer = PeerEngine(
        msgspec.structs.replace(OPTIONS, hash_seed="another"), open_agent=open_fake_agent
    )
    for _ in range(100):
        pull(consumer, producer, chunks, "remote_kv_source")
        consumer.advance(1.0)
    consumer.close()
    # After 0.5, 1, 2, 4, 8, 16, 30, 30 s.
    assert 5 <= producer.look().peers.handshakes_refused - before <= 9


# What differs at the consumer and is no reason not to share.
MATCHES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the order of settings": {"fields": dict(reversed(FIELDS.items()))},
    "more slots": {"num_slots": 128},
    "another timing": {"heartbeat": Heartbeat(interval_s=1.0, timeout_s=5.0), "num_threads": 1},
    "a setting that only one version knows": {"guards": {**GUARDS, "new in 2030": True}},
    "a setting that an older version does not know": {"guards": {"hash_algo": "sha256"}},
}


@pytest.mark.parametrize("role", ["remote_kv_source", "remote_prefiller"])
@pytest.mark.parametrize("case", MATCHES)
def test_peers_that_can_share_do(
    case: str, role: str, producer: PeerEngine, chunks: Chunks
) -> None:
    consumer = PeerEngine(
        msgspec.structs.replace(OPTIONS, **MATCHES[case]), open_agent=open_fake_agent
    )
    assert pull(consumer, producer, chunks, role) == COUNT
    consumer.close()


# --- who says less, or more ---


def test_a_peer_that_sends_a_fingerprint_alone_is_refused_by_it(
    producer: PeerEngine, chunks: Chunks
) -> None:
    with RawPeer() as raw:
        consumer = RawConsumer(raw, producer, FakeAgent("raw"))
        raw.dial(producer.address)
        raw.say(**consumer.introduction(config_fingerprint="0" * 16))
        assert "config_fingerprint" in raw.hear("disconnect")["reason"]
        # An empty one claims nothing.
        raw.say(**consumer.introduction())
        raw.hear("connect_ack")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_len", 0),
        ("block_len", "8192"),
        ("num_blocks", -1),
        ("num_blocks", 2**62),
        ("base_addr", 2**64 - 1),
        ("agent_metadata", ""),
        ("agent_metadata", b""),
        ("hash_seed", None),
        ("hash_seed", 0),
        ("peer_id", 5),
        ("guards", ["dtype"]),
        ("guards", {"dtype": 1}),
        ("incarnation", None),
    ],
)
def test_an_introduction_with_a_wrong_field_is_no_message(
    field: str, value: Any, producer: PeerEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with RawPeer() as raw:
        consumer = RawConsumer(raw, producer, FakeAgent("raw"))
        raw.dial(producer.address)
        raw.say(**consumer.introduction(**{field: value}))
        raw.say(**consumer.introduction(color="red"))
        raw.hear("connect_ack")
    (line,) = [r.getMessage() for r in caplog.records if "no message" in r.getMessage()]
    # Where a rule takes two fields, both numbers are named.
    assert field in line or str(value) in line


@pytest.mark.nixl
def test_metadata_that_is_cut_or_foreign_costs_its_own_fetch_and_nothing_else() -> None:
    producer = PeerEngine(OPTIONS)
    healthy = PeerEngine(OPTIONS)
    held = Chunks("held", COUNT)
    producer.hold(held)
    agent = NixlAgent("raw", [UcxBackend(reach="network")])
    with RawPeer() as raw:
        consumer = RawConsumer(raw, producer, agent)
        whole = agent.metadata()
        cut = [whole[:length] for length in range(1, len(whole), 20)]
        foreign = [b"\x00" * 400, b"\xff" * 400, whole[::-1], whole + b"more", whole[:200] * 3]
        for number, metadata in enumerate([*cut, *foreign]):
            consumer.introduce(agent_metadata=metadata, incarnation=f"raw{number}.1")
            raw.say(**fetch(held.keys, [0, 1, 2], kv_request_id=f"cut {number}"))
            assert not raw.hear("transfer_done", kv_request_id=f"cut {number}")["success"]
        assert pull(healthy, producer, held, "remote_kv_source") == COUNT
        at_rest(producer, healthy)
    agent.close()
    producer.close()
    healthy.close()
