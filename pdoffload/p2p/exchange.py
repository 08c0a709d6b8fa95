"""What the peer service decides: the engine's commands, peers' messages and finished work in; messages, work
and news out. No thread, no socket, no sleep: `pdoffload.p2p.service` brings events and carries out.

One turn of the owner: every event since the last one, by `take`, `received` or `down`; then `end_turn`.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Protocol

from pdoffload.clock import Clock
from pdoffload.errors import ProtocolError, TransferError, WireError
from pdoffload.memory.lending import Arrival, Lender
from pdoffload.p2p.address import Address
from pdoffload.p2p.arrivals import Complaint
from pdoffload.p2p.asking import Asker
from pdoffload.p2p.checking import Checked
from pdoffload.p2p.handshakes import Handshakes
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
    decode,
)
from pdoffload.p2p.news import (
    Answered,
    Ask,
    Command,
    Keep,
    KeepEnds,
    Leave,
    News,
    Offer,
    Pull,
    PullEnded,
)
from pdoffload.p2p.outbound import WriteSettled, Written
from pdoffload.p2p.pulling import Check
from pdoffload.p2p.receivers import Receivers, Receiving
from pdoffload.p2p.receiving import Stage
from pdoffload.p2p.serving import Write
from pdoffload.p2p.session import Answering, Asking
from pdoffload.p2p.sessions import Session, Sessions, Wire
from pdoffload.p2p.terms import PeerTerms, Target
from pdoffload.p2p.writing import Outcome

logger = logging.getLogger(__name__)


class Movers(Protocol):
    """Who moves and checks bytes: `pdoffload.p2p.writing.Writers`. Every order comes back as an outcome."""

    def write(self, write: Write, timeout_s: float) -> None: ...

    def check(self, check: Check, owner: object) -> None: ...

    def forget(self, target: Target) -> None: ...


class Exchange:
    """One thread owns it."""

    def __init__(
        self,
        wire: Wire,
        terms: PeerTerms,
        lender: Lender,
        receivers: Receivers,
        movers: Movers,
        *,
        max_peers: int,
        clock: Clock,
    ) -> None:
        self.sessions = Sessions(
            wire, terms, lender, movers.forget, max_peers=max_peers, clock=clock
        )
        self.handshakes = Handshakes(self.sessions, terms, receivers, movers.forget, clock=clock)
        self._terms = terms
        self._lender = lender
        self._receivers = receivers
        self._movers = movers
        self._clock = clock
        self._closing = False
        self._writing: Counter[str] = Counter()
        """Writes that have not settled, by the address of their peer."""
        self._complaints: dict[Address, Complaint] = {}
        """About those who sent what is no message, at most `max_peers` of them: the last ones."""
        self._news: list[News] = []

    def __repr__(self) -> str:
        return f"<Exchange {self.sessions!r}, {self._receivers!r}>"

    def take_news(self) -> list[News]:
        """What has happened since the last call."""
        taken, self._news = self._news, []
        return taken

    # --- messages ---

    def received(self, address: Address, frame: bytes) -> None:
        """A frame from `address`. What breaks the rules ends that session, and nothing else."""
        try:
            message = decode(frame)
        except WireError as error:
            # It closes nothing: the next message may be right, and deadlines end what waits for this one.
            self.sessions.counts.bad_messages += 1
            self._complain(address, f"peer {address} sent what is no message: {error}")
            return
        try:
            self._on_message(address, message)
        except ProtocolError as error:
            self.sessions.counts.bad_messages += 1
            logger.warning("peer %s broke the protocol: %s", address, error)
            session = self.sessions.get(address)
            if session is not None:
                self.sessions.drop(session, str(error), tell=True)

    def _complain(self, address: Address, what: str) -> None:
        complaint = self._complaints.pop(address, None) or Complaint(self._clock)
        self._complaints[address] = complaint
        if len(self._complaints) > self.sessions.max_peers:
            del self._complaints[next(iter(self._complaints))]
        complaint.about(what)

    def _on_message(self, address: Address, message: Message) -> None:
        if isinstance(message, Connect):
            # Our own line may have ended before this was sent: the answer would be lost on it. What else
            # comes is of the session that ends with the line, maybe from a process before the present one:
            # the present one would hear that it has no session.
            ended = self.sessions.wire.look(address)
            if ended:
                self.down(address, ended)
        session = self.sessions.get(address)
        if isinstance(message, Connect):
            self.handshakes.on_connect(address, message)
        elif session is not None and not _is_late(session, message):
            session.heard_s = self._clock.monotonic_s()
            self._dispatch(session, message)
        elif session is None and isinstance(message, Lookup | Fetch | AbortFetch):
            # Somebody waits for an answer. The others are of a session that is over: two sides that both
            # answered those would never come to an end.
            self.sessions.turn_away(address, "no session: introduce yourself first")

    def _dispatch(self, session: Session, message: Message) -> None:
        if isinstance(message, ConnectAck):
            self.handshakes.on_ack(session, message)
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
                session.asker.on_abort_ack(message)
            case Disconnect():
                self.handshakes.on_disconnect(session, message)

    def down(self, address: Address, reason: str) -> None:
        """The line to `address` broke."""
        self.sessions.down(address, reason)

    # --- commands, and what was ordered before ---

    def take(self, item: Command | Arrival | Outcome) -> None:
        """The engine wants something, a chunk has arrived in the pool, or work is done."""
        now_s = self._clock.monotonic_s()
        match item:
            case Arrival():
                self.sessions.watches.arrived(item)
            case Written():
                self._on_written(item)
            case WriteSettled(write):
                self._settled(write)
            case Checked(check, owner, bad, verified):
                assert isinstance(owner, Asker)
                owner.checked(check.job_id, check.round_seq, bad, verified)
            case Ask():
                self._ask(item, now_s)
            case Pull():
                self._pull(item, now_s)
            case _ if self._closing:
                pass
            case Leave(peer, kv_request_id):
                session = self.sessions.get(peer)
                if session is not None:
                    session.asker.leave(kv_request_id)
            case Keep(kv_request_id):
                fetched = any(each.server.serves(kv_request_id) for each in self.sessions)
                self.sessions.keeping.begin(kv_request_id, fetched=fetched)
            case Offer(kv_request_id, keys):
                self.sessions.keeping.offer(kv_request_id, keys)
            case KeepEnds(kv_request_id):
                self.sessions.keeping.computed(kv_request_id, now_s)
                for each in self.sessions:
                    each.server.on_computed(kv_request_id)

    def _session_with(self, peer: Address) -> tuple[Session | None, str]:
        return (None, "closing") if self._closing else self.handshakes.to_ask(peer)

    def _ask(self, command: Ask, now_s: float) -> None:
        session, why = self._session_with(command.peer)
        if session is None:
            logger.debug("peer %s is not asked: %s", command.peer, why)
            self._news.append(
                Answered(command.peer, command.kv_request_id, command.keys, frozenset())
            )
            return
        session.asker.ask(command.kv_request_id, command.keys, now_s)

    def _pull(self, command: Pull, now_s: float) -> None:
        session, why = self._session_with(command.peer)
        if session is None:
            error = TransferError(f"nothing is pulled from {command.peer}: {why}")
            failed = tuple((key, error) for key in command.keys)
            self._news.append(PullEnded(job_id=command.job_id, failed=failed, tried=False))
            return
        session.asker.pull(command, now_s)

    def _on_written(self, written: Written) -> None:
        if written.settled:
            self._settled(written.write)
        written.write.serve.server.written(
            written.write,
            written.checksums,
            failed=written.error is not None,
            settled=written.settled,
        )

    def _settled(self, write: Write) -> None:
        self._lender.give_back(write.slots)
        name = write.serve.target.name
        self._writing[name] -= 1
        if not self._writing[name]:
            del self._writing[name]

    def receiver_changed(self, receiver: Receiving) -> None:
        """A receiving agent of ours is open, could not be opened, or is closed."""
        if receiver.stage is not Stage.OPEN:
            self._receivers.ended(receiver)
            if receiver.error is not None:
                logger.error("no agent to receive from peers: %s", receiver.error)
            for asker in self.sessions.askers:
                asker.settle(receiver, open_to_cma=receiver.open_to_cma)
        if self._receivers.available is not None:
            self.handshakes.introduce_all()
            return
        reason = str(receiver.error or "our receiving agent is closed")
        for session in self.sessions:
            session.asker.give_up(reason)

    # --- the end of a turn ---

    def end_turn(self) -> None:
        """Let deadlines pass, and carry out what the turn's events have decided."""
        self.sessions.tick(self._clock.monotonic_s())
        for session in self.sessions:
            self.sessions.flush(session)
        replaced = self._receivers.balance(self.sessions.askers)
        if replaced:
            logger.warning(
                "bytes of a failed pull may still come in: our receiving agent is replaced"
            )
        if replaced or self._receivers.num_retiring:
            self.handshakes.introduce_all()
        if not self._closing:
            self.handshakes.call_back()
        self.handshakes.acknowledge_all(self._writing)
        for session in self.sessions:
            for write in session.server.take_writes():
                self._writing[write.serve.target.name] += 1
                self._movers.write(write, self._terms.deadlines.store_timeout_s)
        self._take_from_askers()

    def _take_from_askers(self) -> None:
        for asker in self.sessions.askers:
            for check in asker.take_checks():
                self._movers.check(check, asker)
            self._news.extend(asker.take_news())
        self.sessions.forget_settled()

    def next_deadline_s(self) -> float | None:
        """When a turn is due at the latest, though nothing happens."""
        return self.sessions.next_deadline_s()

    # --- the end ---

    def take_leave(self) -> None:
        """Tell every peer that this process goes. Nobody is asked from now on."""
        self._closing = True
        self.sessions.take_leave()

    def close(self, *, settled: bool) -> None:
        """End every session; what is under way still comes back. `settled`: as in `Sessions.close`."""
        self.sessions.close(settled=settled)
        self._take_from_askers()


def _is_late(session: Session, message: Message) -> bool:
    """Whether a message is of the session before this one, which ended on this side alone: a line can break
    one way. The peer hears of the new session by our `connect`, and then knows that the old one is over."""
    if session.state.asking not in (Asking.SILENT, Asking.DIALLING):
        return False
    if isinstance(message, Lookup | Fetch | AbortFetch):
        return session.state.answering is Answering.STRANGER
    return isinstance(message, LookupResp | TransferDone | AbortAck)
