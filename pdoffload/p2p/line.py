"""One connection to a peer: a DEALER that is dialled once, and its monitor.

RESOLVING --host known--> DIALLING --TCP--> GREETING --handshake--> UP
    '-----------------------'-----------------'----------------------'----> ended, with a reason
"""

from __future__ import annotations

import enum
import itertools

import msgspec
import zmq

from pdoffload.errors import MisuseError
from pdoffload.p2p.address import Address
from pdoffload.p2p.arrivals import HANDSHAKE_FAILED, read_event, why_refused
from pdoffload.p2p.messages import MAX_FRAME_BYTES
from pdoffload.p2p.secret import ClusterSecret

SEND_QUEUE = 1000
"""Frames that wait for a peer before `send` refuses; vLLM 0.33's figure."""
# Peers never send this way (their ROUTERs do not), so what comes is kept small and not read.
_LONGEST_ANSWER_BYTES = 2**16
_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | HANDSHAKE_FAILED
)
_monitor_numbers = itertools.count()


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that answers no ping for `timeout_s` is gone. The defaults are those of vLLM's p2p tier."""

    interval_s: float = 2.0
    timeout_s: float = 10.0


class Stage(enum.Enum):
    """How far a line is."""

    RESOLVING = "resolving"
    DIALLING = "dialling"
    GREETING = "greeting"
    UP = "up"
    ENDED = "ended"


OVERDUE = {
    Stage.RESOLVING: "its host name was not resolved",
    Stage.DIALLING: "nothing answered there",
    Stage.GREETING: "it did not finish the handshake",
}


def milliseconds(duration_s: float) -> int:
    """As ZeroMQ takes a duration; at least 1, because 0 means for ever, or never."""
    return max(1, round(duration_s * 1000))


def prepare(socket: zmq.Socket[bytes], heartbeat: Heartbeat, handshake_timeout_s: float) -> None:
    """Options that both kinds of socket have in common."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(handshake_timeout_s))
    socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds(heartbeat.interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds(heartbeat.timeout_s))
    socket.setsockopt(zmq.HEARTBEAT_TTL, milliseconds(heartbeat.timeout_s))


def watch(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], events: int
) -> zmq.Socket[bytes]:
    """A socket to read `socket`'s monitor events from; `unwatch` it before `socket` is closed."""
    # A name of its own for each: libzmq frees a name some time after its socket was closed.
    name = f"inproc://monitor-{next(_monitor_numbers)}"
    socket.monitor(name, events)
    reader = context.socket(zmq.PAIR)
    reader.setsockopt(zmq.LINGER, 0)
    # libzmq's I/O thread waits where an event has no room. One thread serves all peers: it must not.
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.connect(name)
    return reader


def unwatch(socket: zmq.Socket[bytes], reader: zmq.Socket[bytes]) -> None:
    """Undo `watch`. An event that nobody can read any more would stop libzmq's I/O thread for good."""
    socket.disable_monitor()
    reader.close()


class Line:
    """Owned by the link's thread. `ended` tells why it has ended by itself; empty while it has not."""

    def __init__(self, address: Address, due_s: float) -> None:
        self.address = address
        self.due_s = due_s
        """By when it has to be UP, in the link's monotonic seconds."""
        self.stage = Stage.RESOLVING
        self.ended = ""
        self.monitor: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._waiting: list[bytes] = []
        self._refusal = ""

    def __repr__(self) -> str:
        return f"<Line to {self.address}: {self.ended or self.stage.value}>"

    @property
    def has_waiting(self) -> bool:
        """Whether frames wait for the host's address."""
        return bool(self._waiting)

    def dial(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        own_identity: bytes,
        secret: ClusterSecret | None,
        heartbeat: Heartbeat,
        timeout_s: float,
    ) -> None:
        """Begin to connect. A failure is not raised: the line has `ended`."""
        if self.stage is not Stage.RESOLVING:
            raise MisuseError(f"{self!r} was dialled before")
        self.stage = Stage.DIALLING
        try:
            self._dealer = dealer = context.socket(zmq.DEALER)
            prepare(dealer, heartbeat, timeout_s)
            dealer.setsockopt(zmq.ROUTING_ID, own_identity)
            dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, milliseconds(timeout_s))
            dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.setsockopt(zmq.MAXMSGSIZE, _LONGEST_ANSWER_BYTES)
            if secret is not None:
                dealer.curve_serverkey = secret.server_public
                dealer.curve_publickey = secret.client_public
                dealer.curve_secretkey = secret.client_secret
            self.monitor = watch(context, dealer, _WATCHED)
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self.ended = f"no connection can be opened to it ({error.strerror})"
            return
        for frame in self._waiting:
            dealer.send(frame, zmq.NOBLOCK)
        self._waiting.clear()

    def send(self, frame: bytes) -> bool:
        """Queue a frame, never waiting. False if it was not: the queue is full, or the line has ended."""
        if len(frame) > MAX_FRAME_BYTES:
            raise MisuseError(f"a frame of {len(frame)} bytes; {MAX_FRAME_BYTES} at most")
        if self.ended or self.stage is Stage.ENDED:
            return False
        if self._dealer is None:
            if len(self._waiting) >= SEND_QUEUE:
                return False
            self._waiting.append(frame)
            return True
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def look(self) -> None:
        """Read the monitor, moving on in the stages."""
        while self.monitor is not None and not self.ended:
            try:
                event, value = read_event(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_CONNECTED:
                self.stage = Stage.GREETING
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.stage = Stage.UP
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self.ended = self._reason()
            else:
                # The end of the connection is the next event.
                self._refusal = why_refused(event, value)

    def _reason(self) -> str:
        if self.stage is Stage.DIALLING:
            return "it cannot be reached: nobody listens there, or the way is closed"
        if self.stage is Stage.GREETING:
            return self._refusal or "it closed the connection during the handshake"
        return "the connection was lost, or it answered no ping in time"

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of the sockets; what is queued may still go out for `linger_s`, without the caller."""
        self.stage = Stage.ENDED
        self._waiting.clear()
        if self._dealer is not None:
            if self.monitor is not None:
                unwatch(self._dealer, self.monitor)
            self._dealer.close(linger=round(linger_s * 1000))
        self.monitor = self._dealer = None
