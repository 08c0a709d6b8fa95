"""A line ends in many ways, and says so."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdoffload.p2p.address import Address
from pdoffload.p2p.line import SEND_QUEUE, Heartbeat
from pdoffload.p2p.secret import ClusterSecret
from pdoffload.testing.link_rig import ANY_PORT, Ends


def test_a_line_goes_down_when_the_peer_closes(ends: Ends, secret: ClusterSecret | None) -> None:
    a, b = ends.open(secret), ends.open(secret)
    a.connect(b.address)
    a.send(b.address, b"up")
    ends.until(lambda: ends.frames(b))
    b.close()
    ends.until(lambda: ends.downs(a))
    (down,) = ends.downs(a)
    assert down.address == b.address
    assert "lost" in down.reason
    assert not a.send(b.address, b"no line any more")


def test_a_peer_that_comes_back_under_its_address_is_reached_again(
    ends: Ends, secret: ClusterSecret | None
) -> None:
    a = ends.open(secret)
    address = ANY_PORT
    for incarnation in range(4):
        b = ends.open(secret, address)
        address = b.address
        for link, peer in ((a, b), (b, a)):
            link.connect(peer.address)
            link.send(peer.address, b"%d" % incarnation)
        ends.until(lambda b=b, n=incarnation: ends.frames(b) and len(ends.frames(a)) == n + 1)
        b.close()
        ends.until(lambda n=incarnation: len(ends.downs(a)) == n + 1)
    assert ends.frames(a) == [b"0", b"1", b"2", b"3"]


def test_what_was_queued_for_a_peer_that_is_gone_does_not_reach_its_successor(ends: Ends) -> None:
    """A line is one connection: libzmq would dial again by itself and send what is left."""
    a, b, c = ends.open(), ends.open(), ends.open()
    a.connect(b.address)
    a.send(b.address, b"up")
    ends.until(lambda: ends.frames(b))
    address = b.address
    b.close()
    # The successor is there before the owner of the line looks at it again.
    again = ends.open(address=address)
    a.send(address, b"for its predecessor")
    assert next(again.poll(0.5), None) is None
    c.connect(address)
    c.send(address, b"a first word")
    ends.until(lambda: ends.frames(again) and ends.downs(a))
    assert ends.frames(again) == [b"a first word"]


def test_a_line_to_nobody_goes_down_and_sending_never_waits(ends: Ends) -> None:
    a = ends.open()
    with socket.create_server(("127.0.0.1", 0)) as held:
        nobody = Address("127.0.0.1", held.getsockname()[1])
    a.connect(nobody)
    queued = [a.send(nobody, b"x" * 100) for _ in range(SEND_QUEUE + 10)]
    assert queued == [True] * SEND_QUEUE + [False] * 10
    ends.until(lambda: ends.downs(a))
    (down,) = ends.downs(a)
    assert "cannot be reached" in down.reason
    assert not a.send(nobody, b"x")


def test_a_peer_that_does_not_read_fills_its_queue_and_nothing_else(ends: Ends) -> None:
    a, b = ends.open(), ends.open()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        deaf = Address("127.0.0.1", mute.getsockname()[1])
        a.connect(deaf)
        assert [a.send(deaf, b"x") for _ in range(SEND_QUEUE + 1)][-2:] == [True, False]
        a.connect(b.address)
        a.send(b.address, b"to the other")
        ends.until(lambda: ends.frames(b))


def test_a_peer_that_never_finishes_the_handshake_is_given_up(ends: Ends) -> None:
    a = ends.open(dial_timeout_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        deaf = Address("127.0.0.1", mute.getsockname()[1])
        a.connect(deaf)
        ends.until(lambda: ends.downs(a))
    (down,) = ends.downs(a)
    assert down.address == deaf
    assert "handshake" in down.reason


def test_a_service_of_another_kind_is_no_peer(ends: Ends) -> None:
    a = ends.open(dial_timeout_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        a.connect(Address("127.0.0.1", server.getsockname()[1]))
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 20)
            ends.until(lambda: ends.downs(a))


PEER = """
import sys
from pdoffload.p2p.address import Address
from pdoffload.p2p.link import Link
from pdoffload.p2p.line import Heartbeat
link = Link.bind(Address("127.0.0.1", 0), heartbeat=Heartbeat(interval_s=0.2, timeout_s=1.0))
print(link.address.port, flush=True)
while True:
    for event in link.poll(None):
        link.connect(event.sender)
        link.send(event.sender, event.frame)
"""


@pytest.fixture
def echo() -> Iterator[tuple[subprocess.Popen[str], Address]]:
    """Another process that sends back what it is sent."""
    command = [sys.executable, "-c", PEER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Address("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_peer_that_is_killed_or_stands_still_is_noticed(
    ends: Ends, echo: tuple[subprocess.Popen[str], Address], number: signal.Signals
) -> None:
    process, address = echo
    a = ends.open(heartbeat=Heartbeat(interval_s=0.2, timeout_s=1.0))
    a.connect(address)
    a.send(address, b"hello")
    ends.until(lambda: ends.frames(a) == [b"hello"])
    process.send_signal(number)
    ends.until(lambda: ends.downs(a))
    (down,) = ends.downs(a)
    assert down.address == address
    assert "lost" in down.reason
