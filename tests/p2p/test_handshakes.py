"""Handshakes between whole peers: who is let in, who comes again, and what a new receiving agent changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pdoffload.config import Verify
from pdoffload.errors import NixlError
from pdoffload.p2p.address import Address
from pdoffload.p2p.handshakes import _MOST_TARGETS
from pdoffload.p2p.messages import (
    Connect,
    ConnectAck,
    Disconnect,
    Fetch,
    Message,
    TransferDone,
    encode,
)
from pdoffload.p2p.news import Leave, Pull
from pdoffload.p2p.receiving import Stage
from pdoffload.p2p.session import Answering, Asking
from pdoffload.p2p.sessions import FIRST_BACKOFF_S, IDLE_S, PARTING_S, Session
from pdoffload.testing.fake_peer import FakePeer, terms_of
from pdoffload.testing.peer_rig import FakeCluster
from pdoffload.testing.tier_rig import keys_of

KEYS = keys_of(*range(6))


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster(max_peers=3)
    yield cluster
    cluster.check()


@pytest.fixture
def producer(cluster: FakeCluster) -> FakePeer:
    producer = cluster.start("prefiller")
    producer.hold(KEYS)
    return producer


@pytest.fixture
def consumer(cluster: FakeCluster) -> FakePeer:
    return cluster.start("decoder")


def session_of(peer: FakePeer, other: FakePeer) -> Session:
    session = peer.exchange.sessions.get(other.address)
    assert session is not None
    return session


def sent(cluster: FakeCluster, start: FakePeer, kind: type[Message]) -> list[Message]:
    """Messages of one kind that `start` has sent and that have arrived."""
    return [each for sender, _, each in cluster.seen if sender is start and isinstance(each, kind)]


def replace_agent(cluster: FakeCluster, consumer: FakePeer, producer: FakePeer) -> None:
    """Lose a pull, so that the consumer takes another receiving agent."""
    producer.movers.faults.append("lost")
    job = consumer.pull(producer, "lost", KEYS[5:])
    cluster.run()
    assert not consumer.ended[job].settled
    producer.movers.settle()
    cluster.run()


# --- the first contact ---


def test_whoever_is_asked_first_hears_who_asks(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.ask(producer, "id", KEYS[:2])
    cluster.run()
    assert session_of(consumer, producer).state.asking is Asking.ADMITTED
    assert session_of(producer, consumer).state.answering is Answering.GUEST
    assert session_of(consumer, producer).ours
    assert all(consumer.answers.values())
    (connect,) = sent(cluster, consumer, Connect)
    assert isinstance(connect, Connect)
    assert connect.incarnation == consumer.opened[0].incarnation
    assert producer.opened == [], "whoever only serves needs no receiving agent"


def test_two_peers_may_ask_each_other_at_once(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.ask(producer, "id", KEYS[:1])
    producer.ask(consumer, "other id", KEYS[:1])
    cluster.run()
    assert consumer.answers == {("id", KEYS[0]): True}
    assert producer.answers == {("other id", KEYS[0]): False}
    for peer, other in ((producer, consumer), (consumer, producer)):
        state = session_of(peer, other).state
        assert (state.asking, state.answering) == (Asking.ADMITTED, Answering.GUEST)


def test_nobody_is_asked_by_itself(cluster: FakeCluster, consumer: FakePeer) -> None:
    consumer.ask(consumer, "id", KEYS[:1])
    job = consumer.pull(consumer, "id", KEYS[:1])
    cluster.run()
    assert consumer.answers == {("id", KEYS[0]): False}
    assert "this process itself" in str(consumer.ended[job].failed[0][1])
    assert len(consumer.exchange.sessions) == 0


def test_a_peer_that_is_not_there_costs_a_moment_and_then_less(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    cluster.kill(producer)
    job = consumer.pull(producer, "id", KEYS[:1])
    cluster.run()
    assert "the line broke" in str(consumer.ended[job].failed[0][1])
    assert consumer.ended[job].settled
    job = consumer.pull(producer, "id", KEYS[:1])
    cluster.run()
    assert "failed a moment ago" in str(consumer.ended[job].failed[0][1])
    assert not consumer.ended[job].tried


def test_the_back_off_doubles_and_ends_with_a_word_of_the_peer(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    cluster.kill(producer)
    sessions = consumer.exchange.sessions
    for wait_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        consumer.pull(producer, "id", KEYS[:1])
        cluster.run()
        cluster.pass_time(wait_s - 0.1)
        assert sessions.why_not(producer.address)
        cluster.pass_time(0.1)
        assert not sessions.why_not(producer.address)
    consumer.pull(producer, "id", KEYS[:1])
    cluster.run()
    assert sessions.why_not(producer.address)
    again = cluster.start("prefiller")
    again.ask(consumer, "id", KEYS[:1])
    cluster.run()
    assert not sessions.why_not(producer.address)


def test_a_peer_that_takes_no_message_is_not_waited_for(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.hold(KEYS[5:])
    producer.ask(consumer, "id", KEYS[5:])
    cluster.run()
    job = producer.pull(consumer, "id", keys_of("opens an agent"))
    cluster.run()
    consumer.is_slow_to_open = True
    consumer.receivers.current()
    consumer.is_slow_to_open = False
    cluster.run()
    consumer.wire.is_full = True
    consumer.ask(producer, "id", KEYS[:1])
    refused = consumer.pull(producer, "id", KEYS[:1])
    cluster.run()
    assert consumer.answers == {("id", KEYS[0]): False}
    assert len(consumer.ended[refused].failed) == 1
    assert job in producer.ended


def test_an_old_failure_is_forgotten(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    cluster.kill(producer)
    for _ in range(3):
        consumer.pull(producer, "id", KEYS[:1])
        cluster.pass_time(5)
    cluster.pass_time(60)
    assert "0 backing off" in repr(consumer.exchange.sessions)


def test_a_peer_that_never_answers_is_left_alone_after_the_deadline(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    producer.is_frozen = True
    job = consumer.pull(producer, "id", KEYS[:1])
    cluster.pass_time(29.9)
    assert job not in consumer.ended
    cluster.pass_time(0.2)
    assert consumer.ended[job].settled
    assert len(consumer.exchange.sessions) == 0
    producer.is_frozen = False
    cluster.run()
    assert len(producer.exchange.sessions) == 0, "it was told that nobody waits any more"


def test_an_answer_that_comes_after_all_fits_the_next_attempt(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    """The peer was stopped for long: it answers both of our connects."""
    producer.is_frozen = True
    consumer.ask(producer, "id", KEYS[:1])
    cluster.pass_time(31)
    consumer.ask(producer, "id", KEYS[:1])
    cluster.run()
    producer.is_frozen = False
    cluster.run()
    cluster.pass_time(1)
    consumer.ask(producer, "another", KEYS[:1])
    cluster.run()
    assert consumer.answers[("another", KEYS[0])]
    assert consumer.exchange.sessions.counts.bad_messages == 0


# --- those that do not fit ---


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": "0"}, "hash_seed: 'seed' here, '0' there"),
        ({"chunk_bytes": 8192}, "block_len: 4194304 here, 8192 there"),
        ({"fields": {"model_name": "org/model", "dtype": "float8"}}, '"bfloat16" here, "float8"'),
    ],
)
def test_c21_other_terms_are_refused_with_both_values_on_both_sides(
    cluster: FakeCluster,
    producer: FakePeer,
    changes: dict[str, object],
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = cluster.start("stranger", terms_of(**changes))  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        job = stranger.pull(producer, "id", KEYS[:1])
        cluster.run()
    assert named in str(stranger.ended[job].failed[0][1])
    assert [named in record.getMessage() for record in caplog.records] == [True, True]
    for peer in (producer, stranger):
        assert peer.exchange.sessions.counts.handshakes_refused == 1
        assert len(peer.exchange.sessions) == 0


def test_a_refusal_is_logged_once_and_again_when_its_reason_changes(
    cluster: FakeCluster, producer: FakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = cluster.start("stranger", terms_of(seed="0"))
    caplog.set_level(logging.ERROR, logger="pdoffload.p2p.handshakes")
    for _ in range(3):
        stranger.pull(producer, "id", KEYS[:1])
        cluster.pass_time(60)
    assert [
        r for r in caplog.messages if r.startswith("peer stranger:5710 is refused")
    ].__len__() == 1
    cluster.kill(stranger)
    stranger = cluster.start("stranger", terms_of(seed="1"))
    stranger.pull(producer, "id", KEYS[:1])
    cluster.run()
    assert len([r for r in caplog.messages if "is refused" in r]) == 2
    assert len(producer.exchange.sessions) == 0


def test_those_refused_are_not_remembered_without_end(
    cluster: FakeCluster, producer: FakePeer
) -> None:
    for number in range(10):
        stranger = cluster.start(f"stranger{number}", terms_of(seed="0"))
        stranger.pull(producer, "id", KEYS[:1])
        cluster.run()
    assert len(producer.exchange.handshakes._refused) == cluster.max_peers


def test_a_guest_that_does_not_fit_any_more_loses_its_session(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.ask(producer, "id", KEYS[:1])
    cluster.run()
    other = terms_of(seed="0").introduce("decoder:5710", b"metadata", "x.1")
    producer.exchange.received(consumer.address, encode(other))
    cluster.run()
    assert len(producer.exchange.sessions) == 0
    assert len(consumer.exchange.sessions) == 0


def test_whoever_introduces_itself_by_another_name_is_no_guest(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    lie = terms_of().introduce("another:5710", b"metadata", "x.1")
    producer.exchange.received(consumer.address, encode(lie))
    cluster.run()
    assert producer.exchange.sessions.counts.bad_messages == 1
    assert len(producer.exchange.sessions) == 0


def test_whoever_asks_without_an_introduction_hears_that_it_has_no_session(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    producer.exchange.received(consumer.address, encode(Fetch("id", KEYS[:1], (0,), 0)))
    cluster.run()
    (told,) = sent(cluster, producer, Disconnect)
    assert isinstance(told, Disconnect)
    assert "introduce yourself" in told.reason
    # It may do so right away, by a line that is open; or not.
    assert producer.wire.lines == {consumer.address}
    cluster.pass_time(PARTING_S)
    assert len(producer.wire.lines) == 0


def test_strangers_in_any_number_have_a_bounded_number_of_lines(
    cluster: FakeCluster, producer: FakePeer
) -> None:
    most = producer.exchange.sessions.max_peers
    for number in range(most + 5):
        stranger = Address("stranger", 1 + number)
        producer.exchange.received(stranger, encode(Fetch("id", KEYS[:1], (0,), 0)))
    assert len(producer.wire.lines) == most


def test_two_sides_that_have_both_ended_their_session_are_silent(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.ask(producer, "id", KEYS[:1])
    cluster.run()
    for peer, other in ((producer, consumer), (consumer, producer)):
        peer.exchange.sessions.drop(session_of(peer, other), "over", tell=True)
    cluster.run()
    for message in (TransferDone("id", True, 0), ConnectAck("decoder:5710"), Disconnect("again")):
        producer.exchange.received(consumer.address, encode(message))
    cluster.run()
    assert len(sent(cluster, producer, Disconnect)) == 1


def test_a_stock_peer_has_no_checksums_and_is_not_asked_if_verify_is_always(
    cluster: FakeCluster, consumer: FakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    stock = cluster.start("stock", is_stock=True)
    stock.hold(KEYS)
    job = consumer.pull(stock, "id", KEYS[:1])
    cluster.run()
    assert "sends no checksums" in str(consumer.ended[job].failed[0][1])
    job = consumer.pull(stock, "id", KEYS[:1])
    cluster.run()
    assert "sends no checksums" in str(consumer.ended[job].failed[0][1])
    assert len([r for r in caplog.messages if "if_present" in r]) == 1
    consumer.hold(KEYS[3:4])
    stock_job = stock.exchange.sessions.get(consumer.address)
    assert stock_job is not None, "it may still fetch from here"


@pytest.mark.parametrize("verify", [Verify.IF_PRESENT, Verify.OFF])
def test_a_stock_peer_is_asked_otherwise(cluster: FakeCluster, verify: Verify) -> None:
    stock = cluster.start("stock", terms_of(verify=verify), is_stock=True)
    consumer = cluster.start("decoder", terms_of(verify=verify))
    stock.hold(KEYS)
    consumer.ask(stock, "id", KEYS[:5])
    cluster.run()
    job = consumer.pull(stock, "id", KEYS[:5])
    cluster.run()
    assert (consumer.ended[job].failed, consumer.ended[job].verified) == ((), 0)
    assert len(sent(cluster, consumer, Fetch)) == 1


# --- those that come again ---


def test_c17_a_peer_restarted_under_its_address_begins_anew(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    for _ in range(3):
        consumer.pull(producer, "id", KEYS[:2])
        cluster.step()
        cluster.kill(consumer)
        consumer = cluster.start("decoder")
        cluster.step()
        job = consumer.pull(producer, "id", KEYS[:2])
        cluster.run()
        assert consumer.ended[job].failed == ()
        consumer.check()
    assert len(producer.exchange.sessions) == 1
    assert len(session_of(producer, consumer).targets) == 1


@pytest.mark.parametrize("asked_before", [True, False], ids=["a guest", "whom it asked alone"])
def test_c17_a_peer_that_comes_again_is_not_answered_on_a_line_that_has_ended(
    asked_before: bool, cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    """As a process wakes up that stood still: it finds a new `connect`, and its own line dead."""
    asker, asked = (consumer, producer) if asked_before else (producer, consumer)
    asker.ask(asked, "id", KEYS[:2])
    cluster.run()
    cluster.tells_ends_late = True
    producer.is_frozen = True
    cluster.cut(producer, consumer)
    cluster.run()
    cluster.pass_time(FIRST_BACKOFF_S)
    consumer.ask(producer, "another", KEYS[:1])
    cluster.run()
    producer.is_frozen = False
    cluster.run()
    assert consumer.answers[("another", KEYS[0])]


def test_c17_a_restart_that_nobody_saw_is_seen_in_the_handshake(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.pull(producer, "id", KEYS[:2])
    cluster.run()
    before = session_of(producer, consumer)
    cluster.kill(consumer)
    producer.wire.broken.clear()  # its line seems to live
    consumer = cluster.start("decoder")
    job = consumer.pull(producer, "id", KEYS[:2])
    cluster.run()
    assert consumer.ended[job].failed == ()
    assert session_of(producer, consumer) is not before
    assert before.targets[0] in producer.movers.forgotten


def test_a_session_that_one_side_has_ended_begins_anew_on_both(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    """The same receiving agent introduces itself a second time: what was asked before is void."""
    consumer.ask(producer, "id", KEYS[:2])
    cluster.run()
    assert producer.index.num_lent == 2
    consumer.exchange.sessions.drop(session_of(consumer, producer), "quietly", backoff=False)
    consumer.ask(producer, "another", KEYS[:1])
    cluster.run()
    assert consumer.answers[("another", KEYS[0])]
    assert producer.index.num_lent == 1


def test_a_late_answer_of_the_session_before_ends_no_fetch_of_this_one(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    job = consumer.pull(producer, "id", KEYS[:2])
    while not sent(cluster, consumer, Fetch):
        cluster.step()
    (old,) = sent(cluster, consumer, Fetch)
    assert isinstance(old, Fetch)
    consumer.exchange.sessions.drop(session_of(consumer, producer), "quietly", backoff=False)
    again = consumer.pull(producer, "id", KEYS[2:4])
    producer.movers.faults.append("refused")
    cluster.run()
    late = TransferDone("id", True, old.round_seq, checksums=(b"s" * 16,) * 2)
    consumer.exchange.received(producer.address, encode(late))
    cluster.run()
    assert len(consumer.ended[job].failed) == 2
    assert again in consumer.ended


# --- another receiving agent ---


def test_a_lost_pull_makes_us_introduce_another_agent_within_the_session(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.ask(producer, "id", KEYS[:2])
    cluster.run()
    session = session_of(consumer, producer)
    replace_agent(cluster, consumer, producer)
    assert session_of(consumer, producer) is session
    assert [each.stage for each in consumer.opened] == [Stage.CLOSED, Stage.OPEN]
    assert consumer.unsettled == {}
    assert len(sent(cluster, consumer, Connect)) == 2
    job = consumer.pull(producer, "id", KEYS[:2])
    cluster.run()
    assert consumer.ended[job].failed == ()
    assert len(session_of(producer, consumer).targets) == 1


def test_fetches_that_mean_the_old_agent_go_before_the_new_one_is_named(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    """In one turn: a pull is asked for, and the next agent has opened."""
    consumer.ask(producer, "id", KEYS[:1])
    cluster.run()
    session = session_of(consumer, producer)
    consumer.pull(producer, "id", KEYS[1:3])
    pull = consumer.inbox.pop()
    assert isinstance(pull, Pull)
    session.asker.pull(pull, cluster.clock.monotonic_s())
    process = consumer.opened[0].incarnation.rpartition(".")[0]
    newer = consumer._open_receiver(f"{process}.2")
    newer.advance()
    consumer.receivers._current = newer
    consumer.exchange.handshakes.introduce_all()
    cluster.run()
    kinds = [type(each) for start, _, each in cluster.seen if start is consumer]
    assert kinds[-2:] == [Fetch, Connect]
    assert len(consumer.ended) == 1
    assert next(iter(consumer.ended.values())).failed == ()


def test_while_the_next_agent_opens_nothing_is_asked_by_the_old_one(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.ask(producer, "id", KEYS[:1])
    cluster.run()
    consumer.is_slow_to_open = True
    replace_agent(cluster, consumer, producer)
    job = consumer.pull(producer, "id", KEYS[:2])
    cluster.run()
    assert job not in consumer.ended
    consumer.is_slow_to_open = False
    cluster.run()
    assert consumer.ended[job].failed == ()


def test_an_agent_that_does_not_open_costs_what_waits_for_it_at_once(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.is_slow_to_open = True
    consumer.ask(producer, "id", KEYS[:1])
    job = consumer.pull(producer, "id", KEYS[:2])
    cluster.run()
    consumer.opened[0].fail(NixlError("nixl_agent", "no UCX here"))
    cluster.run()
    assert consumer.answers == {("id", KEYS[0]): False}
    assert "no UCX here" in str(consumer.ended[job].failed[0][1])
    consumer.is_slow_to_open = False
    job = consumer.pull(producer, "id", KEYS[:2])
    cluster.run()
    assert consumer.ended[job].failed == (), "the next need tries again"


def test_an_agent_that_fails_under_pulls_ends_them_settled(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    consumer.ask(producer, "id", KEYS[:1])
    cluster.run()
    producer.is_frozen = True
    job = consumer.pull(producer, "id", KEYS[:2])
    cluster.run()
    consumer.opened[0].fail(NixlError("get_new_notifs", "no progress"))
    cluster.run()
    assert len(consumer.ended[job].failed) == 2
    assert consumer.ended[job].settled
    producer.is_frozen = False
    cluster.run()
    producer.movers.settle()
    job = consumer.pull(producer, "id", KEYS[:2])
    cluster.run()
    assert consumer.ended[job].failed == ()


def test_for_a_stock_peer_another_agent_is_another_session(cluster: FakeCluster) -> None:
    terms = terms_of(verify=Verify.IF_PRESENT)
    stock = cluster.start("stock", terms, is_stock=True)
    consumer = cluster.start("decoder", terms)
    stock.hold(KEYS)
    stock.movers.faults.append("refused")
    job = consumer.pull(stock, "id", KEYS[:2])
    cluster.run()
    assert not consumer.ended[job].settled, "its word is not enough"
    assert len(consumer.exchange.sessions) == 0
    assert consumer.unsettled == {}
    cluster.pass_time(1)
    job = consumer.pull(stock, "id", KEYS[:2])
    cluster.run()
    assert consumer.ended[job].failed == ()


def test_a_guest_with_too_many_agents_at_once_loses_its_session(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    absent = keys_of(*range(100, 100 + _MOST_TARGETS + 2))
    for number, key in enumerate(absent):
        connect = consumer.terms.introduce("decoder:5710", b"metadata", f"x.{number}")
        producer.exchange.received(consumer.address, encode(connect))
        producer.exchange.received(consumer.address, encode(Fetch("id", (key,), (number,), number)))
        producer.turn()
    assert producer.exchange.sessions.counts.bad_messages == 1
    cluster.run()
    assert producer.is_at_rest or len(producer.exchange.sessions) == 1


def test_agents_of_a_guest_are_forgotten_when_nothing_goes_there(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    for number in range(3 * _MOST_TARGETS):
        connect = consumer.terms.introduce("decoder:5710", b"metadata", f"x.{number}")
        producer.exchange.received(consumer.address, encode(connect))
        producer.turn()
    assert len(session_of(producer, consumer).targets) == 1
    assert len(producer.movers.forgotten) == 3 * _MOST_TARGETS - 1


# --- too many ---


def test_no_more_peers_are_taken_than_allowed_and_those_are_told(
    cluster: FakeCluster, producer: FakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    guests = [cluster.start(f"guest{number}") for number in range(cluster.max_peers + 2)]
    for guest in guests:
        guest.ask(producer, "id", KEYS[:1])
    cluster.run()
    assert len(producer.exchange.sessions) == cluster.max_peers
    assert [guest.answers[("id", KEYS[0])] for guest in guests].count(True) == cluster.max_peers
    assert len([r for r in caplog.messages if "max_peers" in r]) == 1
    told = [m for m in sent(cluster, producer, Disconnect) if isinstance(m, Disconnect)]
    assert [each.reason for each in told] == ["no more peers are taken"] * 2


def test_a_peer_that_was_silent_for_long_makes_room(
    cluster: FakeCluster, producer: FakePeer
) -> None:
    guests = [cluster.start(f"guest{number}") for number in range(cluster.max_peers)]
    for guest in guests:
        job = guest.pull(producer, "id", KEYS[:1])
        cluster.run()
        assert guest.ended[job].failed == ()
        guest.post(Leave(producer.address, "id"))
        cluster.run()
    cluster.pass_time(IDLE_S / 2)
    guests[0].ask(producer, "again", KEYS[:1])
    cluster.run()
    guests[0].post(Leave(producer.address, "again"))
    cluster.pass_time(IDLE_S / 2)
    newest = cluster.start("newest")
    newest.ask(producer, "id", KEYS[:1])
    cluster.run()
    assert newest.answers[("id", KEYS[0])]
    assert producer.exchange.sessions.get(guests[0].address) is not None
    assert producer.exchange.sessions.get(guests[1].address) is None
    assert len(guests[1].exchange.sessions) == 0, "it was told"
    assert producer.exchange.sessions.counts.peers_lost == 0


# --- neighbours ---


def test_a_neighbour_that_may_still_write_is_called_back_until_it_rests() -> None:
    cluster = FakeCluster(is_one_host=True)
    with cluster.neighbourhood():
        producer, consumer = cluster.start("prefiller"), cluster.start("decoder")
        producer.hold(KEYS)
        producer.movers.faults.append("lost")
        job = consumer.pull(producer, "id", KEYS[:2])
        cluster.run()
        assert not consumer.ended[job].settled
        cluster.pass_time(20)
        assert consumer.unsettled, "the write is under way over there"
        producer.movers.land()
        producer.movers.settle()
        cluster.pass_time(35)
        assert consumer.unsettled == {}
        job = consumer.pull(producer, "id", KEYS[:2])
        cluster.run()
        assert consumer.ended[job].failed == ()
        cluster.check()


def test_a_neighbour_that_has_ended_writes_no_more() -> None:
    cluster = FakeCluster(is_one_host=True)
    with cluster.neighbourhood():
        producer, consumer = cluster.start("prefiller"), cluster.start("decoder")
        producer.hold(KEYS)
        producer.movers.faults.append("lost")
        consumer.pull(producer, "id", KEYS[:2])
        cluster.run()
        assert consumer.unsettled
        cluster.kill(producer)
        cluster.pass_time(5)
        assert consumer.unsettled == {}


def test_a_peer_is_dialled_once_for_all_requests(
    cluster: FakeCluster, producer: FakePeer, consumer: FakePeer
) -> None:
    for kv_id in ("a", "b", "c"):
        consumer.ask(producer, kv_id, KEYS[:1])
    cluster.run()
    assert len(sent(cluster, consumer, Connect)) == 1
