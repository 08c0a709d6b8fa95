"""Writes by one agent: connections, ends that nobody knows, and agents that are worn out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdoffload.agent.agent import Agent
from pdoffload.agent.driver import Verdict
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import (
    DeadlineExceeded,
    MisuseError,
    NixlError,
    PdOffloadError,
    TransferError,
)
from pdoffload.memory.host import HostRegion
from pdoffload.p2p import outbound
from pdoffload.p2p.hashing import Hashing
from pdoffload.p2p.messages import Fetch
from pdoffload.p2p.outbound import Outbound, WriteSettled, Written
from pdoffload.p2p.serving import Serve, Write
from pdoffload.p2p.session import ServeState
from pdoffload.p2p.terms import Target
from pdoffload.testing.agents import FakeAgent, FakeCall, FakeDriver
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.tier_rig import filled_region, keys_of

KEYS = keys_of(*range(8))
SLOTS = 8


class Away:
    """A peer's pool, and the agent by which it is reached."""

    def __init__(self, name: str) -> None:
        self.region = filled_region(SLOTS, seed=len(name) + 1)
        self.agent = FakeAgent(name)
        self.agent.register_memory(self.region.address, self.region.size_bytes)
        self.target = self.introduce(name)

    def introduce(self, name: str = "decoder") -> Target:
        """Another target in the same memory, as a second `connect` makes it."""
        metadata, chunk_bytes = self.agent.metadata(), self.region.geometry.chunk_bytes
        return Target(name, metadata, self.region.address, SLOTS, chunk_bytes)

    def close(self) -> None:
        self.agent.close()
        self.region.close()


class LosableAgent(FakeAgent):
    """As one of LIBFABRIC's is, whose calls wait for peers."""

    is_lost = False

    @property
    def lost(self) -> bool:
        return self.is_lost


