"""All sessions of a process: who may ask, who is asked, what becomes of a peer that fails.

Everything runs on the service's thread. A peer is known by its address; a session with it lasts until a
message that breaks the rules, a lost connection, a restart on the other side, or the end of this process.
After a failure the next contact starts clean, not before a back-off that doubles each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from pdoffload.clock import Clock
from pdoffload.config import Verify
from pdoffload.errors import ConfigError, ProtocolError
from pdoffload.memory.lending import Lender
from pdoffload.p2p.address import Address
from pdoffload.p2p.asking import AskCounts, Asker
from pdoffload.p2p.keeping import Keeping
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
    encode,
)
from pdoffload.p2p.receivers import Receivers, same_process
from pdoffload.p2p.receiving import Receiver, Stage
from pdoffload.p2p.serving import ServeCounts, Server
from pdoffload.p2p.session import Answering, Asking, SessionState
from pdoffload.p2p.terms import PeerTerms, Target
from pdoffload.p2p.watches import Watches

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0
IDLE_S = 300.0
"""A peer that was not heard of for so long may go when there are too many; vLLM's own figure."""


class Wire(Protocol):
    """What sessions ask of the sockets: `pdoffload.p2p.link.Link`."""

    @property
    def address(self) -> Address:
        """Where this process is reached."""

    def connect(self, address: Address) -> None:
        """Open a line; nothing if there is one. `ConfigError` where the host has no address."""

    def send(self, address: Address, frame: bytes) -> bool:
        """Queue a frame; False if it cannot be queued."""

    def close_line(self, address: Address) -> None:
        """Close a line when what was queued is gone, or soon after."""


class SessionCounts(msgspec.Struct):
    """Counters over all sessions; they never fall."""

    handshakes_done: int = 0
    handshakes_refused: int = 0
    bad_messages: int = 0
    peers_lost: int = 0


class Session:
    """One peer. Changed by `Sessions` alone."""

    def __init__(self, address: Address, asker: Asker, server: Server, now_s: float) -> None:
        self.address = address
        self.asker = asker
        self.server = server
        self.state = SessionState()
        self.wants_in = False
        """Somebody here asks this peer."""
        self.dialled_s = now_s
        self.heard_s = now_s
        self.introduced: Receiver | None = None
        """Whose metadata our last `connect` carried."""
        self.ours = False
        """Whether it speaks our additions to the protocol; known once it has admitted us."""
        self.incarnation = ""
        """Of its receiving agent, as its last `connect` gave it."""
        self.targets: list[Target] = []
        self.mute = ""
        """Why nothing is asked of it although it would answer."""

    def __repr__(self) -> str:
        return f"<Session {self.address}: {self.state!r}, {self.asker!r}, {self.server!r}>"

    @property
    def busy(self) -> bool:
        return self.asker.busy or self.server.busy


class _Backoff(msgspec.Struct):
    wait_s: float
    until_s: float


