"""The writers' threads: real ones, over fake agents and over NIXL's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from pdoffload.agent.agent import Agent
from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.nixl import NixlAgent
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import Verify
from pdoffload.errors import DeadlineExceeded
from pdoffload.memory.host import HostRegion
from pdoffload.p2p import outbound
from pdoffload.p2p.checking import Checked
from pdoffload.p2p.messages import Fetch
from pdoffload.p2p.outbound import WriteSettled, Written
from pdoffload.p2p.pulling import Check
from pdoffload.p2p.serving import Serve, Write
from pdoffload.p2p.session import ServeState
from pdoffload.p2p.terms import Target
from pdoffload.p2p.writing import Outcome, Writers
from pdoffload.testing.agents import FakeAgent, FakeDriver
from pdoffload.testing.tier_rig import PATIENCE_S, ShiftedClock, filled_region, keys_of

SLOTS = 16
KEYS = keys_of(*range(SLOTS))
OpenAgent = Callable[[str], Agent]
T = TypeVar("T", Written, WriteSettled, Checked)


def nixl_agent(purpose: str) -> Agent:
    return NixlAgent(purpose, [UcxBackend(reach="network")])


class Away:
    """A peer's pool, with an agent of the same kind as the writers'."""

    def __init__(self, open_agent: OpenAgent, name: str = "decoder") -> None:
        self.region = filled_region(SLOTS, chunk_bytes=1 << 16, seed=len(name))
        self.agent = open_agent(f"away-{name}")
        self.agent.register_memory(self.region.address, self.region.size_bytes)
        geometry = self.region.geometry
        metadata = self.agent.metadata()
        self.target = Target(name, metadata, self.region.address, SLOTS, geometry.chunk_bytes)

    def close(self) -> None:
        self.agent.close()
        self.region.close()


class Pool:
    """Writers, and all that they have reported, from whatever thread."""

    def __init__(self, open_agent: OpenAgent, *, num_threads: int = 2) -> None:
        self.clock = ShiftedClock()
        self.region = filled_region(SLOTS, chunk_bytes=1 << 16, seed=99)
        self.told: list[Outcome] = []
        self.opened: list[str] = []
        self._open_agent = open_agent
        self.writers = Writers(
            num_threads,
            self._open,
            self.region,
            self.told.append,
            verify=Verify.ALWAYS,
            clock=self.clock,
        )

    def _open(self, purpose: str) -> Agent:
        self.opened.append(f"{purpose} on {threading.current_thread().name}")
        return self._open_agent(purpose)

    def write(self, target: Target, *slots: int, timeout_s: float = 30.0) -> Write:
        keys = tuple(KEYS[slot] for slot in slots)
        serve = Serve(None, Fetch("id", keys, slots, 0), target, 0.0)  # type: ignore[arg-type]
        serve.state = ServeState.WRITING
        write = Write(serve, keys, slots, slots)
        self.writers.write(write, timeout_s)
        return write

    def wait_until(
        self, is_so: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Poll with a deadline; `meanwhile` is done in between."""
        give_up_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
        while not is_so():
            assert SYSTEM_CLOCK.monotonic_s() < give_up_s, self.told
            meanwhile()
            SYSTEM_CLOCK.sleep(0.001)

    def outcomes(self, kind: type[T]) -> list[T]:
        return [each for each in list(self.told) if isinstance(each, kind)]

    def wait_for(
        self, kind: type[T], count: int = 1, meanwhile: Callable[[], None] = lambda: None
    ) -> list[T]:
        self.wait_until(lambda: len(self.outcomes(kind)) >= count, meanwhile)
        assert len(self.outcomes(kind)) == count
        return self.outcomes(kind)

    def has_sent(self, away: Away, *slots: int) -> bool:
        return all(
            bytes(self.region.slot_view(slot)) == bytes(away.region.slot_view(slot))
            for slot in slots
        )


def writer_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("pdoffload-p2p-wr"))


@pytest.fixture(
    params=["fake", pytest.param("nixl", marks=pytest.mark.nixl)],
)
def open_agent(request: pytest.FixtureRequest) -> OpenAgent:
    return nixl_agent if request.param == "nixl" else FakeAgent


@pytest.fixture
def pool(open_agent: OpenAgent) -> Iterator[Pool]:
    pool = Pool(open_agent)
    yield pool
    assert pool.writers.close(PATIENCE_S)
    assert writer_threads() == []
    pool.region.close()


@pytest.fixture
def away(open_agent: OpenAgent) -> Iterator[Away]:
    away = Away(open_agent)
    yield away
    away.close()


