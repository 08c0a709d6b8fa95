"""Names are resolved while others are served, and never waited for."""

from __future__ import annotations

import socket
import threading

import pytest

from pdoffload.p2p import names
from pdoffload.p2p.address import Address
from pdoffload.p2p.line import SEND_QUEUE
from pdoffload.p2p.link import DIAL_TIMEOUT_S
from pdoffload.p2p.secret import ClusterSecret
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.link_rig import PATIENCE_S, Ends


def test_a_name_is_resolved_while_others_are_served(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def slow(host: str) -> list[str]:
        assert answer.wait(PATIENCE_S)
        return ["127.0.0.1"]

    monkeypatch.setattr(names, "resolve", slow)
    a, b, c = ends.open(), ends.open(), ends.open()
    named = Address("node-c", c.address.port)
    a.connect(named)
    assert [a.send(named, b"%d" % i) for i in range(SEND_QUEUE + 1)][-2:] == [True, False]
    a.connect(b.address)
    a.send(b.address, b"meanwhile")
    ends.until(lambda: ends.frames(b))
    answer.set()
    ends.until(lambda: len(ends.frames(c)) == SEND_QUEUE)
    assert ends.frames(c)[:2] == [b"0", b"1"]
    a.send(named, b"later")
    ends.until(lambda: ends.frames(c)[-1] == b"later")


def test_a_name_that_is_not_resolved_in_time_is_down_and_its_late_answer_is_nothing(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def slow(host: str) -> list[str]:
        assert answer.wait(PATIENCE_S)
        return ["127.0.0.1"]

    monkeypatch.setattr(names, "resolve", slow)
    clock = FakeClock()
    a, c = ends.open(clock=clock), ends.open()
    named = Address("node-c", c.address.port)
    a.connect(named)
    a.send(named, b"too late")
    ends.turn()
    assert not ends.downs(a)
    clock.advance(DIAL_TIMEOUT_S)
    ends.until(lambda: ends.downs(a))
    assert "not resolved within 5 s" in ends.downs(a)[0].reason
    a.connect(named)
    a.send(named, b"in time")
    answer.set()
    ends.until(lambda: ends.frames(c))
    assert ends.frames(c) == [b"in time"]


def test_a_name_nobody_knows_is_down_with_the_name(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(names, "resolve", unknown)
    a = ends.open()
    a.connect(Address("node-x", 5710))
    ends.until(lambda: ends.downs(a))
    assert "'node-x'" in ends.downs(a)[0].reason
    assert "not known" in ends.downs(a)[0].reason


def test_a_farewell_to_a_name_goes_out_when_it_is_known(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def slow(host: str) -> list[str]:
        assert asked.wait(PATIENCE_S)
        return ["127.0.0.1"]

    monkeypatch.setattr(names, "resolve", slow)
    a, c = ends.open(), ends.open()
    named = Address("node-c", c.address.port)
    a.connect(named)
    a.send(named, b"dismissed")
    a.close_line(named)
    asked.set()
    ends.until(lambda: ends.frames(c))
    assert ends.frames(c) == [b"dismissed"]
    assert "0 lines" in repr(a)


def test_a_farewell_that_is_overdue_is_not_sent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then a new session with the same peer may be under way, which it would end."""
    answer = threading.Event()

    def slow(host: str) -> list[str]:
        assert answer.wait(PATIENCE_S)
        return ["127.0.0.1"]

    monkeypatch.setattr(names, "resolve", slow)
    clock = FakeClock()
    a, b, c = ends.open(clock=clock), ends.open(), ends.open()
    named = Address("node-c", c.address.port)
    a.connect(named)
    a.send(named, b"disconnect")
    a.close_line(named)
    clock.advance(DIAL_TIMEOUT_S)
    answer.set()
    assert list(a.poll(None)) == []  # woken by the answer
    b.connect(c.address)
    b.send(c.address, b"the only word")
    ends.until(lambda: ends.frames(c))
    ends.turn()
    assert ends.frames(c) == [b"the only word"]


def test_one_name_is_asked_for_once_however_many_wait_for_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    asked: list[str] = []

    def slow(host: str) -> list[str]:
        asked.append(host)
        assert answer.wait(PATIENCE_S)
        return ["127.0.0.1"]

    monkeypatch.setattr(names, "resolve", slow)
    a, peers = ends.open(), [ends.open() for _ in range(4)]
    for peer in peers:
        named = Address("node-c", peer.address.port)
        a.connect(named)
        a.send(named, b"hello")
    answer.set()
    ends.until(lambda: all(ends.frames(peer) for peer in peers))
    assert asked == ["node-c"]


def test_localhost_is_bound_and_dialled_alike(ends: Ends) -> None:
    a, b = ends.open(address=Address("localhost", 0)), ends.open(address=Address("localhost", 0))
    assert b.address.host == "localhost"
    a.connect(b.address)
    a.send(b.address, b"hello")
    ends.until(lambda: ends.frames(b))
    assert ends.senders(b) == {a.address}


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_ipv6_is_bound_and_dialled(ends: Ends, secret: ClusterSecret | None) -> None:
    if not has_ipv6():
        pytest.skip("this host has no ::1")
    a, b = ends.open(secret, Address("::1", 0)), ends.open(secret, Address("::1", 0))
    a.connect(b.address)
    a.send(b.address, b"hello")
    ends.until(lambda: ends.frames(b))
    assert ends.senders(b) == {a.address}
    assert str(a.address).startswith("[::1]:")
