"""Which receiving agent is told to peers, and when the others are closed."""

from __future__ import annotations

import itertools

import pytest

from pdoffload.errors import NixlError, TransferError
from pdoffload.p2p.address import Address
from pdoffload.p2p.asking import Asker
from pdoffload.p2p.news import Pull
from pdoffload.p2p.receivers import Receivers, same_process
from pdoffload.p2p.receiving import Stage
from pdoffload.p2p.stats import AskCounts
from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.peer_fakes import FakeReceiver
from pdoffload.testing.tier_rig import keys_of

PEER = Address("prefiller", 5710)
KEYS = keys_of("a", "b")


class Opener:
    """Opens fakes, and passes on their news."""

    def __init__(self) -> None:
        self.opened: list[FakeReceiver] = []
        self.receivers = Receivers(self._open, clock=FakeClock())

    def _open(self, incarnation: str) -> FakeReceiver:
        receiver = FakeReceiver(incarnation, self._changed, lambda slot, chunk: None)
        self.opened.append(receiver)
        return receiver

    def _changed(self, receiver: FakeReceiver) -> None:
        if receiver.stage is not Stage.OPEN:
            self.receivers.ended(receiver)


@pytest.fixture
def opener() -> Opener:
    return Opener()


def asker_with_a_pull(via: object) -> Asker:
    asker = Asker(PEER, Deadlines(), 4096, itertools.count(), AskCounts())
    asker.admit(via, whole=False)
    asker.pull(Pull(1, PEER, "id", KEYS, (0, 1)), 0.0)
    return asker


def test_an_agent_is_opened_at_the_first_need_and_once(opener: Opener) -> None:
    assert opener.opened == []
    assert opener.receivers.available is None
    first = opener.receivers.current()
    assert opener.receivers.current() is first
    assert opener.receivers.available is first
    assert len(opener.opened) == 1


def test_each_is_another_incarnation_of_one_process(opener: Opener) -> None:
    first = opener.receivers.current()
    opener.opened[0].fail(NixlError("nixl_agent", "no"))
    second = opener.receivers.current()
    assert first.incarnation != second.incarnation
    assert same_process(first.incarnation, second.incarnation)
    assert not same_process(first.incarnation, Opener().receivers.current().incarnation)
    assert not same_process("", "")
    assert not same_process("", first.incarnation)


def test_a_failed_agent_is_tried_again_when_it_is_needed(opener: Opener) -> None:
    opener.receivers.current()
    opener.opened[0].fail(NixlError("nixl_agent", "no"))
    assert opener.receivers.available is None
    assert not opener.receivers.balance([])
    assert len(opener.opened) == 1
    assert opener.receivers.current() is opener.opened[1]


def test_an_agent_that_has_failed_is_not_handed_out_before_its_news_come(opener: Opener) -> None:
    first = opener.receivers.current()
    opener.opened[0].stage = Stage.FAILED
    assert opener.receivers.available is None
    second = opener.receivers.current()
    opener.receivers.ended(first)
    assert opener.receivers.current() is second


def test_agents_hear_how_much_is_expected(opener: Opener) -> None:
    current = opener.receivers.current()
    asker = asker_with_a_pull(current)
    assert not opener.receivers.balance([asker, asker_with_a_pull(current)])
    assert opener.opened[0].expected == 2
    opener.receivers.balance([])
    assert opener.opened[0].expected == 0
    assert not opener.opened[0].retired


def test_an_agent_is_replaced_when_slots_are_in_quarantine_because_of_it(opener: Opener) -> None:
    current = opener.receivers.current()
    lost, other = asker_with_a_pull(current), asker_with_a_pull(current)
    lost.lose("gone")
    assert opener.receivers.balance([lost, other])
    old, new = opener.opened
    assert opener.receivers.current() is new
    assert opener.receivers.num_retiring == 1
    assert (old.expected, old.retired) == (1, False), "the other pull may still come by it"
    assert not opener.receivers.balance([lost, other]), "once is enough"
    other.lose("gone too")
    assert not opener.receivers.balance([lost, other])
    assert old.retired
    assert not new.retired
    old.advance()
    assert opener.receivers.num_retiring == 0
    assert old.stage is Stage.OPENING or old.stage is Stage.CLOSED


def test_a_settled_failure_costs_no_agent(opener: Opener) -> None:
    current = opener.receivers.current()
    asker = asker_with_a_pull(current)
    asker.lose("gone", settled=True)
    assert not opener.receivers.balance([asker])
    assert opener.receivers.current() is current


def test_closing_ends_the_current_agent_and_those_before_it(opener: Opener) -> None:
    current = opener.receivers.current()
    lost, other = asker_with_a_pull(current), asker_with_a_pull(current)
    lost.give_up("no matter")
    lost.lose("gone")
    opener.receivers.balance([lost, other])
    assert opener.receivers.close(1.0)
    assert [each.stage for each in opener.opened] == [Stage.CLOSED, Stage.CLOSED]
    assert all(each.retired for each in opener.opened)


def test_a_thread_that_does_not_end_is_told(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener.receivers.current()
    waited: list[float] = []

    def join(self: FakeReceiver, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return False

    monkeypatch.setattr(FakeReceiver, "join", join)
    assert not opener.receivers.close(5.0)
    assert waited == [5.0]


def test_the_news_of_an_agent_are_its_stages() -> None:
    heard: list[Stage] = []
    fake = FakeReceiver("x.1", lambda each: heard.append(each.stage), lambda slot, chunk: None)
    fake.advance()
    fake.fail(TransferError("no progress"))
    assert heard == [Stage.OPEN, Stage.CLOSED]