@pytest.fixture
def other(open_agent: OpenAgent) -> Iterator[Away]:
    other = Away(open_agent, "other")
    yield other
    other.close()


# --- with fake and with real agents ---


def test_bytes_arrive_and_their_checksums_are_told(pool: Pool, away: Away) -> None:
    write = pool.write(away.target, 4, 2, 9)
    (told,) = pool.wait_for(Written, meanwhile=away.agent.progress)
    assert (told.write, told.error, told.settled) == (write, None, True)
    assert told.checksums == {KEYS[slot]: pool.region.checksum(slot) for slot in (4, 2, 9)}
    assert told.transport not in ("", "unknown")
    assert pool.has_sent(away, 2, 4, 9)
    assert not pool.has_sent(away, 3)


def test_every_write_and_every_check_is_reported_once(pool: Pool, away: Away, other: Away) -> None:
    def progress() -> None:
        away.agent.progress()
        other.agent.progress()

    sums = tuple(pool.region.checksum(slot) for slot in range(SLOTS))
    check = Check(1, 0, KEYS, tuple(range(SLOTS)), sums)
    writes = []
    for round_ in range(20):
        writes += [pool.write(each.target, round_ % SLOTS) for each in (away, other)]
        pool.writers.check(check, round_)
    told = pool.wait_for(Written, 40, meanwhile=progress)
    assert {id(each.write) for each in told} == {id(write) for write in writes}
    assert all(each.error is None for each in told)
    checked = pool.wait_for(Checked, 20)
    assert sorted(each.owner for each in checked) == list(range(20))  # type: ignore[type-var]
    assert all(each.verified == SLOTS for each in checked)
    assert pool.has_sent(away, *range(SLOTS))
    assert pool.has_sent(other, *range(SLOTS))


def test_a_peer_is_served_by_one_writer_and_two_by_two(pool: Pool, away: Away, other: Away) -> None:
    assert writer_threads() == [], "an idle pool has no thread"
    for slot in range(3):
        pool.write(away.target, slot)
    pool.wait_for(Written, 3, meanwhile=away.agent.progress)
    assert pool.opened == ["write-0 on pdoffload-p2p-writer-0"]
    pool.write(other.target, 1)
    pool.wait_for(Written, 4, meanwhile=other.agent.progress)
    assert pool.opened[1:] == ["write-1 on pdoffload-p2p-writer-1"]
    pool.writers.forget(away.target)
    pool.writers.forget(away.target)
    third = Away(pool._open_agent, "third")
    pool.write(third.target, 1)
    pool.wait_for(Written, 5, meanwhile=third.agent.progress)
    assert len(pool.opened) == 2, "the writer that has the fewest"
    pool.writers.forget(third.target)
    pool.wait_until(lambda: "1 peers" in repr(pool.writers))
    third.close()


def test_a_peer_that_was_forgotten_may_come_again_at_once(pool: Pool, away: Away) -> None:
    for slot in range(10):
        target = Target(
            "decoder",
            away.target.metadata,
            away.target.base_address,
            SLOTS,
            away.target.chunk_bytes,
        )
        pool.write(target, slot)
        pool.writers.forget(target)
    told = pool.wait_for(Written, 10, meanwhile=away.agent.progress)
    assert all(each.error is None for each in told), [each.error for each in told]
    assert pool.has_sent(away, *range(10))
    assert repr(pool.writers).endswith("0 peers>")


