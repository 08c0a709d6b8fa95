"""Agents over Mooncake's Transfer Engine in one process; between processes: `test_peers.py`.

The real engine where the package is there; one that answers as it is told where its answers matter.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pdoffload.agent import mooncake, mooncake_engine, mooncake_peer
from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.mooncake import (
    MAX_ROWS_IN_FLIGHT,
    MooncakeAgent,
    MooncakeDriver,
)
from pdoffload.agent.mooncake_engine import MooncakeError
from pdoffload.agent.mooncake_metadata import EngineMetadata, decode
from pdoffload.agent.mooncake_peer import EnginePeer
from pdoffload.agent.mooncake_sockets import Contact
from pdoffload.agent.peer import Peer
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import BackendUnusable, NixlError
from pdoffload.testing import netns, verbs
from pdoffload.testing.agent_rig import PAGE, Memory
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.netns import NetworkNamespace
from pdoffload.testing.peer_child import PeerChild
from pdoffload.testing.peer_contract import PeerContract

needs_mooncake = pytest.mark.mooncake


class PacedClock(FakeClock):
    """Stands still like any fake clock, but its sleeps leave the engine's threads time."""

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        threading.Event().wait(duration_s)


@needs_mooncake
class TestPeers(PeerContract):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return PacedClock()

    @pytest.fixture(autouse=True)
    def _gate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """First contacts wait while it is closed, as they do at a peer that is stopped."""
        self.gate = threading.Event()
        self.gate.set()
        why_not = EnginePeer._why_not

        def wait_first(peer: EnginePeer) -> str:
            while not self.gate.wait(0.01) and not peer._left.is_set():
                pass
            return why_not(peer)

        monkeypatch.setattr(EnginePeer, "_why_not", wait_first)

    def make_agent(self, clock: Clock) -> MooncakeAgent:
        return MooncakeAgent("contract", "127.0.0.1", clock=clock)

    def stall_write(
        self, agent: DrivenAgent, local: Descriptors, remote: Descriptors, peer: Peer
    ) -> Transfer:
        self.gate.clear()
        return super().stall_write(agent, local, remote, peer)

    def wake(self, agent: DrivenAgent) -> None:
        self.gate.set()


# --- the real engine ---


class Pair:
    """Two agents with a memory each; the first knows the second."""

    def __init__(self) -> None:
        self.agent, self.other = (MooncakeAgent("pair", "127.0.0.1") for _ in range(2))
        self.here, self.there = Memory(), Memory()
        self.agent.register_memory(self.here.address, self.here.size_bytes)
        self.other.register_memory(self.there.address, self.there.size_bytes)
        self.told = decode(self.other.metadata())

    def write(self, metadata: EngineMetadata, *, timeout_s: float = 10.0) -> Transfer:
        """A page, to a peer that is added for it and removed if that is possible."""
        self.here.fill(0)
        peer = self.agent.add_peer(metadata.encode())
        done = self.agent.wait(
            self.agent.submit(
                Op.WRITE,
                self.here.rows(0),
                pieces(MemoryKind.DRAM, [metadata.regions[0][0]], PAGE),
                timeout_s=timeout_s,
                what="a write",
                peer=peer,
            )
        )
        if done.settled:
            peer.remove()
        return done


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for each in (pair.agent, pair.other):
        each.check()
        assert each.close(timeout_s=0.1) == []
        assert each.counts.balanced


@needs_mooncake
def test_more_rows_than_the_engine_takes_at_once_arrive(pair: Pair) -> None:
    size_bytes = 16
    offsets = np.arange(0, pair.here.size_bytes, size_bytes)
    assert len(offsets) > 8 * MAX_ROWS_IN_FLIGHT
    pair.here.fill(*range(32))
    peer = pair.agent.add_peer(pair.other.metadata())
    done = pair.agent.wait(
        pair.agent.submit(
            Op.WRITE,
            pieces(MemoryKind.DRAM, pair.here.address + offsets, size_bytes),
            pieces(MemoryKind.DRAM, pair.there.address + offsets[::-1], size_bytes),
            timeout_s=60,
            what="many rows",
            peer=peer,
        )
    )
    assert done.state is TransferState.DONE, done.error
    sent = b"".join(pair.here.page(slot) for slot in range(32))
    came = b"".join(pair.there.page(slot) for slot in range(32))
    rows = [sent[at : at + size_bytes] for at in offsets]
    assert came == b"".join(reversed(rows))


