"""The receiving agent's thread: opens, makes progress while something is expected, closes when retired."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.agent.nixl import NixlAgent
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.errors import NixlError
from pdoffload.p2p.receiving import OpenAgent, Receiver, Stage
from pdoffload.testing.agents import FakeAgent, FakeDriver
from pdoffload.testing.tier_rig import PATIENCE_S, filled_region

SLOTS = 4


class Owner:
    """Receivers over one pool, and what they have told."""

    def __init__(self, open_agent: OpenAgent) -> None:
        self.region = filled_region(SLOTS, chunk_bytes=1 << 16)
        self.heard: list[tuple[str, Stage]] = []
        self.open_agent = open_agent
        self._receivers: list[Receiver] = []

    def receiver(self, incarnation: str = "me.1") -> Receiver:
        receiver = Receiver(
            incarnation,
            self.open_agent,
            self.region,
            lambda each: self.heard.append((each.incarnation, each.stage)),
            clock=SYSTEM_CLOCK,
        )
        self._receivers.append(receiver)
        return receiver

    def opened(self, incarnation: str = "me.1") -> Receiver:
        receiver = self.receiver(incarnation)
        wait_until(lambda: receiver.stage is not Stage.OPENING)
        return receiver

    @property
    def stages(self) -> list[Stage]:
        return [stage for _, stage in self.heard]

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.retire()
            assert receiver.join(PATIENCE_S)
        self.region.close()


def wait_until(is_so: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Poll with a deadline; `meanwhile` is done in between."""
    give_up_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
    while not is_so():
        assert SYSTEM_CLOCK.monotonic_s() < give_up_s
        meanwhile()
        SYSTEM_CLOCK.sleep(0.001)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def owner(driver: FakeDriver) -> Iterator[Owner]:
    owner = Owner(lambda purpose: FakeAgent(purpose, driver=driver))
    yield owner
    owner.close()
    assert driver.open_handles == 0
    assert not [t for t in threading.enumerate() if t.name == "pdoffload-p2p-receive"]


def test_it_opens_over_the_whole_pool_and_tells_its_metadata(owner: Owner) -> None:
    receiver = owner.opened()
    assert owner.heard == [("me.1", Stage.OPEN)]
    writer = FakeAgent("writer")
    peer = writer.add_peer(receiver.metadata)
    source = filled_region(1, chunk_bytes=1 << 16, seed=5)
    writer.register_memory(source.address, source.size_bytes)
    transfer = writer.submit(
        Op.WRITE,
        pieces(MemoryKind.DRAM, [source.address], 1 << 16),
        pieces(MemoryKind.DRAM, [owner.region.slot_address(SLOTS - 1)], 1 << 16),
        timeout_s=10,
        what="a test",
        peer=peer,
    )
    assert transfer.state is TransferState.DONE
    assert bytes(owner.region.slot_view(SLOTS - 1)) == bytes(source.slot_view(0))
    writer.close()
    source.close()


def test_progress_is_made_while_something_is_expected_and_only_then(
    owner: Owner, driver: FakeDriver
) -> None:
    receiver = owner.opened()
    assert "progress" not in driver.calls
    receiver.expect(2)
    wait_until(lambda: driver.calls.count("progress") > 5)
    receiver.expect(1)
    before = len(driver.calls)
    wait_until(lambda: len(driver.calls) > before + 5)
    receiver.expect(0)
    # It may be in the middle of one turn; then it sleeps, and no call is made however often it is looked at.
    wait_until(lambda: receiver._expected == 0)
    settled = threading.Event()
    receiver._changed = lambda each: settled.set()
    receiver.retire()
    assert settled.wait(PATIENCE_S)
    assert receiver.stage is Stage.CLOSED


def test_an_idle_receiver_waits_without_being_woken(owner: Owner, driver: FakeDriver) -> None:
    receiver = owner.opened()
    receiver.expect(0)
    receiver.expect(1)
    receiver.expect(0)
    wait_until(lambda: bool(receiver._condition._waiters))  # type: ignore[attr-defined]
    asleep = len(driver.calls)
    for _ in range(3):
        receiver.expect(0)
    assert len(driver.calls) == asleep


@pytest.mark.parametrize("expected", [0, 3])
def test_a_retired_one_is_closed_and_says_so_once(
    owner: Owner, driver: FakeDriver, expected: int
) -> None:
    receiver = owner.opened()
    receiver.expect(expected)
    receiver.retire()
    receiver.retire()
    assert receiver.join(PATIENCE_S)
    assert owner.stages == [Stage.OPEN, Stage.CLOSED]
    assert receiver.error is None
    assert driver.open_handles == 0


def test_one_that_is_retired_while_it_opens_is_closed(owner: Owner) -> None:
    may_open = threading.Event()
    open_agent = owner.open_agent

    def slowly(purpose: str) -> Agent:
        assert may_open.wait(PATIENCE_S)
        return open_agent(purpose)

    owner.open_agent = slowly
    receiver = owner.receiver()
    assert not receiver.join(0.0)
    receiver.retire()
    may_open.set()
    assert receiver.join(PATIENCE_S)
    assert owner.stages == [Stage.OPEN, Stage.CLOSED]


