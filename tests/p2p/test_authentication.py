"""Who is let in: the cluster's secret, and the names that peers give themselves."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import P2pTierConfig
from pdoffload.errors import ConfigError
from pdoffload.p2p.address import Address
from pdoffload.p2p.secret import ClusterSecret
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.engine_process import EngineProcess
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import (
    HOST,
    Chunks,
    EngineOptions,
    PeerEngine,
    at_rest,
    open_fake_agent,
    pull,
    source,
    step_until,
)
from pdoffload.testing.raw_peer import RawConsumer, RawPeer, lookup
from pdoffload.testing.tier_rig import context_of, filled_region
from pdoffload.tiers.peer import open_peer_tier

OPTIONS = EngineOptions(chunk_bytes=8192)
SECRET, OTHER = "the secret of this cluster", "the secret of another one"
COUNT = 3
_numbers = itertools.count()


def engine_with(secret: str) -> PeerEngine:
    options = msgspec.structs.replace(OPTIONS, secret=secret)
    return PeerEngine(options, open_agent=open_fake_agent)


@pytest.fixture
def engine() -> Iterator[PeerEngine]:
    made = engine_with("")
    yield made
    made.close()


@pytest.fixture
def guarded() -> Iterator[PeerEngine]:
    made = engine_with(SECRET)
    yield made
    made.close()


# --- the secret ---


@pytest.mark.parametrize("role", ["remote_kv_source", "remote_prefiller"])
def test_peers_with_one_secret_share(role: str, guarded: PeerEngine) -> None:
    chunks = Chunks("held", COUNT)
    guarded.hold(chunks)
    consumer = engine_with(SECRET)
    assert pull(consumer, guarded, chunks, role) == COUNT
    assert not at_rest(guarded, consumer)[0].peers.logins_refused
    consumer.close()


@pytest.mark.nixl
def test_processes_with_one_secret_share(nursery: Nursery) -> None:
    options = msgspec.structs.replace(OPTIONS, secret=SECRET)
    with EngineProcess(nursery, options) as one, EngineProcess(nursery, options) as other:
        one.works_with(other)
        other.works_with(one)


@pytest.mark.parametrize("role", ["remote_kv_source", "remote_prefiller"])
@pytest.mark.parametrize(
    ("producers", "consumers"),
    [(SECRET, OTHER), (SECRET, ""), ("", SECRET)],
    ids=["another secret", "no secret", "a secret where none is"],
)
def test_a_peer_with_another_secret_gets_nothing_and_computes_at_once(
    producers: str, consumers: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = Chunks("held", COUNT)
    producer, consumer = engine_with(producers), engine_with(consumers)
    producer.hold(chunks)
    for _ in range(5):
        # No deadline of the tier's passes here.
        assert pull(consumer, producer, chunks, role) == 0
        consumer.advance(31)
    seen = producer.look()
    assert seen.peers.handshakes_done == 0
    assert seen.peers.logins_refused >= 5
    assert consumer.look().peers.handshakes_done == 0
    log = "\n".join(record.getMessage() for record in caplog.records)
    assert str(producer.address) in log
    assert "secret" in log
    # Both have tried in vain to have each other's keys; neither is in the log.
    for secret in (SECRET, OTHER):
        assert secret not in log
        assert ClusterSecret(secret.encode()).server_public.decode() not in log
    for each in (producer, consumer):
        at_rest(each)
        each.close()


def test_who_has_no_secret_hears_nothing_and_costs_nothing(guarded: PeerEngine) -> None:
    chunks = Chunks("held", COUNT)
    guarded.hold(chunks)
    before = guarded.look()
    for _ in range(5):
        with RawPeer() as raw:
            consumer = RawConsumer(raw, guarded, FakeAgent("raw"))
            refused = guarded.look().peers.logins_refused
            raw.dial(guarded.address)
            raw.say(**consumer.introduction())
            raw.say(**lookup(keys=chunks.keys))
            raw.say_bytes(b"garbage")
            step_until(
                lambda: guarded.look().peers.logins_refused > refused,  # noqa: B023
                "a refusal",
                guarded,
            )
            raw.listen()
            assert raw.heard == []
    after = guarded.look()
    assert after.peers.bad_messages == before.peers.bad_messages
    assert after.peers.handshakes_done == 0
    step_until(lambda: guarded.look().num_fds <= before.num_fds + 2, "descriptors to go", guarded)
    assert guarded.look().num_threads <= before.num_threads


def test_strangers_do_not_disturb_those_who_are_let_in(guarded: PeerEngine) -> None:
    consumer = engine_with(SECRET)
    with RawPeer() as raw:
        for number in range(5):
            raw.dial(guarded.address)
            raw.say(**lookup())
            chunks = Chunks(f"held {number}", COUNT)
            guarded.hold(chunks)
            assert pull(consumer, guarded, chunks, "remote_kv_source") == COUNT
    consumer.close()


# --- the start of a tier ---


def table(**keys: object) -> P2pTierConfig:
    return P2pTierConfig(**keys)  # type: ignore[arg-type]


def start(tier_table: P2pTierConfig, address: Address) -> Address:
    """Start a tier and close it; where it was bound."""
    region = filled_region(4)
    tier = open_peer_tier(tier_table, address, context_of(region), lambda: "0")
    bound = tier.address
    tier.close(timeout_s=5)
    region.close()
    return bound


@pytest.mark.nixl
def test_c14_port_0_is_any_free_port_that_is_told_as_it_is() -> None:
    assert start(table(), Address("localhost", 0)).port > 0


@pytest.mark.nixl
def test_c14_a_port_that_is_taken_is_an_error_at_once_that_names_it() -> None:
    start(table(), Address(HOST, 0))  # NIXL's import is not what is measured
    threads = threading.active_count()
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        address = Address(HOST, taken.getsockname()[1])
        began_s = SYSTEM_CLOCK.monotonic_s()
        with pytest.raises(ConfigError, match=rf"port.*{address}"):
            start(table(), address)
        assert SYSTEM_CLOCK.monotonic_s() - began_s < 2
    assert threading.active_count() == threads
    # And then it is free.
    assert start(table(), address) == address


@pytest.mark.nixl
def test_c14_two_tiers_of_one_table_are_told_apart_by_their_ports() -> None:
    region = filled_region(4)
    first = open_peer_tier(table(), Address(HOST, 0), context_of(region), lambda: "0")
    with pytest.raises(ConfigError, match=str(first.address)):
        start(table(), first.address)
    first.close(timeout_s=5)
    region.close()


OUTSIDE = "192.0.2.77"  # of a network for documentation (RFC 5737): not loopback, and nobody's


def test_without_a_secret_nothing_but_loopback_is_bound() -> None:
    with pytest.raises(
        ConfigError, match=rf"host: got .{OUTSIDE}.*cluster_secret_file.*allow_unauth"
    ):
        start(table(), Address(OUTSIDE, 0))


@pytest.mark.nixl
@pytest.mark.parametrize("guard", ["secret", "allowed"])
def test_what_is_guarded_is_bound_wherever_the_host_is(guard: str, tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET)
    secret_file.chmod(0o600)
    keys = (
        {"cluster_secret_file": str(secret_file)}
        if guard == "secret"
        else {"allow_unauthenticated": True}
    )
    # It gets as far as the operating system, which has no such address here.
    with pytest.raises(ConfigError, match=rf"host: {OUTSIDE}.*no such address"):
        start(table(**keys), Address(OUTSIDE, 0))


def test_a_secret_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=rf"cluster_secret_file.*{missing}"):
        start(table(cluster_secret_file=missing), Address(HOST, 0))


# --- names ---


def test_a_peer_that_gives_another_name_is_not_let_in(engine: PeerEngine) -> None:
    with RawPeer() as raw:
        consumer = RawConsumer(raw, engine, FakeAgent("raw"))
        raw.dial(engine.address)
        raw.say(**consumer.introduction(peer_id="127.0.0.1:1"))
        step_until(lambda: engine.look().peers.bad_messages, "a count", engine)
    assert engine.look().peers.handshakes_done == 0


@pytest.mark.parametrize(
    "identity", [b"", b"nonsense", b"127.0.0.1:0", b"127.0.0.1:70000", b"127.1:5", b"\xff:1"]
)
def test_an_identity_that_is_no_address_is_dropped(identity: bytes, engine: PeerEngine) -> None:
    with RawPeer(identity) as raw:
        raw.dial(engine.address)
        raw.say(**lookup())
        step_until(lambda: engine.look().peers.bad_messages, "a count", engine)


def test_a_peer_that_calls_itself_by_our_address_starts_no_talk_with_ourselves(
    engine: PeerEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with RawPeer(engine.address.identity) as raw:
        consumer = RawConsumer(raw, engine, FakeAgent("raw"))
        raw.dial(engine.address)
        for _ in range(3):
            raw.say(**consumer.introduction(peer_id=str(engine.address)))
            raw.say(**lookup())
        step_until(lambda: engine.look().peers.bad_messages, "a count", engine)
    with RawPeer() as raw:
        raw.dial(engine.address)
        raw.say(**lookup())
        raw.hear("disconnect")
    at_rest(engine)
    assert len(caplog.records) < 20


@pytest.mark.parametrize("role", ["remote_kv_source", "remote_prefiller"])
def test_a_request_that_names_this_engine_as_its_source_computes(
    role: str, engine: PeerEngine
) -> None:
    engine.hold(Chunks("held", COUNT))
    assert pull(engine, engine, Chunks("absent", COUNT), role) == 0


def test_a_request_that_names_a_host_nobody_knows_computes_at_once(
    engine: PeerEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(host: str) -> list[str]:
        raise OSError(f"{host} is not known")

    monkeypatch.setattr("pdoffload.p2p.names.resolve", unknown)
    where = source(Address("nowhere.invalid", 5710), "id")
    engine.want("r", {"remote_prefiller": where}, Chunks("absent", COUNT))
    step_until(lambda: engine.pulled("r").ended, "a pull", engine)
    assert engine.pulled("r").num_loaded == 0
    assert "nowhere.invalid" in caplog.text
    engine.finish("r")
