"""Who has no business here gets nothing and costs nothing."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from pdoffload.p2p import listener
from pdoffload.p2p.address import Address
from pdoffload.p2p.arrivals import QUIET_S
from pdoffload.p2p.link import Link
from pdoffload.p2p.messages import MAX_FRAME_BYTES
from pdoffload.p2p.secret import ClusterSecret
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.link_rig import ANY_PORT, PATIENCE_S, Ends

SECRET = ClusterSecret(b"a secret of this test")
OTHER = ClusterSecret(b"a secret of another cluster")


def raw(link: Link, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", link.address.port), timeout=PATIENCE_S)
    client.sendall(sent)
    return client


def greeting(mechanism: bytes) -> bytes:
    """Of ZMTP 3.1, as a client sends it."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# --- messages that are none ---


def test_an_oversized_message_ends_the_connection_it_came_by_and_no_other(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_FRAME_BYTES", 4096)
    a, b = ends.open(), ends.open()
    a.connect(b.address)
    a.send(b.address, b"before")
    monkeypatch.setattr(listener, "MAX_FRAME_BYTES", MAX_FRAME_BYTES)
    liar = ends.open()
    liar.connect(b.address)
    liar.send(b.address, b"in bounds")
    ends.until(lambda: len(ends.frames(b)) == 2)
    liar.send(b.address, bytes(5000))
    ends.until(lambda: ends.downs(liar))
    a.send(b.address, b"after")
    ends.until(lambda: len(ends.frames(b)) == 3)
    assert set(ends.frames(b)) == {b"before", b"in bounds", b"after"}
    assert not ends.downs(a)


@pytest.mark.parametrize(
    ("identity", "frames"),
    [
        (None, [b"hello"]),
        (b"nobody", [b"hello"]),
        (b"0.0.0.0:5710", [b"hello"]),
        (b"127.0.0.1:5710", [b"one", b"two"]),
        (b"127.0.0.1:5710", [b""] * 100),
    ],
)
def test_a_message_without_a_sender_or_of_several_frames_is_dropped_and_counted(
    ends: Ends, identity: bytes | None, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = ends.open(), ends.open()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if identity is not None:
            dealer.routing_id = identity
        dealer.connect(f"tcp://127.0.0.1:{b.address.port}")
        for _ in range(3):
            dealer.send_multipart(frames)
        ends.until(lambda: b.dropped_messages == 3)
    a.connect(b.address)
    a.send(b.address, b"right")
    ends.until(lambda: ends.frames(b))
    assert ends.frames(b) == [b"right"]
    assert len([each for each in caplog.records if "dropped" in each.message]) == 1


def test_a_new_connection_takes_over_the_identity_of_one_that_hangs(ends: Ends) -> None:
    """A peer that was killed may be back before its old connection is known to be dead."""
    b = ends.open()
    identity = b"127.0.0.1:5710"
    with zmq.Context() as context, ExitStack() as stack:
        for i in range(3):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.routing_id = identity
            dealer.connect(f"tcp://127.0.0.1:{b.address.port}")
            dealer.send(b"%d" % i)
            ends.until(lambda i=i: len(ends.frames(b)) == i + 1)
    assert ends.frames(b) == [b"0", b"1", b"2"]


# --- who is not let in ---


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [(OTHER, "secrets differ"), (None, "secret")],
    ids=["wrong", "none"],
)
def test_a_peer_without_the_secret_is_refused_on_both_sides(
    ends: Ends,
    theirs: ClusterSecret | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside, outside = ends.open(SECRET), ends.open(theirs)
    outside.connect(inside.address)
    outside.send(inside.address, b"let me in")
    inside.connect(outside.address)
    inside.send(outside.address, b"a secret word")
    ends.until(lambda: ends.downs(outside) and ends.downs(inside))
    ends.until(lambda: inside.refused_handshakes and outside.refused_handshakes)
    assert not ends.frames(inside)
    assert not ends.frames(outside)
    told = [each.message for each in caplog.records if str(inside.address.port) in each.message]
    assert len(told) == 1
    assert reason in told[0]
    assert "secret" in ends.downs(outside)[0].reason


def test_the_servers_key_alone_does_not_let_a_client_in(ends: Ends) -> None:
    inside, friend = ends.open(SECRET), ends.open(SECRET)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.routing_id = b"127.0.0.1:5710"
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = SECRET.server_public
        dealer.connect(f"tcp://127.0.0.1:{inside.address.port}")
        dealer.send(b"let me in")
        ends.until(lambda: inside.refused_handshakes)
    friend.connect(inside.address)
    friend.send(inside.address, b"hello")
    ends.until(lambda: ends.frames(inside))
    assert ends.frames(inside) == [b"hello"]


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "zeros": bytes(300),
    "ones": b"\xff" * 300,
    "null greeting": greeting(b"NULL") + b"\x04\x26\x05READY" + bytes(30),
    "plain greeting": greeting(b"PLAIN") + b"\x04\x0b\x05HELLO\x01a\x01b",
    "curve, forged hello": greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
    "curve, a frame of 64 MiB": greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 2**26) + b"x",
    "curve, a frame of 1 TiB": greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 2**40) + b"x",
}


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_counted_and_told_once(
    ends: Ends, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    inside = ends.open(SECRET)
    for i in range(5):
        with raw(inside, sent):
            pass
        ends.until(lambda i=i: inside.refused_handshakes == i + 1)
    assert len([each for each in caplog.records if "refused" in each.message]) == 1
    assert not ends.frames(inside)


def test_a_refusal_is_told_again_after_a_quiet_time(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    inside = ends.open(SECRET, clock=clock)
    for count in (1, 2):
        for _ in range(3):
            before = inside.refused_handshakes
            with raw(inside, bytes(300)):
                pass
            ends.until(lambda before=before: inside.refused_handshakes > before)
        assert len([each for each in caplog.records if "refused" in each.message]) == count
        clock.advance(QUIET_S)


def test_a_client_that_says_nothing_is_shown_out(ends: Ends) -> None:
    inside = ends.open(SECRET, dial_timeout_s=0.3)
    clients = [raw(inside) for _ in range(20)]
    ends.until(lambda: inside.refused_handshakes == 20)
    for client in clients:
        with client:
            while client.recv(4096):
                pass


def test_strangers_cost_no_memory_and_no_descriptors(ends: Ends) -> None:
    inside, friend = ends.open(SECRET), ends.open(SECRET)
    friend.connect(inside.address)

    def round_of_garbage() -> None:
        before = inside.refused_handshakes
        for _ in range(10):
            for sent in GARBAGE.values():
                with raw(inside, sent):
                    pass
        ends.until(lambda: inside.refused_handshakes == before + 10 * len(GARBAGE))

    round_of_garbage()
    before, resident = descriptors(), resident_bytes()
    for _ in range(5):
        round_of_garbage()
    ends.until(lambda: descriptors() <= before)
    assert resident_bytes() - resident < 8 * 2**20
    friend.send(inside.address, b"still here")
    ends.until(lambda: ends.frames(inside))


def test_strangers_that_nobody_looks_at_do_not_keep_a_link_from_closing() -> None:
    """Their events pile up while the owner is busy; libzmq's I/O thread must not wait for room."""
    inside = Link.bind(ANY_PORT, secret=SECRET)
    for _ in range(1500):
        with raw(inside, bytes(100)):
            pass
    inside.close()


def test_a_claimed_length_is_not_memory(ends: Ends) -> None:
    """Frames that announce 64 MiB and never come: the pages are not touched."""
    inside = ends.open(SECRET)
    resident = resident_bytes()
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(raw(inside, GARBAGE["curve, a frame of 64 MiB"]))
        friend = ends.open(SECRET)
        friend.connect(inside.address)
        friend.send(inside.address, b"hello")
        ends.until(lambda: ends.frames(inside))
        assert resident_bytes() - resident < 16 * 2**20
    ends.until(lambda: inside.refused_handshakes == 20)


class Recorder:
    """A proxy that keeps what clients send to the server behind it."""

    def __init__(self, port: int) -> None:
        self.recorded = b""
        self._server_port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        server = socket.create_connection(("127.0.0.1", self._server_port))
        self._sockets += [client, server]
        back = threading.Thread(target=self._forward, args=(server, client, False))
        self._threads.append(back)
        back.start()
        self._forward(client, server, True)

    def _forward(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        try:
            while chunk := source.recv(65536):
                if keep:
                    self.recorded += chunk
                sink.sendall(chunk)
        except OSError:
            pass  # the other side was closed first
        # What ends one side ends the other.
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in self._sockets:
            each.close()


def test_a_recorded_handshake_cannot_be_replayed(ends: Ends) -> None:
    inside, friend = ends.open(SECRET), ends.open(SECRET)
    recorder = Recorder(inside.address.port)
    try:
        through = Address("127.0.0.1", recorder.port)
        friend.connect(through)
        friend.send(through, b"do this once")
        ends.until(lambda: ends.frames(inside))
    finally:
        recorder.close()
    assert len(recorder.recorded) > 400
    assert b"do this once" not in recorder.recorded
    for count in range(1, 6):
        with raw(inside, recorder.recorded):
            ends.until(lambda count=count: inside.refused_handshakes == count)
    ends.turn()
    assert ends.frames(inside) == [b"do this once"]