class Sessions:
    """Sessions by address. `forget` is told of targets that are not written to any more."""

    def __init__(
        self,
        wire: Wire,
        terms: PeerTerms,
        lender: Lender,
        receivers: Receivers,
        forget: Callable[[Target], None],
        *,
        max_peers: int,
        clock: Clock,
    ) -> None:
        self.counts = SessionCounts()
        self.asked = AskCounts()
        self.served = ServeCounts()
        self.watches = Watches(lender)
        self.keeping = Keeping(lender, self.watches, terms.deadlines)
        self.leaving: list[Asker] = []
        """Of sessions that are over: what they pulled is being checked, or in quarantine."""
        self._wire = wire
        self._terms = terms
        self._lender = lender
        self._receivers = receivers
        self._forget = forget
        self._max_peers = max_peers
        self._clock = clock
        self._sessions: dict[Address, Session] = {}
        self._backoffs: dict[Address, _Backoff] = {}
        self._refused: dict[Address, str] = {}
        self._full = False

    def __repr__(self) -> str:
        return f"<Sessions with {len(self._sessions)} peers, {len(self._backoffs)} backing off>"

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, address: Address) -> Session | None:
        return self._sessions.get(address)

    # --- our side ---

    def to_ask(self, address: Address) -> tuple[Session | None, str]:
        """The session by which `address` is asked; or None and why it cannot be."""
        session = self._sessions.get(address)
        if session is None:
            if address == self._wire.address:
                return None, "it is this process itself"
            backoff = self._backoffs.get(address)
            if backoff is not None and self._clock.monotonic_s() < backoff.until_s:
                return None, "it failed a moment ago"
            session = self._open(address)
            if session is None:
                return None, "it cannot be reached"
        if session.mute:
            return None, session.mute
        session.wants_in = True
        self._introduce(session)
        return session, ""

    def introduce_all(self) -> None:
        """There is a receiver that peers may not know yet."""
        for session in self:
            self._introduce(session)

    def _introduce(self, session: Session) -> None:
        """Send our `connect` where it is due and our receiving agent is open."""
        if not session.wants_in or session.state.asking in (Asking.DIALLING, Asking.RENEWING):
            return
        receiver = self._receivers.current()
        if session.introduced is receiver or receiver.stage is not Stage.OPEN:
            return
        if session.state.asking is Asking.ADMITTED:
            session.asker.wait()
            if not session.ours:
                # Stock vLLM takes a second connect for a fault: begin anew, once nothing is under way.
                if not session.asker.under_way(session.introduced):
                    reason = "our receiving agent is replaced"
                    self.drop(session, reason, tell=True, backoff=False)
                return
        session.introduced = receiver
        session.dialled_s = self._clock.monotonic_s()
        identity = str(self._wire.address)
        self.send(session, self._terms.introduce(identity, receiver.metadata, receiver.incarnation))

    def _open(self, address: Address) -> Session | None:
        if len(self._sessions) >= self._max_peers and not self._evict_idle():
            if not self._full:
                logger.warning(
                    "%d peers are connected, which is max_peers: no more are taken", self._max_peers
                )
            self._full = True
            return None
        self._full = False
        try:
            self._wire.connect(address)
        except ConfigError as error:
            logger.warning("peer %s: %s", address, "; ".join(error.problems))
            self._back_off(address)
            return None
        deadlines, chunk_bytes = self._terms.deadlines, self._terms.geometry.chunk_bytes
        session = Session(
            address,
            Asker(address, deadlines, chunk_bytes, self.asked),
            Server(address, deadlines, self._lender, self.watches, self.keeping, self.served),
            self._clock.monotonic_s(),
        )
        self._sessions[address] = session
        return session

    def _evict_idle(self) -> bool:
        now_s = self._clock.monotonic_s()
        idle = [each for each in self if not each.busy and now_s - each.heard_s >= IDLE_S]
        if not idle:
            return False
        self.drop(min(idle, key=lambda each: each.heard_s), "idle, and its place is needed")
        return True

    # --- their side ---

    def received(self, address: Address, message: Message) -> None:
        """A message from `address`. What breaks the rules ends that session, and nothing else."""
        session = self._sessions.get(address)
        try:
            if isinstance(message, Connect):
                self._on_connect(address, session, message)
            elif session is None:
                self._dismiss(address, "no session: introduce yourself first")
            else:
                session.heard_s = self._clock.monotonic_s()
                self._dispatch(session, message)
        except ProtocolError as error:
            self.counts.bad_messages += 1
            logger.warning("peer %s broke the protocol: %s", address, error)
            session = self._sessions.get(address)
            if session is not None:
                self.drop(session, str(error), tell=True)

    def _on_connect(self, address: Address, session: Session | None, message: Connect) -> None:
        if message.peer_id != str(address):
            raise ProtocolError(f"introduces itself as {message.peer_id!r}")
        objections = self._terms.objections(message)
        if objections:
            self._refuse(address, session, "; ".join(objections))
            return
        if session is not None and session.state.answering is Answering.GUEST:
            if same_process(message.incarnation, session.incarnation):
                self._forget(session.targets[-1])
            else:
                self.drop(session, "it has restarted", backoff=False)
                session = None
        # It is alive: whatever failed before need not be waited for.
        self._backoffs.pop(address, None)
        session = session or self._open(address)
        if session is None:
            return
        session.state.received(message)
        session.heard_s = self._clock.monotonic_s()
        session.incarnation = message.incarnation
        target = Target(
            str(address),
            message.agent_metadata,
            message.base_addr,
            message.num_blocks,
            message.block_len,
        )
        session.targets.append(target)
        session.server.greet(target, leaves=bool(message.incarnation))
        self.counts.handshakes_done += 1
        self._refused.pop(address, None)
        self.send(session, ConnectAck(str(self._wire.address), message.incarnation))

    def _refuse(self, address: Address, session: Session | None, reason: str) -> None:
        self.counts.handshakes_refused += 1
        if self._refused.get(address) != reason:
            self._refused[address] = reason
            logger.error("peer %s is refused: %s", address, reason)
        if session is not None:
            self.drop(session, f"refused: {reason}", tell=True)
        else:
            self._dismiss(address, f"refused: {reason}")

    def _dismiss(self, address: Address, reason: str) -> None:
        """Tell somebody without a session why it gets no answer."""
        try:
            self._wire.connect(address)
        except ConfigError:
            return  # an identity that leads nowhere: nobody waits there
        self._wire.send(address, encode(Disconnect(reason)))
        self._wire.close_line(address)

    def _dispatch(self, session: Session, message: Message) -> None:
        if isinstance(message, ConnectAck):
            self._on_ack(session, message)
            return
        session.state.received(message)
        now_s = self._clock.monotonic_s()
        match message:
            case Lookup():
                session.server.on_lookup(message, now_s)
            case Fetch():
                session.server.on_fetch(message, now_s)
            case AbortFetch():
                session.server.on_abort_fetch(message)
            case LookupResp():
                session.asker.on_lookup_resp(message)
            case TransferDone():
                session.asker.on_transfer_done(message)
            case AbortAck():
                session.asker.on_abort_ack(message, trusted=session.ours)
            case Disconnect():
                self._on_disconnect(session, message)

    def _on_ack(self, session: Session, message: ConnectAck) -> None:
        receiver = session.introduced
        if receiver is None:
            raise ProtocolError("ConnectAck without a connect of ours")
        if message.incarnation not in ("", receiver.incarnation):
            return  # to the connect before the last
        session.state.received(message)
        session.ours = bool(message.incarnation)
        self._backoffs.pop(session.address, None)
        self.counts.handshakes_done += 1
        if not session.ours and self._terms.verify is Verify.ALWAYS:
            session.mute = "it sends no checksums, and verify is always"
            logger.warning(
                "peer %s runs stock vLLM, which sends no checksums: nothing is loaded from it. "
                "Set verify to if_present to take its chunks unchecked",
                session.address,
            )
            session.asker.lose(session.mute)
            return
        session.asker.admit(receiver, whole=not session.ours)
        self._introduce(session)

    def _on_disconnect(self, session: Session, message: Disconnect) -> None:
        reason = message.reason or "it has ended the session"
        if session.state.asking is Asking.DIALLING and message.reason.startswith("refused"):
            self.counts.handshakes_refused += 1
            logger.error("peer %s refuses us: %s", session.address, reason)
        self.drop(session, reason)

    # --- the end of a session ---

    def down(self, address: Address, reason: str) -> None:
        """The line to `address` broke."""
        session = self._sessions.get(address)
        if session is not None:
            self.drop(session, reason)

    def drop(
        self, session: Session, reason: str, *, tell: bool = False, backoff: bool = True
    ) -> None:
        """End a session: what it asked has failed, what it held is let go."""
        if self._sessions.pop(session.address, None) is None:
            return
        was_busy = session.busy
        if tell and not session.state.closed:
            self._wire.send(session.address, encode(Disconnect(reason)))
        session.state.closed = True
        session.asker.lose(reason)
        session.server.close()
        for target in session.targets:
            self._forget(target)
        self._wire.close_line(session.address)
        self.leaving.append(session.asker)
        if backoff:
            self._back_off(session.address)
            self.counts.peers_lost += 1
        log = logger.warning if was_busy else logger.info
        log("peer %s is gone: %s", session.address, reason)

    def _back_off(self, address: Address) -> None:
        last = self._backoffs.get(address)
        wait_s = min(last.wait_s * 2, LAST_BACKOFF_S) if last else FIRST_BACKOFF_S
        self._backoffs[address] = _Backoff(wait_s, self._clock.monotonic_s() + wait_s)

    def send(self, session: Session, message: Message) -> None:
        """Send, or end the session if the message cannot even be queued."""
        session.state.sent(message)
        if not self._wire.send(session.address, encode(message)):
            self.drop(session, "its line takes no more messages")

    # --- time ---

    def tick(self, now_s: float) -> None:
        """Let deadlines pass: of handshakes, questions, fetches and keeps."""
        for kv_request_id in self.keeping.tick(now_s):
            logger.warning(
                "chunks kept for %r were not fetched in %g s: let go, and a fetch will be refused",
                kv_request_id,
                self._terms.deadlines.unbound_store_timeout_s,
            )
        timeout_s = self._terms.deadlines.lookup_timeout_s
        for session in self:
            session.asker.tick(now_s)
            session.server.tick(now_s)
            waiting = session.state.asking in (Asking.DIALLING, Asking.RENEWING)
            if waiting and now_s - session.dialled_s >= timeout_s:
                self.drop(session, f"no answer to our connect in {timeout_s:g} s")
        for address in [a for a, b in self._backoffs.items() if now_s - b.until_s > LAST_BACKOFF_S]:
            del self._backoffs[address]

    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do at the latest."""
        instants: list[float | None] = [self.keeping.next_deadline_s]
        for session in self:
            instants += (session.asker.next_deadline_s, session.server.next_deadline_s)
            if session.state.asking in (Asking.DIALLING, Asking.RENEWING):
                instants.append(session.dialled_s + self._terms.deadlines.lookup_timeout_s)
        return min((each for each in instants if each is not None), default=None)

    def take_leave(self) -> None:
        """Tell every peer that this process goes: nobody should begin to write into it any more."""
        for session in self:
            self._wire.send(session.address, encode(Disconnect("shutting down")))

    def close(self) -> None:
        """End every session. Our receiving agents are closed already: what was pulled is settled."""
        for session in self:
            session.asker.lose("this process is shutting down", settled=True)
            self.drop(session, "this process is shutting down", backoff=False)
        self.keeping.close()