@needs_mooncake
def test_c17_an_address_that_another_engine_has_now_is_not_mistaken_for_it(pair: Pair) -> None:
    gone = EngineMetadata.of("gone", pair.told.host, pair.told.port, 9, list(pair.told.regions))
    cut = pair.write(gone)
    assert cut.state is TransferState.FAILED
    assert "another Transfer Engine answers" in str(cut.error)
    assert pair.there.page(0) == bytes(PAGE)
    assert pair.write(pair.told).state is TransferState.DONE
    assert pair.there.page(0) == pair.here.page(0)


@needs_mooncake
def test_where_nobody_listens_nothing_is_written_until_somebody_does(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nobody = EngineMetadata.of("nobody", "127.0.0.1", port, 9, list(pair.told.regions))
    for _ in range(2):
        cut = pair.write(nobody)
        assert cut.state is TransferState.FAILED
        assert cut.settled
        assert f"no Transfer Engine answers at 127.0.0.1:{port}" in str(cut.error)
    assert pair.write(pair.told).state is TransferState.DONE


@needs_mooncake
def test_one_that_listens_and_says_nothing_costs_a_deadline_and_delays_nobody(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        silent = EngineMetadata.of("silent", "127.0.0.1", port, 9, list(pair.told.regions))
        late = pair.write(silent, timeout_s=0.05)
        assert late.state is TransferState.UNKNOWN
        assert pair.write(pair.told).state is TransferState.DONE
        assert pair.agent.close(timeout_s=0.01) == []
    assert late.settled_state is TransferState.FAILED
    assert not [each for each in threading.enumerate() if "mooncake-contact" in each.name]


@needs_mooncake
def test_ports_of_a_loopback_host_are_the_loopback_s_alone() -> None:
    driver = MooncakeDriver("driver", "localhost")
    try:
        tied = {
            each.getsockname()[1]: each.getsockopt(
                socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16
            ).strip(b"\0")
            for each in mooncake_listeners(driver)
        }
        assert tied == {driver._port: b"lo", driver._data_port: b"lo"}
    finally:
        driver.close(abandon=False)


@needs_mooncake
def test_ports_that_others_reach_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    mooncake_engine.warn_of_open_ports.cache_clear()
    with caplog.at_level(logging.WARNING, "pdoffload"):
        for _ in range(2):
            driver = MooncakeDriver("driver", "0.0.0.0")
            ports = {each.getsockname()[1] for each in mooncake_listeners(driver)}
            driver.close(abandon=False)
            assert ports == {driver._port, driver._data_port}
    (line,) = caplog.messages
    assert "on all interfaces, without authentication" in line
    assert "0.0.0.0" in line


def mooncake_listeners(driver: MooncakeDriver) -> Iterator[socket.socket]:
    from pdoffload.agent.mooncake_sockets import _listens, _sockets_at

    return (each for each in _sockets_at(driver._ports) if _listens(each))


@needs_mooncake
def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_LEVEL", "WARNING")
    before = dict(os.environ)
    MooncakeDriver("driver", "127.0.0.1").close(abandon=False)
    assert dict(os.environ) == before


@needs_mooncake
def test_between_hosts_bytes_arrive_and_ports_of_the_loopback_are_closed() -> None:
    if reason := netns.why_unavailable():
        pytest.skip(f"no network namespaces here: {reason}")
    size_bytes = 1 << 20
    with netns.joined_pair() as (left, right), ExitStack() as stack:

        def start(end: NetworkNamespace, host: str) -> PeerChild:
            child = PeerChild(
                size_bytes, "MOONCAKE", host=host, inside=end.enter(), **verbs.environment()
            )
            stack.enter_context(child).ask("open")
            return child

        def write(told: bytes, address: int) -> dict[str, Any]:
            writer.ask(f"add {told.hex()}")
            writer.ask(f"write {address} {size_bytes} 1 30")
            return writer.ask("wait")

        writer = start(left, left.address)
        reader, private = start(right, right.address), start(right, "localhost")
        answer = reader.ask("metadata")
        assert write(bytes.fromhex(answer["metadata"]), answer["address"])["state"] == "done"
        assert writer.ask("digest") == reader.ask("digest")
        before = private.ask("digest")
        answer = private.ask("metadata")
        told = decode(bytes.fromhex(answer["metadata"]))
        told = msgspec.structs.replace(told, host=right.address)
        cut = write(told.encode(), answer["address"])
        assert cut["state"] == "failed"
        assert "Connection refused" in cut["error"]
        assert private.ask("digest") == before


@needs_mooncake
@pytest.mark.parametrize("kind", [MemoryKind.VRAM, MemoryKind.FILE])
def test_only_host_memory_can_be_registered(kind: MemoryKind) -> None:
    driver = MooncakeDriver("driver", "127.0.0.1")
    with pytest.raises(MooncakeError, match=f"{kind.value} is not host memory"):
        driver.register(kind, np.array([[4096, 4096, 3]], dtype=np.uint64))
    driver.close(abandon=False)


@needs_mooncake
def test_without_a_peer_nothing_moves(pair: Pair) -> None:
    cut = pair.agent.submit(
        Op.WRITE, pair.here.rows(0), pair.here.rows(1), timeout_s=1, what="a copy"
    )
    assert cut.state is TransferState.FAILED
    assert "between peers alone" in str(cut.error)


# --- an engine that answers as it is told ---


class Engine:
    """Takes every row; `statuses` says how each ends, in the order of the questions."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, int, int, int, str]] = []
        self.refuses_segments = False
        self.refuses_rows = False
        self.statuses: deque[int] = deque()
        self.registering: deque[int] = deque()
        self.registered: list[int] = []

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, address: int, size_bytes: int) -> int:
        code = self.registering.popleft() if self.registering else 0
        if not code:
            self.registered.append(address)
        return code

    def unregister_memory(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_transfer_async(
        self, segment: str, here: list[int], there: list[int], sizes: list[int], opcode: str
    ) -> int:
        if self.refuses_rows if here else self.refuses_segments:
            return 0
        for row in zip(here, there, sizes, strict=True):
            self.posted.append((segment, *row, opcode))
        return len(self.posted) or 1

    def transfer_check_status(self, batch: int) -> int:
        assert 0 < batch <= len(self.posted)
        return self.statuses.popleft() if self.statuses else 0

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        return 0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    opcodes = SimpleNamespace(Write="write", Read="read")
    monkeypatch.setattr(mooncake_engine, "_load", lambda: SimpleNamespace(TransferOpcode=opcodes))
    monkeypatch.setattr(mooncake, "make_engine", lambda host: engine)
    monkeypatch.setattr(MooncakeDriver, "_own_data_port", lambda driver: 2)
    monkeypatch.setattr(mooncake, "keep_to_loopback", lambda ports: None)
    monkeypatch.setattr(mooncake, "hang_up", lambda ports: None)
    monkeypatch.setattr(mooncake, "rouse", lambda port: None)
    monkeypatch.setattr(EnginePeer, "_why_not", lambda peer: "")
    return engine


@pytest.fixture
def driver(engine: Engine) -> Iterator[MooncakeDriver]:
    driver = MooncakeDriver("driver", "127.0.0.1")
    region = [(1 << 20, 1 << 20)]
    driver.add_peer(EngineMetadata.of("peer", "10.0.0.7", 15001, 16002, region).encode())
    yield driver
    driver.close(abandon=False)


def request(driver: MooncakeDriver, op: Op, count: int) -> Any:
    """A request of so many rows of 16 bytes, whose contact is made."""
    starts = [(1 << 20) + 16 * i for i in range(count)]
    rows = pieces(MemoryKind.DRAM, starts, 16)
    made = driver.make(op, rows, rows, "peer")
    driver.start(made)
    assert made.peer._decided.wait(10)
    return made


@pytest.mark.parametrize(
    ("op", "state"), [(Op.READ, TransferState.FAILED), (Op.WRITE, TransferState.UNKNOWN)]
)
def test_a_failed_row_is_told_when_no_other_is_under_way(
    engine: Engine, driver: MooncakeDriver, op: Op, state: TransferState
) -> None:
    made = request(driver, op, MAX_ROWS_IN_FLIGHT + 5)
    driver.check(made)
    assert len(engine.posted) == MAX_ROWS_IN_FLIGHT
    engine.statuses.extend([1, -1, 0])
    assert driver.check(made).state is TransferState.RUNNING
    assert len(engine.posted) == MAX_ROWS_IN_FLIGHT, "a row was posted after one had failed"
    engine.statuses.extend([1] * (MAX_ROWS_IN_FLIGHT - 2))
    verdict = driver.check(made)
    assert verdict.state is state
    assert "a row did not reach peer" in str(verdict.error)
    assert made.peer.rows_in_flight == 0


def test_rows_are_posted_as_others_end(engine: Engine, driver: MooncakeDriver) -> None:
    made = request(driver, Op.WRITE, 2 * MAX_ROWS_IN_FLIGHT)
    second = request(driver, Op.READ, 1)
    driver.check(made)
    assert driver.check(second).state is TransferState.RUNNING
    assert len(engine.posted) == MAX_ROWS_IN_FLIGHT
    engine.statuses.extend([1, 1, 0])
    driver.check(made)
    assert len(engine.posted) == MAX_ROWS_IN_FLIGHT + 2
    engine.statuses.extend([1] * (2 * MAX_ROWS_IN_FLIGHT))
    while driver.check(made).state is not TransferState.DONE:
        pass
    engine.statuses.clear()
    driver.check(second)
    engine.statuses.append(1)
    assert driver.check(second).state is TransferState.DONE
    assert engine.posted[-1] == ("10.0.0.7:15001", 1 << 20, 1 << 20, 16, "read")
    writes = [row[1] for row in engine.posted if row[4] == "write"]
    assert writes == [(1 << 20) + 16 * i for i in range(2 * MAX_ROWS_IN_FLIGHT)]


def test_a_row_that_the_engine_does_not_take_fails_what_has_none_under_way(
    engine: Engine, driver: MooncakeDriver
) -> None:
    engine.refuses_rows = True
    made = request(driver, Op.WRITE, 1)
    verdict = driver.check(made)
    assert verdict.state is TransferState.FAILED
    assert "takes no row" in str(verdict.error)


@pytest.mark.parametrize(
    "call", ["batch_transfer_async", "transfer_check_status", "register_memory"]
)
def test_c16_what_the_engine_raises_is_an_error_of_ours(
    call: str, engine: Engine, driver: MooncakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("broken")

    made = request(driver, Op.WRITE, MAX_ROWS_IN_FLIGHT + 1)
    driver.check(made)
    engine.statuses.extend([1, 0])
    monkeypatch.setattr(engine, call, fail)

    def go_on() -> None:
        driver.check(made)
        driver.register(MemoryKind.DRAM, np.array([[4096, 4096, 0]], dtype=np.uint64))

    with pytest.raises(MooncakeError, match=f"{call} failed: broken"):
        go_on()


def test_c16_what_the_engine_raises_in_a_contact_fails_it(
    driver: MooncakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: object, segment: str) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(mooncake, "open_segment", fail)
    made = request(driver, Op.WRITE, 1)
    verdict = driver.check(made)
    assert verdict.state is TransferState.FAILED
    assert "10.0.0.7:15001: broken" in str(verdict.error)


def test_an_engine_that_gets_no_answer_is_tried_again(
    engine: Engine, driver: MooncakeDriver
) -> None:
    engine.refuses_segments = True
    made = request(driver, Op.WRITE, 1)
    assert "does not answer the engine" in str(driver.check(made).error)
    engine.refuses_segments = False
    again = request(driver, Op.WRITE, 1)
    assert driver.check(again).state is TransferState.RUNNING
    assert len(engine.posted) == 1


@pytest.mark.parametrize("is_removed", [False, True])
def test_an_engine_that_is_held_up_in_a_contact_is_not_said_to_be_closed(
    is_removed: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_peer, "JOIN_TIMEOUT_S", 0.01)
    answer, inside = threading.Event(), threading.Event()

    def wait(engine: object, segment: str) -> bool:
        inside.set()
        return answer.wait(10)

    monkeypatch.setattr(mooncake, "open_segment", wait)
    driver = MooncakeDriver("driver", "127.0.0.1")
    region = [(1 << 20, 1 << 20)]
    driver.add_peer(EngineMetadata.of("peer", "10.0.0.7", 15001, 16002, region).encode())
    rows = pieces(MemoryKind.DRAM, [1 << 20], 16)
    made = driver.make(Op.WRITE, rows, rows, "peer")
    assert driver.start(made).state is TransferState.RUNNING
    assert inside.wait(10)
    if is_removed:
        driver.remove_peer("peer")
    with pytest.raises(MooncakeError, match="close failed: the engine waits for peer yet"):
        driver.close(abandon=False)
    answer.set()
    assert made.peer._decided.wait(10)
    assert engine.posted == []


def test_c17_an_address_is_new_to_the_engine_with_each_engine_that_has_it(
    engine: Engine, driver: MooncakeDriver
) -> None:
    region = [(1 << 20, 1 << 20)]
    segments = []
    for data_port in (16002, 16002, 16003, 16003, 16002):
        driver.remove_peer("peer")
        told = EngineMetadata.of("peer", "10.0.0.7", 15001, data_port, region)
        driver.add_peer(told.encode())
        segments.append(driver._peers["peer"].segment)
    addresses = ["15001", "15001", "015001", "015001", "0015001"]
    assert segments == [f"10.0.0.7:{address}" for address in addresses]


def test_a_region_is_registered_as_a_whole_or_not_at_all(
    engine: Engine, driver: MooncakeDriver
) -> None:
    rows = np.array([[4096, 4096, 0], [16384, 4096, 0]], dtype=np.uint64)
    engine.registering.extend([0, -3])
    with pytest.raises(MooncakeError, match="register_memory failed: code -3 for 4096 bytes"):
        driver.register(MemoryKind.DRAM, rows)
    assert engine.registered == []
    assert decode(driver.metadata()).regions == ()
    handle = driver.register(MemoryKind.DRAM, rows)
    assert decode(driver.metadata()).regions == ((4096, 4096), (16384, 4096))
    driver.deregister(handle)
    assert engine.registered == []


@pytest.mark.parametrize(
    ("contact", "reason"),
    [
        (Contact("10.0.0.7:15001", "rdma", 16002, 2), "does not acknowledge"),
        (Contact("10.0.0.7:15001", "tcp", 16002, 1), "does not acknowledge"),
        (Contact("10.0.0.8:15001", "tcp", 16002, 2), "another Transfer Engine"),
        (Contact("10.0.0.7:15001", "tcp", 16003, 2), "another Transfer Engine"),
    ],
)
def test_who_answers_is_compared_with_what_was_told(
    contact: Contact, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdoffload.agent.mooncake_peer.ask", lambda connection: contact)
    monkeypatch.setattr(socket.socket, "connect", lambda connection, address: None)
    told = EngineMetadata.of("peer", "10.0.0.7", 15001, 16002, [])
    opened: list[str] = []
    peer = EnginePeer(told, "10.0.0.7:15001")
    peer.reach(lambda segment: bool(opened.append(segment)))
    assert peer._decided.wait(10)
    assert reason in peer.failure
    assert opened == []
    peer.leave()


# --- what is missing or does not fit ---


def test_c13_without_the_package_its_use_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mooncake_engine._load.cache_clear()
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(BackendUnusable, match=r"pip install pdoffload\[mooncake\]"):
        MooncakeAgent("agent", "127.0.0.1")
    mooncake_engine._load.cache_clear()


@pytest.mark.parametrize("host", ["::1", "fe80::1%eth0"])
def test_an_ipv6_address_is_refused(host: str) -> None:
    with pytest.raises(BackendUnusable, match="a name or an IPv4 address"):
        MooncakeAgent("agent", host)


def test_a_protocol_that_does_not_acknowledge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(BackendUnusable, match="MC_TCP_PROTO=1"):
        MooncakeAgent("agent", "127.0.0.1")


def test_an_error_names_the_engine_and_travels() -> None:
    error = MooncakeError("register_memory", "code -1")
    assert isinstance(error, NixlError)
    assert str(pickle.loads(pickle.dumps(error))) == "Mooncake register_memory failed: code -1"
