"""Whole conversations: prefill and decode, prefixes of others, and everything that comes between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdoffload.config import Verify
from pdoffload.errors import CorruptChunk, DeadlineExceeded
from pdoffload.memory.lending import READY
from pdoffload.p2p.address import Address
from pdoffload.p2p.arrivals import QUIET_S
from pdoffload.p2p.messages import (
    AbortAck,
    AbortFetch,
    Disconnect,
    Fetch,
    Message,
    TransferDone,
    encode,
)
from pdoffload.p2p.news import Ask, Keep, KeepEnds, Leave, Offer
from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.fake_peer import FakePeer, terms_of
from pdoffload.testing.peer_rig import FakeCluster
from pdoffload.testing.tier_rig import keys_of

KEYS = keys_of(*range(8))
DEADLINES = Deadlines()


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster()
    yield cluster
    cluster.check()
    for peer in cluster.peers.values():
        peer.is_frozen = False
        peer.movers.faults.clear()
    for _ in range(4):
        cluster.pass_time(60)
        for peer in cluster.peers.values():
            peer.movers.settle()
    for peer in cluster.peers.values():
        assert not peer.pulls
        assert not peer.unsettled
        assert peer.is_at_rest, peer
    cluster.check()


@pytest.fixture
def prefiller(cluster: FakeCluster) -> FakePeer:
    return cluster.start("prefiller")


@pytest.fixture
def decoder(cluster: FakeCluster) -> FakePeer:
    return cluster.start("decoder")


def kinds(cluster: FakeCluster, start: FakePeer) -> list[type[Message]]:
    return [type(each) for sender, _, each in cluster.seen if sender is start]


# --- prefill and decode ---


def test_a_decoder_pulls_what_a_prefiller_has_kept(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.post(Keep("id"))
    prefiller.reserve(KEYS)
    prefiller.post(Offer("id", KEYS))
    cluster.run()
    prefiller.index.commit(KEYS)
    prefiller.post(KeepEnds("id"))
    cluster.run()
    assert prefiller.index.num_lent == len(KEYS)
    job = decoder.pull(prefiller, "id", KEYS)
    cluster.run()
    assert decoder.ended[job].failed == ()
    assert decoder.ended[job].verified == len(KEYS)
    assert all(decoder.index.find(key) is READY for key in KEYS)
    assert kinds(cluster, decoder).count(Fetch) == 4, "two chunks a round"
    decoder.post(Leave(prefiller.address, "id"))
    cluster.run()
    assert prefiller.index.num_lent == 0


def test_a_decoder_may_come_before_the_chunks_and_the_request(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    job = decoder.pull(prefiller, "id", KEYS[:3])
    cluster.run()
    prefiller.post(Keep("id"))
    for key in KEYS[:3]:
        prefiller.reserve([key])
        prefiller.post(Offer("id", (key,)))
        cluster.pass_time(2)
        prefiller.index.commit([key])
        cluster.pass_time(2)
    prefiller.post(KeepEnds("id"))
    cluster.run()
    assert decoder.ended[job].failed == ()
    assert prefiller.exchange.sessions.keeping.expired_keeps == 0


def test_a_prefiller_that_aborts_does_not_let_the_decoder_wait(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.post(Keep("id"))
    job = decoder.pull(prefiller, "id", KEYS[:2])
    cluster.run()
    assert job not in decoder.ended
    prefiller.post(KeepEnds("id"))
    cluster.run()
    assert len(decoder.ended[job].failed) == 2
    assert decoder.ended[job].settled


def test_c18_a_decoder_that_comes_too_late_is_refused_at_once(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:2])
    prefiller.post(Keep("id"))
    prefiller.post(Offer("id", KEYS[:2]))
    prefiller.post(KeepEnds("id"))
    cluster.pass_time(DEADLINES.unbound_store_timeout_s)
    assert prefiller.index.num_lent == 0
    assert prefiller.exchange.sessions.keeping.expired_keeps == 1
    job = decoder.pull(prefiller, "id", KEYS[:2])
    cluster.run()
    assert len(decoder.ended[job].failed) == 2
    assert decoder.ended[job].settled


def test_a_prefiller_that_computes_slowly_keeps_all_for_a_decoder_that_comes_at_the_end(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.post(Keep("id"))
    for key in KEYS[:3]:
        prefiller.hold([key])
        prefiller.post(Offer("id", (key,)))
        cluster.pass_time(2 * DEADLINES.unbound_store_timeout_s)
    prefiller.post(KeepEnds("id"))
    cluster.run()
    prefiller.reset()
    job = decoder.pull(prefiller, "id", KEYS[:3])
    cluster.run()
    assert decoder.ended[job].failed == ()
    assert prefiller.exchange.sessions.keeping.expired_keeps == 0


def test_c18_chunks_that_are_gone_since_their_decoder_left_are_not_waited_for(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:2])
    prefiller.post(Keep("id"))
    prefiller.post(Offer("id", KEYS[:2]))
    prefiller.post(KeepEnds("id"))
    job = decoder.pull(prefiller, "id", KEYS[:2])
    decoder.post(Leave(prefiller.address, "id"))
    cluster.run()
    assert decoder.ended[job].failed == ()
    prefiller.reset()
    decoder.reset()
    job = decoder.pull(prefiller, "id", KEYS[:2])
    cluster.run()
    assert len(decoder.ended[job].failed) == 2
    # A request that uses the id again computes them anew, and is waited for.
    prefiller.post(Keep("id"))
    job = decoder.pull(prefiller, "id", KEYS[:2])
    cluster.run()
    assert job not in decoder.ended
    prefiller.hold(KEYS[:2])
    cluster.run()
    assert decoder.ended[job].failed == ()
    for peer, command in ((prefiller, KeepEnds("id")), (decoder, Leave(prefiller.address, "id"))):
        peer.post(command)
    cluster.run()


# --- what is no message ---


def test_a_peer_that_sends_nonsense_again_and_again_is_logged_once_a_while(
    cluster: FakeCluster, prefiller: FakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    def send(number: int, times: int = 1) -> int:
        """How many lines are logged of it."""
        caplog.clear()
        for _ in range(times):
            prefiller.exchange.received(Address("raw", number), b"nonsense")
        assert all(f"raw:{number} sent what is no" in each for each in caplog.messages)
        return len(caplog.messages)

    assert send(1, times=1000) == 1
    assert send(2) == 1, "another peer is news"
    assert send(1) == 0
    cluster.clock.advance(QUIET_S)
    assert send(1) == 1
    for number in range(cluster.max_peers):
        send(100 + number)
    assert send(1) == 1, "whoever was quiet while others were not is forgotten: memory is bounded"
    assert prefiller.exchange.sessions.counts.bad_messages == 1004 + cluster.max_peers


# --- prefixes of others ---


def test_a_prefix_is_asked_for_and_its_hits_are_pulled(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:4])
    decoder.ask(prefiller, "id", KEYS)
    cluster.run()
    assert [decoder.answers[("id", key)] for key in KEYS] == [True] * 4 + [False] * 4
    prefiller.reset()
    job = decoder.pull(prefiller, "id", KEYS[:4])
    cluster.run()
    assert decoder.ended[job].failed == (), "what was promised is held, whatever the engine forgets"
    decoder.post(Leave(prefiller.address, "id"))
    cluster.run()
    assert prefiller.index.num_lent == 0


def test_a_request_that_ends_before_its_pull_leaves_nothing_behind(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:4])
    for number in range(20):
        decoder.ask(prefiller, f"id {number}", KEYS[:4])
        if number % 3:
            cluster.run()
        decoder.post(Leave(prefiller.address, f"id {number}"))
        cluster.run()
    assert prefiller.index.num_lent == 0
    assert not prefiller.exchange.sessions.get(decoder.address).server.busy  # type: ignore[union-attr]


def test_a_wrong_byte_is_found_by_the_consumer(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:2])
    prefiller.movers.faults.append("garbled")
    job = decoder.pull(prefiller, "id", KEYS[:2])
    cluster.run()
    assert all(isinstance(error, CorruptChunk) for _, error in decoder.ended[job].failed)
    assert len(decoder.ended[job].failed) == 2
    assert len(decoder.opened) == 1, "nothing may still land"


# --- writes that go wrong ---


def test_a_refused_write_costs_its_round_alone(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:4])
    prefiller.movers.faults.append("refused")
    job = decoder.pull(prefiller, "id", KEYS[:4])
    cluster.run()
    assert [key for key, _ in decoder.ended[job].failed] == list(KEYS[:2])
    assert decoder.ended[job].settled


def test_bytes_that_land_late_land_in_slots_of_nobody(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:4])
    decoder.is_slow_to_open = False
    prefiller.movers.faults.append("lost")
    job = decoder.pull(prefiller, "id", KEYS[:4])
    while job not in decoder.ended:
        cluster.step()
    assert not decoder.ended[job].settled
    prefiller.movers.land()
    cluster.run()
    assert decoder.unsettled == {}, "our agent is closed"
    decoder.hold(KEYS[:2])
    prefiller.movers.land()
    prefiller.movers.settle()
    cluster.run()
    assert prefiller.index.num_lent == 0 or prefiller.exchange.sessions


# --- deadlines ---


def test_a_pull_that_is_late_is_aborted_and_its_slots_are_free(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    job = decoder.pull(prefiller, "unknown", KEYS[:2])
    cluster.pass_time(DEADLINES.load_timeout_s)
    assert AbortFetch in kinds(cluster, decoder) or TransferDone in kinds(cluster, prefiller)
    assert decoder.ended[job].settled
    assert len(decoder.opened) == 1


@pytest.mark.parametrize("wakes_in_time", [True, False])
def test_a_producer_that_stands_still_costs_the_pull_and_not_the_slots(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer, wakes_in_time: bool
) -> None:
    prefiller.hold(KEYS[:2])
    decoder.ask(prefiller, "id", KEYS[:2])
    cluster.run()
    prefiller.is_frozen = True
    job = decoder.pull(prefiller, "id", KEYS[:2])
    cluster.pass_time(DEADLINES.load_timeout_s + (5 if wakes_in_time else 15))
    prefiller.is_frozen = False
    cluster.run()
    assert all(isinstance(error, DeadlineExceeded) for _, error in decoder.ended[job].failed)
    assert len(decoder.ended[job].failed) == 2
    assert decoder.ended[job].settled is wakes_in_time
    assert decoder.unsettled == {}
    cluster.pass_time(1)
    again = decoder.pull(prefiller, "id", KEYS[:2])
    cluster.run()
    assert decoder.ended[again].failed == ()


def test_an_acknowledgement_that_never_comes_costs_our_agent(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    decoder.ask(prefiller, "id", KEYS[:1])
    cluster.run()
    prefiller.is_frozen = True
    job = decoder.pull(prefiller, "id", KEYS[:2])
    cluster.pass_time(DEADLINES.load_timeout_s + DEADLINES.abort_timeout_s)
    assert not decoder.ended[job].settled
    assert decoder.unsettled == {}, "the agent was closed at once: nothing else was under way"
    assert len(decoder.opened) == 2
    assert decoder.exchange.sessions.asked.expired_aborts == 1


def test_a_question_to_a_peer_that_stands_still_is_a_miss_in_time(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:1])
    decoder.ask(prefiller, "id", KEYS[:1])
    cluster.run()
    prefiller.is_frozen = True
    decoder.ask(prefiller, "another", KEYS[:1])
    cluster.pass_time(DEADLINES.lookup_timeout_s)
    assert decoder.answers[("another", KEYS[0])] is False
    assert decoder.exchange.sessions.asked.expired_lookups == 1


# --- lost peers, at every step of a pull ---


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("victim", ["prefiller", "decoder", "both lines"])
def test_whoever_is_lost_whenever_the_rest_goes_on(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer, steps: int, victim: str
) -> None:
    prefiller.hold(KEYS[:4])
    decoder.ask(prefiller, "id", KEYS[:4])
    job = decoder.pull(prefiller, "id", KEYS[:4])
    for _ in range(steps):
        cluster.step()
    if victim == "both lines":
        cluster.cut(prefiller, decoder)
    else:
        cluster.kill(prefiller if victim == "prefiller" else decoder)
    cluster.run()
    cluster.check()
    if victim != "decoder":
        assert job in decoder.ended
        prefiller.movers.settle()
    cluster.pass_time(1)
    if victim == "prefiller":
        prefiller = cluster.start("prefiller")
        prefiller.hold(KEYS[:4])
    if victim == "decoder":
        decoder = cluster.start("decoder")
    decoder.index.clear([])
    again = decoder.pull(prefiller, "again", KEYS[:4])
    cluster.run()
    assert decoder.ended[again].failed == ()


# --- what peers must not do ---


def test_a_frame_that_is_no_message_closes_nothing(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    decoder.ask(prefiller, "id", KEYS[:1])
    cluster.run()
    prefiller.exchange.received(decoder.address, b"\xc1 garbage")
    prefiller.exchange.received(decoder.address, b"")
    assert prefiller.exchange.sessions.counts.bad_messages == 2
    decoder.ask(prefiller, "another", KEYS[:1])
    cluster.run()
    assert ("another", KEYS[0]) in decoder.answers


def test_a_message_out_of_turn_ends_that_session_alone(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    other = cluster.start("other")
    prefiller.hold(KEYS[:2])
    for peer in (decoder, other):
        peer.ask(prefiller, "id", KEYS[:2])
    cluster.run()
    fetch = encode(Fetch("id", KEYS[:1], (10**6,), 0))
    prefiller.exchange.received(decoder.address, fetch)
    cluster.run()
    assert prefiller.exchange.sessions.counts.bad_messages == 1
    assert prefiller.exchange.sessions.get(decoder.address) is None
    assert decoder.exchange.sessions.get(prefiller.address) is None, "it was told"
    job = other.pull(prefiller, "id", KEYS[:2])
    cluster.run()
    assert other.ended[job].failed == ()


def test_answers_to_nothing_are_ignored(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    decoder.ask(prefiller, "id", KEYS[:1])
    cluster.run()
    for message in (TransferDone("x", True, 0), AbortAck("x", 0), AbortAck("id", 9)):
        decoder.exchange.received(prefiller.address, encode(message))
    cluster.run()
    assert decoder.exchange.sessions.get(prefiller.address) is not None


# --- the end ---


def test_closing_ends_what_was_asked_and_takes_leave(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS[:4])
    decoder.ask(prefiller, "id", KEYS[:1])
    cluster.run()
    prefiller.is_frozen = True
    job = decoder.pull(prefiller, "id", KEYS[:4])
    cluster.run()
    decoder.exchange.take_leave()
    assert decoder.receivers.close(1.0)
    decoder.exchange.close(settled=True)
    decoder.turn()
    assert len(decoder.ended[job].failed) == 4
    assert decoder.ended[job].settled
    prefiller.is_frozen = False
    cluster.run()
    assert len(prefiller.exchange.sessions) == 0
    assert prefiller.index.num_lent == 0


def test_after_the_leave_nobody_is_asked_and_nothing_is_kept(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    decoder.hold(KEYS[:2])
    decoder.exchange.take_leave()
    decoder.exchange.close(settled=True)
    decoder.post(Ask(prefiller.address, "id", KEYS[2:3]))
    decoder.pull(prefiller, "id", KEYS[2:4])
    decoder.post(Keep("kept"))
    decoder.post(Offer("kept", KEYS[:2]))
    decoder.post(KeepEnds("kept"))
    decoder.post(Leave(prefiller.address, "id"))
    cluster.run()
    assert decoder.answers == {("id", KEYS[2]): False}
    assert len(decoder.ended) == 1
    assert decoder.index.num_lent == 0
    assert decoder.opened == []


def test_one_process_may_pull_and_keep_the_same_chunks(cluster: FakeCluster) -> None:
    """It keeps for a decoder what it has pulled from somebody else."""
    terms = terms_of(verify=Verify.IF_PRESENT)
    source, middle, last = (cluster.start(name, terms) for name in ("source", "middle", "last"))
    source.hold(KEYS[:2])
    middle.post(Keep("to the last"))
    pulled = middle.pull(source, "from the source", KEYS[:2])
    middle.post(Offer("to the last", KEYS[:2]))
    job = last.pull(middle, "to the last", KEYS[:2])
    cluster.run()
    middle.post(KeepEnds("to the last"))
    cluster.run()
    assert middle.ended[pulled].failed == ()
    assert last.ended[job].failed == ()


def test_c17_the_last_words_of_a_killed_process_are_not_answered_to_its_successor(
    cluster: FakeCluster, prefiller: FakePeer, decoder: FakePeer
) -> None:
    prefiller.hold(KEYS)
    decoder.pull(prefiller, "first", KEYS[:2])
    cluster.run()
    decoder.pull(prefiller, "second", KEYS[2:4])
    decoder.turn()
    cluster.kill(decoder, last_words=True)
    cluster.tells_ends_late = True
    successor = cluster.start("decoder")
    job = successor.pull(prefiller, "third", KEYS[4:])
    successor.turn()
    cluster.run()
    sent = [type(each) for start, end, each in cluster.seen if end is successor]
    assert Disconnect not in sent
    assert successor.ended[job].failed == ()