def test_c16_a_job_that_raises_ends_and_the_next_one_is_done(
    pool: Pool, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = Check(1, 0, KEYS[:1], (SLOTS,), (b"s" * 16,))
    pool.writers.check(beyond, "owner")
    (failed,) = pool.wait_for(Checked)
    assert "slot 16 does not exist" in str(failed.bad[KEYS[0]])
    liar = Target("liar", b"garbage", 0x1000, SLOTS, 1 << 16)
    pool.write(liar, 0)
    (told,) = pool.wait_for(Written)
    assert told.error is not None
    assert told.settled

    def exits(self: HostRegion, slot: int) -> memoryview:
        raise SystemExit("a plugin's own")

    monkeypatch.setattr(HostRegion, "slot_view", exits)
    before = writer_threads()
    sums = (pool.region.checksum(0),) if pool.region._digest_known[0] else (b"s" * 16,)
    pool.writers.check(Check(2, 0, KEYS[:1], (0,), sums), "owner")
    pool.wait_for(Checked, 2)
    monkeypatch.undo()
    pool.write(away.target, 5)
    assert pool.wait_for(Written, 2, meanwhile=away.agent.progress)[1].error is None
    assert set(before) <= set(writer_threads())


# --- with fake agents alone ---


class Scripted:
    """Opens fake agents, and keeps their drivers for the test to speak to."""

    def __init__(self) -> None:
        self.drivers: list[FakeDriver] = []

    def __call__(self, purpose: str) -> Agent:
        driver = FakeDriver()
        driver.hold()
        self.drivers.append(driver)
        return FakeAgent(purpose, driver=driver)


def test_an_agent_is_replaced_and_what_waited_is_written_in_its_order() -> None:
    agents = Scripted()
    pool = Pool(agents, num_threads=1)
    pool._open_agent = lambda purpose: _shifted(agents(purpose), pool.clock)
    away = Away(FakeAgent)
    stuck = pool.write(away.target, 0, timeout_s=5.0)
    second = pool.write(away.target, 1, timeout_s=100.0)
    pool.wait_until(lambda: len(agents.drivers) == 1 and len(agents.drivers[0]._requests) == 2)
    pool.clock.shift_s += 6.0
    (told,) = pool.wait_for(Written)
    assert told.write is stuck
    assert isinstance(told.error, DeadlineExceeded)
    assert not told.settled
    later = pool.write(away.target, 2)
    pool.writers.forget(away.target)
    agents.drivers[0].let_go()
    pool.wait_until(lambda: len(agents.drivers) == 2)
    agents.drivers[1].let_go()
    told_all = pool.wait_for(Written, 3)
    assert [each.write for each in told_all] == [stuck, second, later]
    assert pool.wait_for(WriteSettled)[0].write is stuck
    pool.wait_until(lambda: "remove_peer" in agents.drivers[1].calls)
    assert pool.writers.close(PATIENCE_S)
    assert all(driver.open_handles == 0 for driver in agents.drivers)
    away.close()
    pool.region.close()


def _shifted(agent: Agent, clock: ShiftedClock) -> Agent:
    """`agent` with deadlines by the clock of the test."""
    assert isinstance(agent, FakeAgent)
    agent._clock = clock
    return agent


def test_closing_ends_what_is_under_way_and_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "CLOSE_TIMEOUT_S", 0.1)
    agents = Scripted()
    pool = Pool(agents, num_threads=1)
    away = Away(FakeAgent)
    under_way = pool.write(away.target, 0)
    pool.wait_until(lambda: len(agents.drivers) == 1 and bool(agents.drivers[0]._requests))
    waiting = [pool.write(away.target, slot) for slot in range(1, 5)]
    assert pool.writers.close(PATIENCE_S)
    told = pool.outcomes(Written)
    assert len(told) == 5
    assert {id(each.write) for each in told} == {id(each) for each in [under_way, *waiting]}
    assert all(each.error is not None and each.settled for each in told)
    assert writer_threads() == []
    away.close()
    pool.region.close()


def test_closing_writers_that_never_wrote_waits_for_nobody() -> None:
    pool = Pool(FakeAgent)
    away = Away(FakeAgent)
    pool.writers.forget(away.target)
    assert pool.writers.close(0.0)
    assert pool.opened == []
    away.close()
    pool.region.close()


def test_a_writer_that_does_not_stop_in_time_is_told() -> None:
    released = threading.Event()

    def hangs(purpose: str) -> Agent:
        released.wait(PATIENCE_S)
        return FakeAgent(purpose)

    pool = Pool(hangs, num_threads=2)
    away = Away(FakeAgent)
    pool.write(away.target, 0)
    pool.wait_until(lambda: len(pool.opened) == 1)
    assert not pool.writers.close(0.0)
    released.set()
    assert pool.writers.close(PATIENCE_S)
    assert len(pool.outcomes(Written)) == 1
    away.close()
    pool.region.close()


# --- with real agents alone ---


@pytest.mark.nixl
def test_a_real_write_that_stalls_is_unknown_until_its_agent_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By TCP nothing lands while the other side makes no progress."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    pool = Pool(nixl_agent, num_threads=1)
    away = Away(nixl_agent)
    stuck = pool.write(away.target, 3, timeout_s=0.3)
    (told,) = pool.wait_for(Written)
    assert told.write is stuck
    assert isinstance(told.error, DeadlineExceeded)
    assert not told.settled
    pool.wait_for(WriteSettled)
    assert not pool.has_sent(away, 3)
    good = pool.write(away.target, 4)
    told_all = pool.wait_for(Written, 2, meanwhile=away.agent.progress)
    assert told_all[1].write is good
    assert told_all[1].error is None
    assert pool.has_sent(away, 4)
    assert len(pool.opened) == 2
    assert pool.writers.close(PATIENCE_S)
    away.close()
    pool.region.close()
