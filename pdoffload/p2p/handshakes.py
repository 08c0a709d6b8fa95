"""Introducing ourselves to peers, and letting others in or not. The service's thread.

ours:    to_ask --receiving agent open--> connect --> connect_ack: admitted
         the agent is replaced: what is asked waits, and `connect` is sent again with the new one
theirs:  connect --same terms--> connect_ack: a guest
                 --other terms--> disconnect, with both values of what differs
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from pdoffload.clock import Clock
from pdoffload.config import Verify
from pdoffload.errors import ProtocolError
from pdoffload.p2p.address import Address
from pdoffload.p2p.messages import (
    Connect,
    ConnectAck,
    Disconnect,
    fit_for_a_log,
)
from pdoffload.p2p.neighbours import is_neighbour, own_mark
from pdoffload.p2p.receivers import Receivers, Receiving, same_process
from pdoffload.p2p.receiving import Stage
from pdoffload.p2p.session import Answering, Asking
from pdoffload.p2p.sessions import LONGEST_REASON, Session, Sessions
from pdoffload.p2p.terms import PeerTerms, Target

logger = logging.getLogger(__name__)

_REFUSED = "refused: "
_MOST_TARGETS = 16
"""Receiving agents of one peer that fetches are under way into at one time: each takes a connection."""


class Handshakes:
    """The handshakes of all sessions. `forget` is told of targets that are not written to any more."""

    def __init__(
        self,
        sessions: Sessions,
        terms: PeerTerms,
        receivers: Receivers,
        forget: Callable[[Target], None],
        *,
        clock: Clock,
    ) -> None:
        self._sessions = sessions
        self._wire = sessions.wire
        self._terms = terms
        self._receivers = receivers
        self._forget = forget
        self._clock = clock
        self._refused: dict[Address, str] = {}
        """What was said of those refused last: said once."""

    # --- our side ---

    def to_ask(self, address: Address) -> tuple[Session | None, str]:
        """The session by which `address` is asked; or None and why it cannot be."""
        session = self._sessions.get(address)
        if session is None:
            if address == self._wire.address:
                return None, "it is this process itself"
            why_not = self._sessions.why_not(address)
            if why_not:
                return None, why_not
            session = self._sessions.open(address)
            if session is None:
                return None, "it cannot be reached"
        if session.mute:
            return None, session.mute
        session.wants_in = True
        self._introduce(session, self._receivers.current())
        # It may have ended by that.
        return (None, "it takes no messages") if session.state.closed else (session, "")

    def introduce_all(self) -> None:
        """There may be a receiver that peers do not know yet."""
        receiver = self._receivers.available
        if receiver is not None:
            for session in self._sessions:
                self._introduce(session, receiver)

    def _introduce(self, session: Session, receiver: Receiving) -> None:
        """Send our `connect` where it is due and our receiving agent is open."""
        if not session.wants_in or session.state.asking in (Asking.DIALLING, Asking.RENEWING):
            return
        if session.introduced is receiver:
            return
        if session.state.asking is Asking.ADMITTED and not self._withdraw(session):
            return
        if receiver.stage is not Stage.OPEN:
            return
        session.introduced = receiver
        session.dialled_s = self._clock.monotonic_s()
        identity = str(self._wire.address)
        self._sessions.send(
            session, self._terms.introduce(identity, receiver.metadata, receiver.incarnation)
        )

    def _withdraw(self, session: Session) -> bool:
        """Ask for nothing more by the agent that this peer knows; whether it may be told of another now."""
        # Messages that mean the old agent go before the connect that names the new one.
        self._sessions.flush(session)
        session.asker.wait()
        if session.ours or session.state.closed:
            return not session.state.closed
        # Stock vLLM takes a second connect for a fault: begin anew, once nothing is under way. Not at once:
        # its ROUTER is deaf to a new connection under a name while it has not read the old one to the end.
        if not session.asker.under_way(session.introduced):
            self._sessions.drop(session, "our receiving agent is replaced", tell=True)
        return False

    def on_ack(self, session: Session, message: ConnectAck) -> None:
        """The peer knows our receiving agent."""
        receiver = session.introduced
        if receiver is None:
            raise ProtocolError("ConnectAck without a connect of ours")
        if message.incarnation not in ("", receiver.incarnation):
            return  # to the connect before the last
        is_awaited = session.state.asking in (Asking.DIALLING, Asking.RENEWING)
        session.state.received(message)
        for asker in self._sessions.leaving:
            if asker.peer == session.address:
                asker.on_rest(message.process)
        session.asker.know_writer(message.process)
        if not is_awaited:
            return
        session.ours = bool(message.incarnation)
        self._sessions.is_well(session.address)
        self._sessions.counts.handshakes_done += 1
        if not session.ours and self._terms.verify is Verify.ALWAYS:
            session.mute = "it sends no checksums, and verify is always"
            logger.warning(
                "peer %s runs stock vLLM, which sends no checksums: nothing is loaded from it. "
                "Set verify to if_present to take its chunks unchecked",
                session.address,
            )
            session.asker.lose(session.mute)
        elif self._receivers.available is receiver:
            session.asker.admit(receiver, whole=not session.ours)
        elif self._receivers.available is not None:
            self._introduce(session, self._receivers.available)

    # --- their side ---

    def on_connect(self, address: Address, message: Connect) -> None:
        """A peer introduces itself: it becomes a guest, or hears why not. `ProtocolError`: it lies."""
        if message.peer_id != str(address):
            raise ProtocolError(f"introduces itself as {fit_for_a_log(message.peer_id)!r}")
        session = self._sessions.get(address)
        objections = self._terms.objections(message)
        if objections:
            self._refuse(address, session, "; ".join(objections))
            return
        if session is not None and session.state.answering is Answering.GUEST:
            session = self._come_again(session, message)
        self._sessions.is_well(address)
        session = session or self._sessions.open(address)
        if session is None:
            self._sessions.turn_away(address, "no more peers are taken")
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
        session.server.greet(target, leaves=bool(message.incarnation))
        self._keep_targets(session, target)
        self._sessions.counts.handshakes_done += 1
        self._refused.pop(address, None)
        session.neighbour = is_neighbour(message.process)
        session.ack = ConnectAck(str(self._wire.address), message.incarnation, own_mark())
        if not message.incarnation and self._terms.verify is not Verify.ALWAYS:
            # Stock vLLM takes a connect before its own is acknowledged, or never.
            session.wants_in = True
            self._introduce(session, self._receivers.current())

    def acknowledge_all(self, writes_under_way: Collection[str]) -> None:
        """Admit guests, at the end of the turn in which they came if nothing speaks against it.

        `writes_under_way`: addresses into which an earlier session may still be writing. A neighbour takes
        our word that this is over.
        """
        for session in self._sessions:
            ack = session.ack
            if ack is None or (session.neighbour and str(session.address) in writes_under_way):
                continue
            is_stock = not session.incarnation
            to_introduce = session.wants_in and session.introduced is None
            if is_stock and to_introduce and self._receivers.available is not None:
                continue
            session.ack = None
            self._sessions.send(session, ack)

    def call_back(self) -> None:
        """Where slots are in quarantine because a neighbour may still write: begin a new session with it,
        by the usual back-off. It admits us when what it had begun in the last one is over."""
        for session in self._sessions:
            if session.asker.waits_for_writer:
                self._sessions.drop(
                    session, "what it had begun to write may not be over", tell=True
                )
        for asker in self._sessions.leaving:
            if asker.waits_for_writer:
                self.to_ask(asker.peer)

    def _come_again(self, session: Session, message: Connect) -> Session | None:
        """A guest introduces itself again: with its next receiving agent, or because it begins anew."""
        renews = session.incarnation != message.incarnation
        if renews and same_process(message.incarnation, session.incarnation):
            return session
        self._sessions.drop(session, "it has begun anew", backoff=False, keep_line=not renews)
        return None

    def _keep_targets(self, session: Session, target: Target) -> None:
        """`target` is where fetches go from now on; those before it are left when nothing goes there."""
        still = [each for each in session.targets if session.server.writes_into(each)]
        if len(still) >= _MOST_TARGETS:
            raise ProtocolError(f"fetches into {len(still)} receiving agents are under way")
        for each in session.targets:
            if each not in still:
                self._forget(each)
        session.targets = [*still, target]

    def _refuse(self, address: Address, session: Session | None, reason: str) -> None:
        self._sessions.counts.handshakes_refused += 1
        if self._refused.pop(address, None) != reason:
            logger.error("peer %s is refused: %s", address, reason)
        self._refused[address] = reason
        if len(self._refused) > self._sessions.max_peers:
            del self._refused[next(iter(self._refused))]
        if session is not None:
            self._sessions.drop(session, _REFUSED + reason, tell=True)
        else:
            self._sessions.turn_away(address, _REFUSED + reason)

    def on_disconnect(self, session: Session, message: Disconnect) -> None:
        """The peer has ended the session."""
        reason = fit_for_a_log(message.reason, LONGEST_REASON) or "it has ended the session"
        if session.state.asking is Asking.DIALLING and reason.startswith(_REFUSED):
            self._sessions.counts.handshakes_refused += 1
            logger.error("peer %s refuses us: %s", session.address, reason)
        self._sessions.drop(session, reason)
