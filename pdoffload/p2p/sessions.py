"""All sessions of a process: who there is, and what becomes of a peer that fails.

Everything runs on the service's thread. A peer is known by its address; a session with it lasts until a
message that breaks the rules, a lost connection, a restart on the other side, or the end of this process.
After a failure the next contact starts clean, not before a back-off that doubles each time.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from pdoffload.clock import Clock
from pdoffload.errors import ConfigError
from pdoffload.memory.lending import Lender
from pdoffload.p2p.address import Address
from pdoffload.p2p.asking import Asker
from pdoffload.p2p.keeping import Keeping
from pdoffload.p2p.messages import ConnectAck, Disconnect, Message, encode, fit_for_a_log
from pdoffload.p2p.receivers import Receiving
from pdoffload.p2p.serving import Server
from pdoffload.p2p.session import Asking, SessionState
from pdoffload.p2p.stats import AskCounts, ServeCounts, SessionCounts
from pdoffload.p2p.terms import PeerTerms, Target
from pdoffload.p2p.watches import Watches

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0
IDLE_S = 300.0
"""A peer that was not heard of for so long may go when there are too many; vLLM's own figure."""
PARTING_S = 1.0
"""How long the line stays open to a peer that was told the end of its session, or why it gets none. It may
begin a new one right away, and libzmq's ROUTER, which is the other end, can turn deaf to a connection under
a name of which several come and go at a time: seen with three, once in some hundred times."""
LONGEST_REASON = 2000
"""Of a `disconnect`, as it is sent and as it is logged: room for every setting that differs."""
_DIALLING = (Asking.DIALLING, Asking.RENEWING)


class Wire(Protocol):
    """What sessions ask of the sockets: `pdoffload.p2p.link.Link`."""

    @property
    def address(self) -> Address:
        """Where this process is reached."""

    def connect(self, address: Address) -> None:
        """Open a line; nothing if there is one. `ConfigError` where the host has no address."""

    def send(self, address: Address, frame: bytes) -> bool:
        """Queue a frame; False if it cannot be queued."""

    def look(self, address: Address) -> str:
        """Why the line has ended, if it has by now: it is forgotten then, and nothing else tells of it."""

    def close_line(self, address: Address) -> None:
        """Close a line when what was queued is gone, or soon after."""


