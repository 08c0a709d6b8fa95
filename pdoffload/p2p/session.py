"""The session with one peer: which message may come when. Tables; no socket, clock, thread or log.

A session is two conversations over one pair of sockets, and each side may have both. In the one we ask:

    SILENT --connect--> DIALLING --connect_ack--> ADMITTED --lookup, fetch, abort_fetch-->
                                                           <--lookup_resp, transfer_done, abort_ack--
    ADMITTED --connect--> RENEWING --connect_ack--> ADMITTED      (another receiving agent)

in the other we answer:

    STRANGER --connect--> GUEST <--lookup, fetch, abort_fetch--
                                --connect_ack, lookup_resp, transfer_done, abort_ack-->

What is not in the table is an error that names the state and the message: `MisuseError` when we would send
it, `ProtocolError` when they did.
"""

from __future__ import annotations

import enum

from pdoffload.errors import MisuseError, ProtocolError
from pdoffload.p2p.messages import (
    AbortAck,
    AbortFetch,
    Connect,
    ConnectAck,
    Disconnect,
    Fetch,
    Lookup,
    LookupResp,
    Message,
    TransferDone,
)


class Asking(enum.Enum):
    """How far we are with a peer whose chunks we want."""

    SILENT = "silent"
    DIALLING = "dialling"
    ADMITTED = "admitted"
    RENEWING = "renewing"
    """Admitted, and introduced again with another receiving agent: nothing new is asked meanwhile."""


class Answering(enum.Enum):
    """How far a peer is that may want chunks of ours."""

    STRANGER = "stranger"
    GUEST = "guest"


class Direction(enum.Enum):
    """Which way a message goes, as seen from here."""

    SENT = "sent"
    RECEIVED = "received"


SENT, RECEIVED = Direction.SENT, Direction.RECEIVED
MessageType = type[Message]

ASKING_STEPS: dict[tuple[Direction, MessageType, Asking], Asking] = {
    (SENT, Connect, Asking.SILENT): Asking.DIALLING,
    (RECEIVED, ConnectAck, Asking.DIALLING): Asking.ADMITTED,
    (SENT, Lookup, Asking.ADMITTED): Asking.ADMITTED,
    (RECEIVED, LookupResp, Asking.ADMITTED): Asking.ADMITTED,
    (SENT, Fetch, Asking.ADMITTED): Asking.ADMITTED,
    (RECEIVED, TransferDone, Asking.ADMITTED): Asking.ADMITTED,
    (SENT, AbortFetch, Asking.ADMITTED): Asking.ADMITTED,
    (RECEIVED, AbortAck, Asking.ADMITTED): Asking.ADMITTED,
    (RECEIVED, ConnectAck, Asking.ADMITTED): Asking.ADMITTED,  # to a connect that was given up
    (SENT, Connect, Asking.ADMITTED): Asking.RENEWING,
    (RECEIVED, ConnectAck, Asking.RENEWING): Asking.ADMITTED,
    (RECEIVED, LookupResp, Asking.RENEWING): Asking.RENEWING,
    (RECEIVED, TransferDone, Asking.RENEWING): Asking.RENEWING,
    (SENT, AbortFetch, Asking.RENEWING): Asking.RENEWING,
    (RECEIVED, AbortAck, Asking.RENEWING): Asking.RENEWING,
}

ANSWERING_STEPS: dict[tuple[Direction, MessageType, Answering], Answering] = {
    (RECEIVED, Connect, Answering.STRANGER): Answering.GUEST,
    (RECEIVED, Connect, Answering.GUEST): Answering.GUEST,  # with another receiving agent
    (SENT, ConnectAck, Answering.GUEST): Answering.GUEST,
    (RECEIVED, Lookup, Answering.GUEST): Answering.GUEST,
    (SENT, LookupResp, Answering.GUEST): Answering.GUEST,
    (RECEIVED, Fetch, Answering.GUEST): Answering.GUEST,
    (SENT, TransferDone, Answering.GUEST): Answering.GUEST,
    (RECEIVED, AbortFetch, Answering.GUEST): Answering.GUEST,
    (SENT, AbortAck, Answering.GUEST): Answering.GUEST,
}


