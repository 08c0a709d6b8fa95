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
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.memory.host import HostRegion
from pdoffload.memory.lending import Arrival, Lender
from pdoffload.p2p.address import Address
from pdoffload.p2p.exchange import Exchange
from pdoffload.p2p.link import Down, Link, Received
from pdoffload.p2p.news import Command, News
from pdoffload.p2p.outbound import Written
from pdoffload.p2p.receivers import Receivers
from pdoffload.p2p.receiving import OpenAgent, Receiver
from pdoffload.p2p.session import Answering, Asking
from pdoffload.p2p.stats import PeerStats
from pdoffload.p2p.terms import PeerTerms
from pdoffload.p2p.writing import Outcome, Writers

logger = logging.getLogger(__name__)

_WAIT_S = 60.0
"""The longest sleep when nothing is due. A wake-up a minute costs nothing and hides no lost one."""
_AFTER_AN_ERROR_S = 0.1
"""An error that comes with every turn must not take a core, nor fill a disk with log."""


SWITCH_INTERVAL_S = 0.0005
"""How long a thread that runs Python may keep the interpreter from the others that want it, from the first
service of a process on. By Python's default, 5 ms, a peer would wait so long at each of a dozen hand-overs
whenever the engine's thread computes in Python (docs/decisions/0010-peers-and-the-interpreter-lock.md)."""


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
        self._receivers = Receivers(
            lambda incarnation: Receiver(incarnation, open_agent, region, self._put, clock=clock),
            clock=clock,
        )
        self._exchange = Exchange(
            link,
            terms,
            lender,
            self._receivers,
            self._writers,
            max_peers=max_peers,
            clock=clock,
        )
        self._thread = threading.Thread(target=self._run, name="pdoffload-p2p-control", daemon=True)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        lender.listen(self._on_arrivals)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<PeerService {self.address}: {self._exchange!r}>"

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
            # One bad turn must not leave every peer and every pull without an answer.
            try:
                self._turn()
            except Exception:
                logger.exception("the peer service met an error it does not know; it goes on")
                self._clock.sleep(_AFTER_AN_ERROR_S)
        self._shut_down()

    def _turn(self) -> None:
        exchange = self._exchange
        due_s = exchange.next_deadline_s()
        now_s = self._clock.monotonic_s()
        wait_s = _WAIT_S if due_s is None else min(max(due_s - now_s, 0.0), _WAIT_S)
        for event in self._link.poll(0.0 if self._inbox else wait_s):
            if isinstance(event, Received):
                exchange.received(event.sender, event.frame)
            elif isinstance(event, Down):
                exchange.down(event.address, event.reason)
        for _ in range(len(self._inbox)):
            self._take(self._inbox.popleft())
        exchange.end_turn()
        self._news.extend(exchange.take_news())
        self.stats = self._count()

    def _take(self, item: Command | Arrival | Outcome | Receiver) -> None:
        if isinstance(item, Receiver):
            self._exchange.receiver_changed(item)
            return
        self._exchange.take(item)
        if isinstance(item, Written) and item.transport:
            self._note_transport(item.write.serve.target.name, item.transport)

    def _note_transport(self, peer: str, transport: str) -> None:
        if self._transports.get(peer) != transport:
            self._transports[peer] = transport
            logger.info("peer %s is written to by %s", peer, transport)

    def _count(self) -> PeerStats:
        sessions = self._exchange.sessions
        counts, served, asked = sessions.counts, sessions.served, sessions.asked
        up = (
            session
            for session in sessions
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
            expired_keeps=sessions.keeping.expired_keeps,
            refused_fetches=served.refused_fetches,
            store_deadlines=served.expired_stores,
            lookup_deadlines=asked.expired_lookups,
            load_deadlines=asked.expired_loads,
            abort_deadlines=asked.expired_aborts,
        )

    def _transport_counts(self) -> tuple[tuple[str, int], ...]:
        known = {str(session.address) for session in self._exchange.sessions}
        self._transports = {peer: how for peer, how in self._transports.items() if peer in known}
        return tuple(sorted(Counter(self._transports.values()).items()))

    def _shut_down(self) -> None:
        """The order matters: first nothing may land any more, then pulls fail as settled ones, then
        writes end, and with them the last loans."""
        self._exchange.take_leave()
        timeout_s = self._terms.deadlines.abort_timeout_s
        nothing_lands = self._receivers.close(timeout_s)
        self._exchange.close(settled=nothing_lands)
        if not self._writers.close(timeout_s) or not nothing_lands:
            logger.error("a thread of the peer service did not stop within %g s", timeout_s)
        # What was not begun is told as such.
        while self._inbox:
            self._take(self._inbox.popleft())
        self._exchange.end_turn()
        self._news.extend(self._exchange.take_news())
        self._link.close()