class Writer:
    """An outbound over fakes, driven step by step, and all that it reported."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.region = filled_region(SLOTS)
        self.drivers: list[FakeDriver] = []
        self.told: list[Written | WriteSettled] = []
        self.refusal: BaseException | None = None
        self.outbound = Outbound(
            "write-0", self._open, self.region, self.told.append, clock=self.clock
        )

    def _open(self, purpose: str) -> Agent:
        if self.refusal is not None:
            raise self.refusal
        self.drivers.append(FakeDriver(clock=self.clock))
        self.agent = LosableAgent(purpose, driver=self.drivers[-1], clock=self.clock)
        return self.agent

    @property
    def driver(self) -> FakeDriver:
        return self.drivers[-1]

    def write(self, target: Target, *slots: int) -> Write:
        """Those slots into the same slots over there, under keys of the same number."""
        keys = tuple(KEYS[slot] for slot in slots)
        serve = Serve(None, Fetch("id", keys, slots, 0), target, 0.0)  # type: ignore[arg-type]
        serve.state = ServeState.WRITING
        return Write(serve, keys, slots, slots)

    def post(self, target: Target, *slots: int, timeout_s: float = 30.0) -> Write:
        write = self.write(target, *slots)
        assert self.begin(write, self.clock.monotonic_s() + timeout_s)
        return write

    def begin(self, write: Write, deadline_s: float) -> bool:
        return self.outbound.post(write, deadline_s, Hashing(self.region, write))

    def written(self, write: Write) -> Written:
        """How it ended; told exactly once."""
        (told,) = [t for t in self.told if isinstance(t, Written) and t.write is write]
        return told

    def failure(self, write: Write) -> PdOffloadError:
        told = self.written(write)
        assert told.error is not None
        return told.error

    def has_settled(self, write: Write) -> bool:
        found = [t for t in self.told if isinstance(t, WriteSettled) and t.write is write]
        assert len(found) <= 1
        return bool(found)


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.outbound.close()
    assert all(driver.open_handles == 0 for driver in writer.drivers)
    writer.region.close()


@pytest.fixture
def away() -> Iterator[Away]:
    away = Away("decoder")
    yield away
    away.close()


@pytest.fixture
def other() -> Iterator[Away]:
    other = Away("other")
    yield other
    other.close()


def equal_slots(writer: Writer, away: Away, *slots: int) -> bool:
    return all(
        bytes(writer.region.slot_view(slot)) == bytes(away.region.slot_view(slot)) for slot in slots
    )


# --- ordinary life ---


def test_a_write_moves_the_bytes_and_tells_their_checksums(writer: Writer, away: Away) -> None:
    write = writer.post(away.target, 3, 1)
    told = writer.written(write)
    assert (told.error, told.settled) == (None, True)
    assert told.checksums == {KEYS[slot]: writer.region.checksum(slot) for slot in (3, 1)}
    assert equal_slots(writer, away, 1, 3)
    assert not equal_slots(writer, away, 0)
    assert not writer.outbound.busy


def test_the_agent_is_opened_at_the_first_write_and_connects_once(
    writer: Writer, away: Away
) -> None:
    assert writer.drivers == []
    assert not writer.outbound.busy
    writer.outbound.poll()
    for slot in range(3):
        writer.post(away.target, slot)
    assert len(writer.drivers) == 1
    assert writer.driver.calls.count("add_peer") == 1
    assert writer.driver.calls.count("register") == 1


def test_a_write_under_way_is_told_when_it_ends(writer: Writer, away: Away) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(1)
    write = writer.post(away.target, 1)
    writer.outbound.poll()
    assert writer.outbound.busy
    assert not [told for told in writer.told if told.write is write]
    writer.driver.let_go()
    writer.outbound.poll()
    assert writer.written(write).error is None
    assert not writer.outbound.busy


def test_a_forgotten_peer_is_disconnected(writer: Writer, away: Away, other: Away) -> None:
    writer.post(away.target, 0)
    writer.post(other.target, 0)
    assert writer.outbound.forget(away.target)
    assert writer.outbound.forget(away.target), "also if it is not connected"
    assert writer.driver.calls.count("remove_peer") == 1
    assert writer.driver.open_handles == 2, "the pool and the other peer"


def test_a_forgotten_peer_is_disconnected_after_its_last_write(writer: Writer, away: Away) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(1)
    write = writer.post(away.target, 1)
    assert writer.outbound.forget(away.target)
    assert "remove_peer" not in writer.driver.calls
    writer.driver.let_go()
    writer.outbound.poll()
    assert writer.written(write).error is None
    assert "remove_peer" in writer.driver.calls


def test_c17_a_peer_that_was_forgotten_may_come_again(writer: Writer, away: Away) -> None:
    writer.post(away.target, 0)
    writer.outbound.forget(away.target)
    write = writer.post(away.introduce(), 1)
    assert writer.written(write).error is None
    assert len(writer.drivers) == 1


# --- writes that are not begun ---


def test_a_write_that_nobody_waits_for_any_more_moves_nothing(writer: Writer, away: Away) -> None:
    write = writer.write(away.target, 1)
    write.serve.state = ServeState.STOPPING
    assert writer.begin(write, 1e9)
    assert "nobody waits" in str(writer.failure(write))
    assert writer.written(write).settled
    assert not equal_slots(writer, away, 1)
    assert writer.drivers == []


def test_a_write_whose_turn_comes_too_late_moves_nothing(writer: Writer, away: Away) -> None:
    write = writer.write(away.target, 1)
    assert writer.begin(write, writer.clock.monotonic_s())
    assert "deadline" in str(writer.failure(write))
    assert writer.drivers == []


@pytest.mark.parametrize(
    "refusal", [NixlError("create_backend", "no UCX"), MemoryError("full"), SystemExit(3)]
)
def test_c16_an_agent_that_does_not_open_fails_the_write_and_is_tried_again(
    writer: Writer, away: Away, refusal: BaseException
) -> None:
    writer.refusal = refusal
    write = writer.post(away.target, 1)
    assert str(refusal) in str(writer.failure(write))
    assert writer.written(write).settled
    writer.refusal = None
    assert writer.written(writer.post(away.target, 2)).error is None


def test_an_agent_that_cannot_register_the_pool_is_closed(writer: Writer, away: Away) -> None:
    def open_agent(purpose: str) -> Agent:
        agent = FakeAgent(purpose, clock=writer.clock)
        agent.driver.script("register", NixlError("register", "RLIMIT_MEMLOCK"))
        writer.drivers.append(agent.driver)
        return agent

    writer.outbound._open_agent = open_agent
    write = writer.post(away.target, 1)
    assert "RLIMIT_MEMLOCK" in str(writer.failure(write))
    assert "close" in writer.driver.calls


def test_metadata_that_is_none_fails_the_write_alone(writer: Writer, away: Away) -> None:
    target = Target("liar", b"not metadata", 0x1000, SLOTS, away.target.chunk_bytes)
    write = writer.post(target, 1)
    assert writer.written(write).settled
    assert "garbled" in str(writer.failure(write))
    assert writer.written(writer.post(away.target, 1)).error is None


def test_slots_outside_of_what_the_peer_registered_fail_the_write_alone(
    writer: Writer, away: Away
) -> None:
    beyond = away.region.address + away.region.size_bytes
    target = Target("liar", away.agent.metadata(), beyond, SLOTS, away.region.geometry.chunk_bytes)
    write = writer.post(target, 0)
    assert writer.written(write).settled
    assert "NOT_FOUND" in str(writer.failure(write))


# --- ends that nobody knows ---


def test_a_write_past_its_deadline_wears_the_agent_out(
    writer: Writer, away: Away, other: Away
) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(1)
    stuck = writer.post(away.target, 1, timeout_s=5.0)
    writer.driver.hold(1)
    healthy = writer.post(other.target, 2)
    writer.clock.advance(6.0)
    writer.outbound.poll()
    assert isinstance(writer.failure(stuck), DeadlineExceeded)
    assert not writer.written(stuck).settled
    assert writer.outbound.worn
    late = writer.write(away.target, 3)
    assert not writer.begin(late, 1e9), "it waits for the next agent"
    assert not writer.outbound.forget(away.target)
    writer.outbound.poll()
    assert not writer.has_settled(stuck), "another write is under way"
    for request in list(writer.driver._requests):
        request.held = request.remote[0][0] != other.region.slot_address(2)
    writer.outbound.poll()
    assert writer.written(healthy).error is None
    writer.outbound.poll()
    assert writer.has_settled(stuck)
    assert not writer.outbound.worn
    assert writer.begin(late, 1e9)
    assert writer.written(late).error is None
    assert len(writer.drivers) == 2
    assert not equal_slots(writer, away, 1), "it was never moved"


@pytest.mark.parametrize("call", ["add_peer", "make"])
def test_an_agent_that_is_lost_in_a_call_is_replaced(
    call: FakeCall, writer: Writer, away: Away, other: Away
) -> None:
    writer.post(other.target, 0)
    writer.driver.script(call, NixlError(call, "it has not returned within 5 s"))
    writer.agent.is_lost = True
    failed = writer.post(away.target, 1)
    assert writer.written(failed).settled, "it was not begun"
    assert "not returned" in str(writer.failure(failed))
    assert writer.outbound.worn
    writer.outbound.poll()
    assert writer.written(writer.post(away.target, 1)).error is None
    assert len(writer.drivers) == 2


def test_an_agent_that_has_known_many_peers_makes_room_for_another(
    writer: Writer, away: Away, other: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "MOST_PEERS", 2)
    writer.post(away.target, 0)
    writer.outbound.forget(away.target)
    writer.post(other.target, 0)
    again = writer.write(away.introduce(), 1)
    assert not writer.begin(again, 1e9)
    assert writer.outbound.worn
    writer.outbound.poll()
    assert writer.begin(again, 1e9)
    assert writer.written(again).error is None
    assert len(writer.drivers) == 2


def test_c17_a_peer_that_dies_under_a_write_costs_the_agent(writer: Writer, away: Away) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(1)
    write = writer.post(away.target, 1)
    away.agent.driver.dead = True
    writer.driver.let_go()
    writer.outbound.poll()
    assert not writer.written(write).settled
    writer.outbound.poll()
    assert writer.has_settled(write)
    assert len(writer.drivers) == 1
    away.agent.driver.dead = False
    assert writer.written(writer.post(away.target, 2)).error is None


def test_an_unknown_end_that_nixl_tells_after_all_settles_at_once(
    writer: Writer, away: Away
) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(2)
    late, other_write = writer.post(away.target, 1, timeout_s=5.0), writer.post(away.target, 2)
    writer.clock.advance(6.0)
    writer.outbound.poll()
    assert not writer.has_settled(late)
    for request in list(writer.driver._requests):
        request.held = request.remote[0][0] != away.region.slot_address(1)
    writer.outbound.poll()
    assert writer.has_settled(late)
    assert writer.outbound.worn
    writer.driver.let_go()
    writer.outbound.poll()
    assert writer.written(other_write).error is None


def test_a_write_that_nixl_fails_is_settled_and_costs_no_agent(writer: Writer, away: Away) -> None:
    writer.post(away.target, 0)
    error = NixlError("transfer", "refused")
    writer.driver.script("start", Verdict(TransferState.FAILED, error))
    write = writer.post(away.target, 1)
    assert writer.written(write).settled
    assert not writer.outbound.worn


def test_a_peer_back_before_its_last_write_has_ended_waits_for_the_next_agent(
    writer: Writer, away: Away
) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(1)
    before = writer.post(away.target, 1)
    writer.outbound.forget(away.target)
    write = writer.write(away.introduce(), 2)
    assert not writer.begin(write, 1e9)
    assert writer.outbound.worn
    writer.driver.let_go()
    writer.outbound.poll()
    assert writer.written(before).error is None
    assert writer.begin(write, 1e9)
    assert writer.written(write).error is None
    assert len(writer.drivers) == 2


def test_a_peer_that_nixl_does_not_let_go_of_costs_the_agent(writer: Writer, away: Away) -> None:
    writer.post(away.target, 0)
    writer.driver.script("remove_peer", NixlError("remove_remote_agent", "no"), times=2)
    assert writer.outbound.forget(away.target)
    assert writer.outbound.worn
    writer.outbound.poll()
    assert writer.written(writer.post(away.introduce(), 1)).error is None
    assert len(writer.drivers) == 2
    writer.drivers[0]._peers.clear()  # it went with its agent


# --- C16: exceptions where nobody expects one ---


def test_an_exception_out_of_submit_leaves_the_slots_lent_until_the_agent_is_closed(
    writer: Writer, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.post(away.target, 0)

    def interrupted(*args: object, **kwargs: object) -> None:
        raise MemoryError("in the middle of it")

    monkeypatch.setattr(FakeAgent, "submit", interrupted)
    write = writer.post(away.target, 1)
    monkeypatch.undo()
    assert "MemoryError" in str(writer.failure(write))
    assert not writer.written(write).settled
    writer.outbound.poll()
    assert writer.has_settled(write)
    assert writer.written(writer.post(away.target, 2)).error is None


def test_a_refusal_by_the_agent_itself_is_settled(
    writer: Writer, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise MisuseError("outside of every region")

    monkeypatch.setattr(FakeAgent, "submit", refuse)
    write = writer.post(away.target, 1)
    assert writer.written(write).settled
    assert not writer.outbound.worn


def test_an_exception_out_of_poll_ends_every_write_under_way(
    writer: Writer, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(2)
    writes = [writer.post(away.target, slot) for slot in (1, 2)]

    def broken(self: object) -> None:
        raise ValueError("a plugin's own")

    monkeypatch.setattr(FakeAgent, "poll", broken)
    writer.outbound.poll()
    monkeypatch.undo()
    for write in writes:
        assert "ValueError" in str(writer.failure(write))
        assert not writer.written(write).settled
        assert writer.has_settled(write), "the agent is closed"
    assert writer.written(writer.post(away.target, 3)).error is None


def test_bytes_whose_checksum_cannot_be_had_do_not_count_as_sent(
    writer: Writer, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: HostRegion, slot: int) -> bytes:
        raise MemoryError("no room for a digest")

    monkeypatch.setattr(HostRegion, "checksum", broken)
    write = writer.post(away.target, 1)
    assert "MemoryError" in str(writer.failure(write))
    assert writer.written(write).settled


def test_an_agent_that_does_not_close_keeps_the_slots_of_its_writes(
    writer: Writer, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(1)
    write = writer.post(away.target, 1, timeout_s=5.0)
    agent = writer.outbound._agent
    assert agent is not None

    def broken(self: object, *, timeout_s: float) -> None:
        raise TransferError("it hangs")

    monkeypatch.setattr(FakeAgent, "close", broken)
    writer.clock.advance(6.0)
    writer.outbound.poll()
    monkeypatch.undo()
    assert not writer.written(write).settled
    assert not writer.has_settled(write)
    assert writer.written(writer.post(away.target, 2)).error is None, "life goes on with another"
    agent.close(timeout_s=0.0)


# --- the end ---


def test_closing_waits_a_little_and_ends_the_rest_as_failed(writer: Writer, away: Away) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(1)
    stuck = writer.post(away.target, 1)
    writer.outbound.close()
    told = writer.written(stuck)
    assert told.error is not None
    assert told.settled
    assert not writer.outbound.busy
    writer.outbound.close()


def test_closing_settles_what_was_lost(writer: Writer, away: Away) -> None:
    writer.post(away.target, 0)
    writer.driver.hold(2)
    lost, _ = writer.post(away.target, 1, timeout_s=5.0), writer.post(away.target, 2)
    writer.clock.advance(6.0)
    writer.outbound.poll()
    assert not writer.has_settled(lost)
    writer.outbound.close()
    assert writer.has_settled(lost)