class Session:
    """One peer. Changed by `Sessions` and `Handshakes` alone."""

    def __init__(self, address: Address, asker: Asker, server: Server, now_s: float) -> None:
        self.address = address
        self.asker = asker
        self.server = server
        self.state = SessionState()
        self.wants_in = False
        """Somebody here asks this peer."""
        self.dialled_s = now_s
        self.heard_s = now_s
        self.introduced: Receiving | None = None
        """Whose metadata our last `connect` carried."""
        self.ours = False
        """Whether it speaks our additions to the protocol; known once it has admitted us."""
        self.incarnation = ""
        """Of its receiving agent, as its last `connect` gave it."""
        self.targets: list[Target] = []
        """Its memory, as it gave it; the last one is that of now, those before it are still written to."""
        self.mute = ""
        """Why nothing is asked of it although it would answer."""
        self.ack: ConnectAck | None = None
        """To be sent, unless it is held back: see `Handshakes.acknowledge_all`."""
        self.neighbour = False

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
        self.wire = wire
        self.max_peers = max_peers
        self._leaving: list[Asker] = []
        """Of sessions that are over: what they pulled is being checked, or in quarantine."""
        self._terms = terms
        self._lender = lender
        self._forget = forget
        self._clock = clock
        self._serials = itertools.count()
        self._sessions: dict[Address, Session] = {}
        self._backoffs: dict[Address, _Backoff] = {}
        self._parting: dict[Address, float] = {}
        """Lines without a session, and when they are closed."""
        self._full = False

    def __repr__(self) -> str:
        return f"<Sessions with {len(self._sessions)} peers, {len(self._backoffs)} backing off>"

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, address: Address) -> Session | None:
        return self._sessions.get(address)

    @property
    def askers(self) -> tuple[Asker, ...]:
        """Of all sessions, and of those that are over and not settled yet."""
        return (*(session.asker for session in self._sessions.values()), *self._leaving)

    @property
    def leaving(self) -> tuple[Asker, ...]:
        """Of those sessions that are over."""
        return tuple(self._leaving)

    def open(self, address: Address) -> Session | None:
        """A new session with a peer that has none. None, with the reason logged, if there can be none."""
        if len(self._sessions) >= self.max_peers and not self._evict_idle():
            if not self._full:
                logger.warning(
                    "%d peers are connected, which is max_peers: no more are taken", self.max_peers
                )
            self._full = True
            return None
        self._full = False
        try:
            self.wire.connect(address)
        except ConfigError as error:
            logger.warning("peer %s: %s", address, "; ".join(error.problems))
            self._back_off(address)
            return None
        self._parting.pop(address, None)
        deadlines, chunk_bytes = self._terms.deadlines, self._terms.geometry.chunk_bytes
        session = Session(
            address,
            Asker(address, deadlines, chunk_bytes, self._serials, self.asked),
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
        longest = min(idle, key=lambda each: each.heard_s)
        self.drop(longest, "idle, and its place is needed", tell=True, backoff=False)
        return True

    # --- messages ---

    def send(self, session: Session, message: Message) -> None:
        """Send, or end the session if the message cannot even be queued."""
        session.state.sent(message)
        if not self.wire.send(session.address, encode(message)):
            self.drop(session, "its line takes no more messages")

    def flush(self, session: Session) -> None:
        """Send what both halves of a session have to say."""
        for message in (*session.asker.take_messages(), *session.server.take_messages()):
            if session.state.closed:
                return
            self.send(session, message)

    # --- the end of a session ---

    def down(self, address: Address, reason: str) -> None:
        """The line to `address` broke."""
        self._parting.pop(address, None)
        session = self._sessions.get(address)
        if session is not None:
            self.drop(session, reason)

    def drop(
        self,
        session: Session,
        reason: str,
        *,
        tell: bool = False,
        backoff: bool = True,
        keep_line: bool = False,
    ) -> None:
        """End a session: what it asked has failed, what it held is let go.

        `keep_line`: the line is good, and the next session wants one. A peer that is told keeps it too.
        """
        if self._sessions.get(session.address) is not session:
            return
        del self._sessions[session.address]
        was_busy = session.busy
        told = tell and not session.state.closed
        if told:
            self.wire.send(session.address, encode(goodbye(reason)))
        session.state.closed = True
        session.asker.lose(reason)
        session.server.close()
        for target in session.targets:
            self._forget(target)
        if told or keep_line:
            self._part(session.address)
        else:
            self.wire.close_line(session.address)
        self._leaving.append(session.asker)
        if backoff:
            self._back_off(session.address)
            self.counts.peers_lost += 1
        log = logger.warning if was_busy else logger.info
        log("peer %s is gone: %s", session.address, reason)

    def turn_away(self, address: Address, reason: str) -> None:
        """Tell somebody without a session why it gets no answer."""
        try:
            self.wire.connect(address)
        except ConfigError:
            return  # an identity that leads nowhere: nobody waits there
        self.wire.send(address, encode(goodbye(reason)))
        self._part(address)

    def _part(self, address: Address) -> None:
        """Leave a line open for a while. Strangers are many, and each costs sockets: not for all of them."""
        self._parting.pop(address, None)
        self._parting[address] = self._clock.monotonic_s() + PARTING_S
        if len(self._parting) > self.max_peers:
            oldest = next(iter(self._parting))
            del self._parting[oldest]
            self.wire.close_line(oldest)

    def why_not(self, address: Address) -> str:
        """Why a peer without a session should not be dialled now; empty if it may be."""
        backoff = self._backoffs.get(address)
        waits = backoff is not None and self._clock.monotonic_s() < backoff.until_s
        return "it failed a moment ago" if waits else ""

    def is_well(self, address: Address) -> None:
        """It speaks to us: whatever failed before need not be waited for."""
        self._backoffs.pop(address, None)

    def _back_off(self, address: Address) -> None:
        last = self._backoffs.get(address)
        wait_s = min(last.wait_s * 2, LAST_BACKOFF_S) if last else FIRST_BACKOFF_S
        self._backoffs[address] = _Backoff(wait_s, self._clock.monotonic_s() + wait_s)

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
            if session.state.asking in _DIALLING and now_s - session.dialled_s >= timeout_s:
                self.drop(session, f"no answer to our connect in {timeout_s:g} s", tell=True)
        for asker in self._leaving:
            asker.tick(now_s)
        for address in [a for a, until_s in self._parting.items() if now_s >= until_s]:
            del self._parting[address]
            self.wire.close_line(address)
        for address in [a for a, b in self._backoffs.items() if now_s - b.until_s > LAST_BACKOFF_S]:
            del self._backoffs[address]

    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do at the latest."""
        instants: list[float | None] = [self.keeping.next_deadline_s, *self._parting.values()]
        instants += (asker.next_deadline_s for asker in self._leaving)
        for session in self:
            instants += (session.asker.next_deadline_s, session.server.next_deadline_s)
            if session.state.asking in _DIALLING:
                instants.append(session.dialled_s + self._terms.deadlines.lookup_timeout_s)
        return min((each for each in instants if each is not None), default=None)

    def forget_settled(self) -> None:
        """Of sessions that are over: those about which all is known, and told."""
        self._leaving = [asker for asker in self._leaving if asker.busy or asker.num_lost]

    def take_leave(self) -> None:
        """Tell every peer that this process goes: nobody should begin to write into it any more."""
        for session in self:
            self.wire.send(session.address, encode(goodbye("shutting down")))

    def close(self, *, settled: bool) -> None:
        """End every session. `settled`: our receiving agents are closed, what was pulled is settled."""
        reason = "this process is shutting down"
        for session in self:
            session.asker.lose(reason, settled=settled)
            self.drop(session, reason, backoff=False)
        self.keeping.close()


def goodbye(reason: str) -> Disconnect:
    """A `disconnect` with as much of the reason as peers read."""
    return Disconnect(fit_for_a_log(reason, LONGEST_REASON))
