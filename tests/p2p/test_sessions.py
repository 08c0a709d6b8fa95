"""The table of sessions: how they begin, what their end leaves, and when time is up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdoffload.errors import ConfigError, MisuseError
from pdoffload.p2p.address import Address
from pdoffload.p2p.messages import Disconnect, Lookup, decode
from pdoffload.p2p.news import PullEnded
from pdoffload.p2p.sessions import LONGEST_REASON, Sessions, goodbye
from pdoffload.p2p.terms import Target
from pdoffload.policy.lru import Lru
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.fake_peer import terms_of
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiering.index import Index

HERE = Address("here", 5710)
THERE = Address("there", 5710)
KEYS = keys_of(*range(3))


class NoWire:
    """Lines to nowhere, and everything that was sent by them."""

    def __init__(self) -> None:
        self.address = HERE
        self.lines: set[Address] = set()
        self.sent: list[tuple[Address, bytes]] = []
        self.is_full = False
        self.problem = ""

    def connect(self, address: Address) -> None:
        if self.problem:
            raise ConfigError([self.problem])
        self.lines.add(address)

    def send(self, address: Address, frame: bytes) -> bool:
        if self.is_full or address not in self.lines:
            return False
        self.sent.append((address, frame))
        return True

    def look(self, address: Address) -> str:
        return ""

    def close_line(self, address: Address) -> None:
        self.lines.discard(address)


class Table:
    """Sessions over `NoWire`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.wire = NoWire()
        self.index = Index(8, Lru(8))
        self.index.listen(lambda arrivals: None)
        self.forgotten: list[Target] = []
        self.sessions = Sessions(
            self.wire,
            terms_of(),
            self.index,
            self.forgotten.append,
            max_peers=2,
            clock=self.clock,
        )


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table.sessions.close(settled=True)
    assert table.index.num_lent == 0


def test_a_session_has_a_line_of_its_own(table: Table) -> None:
    session = table.sessions.open(THERE)
    assert session is not None
    assert table.sessions.get(THERE) is session
    assert list(table.sessions) == [session]
    assert table.wire.lines == {THERE}
    table.sessions.drop(session, "over")
    assert table.sessions.get(THERE) is None
    assert table.wire.lines == set()


def test_a_host_without_an_address_is_not_tried_again_at_once(table: Table) -> None:
    table.wire.problem = "its host cannot be resolved"
    assert table.sessions.open(THERE) is None
    assert table.sessions.why_not(THERE)
    assert len(table.sessions) == 0


def test_a_session_ends_once(table: Table) -> None:
    session = table.sessions.open(THERE)
    assert session is not None
    table.sessions.drop(session, "one reason")
    again = table.sessions.open(THERE)
    table.sessions.drop(session, "another reason")
    assert table.sessions.get(THERE) is again
    assert table.sessions.counts.peers_lost == 1


def test_the_peer_is_told_why_if_it_is_to_be_told(table: Table) -> None:
    for tell in (True, False):
        session = table.sessions.open(THERE)
        assert session is not None
        table.sessions.drop(session, "for a reason", tell=tell)
    ((to, frame),) = table.wire.sent
    assert to == THERE
    assert decode(frame) == Disconnect("for a reason")


def test_a_line_that_breaks_ends_its_session_alone(table: Table) -> None:
    other = table.sessions.open(Address("other", 5710))
    table.sessions.open(THERE)
    table.sessions.down(THERE, "it broke")
    table.sessions.down(THERE, "it broke")
    table.sessions.down(Address("nobody", 1), "it broke")
    assert list(table.sessions) == [other]
    assert table.sessions.counts.peers_lost == 1


def test_a_line_that_takes_nothing_ends_its_session(table: Table) -> None:
    session = table.sessions.open(THERE)
    assert session is not None
    table.wire.is_full = True
    table.sessions.send(session, terms_of().introduce(str(HERE), b"metadata", "x.1"))
    assert session.state.closed
    assert len(table.sessions) == 0


def test_what_was_queued_for_a_session_that_has_ended_is_not_sent(table: Table) -> None:
    session = table.sessions.open(THERE)
    assert session is not None
    session.asker.admit("agent", whole=False)
    session.asker.ask("id", KEYS, 0.0)
    table.sessions.drop(session, "over", backoff=False)
    table.sessions.flush(session)
    assert table.wire.sent == []


def test_a_message_out_of_turn_is_our_fault(table: Table) -> None:
    session = table.sessions.open(THERE)
    assert session is not None
    with pytest.raises(MisuseError, match="Lookup may not be sent"):
        table.sessions.send(session, Lookup("id", KEYS, 0))


def test_memory_of_a_lost_peer_is_forgotten(table: Table) -> None:
    session = table.sessions.open(THERE)
    assert session is not None
    session.targets = [Target("there", b"", 0, 1, 1) for _ in range(2)]
    table.sessions.drop(session, "over")
    assert table.forgotten == session.targets


def test_whoever_asked_hears_of_the_end_and_is_forgotten_then(table: Table) -> None:
    session = table.sessions.open(THERE)
    assert session is not None
    session.asker.ask("id", KEYS, 0.0)
    table.sessions.drop(session, "over")
    assert table.sessions.askers == (session.asker,)
    assert len(session.asker.take_news()) == 1
    table.sessions.forget_settled()
    assert table.sessions.askers == ()


def test_deadlines_of_a_session_are_those_of_the_table(table: Table) -> None:
    assert table.sessions.next_deadline_s() is None
    session = table.sessions.open(THERE)
    assert session is not None
    now_s = table.clock.monotonic_s()
    session.asker.ask("id", KEYS, now_s)
    assert table.sessions.next_deadline_s() == now_s + 30.0
    table.sessions.keeping.begin("kept", fetched=False)
    table.sessions.keeping.computed("kept", now_s - 50)
    assert table.sessions.next_deadline_s() == now_s + 10.0
    table.sessions.tick(now_s + 30.0)
    assert table.sessions.asked.expired_lookups == 3


def test_at_the_end_everybody_is_told_and_what_was_pulled_is_settled(table: Table) -> None:
    session = table.sessions.open(THERE)
    assert session is not None
    session.asker.ask("id", KEYS, 0.0)
    table.sessions.take_leave()
    assert [decode(frame) for _, frame in table.wire.sent] == [Disconnect("shutting down")]
    table.sessions.close(settled=True)
    assert len(table.sessions) == 0
    news = session.asker.take_news()
    assert not any(isinstance(each, PullEnded) and not each.settled for each in news)
    assert table.sessions.counts.peers_lost == 0


def test_a_reason_is_cut_to_what_peers_read_and_has_no_line_breaks() -> None:
    told = goodbye("a\nb" + "x" * 10_000)
    assert len(told.reason) <= 2 * LONGEST_REASON
    assert "\n" not in told.reason
