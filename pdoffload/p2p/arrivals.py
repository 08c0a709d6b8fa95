"""Who knocks at the listening socket and is not let in: counted, and told once.

ZeroMQ's monitor tells of connections in events. This file knows their meaning and no socket.
"""

from __future__ import annotations

import errno
import logging
import os
import struct

import zmq

from pdoffload.clock import Clock

_log = logging.getLogger(__name__)

QUIET_S = 60.0
"""After so long without another one, a refusal is news again and is logged."""

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
WATCHED = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
)
_EVENT = struct.Struct("=HI")


def read_event(frame: bytes) -> tuple[int, int]:
    """Event and value in the first frame of a monitor's message (zmq_socket_monitor(3))."""
    event, value = _EVENT.unpack(frame)
    return event, value


def why_refused(event: int, value: int) -> str:
    """What a failed handshake means to an operator."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "the client's key is not the cluster's"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "one side has a cluster secret, the other has none"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "the cluster secrets differ, or a recorded handshake was replayed"
        return f"the handshake broke ZeroMQ's protocol (0x{value:x})"
    if value == errno.EAGAIN:
        return "the handshake was not finished in time"
    # Also what the side sees that reads the other's greeting second.
    return (
        f"the other side broke off ({os.strerror(value)}); is the cluster secret the same on both?"
    )


class Complaint:
    """Says in the log that something goes on; once, until there was none for `QUIET_S`."""

    def __init__(self, clock: Clock) -> None:
        self.count = 0
        self._clock = clock
        self._last_s = -QUIET_S

    def about(self, what: str) -> None:
        """It happened again. `what` is logged if it is news, the count always rises."""
        self.count += 1
        now_s = self._clock.monotonic_s()
        if now_s - self._last_s >= QUIET_S:
            _log.warning("%s (number %d; more of the kind are only counted)", what, self.count)
        self._last_s = now_s


class Arrivals:
    """Connections of the listening socket, from its monitor's events.

    A success names no connection. It is given to the one that waits longest, and taken back from it if it
    fails after all. So of handshakes of one moment a refusal may be seen late; and a peer that leaves while
    another still shakes hands may be taken for one.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}
        self._admitted: set[int] = set()
        self._failure = ""

    def take(self, event: int, value: int) -> str:
        """Why a client was refused, if this event is the end of one that was; else empty.

        `value` is the connection's descriptor for the events that accept or end one.
        """
        if event == zmq.EVENT_ACCEPTED:
            self._admitted.discard(value)
            self._waiting[value] = None
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._admit_oldest()
        elif event == zmq.EVENT_DISCONNECTED:
            return self._ended(value)
        elif event & HANDSHAKE_FAILED:
            # The end of the same connection is the next event.
            self._failure = why_refused(event, value)
        return ""

    def _admit_oldest(self) -> None:
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            del self._waiting[oldest]
            self._admitted.add(oldest)

    def _ended(self, descriptor: int) -> str:
        failure, self._failure = self._failure, ""
        admitted = descriptor in self._admitted
        self._admitted.discard(descriptor)
        self._waiting.pop(descriptor, None)
        if failure and admitted:
            self._admit_oldest()
        return failure or ("" if admitted else "what was sent is no ZeroMQ 3 handshake")
