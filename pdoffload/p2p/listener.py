"""The listening socket: who is let in, and what they send.

With a cluster secret it is a CURVE server, and ZeroMQ asks us for every client whether its key is right
(ZAP, rfc.zeromq.org/spec/27). Who fails at that, or before, gets no answer and is forgotten at once.
What libzmq does not bound is how many frames a message has: it takes a peer that was let in to abuse that.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator

import msgspec
import zmq
from zmq.utils import z85

from pdoffload.clock import Clock
from pdoffload.errors import WireError
from pdoffload.p2p.address import Address, endpoint
from pdoffload.p2p.arrivals import WATCHED, Arrivals, Complaint, read_event
from pdoffload.p2p.line import Heartbeat, prepare, unwatch, watch
from pdoffload.p2p.messages import MAX_FRAME_BYTES
from pdoffload.p2p.secret import ClusterSecret

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"pdoffload"
_RECEIVE_QUEUE = 100
"""Messages of one peer that are read ahead; after that they wait in its own queue."""
_CURVE_BYTES = 64
"""More than encryption adds to a frame (33 bytes: name, nonce, authenticator, flags)."""
_FRAMES_PER_TURN = 256
_EVENTS_PER_TURN = 1024
# To take an identity apart costs more than to decode most messages; peers are few (max_peers: 4096).
_sender_of = functools.lru_cache(maxsize=4096)(Address.from_identity)


class Received(msgspec.Struct, frozen=True):
    """A peer that calls itself `sender` sent `frame`, of at most `MAX_FRAME_BYTES`."""

    sender: Address
    frame: bytes


class Listener:
    """A ROUTER that never sends, its monitor, and the one who answers ZAP. One thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: ClusterSecret | None,
        heartbeat: Heartbeat,
        handshake_timeout_s: float,
        clock: Clock,
    ) -> None:
        self.refusals = Complaint(clock)
        self.drops = Complaint(clock)
        self._secret = secret
        self._arrivals = Arrivals()
        self._at = "?"
        self._zap: zmq.Socket[bytes] | None = None
        self._router = router = context.socket(zmq.ROUTER)
        prepare(router, heartbeat, handshake_timeout_s)
        # A peer that was restarted has its identity again, perhaps before its old connection is known dead.
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _CURVE_BYTES)
        router.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        if secret is not None:
            self._zap = context.socket(zmq.REP)
            self._zap.bind(_ZAP_ENDPOINT)
            router.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.curve_publickey = secret.server_public
            router.curve_secretkey = secret.server_secret
        self._monitor = watch(context, router, WATCHED)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading."""
        return [self._router, self._monitor, *([] if self._zap is None else [self._zap])]

    def bind(self, numeric: str, port: int) -> int:
        """Listen at a numeric address; the port it became. `zmq.ZMQError` if it cannot be."""
        self._router.setsockopt(zmq.IPV6, int(":" in numeric))
        self._router.bind(endpoint(numeric, port))
        bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self._at = bound.rstrip(b"\0").decode("ascii")
        return int(self._at.rpartition(":")[2])

    def serve(self, ready: Container[object]) -> Iterator[Received]:
        """Take what has come on the sockets in `ready`, a bounded part of it: each frame when asked for."""
        if self._zap is not None and self._zap in ready:
            self._answer_zap(self._zap)
        if self._monitor in ready:
            self._count_arrivals()
        if self._router in ready:
            yield from self._take_frames()

    def close(self) -> None:
        """Stop listening; idempotent."""
        if not self._router.closed:
            unwatch(self._router, self._monitor)
        self._router.close(linger=0)
        if self._zap is not None:
            self._zap.close(linger=0)

    def _take_frames(self) -> Iterator[Received]:
        taken_bytes = 0
        for _ in range(_FRAMES_PER_TURN):
            if self._router.closed or taken_bytes >= MAX_FRAME_BYTES:
                return
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                self.drops.about(f"a peer's message of {len(frames)} frames was dropped")
                continue
            try:
                sender = _sender_of(identity)
            except WireError as error:
                self.drops.about(f"a peer's message was dropped: {error}")
                continue
            taken_bytes += len(frames[0])
            yield Received(sender, frames[0])

    def _count_arrivals(self) -> None:
        for _ in range(_EVENTS_PER_TURN):
            try:
                event, value = read_event(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            reason = self._arrivals.take(event, value)
            if reason:
                self.refusals.about(f"a client was refused at {self._at}: {reason}")

    def _answer_zap(self, zap: zmq.Socket[bytes]) -> None:
        """A request is: version, id, domain, address, identity, mechanism, and for CURVE the key."""
        assert self._secret is not None
        for _ in range(_EVENTS_PER_TURN):
            try:
                version, request, *_, mechanism, key = zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            right = mechanism == b"CURVE" and key == z85.decode(self._secret.client_public)
            status = (b"200", b"OK") if right else (b"400", b"another client key")
            zap.send_multipart([version, request, *status, b"", b""])