class SessionState:
    """Both conversations' states. One thread."""

    __slots__ = ("answering", "asking", "closed")

    def __init__(self) -> None:
        self.asking = Asking.SILENT
        self.answering = Answering.STRANGER
        self.closed = False

    def __repr__(self) -> str:
        end = ", closed" if self.closed else ""
        return f"<SessionState {self.asking.value}, {self.answering.value}{end}>"

    def sent(self, message: Message) -> None:
        """We send `message` now. `MisuseError` where the table has no such step."""
        if not self._step(SENT, message):
            raise MisuseError(f"{type(message).__name__} may not be sent in {self!r}")

    def received(self, message: Message) -> None:
        """The peer sent `message`. `ProtocolError` where the table has no such step."""
        if not self._step(RECEIVED, message):
            raise ProtocolError(f"{type(message).__name__} may not come in {self!r}")

    def _step(self, direction: Direction, message: Message) -> bool:
        if self.closed:
            return False
        kind = type(message)
        if kind is Disconnect:
            self.closed = True
            return True
        asking = ASKING_STEPS.get((direction, kind, self.asking))
        if asking is not None:
            self.asking = asking
            return True
        answering = ANSWERING_STEPS.get((direction, kind, self.answering))
        if answering is not None:
            self.answering = answering
            return True
        return False


class PullState(enum.Enum):
    """One fetch, on the side that asked for it."""

    WAITING = "waiting"
    """Not sent yet: the handshake or our receiving agent is not through."""
    FETCHING = "fetching"
    ABORTING = "aborting"
    """Its deadline has passed; the producer was told to stop."""
    LOST = "lost"
    """Given up without word that nothing moves any more: its slots stay in quarantine."""
    ENDED = "ended"


class PullEvent(enum.Enum):
    """What can happen to a fetch."""

    SENT = "fetch sent"
    DONE = "transfer_done"
    ACKNOWLEDGED = "abort_ack"
    DEADLINE = "deadline"
    PEER_LOST = "peer lost"
    AGENT_CLOSED = "our receiving agent closed"


PULL_STEPS: dict[tuple[PullState, PullEvent], PullState] = {
    (PullState.WAITING, PullEvent.SENT): PullState.FETCHING,
    (PullState.WAITING, PullEvent.DEADLINE): PullState.ENDED,
    (PullState.WAITING, PullEvent.PEER_LOST): PullState.ENDED,
    (PullState.WAITING, PullEvent.AGENT_CLOSED): PullState.ENDED,
    (PullState.FETCHING, PullEvent.DONE): PullState.ENDED,
    (PullState.FETCHING, PullEvent.DEADLINE): PullState.ABORTING,
    (PullState.FETCHING, PullEvent.PEER_LOST): PullState.LOST,
    (PullState.FETCHING, PullEvent.AGENT_CLOSED): PullState.ENDED,
    (PullState.ABORTING, PullEvent.DONE): PullState.ENDED,
    (PullState.ABORTING, PullEvent.ACKNOWLEDGED): PullState.ENDED,
    (PullState.ABORTING, PullEvent.DEADLINE): PullState.LOST,
    (PullState.ABORTING, PullEvent.PEER_LOST): PullState.LOST,
    (PullState.ABORTING, PullEvent.AGENT_CLOSED): PullState.ENDED,
}


class ServeState(enum.Enum):
    """One fetch, on the side that serves it."""

    GATHERING = "gathering"
    """Some of its chunks are not in the pool yet; those that are may be on their way already."""
    WRITING = "writing"
    """All its chunks were handed to a writer."""
    STOPPING = "stopping"
    """Aborted, or failed: nothing more is written, and what is under way is waited for."""
    ENDED = "ended"


class ServeEvent(enum.Enum):
    """What can happen to a fetch that is served."""

    GATHERED = "last chunk arrived"
    MISSING = "a chunk will not come"
    DEADLINE = "deadline"
    ABORTED = "abort_fetch"
    WRITE_FAILED = "a write failed"
    IDLE = "no write under way"


SERVE_STEPS: dict[tuple[ServeState, ServeEvent], ServeState] = {
    (ServeState.GATHERING, ServeEvent.GATHERED): ServeState.WRITING,
    (ServeState.GATHERING, ServeEvent.MISSING): ServeState.STOPPING,
    (ServeState.GATHERING, ServeEvent.DEADLINE): ServeState.STOPPING,
    (ServeState.GATHERING, ServeEvent.ABORTED): ServeState.STOPPING,
    (ServeState.GATHERING, ServeEvent.WRITE_FAILED): ServeState.STOPPING,
    (ServeState.WRITING, ServeEvent.ABORTED): ServeState.STOPPING,
    (ServeState.WRITING, ServeEvent.WRITE_FAILED): ServeState.STOPPING,
    (ServeState.WRITING, ServeEvent.IDLE): ServeState.ENDED,
    (ServeState.STOPPING, ServeEvent.ABORTED): ServeState.STOPPING,
    (ServeState.STOPPING, ServeEvent.WRITE_FAILED): ServeState.STOPPING,
    (ServeState.STOPPING, ServeEvent.IDLE): ServeState.ENDED,
}
