"""Peers without threads, sockets, NIXL or time: whole conversations, one step after the other.

Every peer has a real index and a real exchange; what has a thread or a socket of its own is a fake
(`pdoffload.testing.peer_fakes`) that a test drives. The bytes of a chunk are its key, so that a wrong one is
seen at once.

    cluster = FakeCluster()
    prefiller, decoder = cluster.start("prefiller"), cluster.start("decoder")
    prefiller.hold(keys)
    job = decoder.pull(prefiller, "id", keys)
    cluster.run()                              # until nothing moves any more
    assert decoder.ended[job].failed == ()

    cluster.cut(prefiller, decoder)            # both lines break, frames on them are lost
    decoder.is_frozen = True                   # as after SIGSTOP
    cluster.kill(prefiller)
    cluster.pass_time(30)                      # deadlines pass, each at its instant
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import msgspec

from pdoffload.p2p import handshakes, pulling
from pdoffload.p2p.address import Address
from pdoffload.p2p.messages import Connect, ConnectAck, Message, decode, encode
from pdoffload.p2p.neighbours import UNKNOWN
from pdoffload.p2p.session import Answering
from pdoffload.p2p.terms import PeerTerms
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.fake_peer import FakePeer, terms_of
from pdoffload.testing.peer_fakes import FakeReceiver, without_ours

_MOST_TURNS = 1000
"""More without coming to rest is a conversation that does not end."""


class FakeCluster:
    """Peers, and the frames and broken lines between them. One clock for all."""

    def __init__(self, *, max_peers: int = 8, is_one_host: bool = False) -> None:
        """`is_one_host`: peers may write by cma; to be used inside of `neighbourhood`."""
        self.clock = FakeClock()
        self.max_peers = max_peers
        self.is_one_host = is_one_host
        self.jobs = itertools.count(1)
        self.marks = itertools.count(1)
        self.peers: dict[Address, FakePeer] = {}
        self.tells_ends_late = False
        """Whether who has frames to take and a line that has broken takes the frames first."""
        self.seen: list[tuple[FakePeer, FakePeer, Message]] = []
        """Every message that has arrived: from, to, what."""
        self._queues: dict[tuple[Address, Address], deque[bytes]] = {}

    def start(
        self, name: str, terms: PeerTerms | None = None, *, is_stock: bool = False
    ) -> FakePeer:
        """A new process; in the place of one that was killed, under its address, if there was one."""
        address = Address(name, 5710)
        peer = FakePeer(self, address, terms or terms_of())
        peer.is_stock = is_stock
        # It does not say who it is: docs/peers.md tells to keep it from cma.
        peer.movers.uses_cma = not is_stock
        self.peers[address] = peer
        return peer

    def kill(self, peer: FakePeer, *, last_words: bool = False) -> None:
        """The process is gone, and so are all lines to and from it. `last_words`: what it had sent is
        not lost, and arrives as if from its successor under the address."""
        del self.peers[peer.address]
        for other in self.peers.values():
            other.wire.break_line(peer.address)
        for start, end in list(self._queues):
            if end == peer.address or (start == peer.address and not last_words):
                del self._queues[start, end]

    def cut(self, one: FakePeer, other: FakePeer) -> None:
        """The lines between two break; what was on them is lost."""
        for start, end in ((one, other), (other, one)):
            self._queues.pop((start.address, end.address), None)
            start.wire.break_line(end.address)

    def queue(self, start: Address, end: Address) -> deque[bytes] | None:
        """Frames on their way; None where nobody listens."""
        return self._queues.setdefault((start, end), deque()) if end in self.peers else None

    def receiver_of(self, metadata: bytes) -> FakeReceiver | None:
        """The receiving agent with this metadata, if its process lives."""
        opened = (each for peer in self.peers.values() for each in peer.opened)
        return next((each for each in opened if each.metadata == metadata), None)

    @contextmanager
    def neighbourhood(self) -> Iterator[None]:
        """Meanwhile the peers of this cluster are processes of one host, as far as anybody can tell."""
        with (
            patch.object(handshakes, "is_neighbour", lambda mark: mark != UNKNOWN),
            patch.object(pulling, "may_still_write", self._may_still_write),
        ):
            yield

    def _may_still_write(self, mark: str) -> bool:
        return any(peer.mark == mark for peer in self.peers.values())

    # --- steps ---

    def deliver(self, start: FakePeer, end: FakePeer) -> bool:
        """One frame arrives; whether there was one."""
        queue = self._queues.get((start.address, end.address))
        if not queue:
            return False
        message = decode(queue.popleft())
        if isinstance(message, Connect | ConnectAck):
            message = msgspec.structs.replace(message, process=start.mark)
        if start.is_stock or end.is_stock:
            message = without_ours(message)
        self.seen.append((start, end, message))
        session = end.exchange.sessions.get(start.address)
        is_second = session is not None and session.state.answering is Answering.GUEST
        if end.is_stock and isinstance(message, Connect) and session is not None and is_second:
            # Stock vLLM takes it for a fault.
            end.exchange.sessions.drop(session, "a second connect", tell=True)
        else:
            end.exchange.received(start.address, encode(message))
        return True

    def step(self, *, writers_first: bool = False) -> bool:
        """Everybody takes one turn, with all that has arrived; whether anything happened, or is to come.

        Writers carry out what a turn has ordered right after it; `writers_first`: what former turns have
        ordered, before the messages of this one.
        """
        moved = False
        awake = [peer for peer in self.peers.values() if not peer.is_frozen]
        for end in awake:
            if writers_first:
                moved = end.movers.work() or moved
            if not self.tells_ends_late:
                moved = end.hear_of_ends() or moved
            for start in list(self.peers.values()):
                while self.deliver(start, end):
                    moved = True
            moved = end.hear_of_ends() or moved
            moved = end.turn() or moved
            if not writers_first:
                moved = end.movers.work() or moved
        # What was sent to somebody who has had his turn.
        waits = any(self._queues.get((a.address, b.address)) for a in awake for b in awake)
        return moved or waits or any(peer.wire.broken or peer.movers.has_work for peer in awake)

    def run(self) -> None:
        """Until nothing moves any more; no time passes."""
        for _ in range(_MOST_TURNS):
            if not self.step():
                return
        raise AssertionError(f"no end of it: {self.seen[-4:]}")

    def pass_time(self, duration_s: float) -> None:
        """Let time pass, and everything come to rest at every deadline on the way."""
        end_s = self.clock.monotonic_s() + duration_s
        self.run()
        while (now_s := self.clock.monotonic_s()) < end_s:
            dues = [
                peer.exchange.next_deadline_s()
                for peer in self.peers.values()
                if not peer.is_frozen
            ]
            next_s = min(
                (due_s for due_s in dues if due_s is not None and due_s > now_s), default=end_s
            )
            self.clock.advance(min(next_s, end_s) - now_s)
            self.run()

    def check(self) -> None:
        """Prove that everybody's books agree."""
        for peer in self.peers.values():
            peer.check()