@pytest.mark.parametrize(
    "failure", [NixlError("nixl_agent", "no UCX"), MemoryError("full"), SystemExit("a plugin's")]
)
def test_c16_an_agent_that_does_not_open_is_told_whatever_it_raises(
    owner: Owner, failure: BaseException
) -> None:
    def fails(purpose: str) -> Agent:
        raise failure

    owner.open_agent = fails
    receiver = owner.opened()
    assert receiver.stage is Stage.FAILED
    assert receiver.join(PATIENCE_S)
    assert owner.stages == [Stage.FAILED]
    assert str(failure) in str(receiver.error)
    receiver.retire()
    receiver.expect(1)


@pytest.mark.parametrize("call", ["register", "metadata"])
def test_an_agent_that_cannot_be_used_is_closed_and_told(
    owner: Owner, driver: FakeDriver, call: str
) -> None:
    driver.script(call, NixlError(call, "refused"))  # type: ignore[arg-type]
    receiver = owner.opened()
    assert receiver.join(PATIENCE_S)
    assert owner.stages == [Stage.FAILED]
    assert "refused" in str(receiver.error)
    assert "close" in driver.calls


@pytest.mark.parametrize(
    "failure", [NixlError("get_new_notifs", "broken"), SystemExit("a plugin's")]
)
def test_c16_without_progress_it_ends_and_says_why(
    owner: Owner,
    driver: FakeDriver,
    failure: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver = owner.opened()

    def fails(self: FakeDriver) -> int:
        raise failure

    monkeypatch.setattr(FakeDriver, "progress", fails)
    receiver.expect(1)
    assert receiver.join(PATIENCE_S)
    assert owner.stages == [Stage.OPEN, Stage.CLOSED]
    assert str(failure) in str(receiver.error)
    assert driver.open_handles == 0


def test_an_agent_that_does_not_close_is_never_said_to_be_closed(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = owner.opened()
    close, kept = FakeAgent.close, []

    def fails(self: FakeAgent, *, timeout_s: float) -> None:
        kept.append(self)
        raise MemoryError("in the middle of it")

    monkeypatch.setattr(FakeAgent, "close", fails)
    receiver.retire()
    assert receiver.join(PATIENCE_S)
    monkeypatch.undo()
    assert owner.stages == [Stage.OPEN], (
        "bytes may land for ever: the slots are never told to be free"
    )
    assert receiver.stage is Stage.FAILED, "and nobody is introduced to it"
    (agent,) = kept
    agent._owner = (agent._owner[0], threading.get_ident())
    close(agent)


# --- with NIXL ---


def nixl_agent(purpose: str) -> Agent:
    return NixlAgent(purpose, [UcxBackend(reach="network")])


@pytest.mark.nixl
def test_real_bytes_land_by_tcp_only_while_something_is_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    owner = Owner(nixl_agent)
    receiver = owner.opened()
    source = filled_region(SLOTS, chunk_bytes=1 << 16, seed=5)
    writer = nixl_agent("writer")
    writer.register_memory(source.address, source.size_bytes)
    peer = writer.add_peer(receiver.metadata)

    def begin(slot: int) -> object:
        return writer.submit(
            Op.WRITE,
            pieces(MemoryKind.DRAM, [source.slot_address(slot)], 1 << 16),
            pieces(MemoryKind.DRAM, [owner.region.slot_address(slot)], 1 << 16),
            timeout_s=PATIENCE_S,
            what="a test",
            peer=peer,
        )

    def landed(slot: int) -> bool:
        return bytes(owner.region.slot_view(slot)) == bytes(source.slot_view(slot))

    transfer = begin(1)
    for _ in range(50):
        writer.poll()
        assert not landed(1)
    receiver.expect(1)
    wait_until(lambda: transfer.settled, meanwhile=writer.poll)  # type: ignore[attr-defined]
    assert landed(1)
    receiver.expect(0)
    owner.close()
    lost = begin(2)
    wait_until(
        lambda: lost.state is not TransferState.RUNNING,  # type: ignore[attr-defined]
        meanwhile=writer.poll,
    )
    assert lost.state is not TransferState.DONE  # type: ignore[attr-defined]
    writer.close()
    source.close()


@pytest.mark.nixl
def test_real_agents_are_replaced_again_and_again_without_a_trace() -> None:
    owner = Owner(nixl_agent)
    before = threading.active_count()
    seen = set()
    for number in range(4):
        receiver = owner.opened(f"me.{number}")
        seen.add(receiver.metadata)
        receiver.retire()
        assert receiver.join(PATIENCE_S)
    assert len(seen) == 4
    assert threading.active_count() == before
    owner.close()
