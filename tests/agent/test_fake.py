"""The fake agent keeps the contract, and does what a test tells it to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors
from pdoffload.agent.driver import Verdict
from pdoffload.agent.peer import Peer
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import MisuseError, NixlError, TransferError
from pdoffload.testing.agent_contract import AgentContract
from pdoffload.testing.agent_rig import PAGE, Memory, file_rows
from pdoffload.testing.agents import FakeAgent, FakeDriver, FakeNetwork
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.object_contract import ObjectContract
from pdoffload.testing.peer_contract import PeerContract


class TestContract(AgentContract):
    def make_agent(self, clock: Clock) -> FakeAgent:
        return FakeAgent(clock=clock)

    def stall(
        self, agent: FakeAgent, local: Descriptors, tmp_path: Path, *, timeout_s: float
    ) -> tuple[Transfer, Callable[[], None]]:
        fd = os.open(tmp_path / "stalled", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, PAGE)
        agent.register_files([fd], [PAGE])
        agent.driver.hold(1)
        transfer = agent.submit(
            Op.READ, local, file_rows(fd, 0), timeout_s=timeout_s, what="stalled load"
        )
        return transfer, agent.driver.let_go


class TestObjects(ObjectContract):
    def make_agent(self, clock: Clock) -> FakeAgent:
        return FakeAgent(clock=clock)


class TestPeers(PeerContract):
    def make_agent(self, clock: Clock) -> FakeAgent:
        return FakeAgent(clock=clock)

    def stall_write(
        self, agent: FakeAgent, local: Descriptors, remote: Descriptors, peer: Peer
    ) -> Transfer:
        agent.driver.hold(1)
        return super().stall_write(agent, local, remote, peer)

    def wake(self, agent: FakeAgent) -> None:
        agent.driver.let_go()


LOST = NixlError("scripted", "NIXL_ERR_BACKEND")


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def agent(fake: FakeDriver):
    agent = FakeAgent(driver=fake)
    yield agent
    agent.check()
    agent.close()
    assert agent.counts.balanced
    assert fake.open_handles == 0


@pytest.fixture
def memory(agent: FakeAgent) -> Memory:
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    return memory


@pytest.fixture
def fd(agent: FakeAgent, tmp_path: Path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8 * PAGE)
    agent.register_files([fd], [8 * PAGE])
    yield fd
    os.close(fd)


def load(agent: FakeAgent, memory: Memory, fd: int, slot: int) -> Transfer:
    rows = memory.rows(slot), file_rows(fd, slot)
    return agent.wait(agent.submit(Op.READ, *rows, timeout_s=5, what=f"load of slot {slot}"))


def test_c16_a_refused_registration_leaves_nothing_behind(
    agent: FakeAgent, fake: FakeDriver
) -> None:
    memory = Memory()
    fake.script("register", LOST)
    with pytest.raises(NixlError):
        agent.register_memory(memory.address, memory.size_bytes)
    assert agent.counts.registrations_made == 0
    agent.register_memory(memory.address, memory.size_bytes)


def test_c16_a_refused_request_is_a_failed_transfer(
    agent: FakeAgent, fake: FakeDriver, memory: Memory, fd: int
) -> None:
    fake.script("make", LOST)
    bad = load(agent, memory, fd, 0)
    assert bad.state is TransferState.FAILED
    assert bad.settled
    assert bad.error is not None
    assert bad.error.__cause__ is LOST
    assert agent.poll() == []
    assert load(agent, memory, fd, 1).state is TransferState.DONE


@pytest.mark.parametrize("call", ["start", "check"])
def test_c16_a_fault_after_the_post_is_unknown_and_keeps_its_memory(
    call: str, fake: FakeDriver, tmp_path: Path
) -> None:
    agent = FakeAgent(driver=fake)
    memory = Memory()
    region = agent.register_memory(memory.address, memory.size_bytes)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8 * PAGE)
    agent.register_files([fd], [8 * PAGE])
    fake.script(call, LOST)  # type: ignore[arg-type]
    bad = load(agent, memory, fd, 0)
    assert bad.state is TransferState.UNKNOWN
    assert isinstance(bad.error, TransferError)
    assert not bad.settled
    assert agent.poll() == [], "told once"
    assert load(agent, memory, fd, 1).state is TransferState.DONE
    assert bad.settled_state is None, "a request that NIXL lost is never asked about again"
    with pytest.raises(MisuseError, match="in use"):
        region.release()
    agent.check()
    assert agent.close() == [bad]
    os.close(fd)


def test_c16_a_fault_between_memories_is_settled_by_close(fake: FakeDriver) -> None:
    agent = FakeAgent(driver=fake)
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    fake.script("start", LOST)
    bad = agent.submit(Op.READ, memory.rows(0), memory.rows(1), timeout_s=5, what="copy")
    assert bad.state is TransferState.UNKNOWN
    assert agent.close() == []
    assert bad.settled_state is TransferState.FAILED
    assert agent.counts.balanced


def test_c16_a_request_that_cannot_be_given_back_is_tried_again_at_the_end(
    agent: FakeAgent, fake: FakeDriver, memory: Memory, fd: int, caplog: pytest.LogCaptureFixture
) -> None:
    fake.script("release", LOST)
    assert load(agent, memory, fd, 0).state is TransferState.DONE
    assert "keeps a finished request" in caplog.text
    counts = agent.counts
    assert counts.transfers_made - counts.transfers_released == 1
    assert load(agent, memory, fd, 1).state is TransferState.DONE


def test_c16_a_region_that_nixl_keeps_stays_live(agent: FakeAgent, fake: FakeDriver) -> None:
    memory = Memory()
    region = agent.register_memory(memory.address, memory.size_bytes)
    fake.script("deregister", LOST)
    with pytest.raises(NixlError):
        region.release()
    assert not region.released
    region.release()
    assert region.released


def test_a_failed_verdict_frees_the_memory(
    agent: FakeAgent, fake: FakeDriver, memory: Memory, fd: int
) -> None:
    fake.script("check", Verdict(TransferState.FAILED, LOST))
    bad = load(agent, memory, fd, 0)
    assert (bad.state, bad.settled) == (TransferState.FAILED, True)


def test_a_queue_that_lost_track_takes_its_file_transfers_with_it(
    fake: FakeDriver, tmp_path: Path
) -> None:
    agent = FakeAgent(driver=fake)
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8 * PAGE)
    agent.register_files([fd], [8 * PAGE])
    innocent = [
        agent.submit(Op.READ, memory.rows(i), file_rows(fd, i), timeout_s=5, what=f"load {i}")
        for i in range(3)
    ]
    fake.script("check", Verdict(TransferState.UNKNOWN, LOST, spreads=True))
    assert agent.poll() == innocent
    assert {transfer.state for transfer in innocent} == {TransferState.UNKNOWN}
    late = agent.submit(Op.READ, memory.rows(5), file_rows(fd, 5), timeout_s=5, what="late")
    assert late.state is TransferState.FAILED
    copy = agent.submit(Op.READ, memory.rows(6), memory.rows(7), timeout_s=5, what="copy")
    assert copy.state is TransferState.DONE
    assert agent.close() == innocent
    os.close(fd)


def test_an_error_that_may_be_anybody_s_takes_all_transfers_between_memories_with_it(
    fake: FakeDriver, tmp_path: Path
) -> None:
    agent = FakeAgent(driver=fake)
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8 * PAGE)
    agent.register_files([fd], [8 * PAGE])
    fake.hold(3)
    copies = [
        agent.submit(Op.WRITE, memory.rows(i), memory.rows(i + 8), timeout_s=5, what=f"copy {i}")
        for i in range(3)
    ]
    fake.script("check", Verdict(TransferState.UNKNOWN, LOST, spreads=True))
    assert agent.poll() == copies
    assert {copy.state for copy in copies} == {TransferState.UNKNOWN}
    load = agent.submit(Op.READ, memory.rows(5), file_rows(fd, 5), timeout_s=5, what="load")
    assert agent.wait(load).state is TransferState.DONE
    assert agent.close() == []
    assert all(copy.settled for copy in copies)
    os.close(fd)


def test_a_delay_is_kept_by_the_clock(tmp_path: Path) -> None:
    clock = FakeClock()
    agent = FakeAgent(driver=FakeDriver(clock=clock, delay_s=0.2), clock=clock)
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    memory.fill(0)
    copy = agent.submit(Op.WRITE, memory.rows(0), memory.rows(1), timeout_s=5, what="slow copy")
    assert copy.state is TransferState.RUNNING
    assert memory.page(1) != memory.page(0)
    assert agent.wait(copy).state is TransferState.DONE
    assert memory.page(1) == memory.page(0)
    assert clock.slept_s >= 0.19
    agent.close()


# --- peers ---


@pytest.fixture
def reader():
    reader = FakeAgent("reader")
    yield reader
    reader.close()


def send(agent: FakeAgent, reader: FakeAgent, memory: Memory, there: Memory) -> Transfer:
    peer = agent.add_peer(reader.metadata())
    rows = memory.rows(0), there.rows(0)
    return agent.submit(Op.WRITE, *rows, timeout_s=5, what="write", peer=peer)


@pytest.mark.parametrize("end", ["dies", "is closed", "forgets its memory"])
def test_a_write_to_what_is_gone_is_unknown_until_the_agent_is_closed(
    reader: FakeAgent, end: str
) -> None:
    agent, memory, there = FakeAgent("writer"), Memory(), Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    region = reader.register_memory(there.address, there.size_bytes)
    agent.driver.hold(1)
    lost = send(agent, reader, memory, there)
    if end == "dies":
        reader.driver.dead = True
    elif end == "is closed":
        reader.close()
    else:
        region.release()
    memory.fill(0)
    agent.driver.let_go()
    assert agent.poll() == [lost]
    assert lost.state is TransferState.UNKNOWN
    assert "REMOTE_DISCONNECT" in str(lost.error)
    assert there.page(0) != memory.page(0)
    assert agent.close() == []
    assert lost.settled_state is TransferState.FAILED
    assert agent.driver.open_handles == 0


def test_peers_are_scripted_like_everything_else(
    agent: FakeAgent, fake: FakeDriver, reader: FakeAgent
) -> None:
    for call in ("metadata", "add_peer", "progress", "remove_peer"):
        fake.script(call, LOST)  # type: ignore[arg-type]
    with pytest.raises(NixlError):
        agent.metadata()
    with pytest.raises(NixlError):
        agent.add_peer(reader.metadata())
    with pytest.raises(NixlError):
        agent.progress()
    peer = agent.add_peer(reader.metadata())
    with pytest.raises(NixlError):
        peer.remove()
    assert not peer.removed
    peer.remove()
    fake.notifications = 3
    agent.progress()
    agent.progress()
    assert agent.notifications_dropped == 3


def test_agents_of_two_networks_do_not_meet() -> None:
    agent = FakeAgent(driver=FakeDriver(network=FakeNetwork()))
    reader, memory, there = FakeAgent("reader"), Memory(), Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    reader.register_memory(there.address, there.size_bytes)
    assert send(agent, reader, memory, there).state is TransferState.UNKNOWN
    for each in (agent, reader):
        assert each.close() == []
