"""The sockets of a Transfer Engine, as far as they can be had without one."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from pdoffload.agent.mooncake_sockets import ask, hang_up, keep_to_loopback, rouse

ANSWER = {
    "name": "here:1",
    "protocol": "tcp",
    "tcp_data_port": 7,
    "tcp_proto_version": 2,
    "more": [],
}


def framed(answer: object) -> bytes:
    text = b"\x01" + json.dumps(answer).encode()
    return struct.pack("<Q", len(text)) + text


@contextmanager
def answering(answer: bytes) -> Iterator[socket.socket]:
    """A connection at whose other end somebody reads a question, gives `answer` and hangs up."""
    ours, theirs = socket.socketpair()
    asked: list[bytes] = []

    def serve() -> None:
        with theirs:
            asked.append(theirs.recv(100))
            theirs.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        ours.settimeout(10)
        yield ours
        thread.join()
    assert asked == [struct.pack("<Q", 3) + b"\x01{}"]


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listening socket, a connection to it, and its other end."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = listening.getsockname()[1]
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        accepted, _ = listening.accept()
        yield listening, client, stack.enter_context(accepted)


def test_an_engine_tells_its_ports() -> None:
    with answering(framed(ANSWER)) as connection:
        contact = ask(connection)
    assert (contact.name, contact.protocol, contact.tcp_data_port) == ("here:1", "tcp", 7)
    assert contact.acknowledges


def test_an_old_engine_does_not_acknowledge() -> None:
    old = {"name": "here:1", "protocol": "tcp", "tcp_data_port": 7}
    with answering(framed(old)) as connection:
        assert not ask(connection).acknowledges


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack("<Q", 2**40),
        struct.pack("<Q", 0),
        framed(ANSWER)[:-3],
        framed([]),
        framed({"name": "here:1"}),
        framed(ANSWER | {"tcp_data_port": "7"}),
    ],
)
def test_what_is_no_engine_is_told_apart(answer: bytes) -> None:
    with answering(answer) as connection, pytest.raises((OSError, ValueError)):
        ask(connection)


def test_a_socket_tied_to_the_loopback_takes_nobody_else() -> None:
    with connected() as (listening, client, _), connected() as (other, other_client, _):
        keep_to_loopback([listening.getsockname()[1]])
        tied, free = (
            each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).strip(b"\0")
            for each in (listening, other)
        )
        assert (tied, free) == (b"lo", b"")
        assert client.recv(1) == b"", "who had come before is still there"
        other_client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other_client.recv(1)
        socket.create_connection(("127.0.0.1", listening.getsockname()[1]), 10).close()


def test_hanging_up_ends_what_was_accepted_and_nothing_else() -> None:
    with connected() as (listening, client, accepted), connected() as (_, other_client, other):
        hang_up([listening.getsockname()[1]])
        assert client.recv(1) == b""
        assert accepted.recv(1) == b""
        other.sendall(b"x")
        assert other_client.recv(1) == b"x"
        socket.create_connection(listening.getsockname(), 10).close()


def test_who_waits_for_somebody_to_come_is_roused() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        came: list[object] = []
        thread = threading.Thread(target=lambda: came.append(listening.accept()[0].close()))
        thread.start()
        rouse(listening.getsockname()[1])
        thread.join(10)
        assert came == [None]
