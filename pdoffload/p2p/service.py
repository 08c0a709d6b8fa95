"""The peer service: one thread that talks to peers, whatever the engine is doing.

    engine's thread                    p2p-control                       other threads
    ---------------                    -----------                       -------------
    post(command)   --inbox-->         sessions, deadlines    <--inbox-- the pool's arrivals (engine's thread)
    take_news()     <--news--          sockets                <--inbox-- writers: written, checked
                                       lends from the pool    <--inbox-- receivers: open, closed

The engine waits for nothing here and nothing here waits for the engine: what peers ask is answered from what
the pool lends.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import TransferError, WireError
from pdoffload.memory.host import HostRegion
from pdoffload.memory.lending import Arrival, Lender
from pdoffload.p2p.address import Address
from pdoffload.p2p.asking import Asker
from pdoffload.p2p.link import Down, Link, Received
from pdoffload.p2p.messages import decode
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
from pdoffload.p2p.receivers import Receivers
from pdoffload.p2p.receiving import OpenAgent, Receiver, Stage
from pdoffload.p2p.session import Answering, Asking
from pdoffload.p2p.sessions import Session, Sessions
from pdoffload.p2p.stats import PeerStats
from pdoffload.p2p.terms import PeerTerms
from pdoffload.p2p.writing import Checked, Outcome, Writers, WriteSettled, Written

logger = logging.getLogger(__name__)

_WAIT_S = 60.0
"""The longest sleep when nothing is due. A wake-up a minute costs nothing and hides no lost one."""
EVENTS_PER_ROUND = 256


class PeerService:
    """Started by its constructor; takes ownership of `link`. `post`, `take_news`, `stats` and `close`
    belong to one thread, the engine's.

    From `close` on nothing is borrowed from the pool, unless a thread was left behind (logged).
    """

    def __init__(
        self,
        link: Link,
        terms: PeerTerms,
        lender: Lender,
        region: HostRegion,
        open_agent: OpenAgent,
        *,
        num_threads: int,
        max_peers: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.address: Address = link.address
        self.stats = PeerStats()
        self._link = link
        self._terms = terms
        self._lender = lender
        self._clock = clock
        self._inbox: deque[Command | Arrival | Outcome | Receiver] = deque()
        self._news: deque[News] = deque()
        self._closing = False
        self._transports: dict[str, str] = {}
        """Transport by peer, for those with a session."""
        self._writers = Writers(
            num_threads, open_agent, region, self._put, verify=terms.verify, clock=clock
        )
        self._receivers = Receivers(open_agent, region, self._put, clock=clock)
        self._sessions = Sessions(
            link,
            terms,
            lender,
            self._receivers,
            self._writers.forget,
            max_peers=max_peers,
            clock=clock,
        )
        self._thread = threading.Thread(target=self._run, name="pdoffload-p2p-control", daemon=True)
        lender.listen(self._on_arrivals)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<PeerService {self.address}: {self._sessions!r}>"

    # --- any thread ---

    def post(self, command: Command) -> None:
        """Queue a command; returns at once. Its news comes by `take_news`."""
        self._put(command)

    def take_news(self) -> list[News]:
        """What has happened since the last call."""
        news: list[News] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def close(self, timeout_s: float) -> list[News]:
        """Take leave of the peers, end everything, stop all threads. What was under way has failed."""
        if not self._closing:
            self._closing = True
            self._link.wake()
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.error("the peer service did not stop within %g s; left behind", timeout_s)
        return self.take_news()

    def _put(self, item: Command | Arrival | Outcome | Receiver) -> None:
        self._inbox.append(item)
        self._link.wake()

    def _on_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        self._inbox.extend(arrivals)
        self._link.wake()

    # --- the service's thread ---

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except (
                Exception
            ):  # one bad turn must not leave every peer and every pull without an answer
                logger.exception("the peer service met an error it does not know; it goes on")
        self._shut_down()

    def _turn(self) -> None:
        due_s = self._sessions.next_deadline_s()
        now_s = self._clock.monotonic_s()
        wait_s = _WAIT_S if due_s is None else min(max(due_s - now_s, 0.0), _WAIT_S)
        for event in self._link.poll(0.0 if self._inbox else wait_s):
            if isinstance(event, Received):
                self._on_frame(event)
            elif isinstance(event, Down):
                self._sessions.down(event.address, event.reason)
        for _ in range(len(self._inbox)):
            self._take(self._inbox.popleft())
        self._sessions.tick(self._clock.monotonic_s())
        self._settle_up()

    def _on_frame(self, event: Received) -> None:
        try:
            message = decode(event.frame)
        except WireError as error:
            # It closes nothing: the next message may be right, and deadlines end what waits for this one.
            self._sessions.counts.bad_messages += 1
            logger.warning("peer %s sent what is no message: %s", event.sender, error)
            return
        self._sessions.received(event.sender, message)

    def _take(self, item: Command | Arrival | Outcome | Receiver) -> None:
        sessions, now_s = self._sessions, self._clock.monotonic_s()
        match item:
            case Arrival():
                sessions.watches.arrived(item)
            case Written():
                self._on_written(item)
            case WriteSettled(write):
                self._lender.give_back(write.slots)
            case Checked(check, owner, bad, verified):
                assert isinstance(owner, Asker)
                owner.checked(check.job_id, check.round_seq, bad, verified)
            case Receiver():
                self._on_receiver(item)
            case Ask():
                self._ask(item)
            case Pull():
                self._pull(item, now_s)
            case Leave(peer, kv_request_id):
                session = sessions.get(peer)
                if session is not None:
                    session.asker.leave(kv_request_id)
            case Keep(kv_request_id):
                sessions.keeping.begin(kv_request_id, now_s)
            case Offer(kv_request_id, keys):
                sessions.keeping.offer(kv_request_id, keys, now_s)
            case KeepEnds(kv_request_id):
                sessions.keeping.computed(kv_request_id)
                for each in sessions:
                    each.server.on_computed(kv_request_id)

    def _session_with(self, peer: Address) -> tuple[Session | None, str]:
        return (None, "closing") if self._closing else self._sessions.to_ask(peer)

    def _ask(self, command: Ask) -> None:
        session, why = self._session_with(command.peer)
        if session is None:
            logger.debug("peer %s is not asked: %s", command.peer, why)
            self._news.append(
                Answered(command.peer, command.kv_request_id, command.keys, frozenset())
            )
            return
        session.asker.ask(command.kv_request_id, command.keys)

    def _pull(self, command: Pull, now_s: float) -> None:
        session, why = self._session_with(command.peer)
        if session is None:
            error = TransferError(f"nothing is pulled from {command.peer}: {why}")
            failed = tuple((key, error) for key in command.keys)
            self._news.append(PullEnded(job_id=command.job_id, failed=failed))
            return
        session.asker.pull(command, now_s)

    def _on_written(self, written: Written) -> None:
        if written.settled:
            self._lender.give_back(written.write.slots)
        write = written.write
        write.serve.server.written(
            write, written.checksums, failed=written.error is not None, settled=written.settled
        )
        if written.transport:
            self._note_transport(write.serve.target.name, written.transport)

    def _note_transport(self, peer: str, transport: str) -> None:
        if self._transports.get(peer) != transport:
            self._transports[peer] = transport
            logger.info("peer %s is written to by %s", peer, transport)

    def _on_receiver(self, receiver: Receiver) -> None:
        if receiver.stage is Stage.OPEN:
            self._sessions.introduce_all()
            return
        self._receivers.ended(receiver)
        if receiver.error is not None:
            logger.error("no agent to receive from peers: %s", receiver.error)
            for session in self._sessions:
                if session.state.asking is Asking.SILENT or session.introduced is receiver:
                    session.asker.lose(str(receiver.error))
        for asker in self._askers():
            asker.settle(receiver)

    def _askers(self) -> Iterator[Asker]:
        return chain((session.asker for session in self._sessions), tuple(self._sessions.leaving))

    def _settle_up(self) -> None:
        """Carry out what the turn's events have decided."""
        for session in self._sessions:
            for write in session.server.take_writes():
                self._writers.write(write, self._terms.deadlines.store_timeout_s)
            for message in (*session.asker.take_messages(), *session.server.take_messages()):
                if session.state.closed:
                    break
                self._sessions.send(session, message)
        replaced = self._receivers.balance(self._askers())
        if replaced:
            logger.warning(
                "bytes of a failed pull may still come in: our receiving agent is replaced"
            )
        if replaced or self._receivers.num_retiring:
            self._sessions.introduce_all()
        for asker in self._askers():
            for check in asker.take_checks():
                self._writers.check(check, asker)
            self._news.extend(asker.take_news())
        self._sessions.leaving = [a for a in self._sessions.leaving if a.busy or a.num_lost]
        self.stats = self._count()

    def _count(self) -> PeerStats:
        counts, served = self._sessions.counts, self._sessions.served
        up = (
            session
            for session in self._sessions
            if session.state.asking is Asking.ADMITTED or session.state.answering is Answering.GUEST
        )
        return PeerStats(
            peers_up=sum(1 for _ in up),
            kept_slots=self._lender.num_lent,
            transports=self._transport_counts(),
            handshakes_done=counts.handshakes_done,
            handshakes_refused=counts.handshakes_refused,
            logins_refused=self._link.refused_handshakes,
            bad_messages=counts.bad_messages + self._link.dropped_messages,
            peers_lost=counts.peers_lost,
            served_lookups=served.lookups,
            served_chunks=served.chunks,
            served_bytes=served.chunks * self._terms.geometry.chunk_bytes,
            expired_keeps=self._sessions.keeping.expired_keeps,
            refused_fetches=served.refused_fetches,
            store_deadlines=served.expired_stores,
            load_deadlines=self._sessions.asked.expired_loads,
            abort_deadlines=self._sessions.asked.expired_aborts,
        )

    def _transport_counts(self) -> tuple[tuple[str, int], ...]:
        known = {str(session.address) for session in self._sessions}
        self._transports = {peer: how for peer, how in self._transports.items() if peer in known}
        return tuple(sorted(Counter(self._transports.values()).items()))

    def _shut_down(self) -> None:
        """The order matters: first nothing may land any more, then pulls fail as settled ones, then
        writes end, and with them the last loans."""
        self._sessions.take_leave()
        timeout_s = self._terms.deadlines.abort_timeout_s
        stopped = self._receivers.close(timeout_s)
        self._sessions.close()
        stopped = self._writers.close(timeout_s) and stopped
        if not stopped:
            logger.error("a thread of the peer service did not stop within %g s", timeout_s)
        # What was not begun is told as such; a new session cannot be opened any more.
        while self._inbox:
            self._take(self._inbox.popleft())
        for asker in self._askers():
            self._news.extend(asker.take_news())
        self._link.close()
