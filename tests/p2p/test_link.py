"""Sockets that are real: frames both ways, lines that end, links that close."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from pdoffload.errors import ConfigError, MisuseError
from pdoffload.p2p import link as link_module
from pdoffload.p2p import listener, names
from pdoffload.p2p.address import Address
from pdoffload.p2p.link import Down, Link, Received
from pdoffload.p2p.secret import ClusterSecret
from pdoffload.testing.link_rig import ANY_PORT, PATIENCE_S, Ends


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- frames ---


def test_frames_go_both_ways_and_arrive_in_order(ends: Ends, secret: ClusterSecret | None) -> None:
    a, b = ends.open(secret), ends.open(secret)
    sent = [b"%d" % i for i in range(500)]
    a.connect(b.address)
    assert all(a.send(b.address, frame) for frame in sent)
    ends.until(lambda: len(ends.frames(b)) == len(sent))
    assert ends.frames(b) == sent
    assert ends.senders(b) == {a.address}
    b.connect(a.address)
    b.send(a.address, b"an answer")
    ends.until(lambda: ends.frames(a))
    assert ends.frames(a) == [b"an answer"]
    assert not ends.downs(a)
    assert not ends.downs(b)


def test_the_longest_frame_passes_and_a_longer_one_is_not_sent(
    ends: Ends, secret: ClusterSecret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_FRAME_BYTES", 2**20)
    monkeypatch.setattr("pdoffload.p2p.line.MAX_FRAME_BYTES", 2**20)
    a, b = ends.open(secret), ends.open(secret)
    a.connect(b.address)
    assert a.send(b.address, bytes(2**20))
    ends.until(lambda: ends.frames(b))
    with pytest.raises(MisuseError, match="at most"):
        a.send(b.address, bytes(2**20 + 1))


def test_a_line_that_was_opened_is_not_opened_twice(ends: Ends) -> None:
    a, b = ends.open(), ends.open()
    for i in range(3):
        a.connect(b.address)
        a.send(b.address, b"%d" % i)
    ends.until(lambda: len(ends.frames(b)) == 3)
    assert ends.frames(b) == [b"0", b"1", b"2"]
    assert "1 lines" in repr(a)


def test_what_was_queued_before_a_line_is_closed_still_arrives(
    ends: Ends, secret: ClusterSecret | None
) -> None:
    a, b, c = ends.open(secret), ends.open(secret), ends.open(secret)
    a.connect(b.address)
    a.send(b.address, b"up")
    ends.until(lambda: ends.frames(b))
    a.send(b.address, b"farewell")
    a.close_line(b.address)
    ends.until(lambda: len(ends.frames(b)) == 2)
    a.connect(c.address)
    a.send(c.address, b"dismissed")
    a.close_line(c.address)
    ends.until(lambda: ends.frames(c))
    assert not a.send(b.address, b"no line any more")
    assert not ends.downs(a)


def test_a_peer_is_told_goodbye_when_the_link_closes(ends: Ends) -> None:
    a, b = ends.open(), ends.open()
    a.connect(b.address)
    a.send(b.address, b"up")
    ends.until(lambda: ends.frames(b))
    a.send(b.address, b"disconnect")
    a.close()
    ends.until(lambda: len(ends.frames(b)) == 2)


# --- binding ---


def test_c14_a_port_that_is_taken_is_an_error_that_names_it_and_leaves_nothing_open(
    ends: Ends, secret: ClusterSecret | None
) -> None:
    taken = ends.open(secret)
    before, threads = descriptors(), threading.active_count()
    for _ in range(20):
        with pytest.raises(ConfigError) as caught:
            ends.open(secret, taken.address)
    (problem,) = caught.value.problems
    assert problem.startswith(f"port: {taken.address} is taken")
    assert threading.active_count() == threads
    ends.until(lambda: descriptors() <= before)
    with socket.create_server(("127.0.0.1", 0)) as held, pytest.raises(ConfigError, match="taken"):
        ends.open(secret, Address("127.0.0.1", held.getsockname()[1]))


def test_c14_port_0_is_any_free_port_and_the_address_tells_which(ends: Ends) -> None:
    a, b = ends.open(), ends.open()
    assert 0 < a.address.port != b.address.port > 0


def test_an_address_of_another_host_cannot_be_bound() -> None:
    with pytest.raises(ConfigError, match=r"host: 192\.0\.2\.7:5710 cannot be bound"):
        Link.bind(Address("192.0.2.7", 5710))


def test_a_name_nobody_knows_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(link_module, "resolve", unknown)
    with pytest.raises(ConfigError, match=r"host: got 'node-x', which cannot be resolved"):
        Link.bind(Address("node-x", 5710))


# --- the life of a link ---


def test_what_the_caller_does_between_two_events_is_seen_by_the_next(ends: Ends) -> None:
    """A line that is closed and opened anew inside the loop is not the one that had gone down."""
    a, b, c = ends.open(), ends.open(), ends.open()
    a.connect(c.address)
    a.send(c.address, b"up")
    b.connect(a.address)
    ends.until(lambda: ends.frames(c))
    c_address = c.address
    b.send(a.address, b"trigger")
    c.close()
    again: list[Link] = []
    seen: list[Received | Down] = []

    def turn() -> bool:
        for event in a.poll(0.05):
            seen.append(event)
            if isinstance(event, Received):
                a.close_line(c_address)
                again.append(ends.open(address=c_address))
                a.connect(c_address)
                a.send(c_address, b"to the new one")
        return bool(again and ends.frames(again[0]))

    ends.until(turn, besides=a)
    # Either the end of the old line came first, or it was closed before that: never an end of the new one.
    assert [type(event) for event in seen] in ([Received], [Down, Received])
    assert ends.frames(again[0]) == [b"to the new one"]


def test_c17_a_line_is_seen_dead_before_what_came_after_its_end_is_answered(ends: Ends) -> None:
    """Without a secret: with one nothing comes from a new connection unless `a` lets it in by a poll."""
    a, b = ends.open(), ends.open()
    a.connect(b.address)
    a.send(b.address, b"up")
    ends.until(lambda: ends.frames(b))
    assert a.look(b.address) == ""
    b.close()
    again = ends.open(address=b.address)
    again.connect(a.address)
    again.send(a.address, b"a question")
    # Meanwhile `a` stands still: both wait for it, the end of its line and the question.
    assert ends.has_come(a)
    ended = []
    for event in a.poll(0.0):
        assert isinstance(event, Received)
        ended.append(a.look(event.sender))
        a.connect(event.sender)
        a.send(event.sender, b"the answer")
    assert ended == ["the connection was lost, or it answered no ping in time"]
    ends.until(lambda: ends.frames(again))
    assert ends.frames(again) == [b"the answer"]
    assert not ends.downs(a)


def test_a_poll_is_woken_from_any_thread(ends: Ends) -> None:
    a = ends.open()
    waker = threading.Thread(target=a.wake)
    waker.start()
    assert list(a.poll(None)) == []
    waker.join()
    a.wake()
    a.wake()
    assert list(a.poll(None)) == []
    assert list(a.poll(0.0)) == []


def test_a_closed_link_may_be_woken_and_closed_again_and_nothing_else(ends: Ends) -> None:
    a, b = ends.open(), ends.open()
    a.connect(b.address)
    a.close()
    a.close()
    a.wake()
    for use in (
        lambda: a.connect(b.address),
        lambda: a.send(b.address, b"x"),
        lambda: a.look(b.address),
        lambda: a.close_line(b.address),
        lambda: list(a.poll(0.0)),
    ):
        with pytest.raises(MisuseError, match="closed"):
            use()


def test_a_link_may_be_closed_inside_its_own_loop(ends: Ends) -> None:
    a, b = ends.open(), ends.open()
    a.connect(b.address)
    for _ in range(5):
        a.send(b.address, b"x")
    seen = 0

    def turn() -> bool:
        nonlocal seen
        for _ in b.poll(0.05):
            seen += 1
            b.close()
        return seen > 0

    ends.until(turn, besides=b)
    assert seen == 1


@pytest.mark.parametrize("state", ["refused", "mute", "unresolved"])
def test_closing_does_not_wait_for_a_peer_that_does_not_answer(
    ends: Ends, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its bound, closing would hang until the test's time is up."""
    answer = threading.Event()
    monkeypatch.setattr(
        names, "resolve", lambda host: ["127.0.0.1"] if answer.wait(PATIENCE_S) else []
    )
    a = ends.open()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host = "node-x" if state == "unresolved" else "127.0.0.1"
        peer = Address(host, 1 if state == "refused" else mute.getsockname()[1])
        a.connect(peer)
        for _ in range(100):
            a.send(peer, b"x" * 1000)
        a.close()
    answer.set()


def test_two_hundred_lines_and_links_leave_no_descriptor_and_no_thread(
    ends: Ends, secret: ClusterSecret | None
) -> None:
    hub = ends.open(secret)
    tasks = Path("/proc/self/task")
    before, threads = descriptors(), len(list(tasks.iterdir()))
    for cycle in range(200):
        peer = Link.bind(ANY_PORT, secret=secret)
        peer.connect(hub.address)
        peer.send(hub.address, b"%d" % cycle)
        hub.connect(peer.address)
        ends.until(lambda cycle=cycle: len(ends.frames(hub)) == cycle + 1)
        if cycle % 2:
            hub.close_line(peer.address)
        peer.close()
    ends.until(lambda: len(ends.downs(hub)) == 100)
    ends.until(lambda: descriptors() <= before and len(list(tasks.iterdir())) <= threads)
    assert "0 lines" in repr(hub)
