"""One process of a `FakeCluster`: its engine, its pool, and its peer service without threads or sockets."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pdoffload.config import Verify
from pdoffload.layout import BlockKey, Geometry, RunConfig
from pdoffload.memory.lending import Arrival
from pdoffload.memory.pool import SlotState
from pdoffload.p2p.address import Address
from pdoffload.p2p.exchange import Exchange
from pdoffload.p2p.news import Answered, Ask, Command, News, Pull, PullEnded
from pdoffload.p2p.outbound import WriteSettled, Written
from pdoffload.p2p.receivers import Receivers
from pdoffload.p2p.serving import Write
from pdoffload.p2p.terms import Deadlines, PeerTerms
from pdoffload.p2p.writing import Outcome
from pdoffload.policy.lru import Lru
from pdoffload.testing.peer_fakes import FakeMovers, FakeReceiver, FakeWire
from pdoffload.tiering.index import Index

if TYPE_CHECKING:
    from pdoffload.testing.peer_rig import FakeCluster

CHUNK_BYTES = 4 << 20
"""Two chunks are a round: pulls of three take two."""
SLOTS = 64


def terms_of(
    *,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
    verify: Verify = Verify.ALWAYS,
    seed: str = "seed",
    chunk_bytes: int = CHUNK_BYTES,
    fields: dict[str, object] | None = None,
) -> PeerTerms:
    """Terms that agree with those of every other peer made without arguments."""
    return PeerTerms(
        geometry=Geometry(num_slots=SLOTS, worker_bytes=chunk_bytes, num_copies=1),
        base_address=0x1000,
        run_config=RunConfig(fields=fields or {"model_name": "org/model", "dtype": "bfloat16"}),
        hash_seed=lambda: seed,
        deadlines=deadlines,
        verify=verify,
    )


class FakePeer:
    """One process: `post` is its engine's command, `turn` what its service's thread does once."""

    def __init__(self, cluster: FakeCluster, address: Address, terms: PeerTerms) -> None:
        self.cluster = cluster
        self.address = address
        self.terms = terms
        self.is_frozen = False
        """As after SIGSTOP: it takes no turn; frames to it wait, and ends of its lines."""
        self.is_slow_to_open = False
        """Its receiving agents stay OPENING."""
        self.is_stock = False
        """It neither sends nor reads the fields that are ours."""
        self.mark = f"mark {next(cluster.marks)}"
        """What it is as a process of its host, see `pdoffload.p2p.neighbours`."""
        self.index = Index(SLOTS, Lru(SLOTS))
        self.pool: list[bytes] = [b""] * SLOTS
        self.inbox: deque[Command | Arrival | Outcome | FakeReceiver] = deque()
        self.news: list[News] = []
        self.answers: dict[tuple[str, BlockKey], bool] = {}
        """By id and key; `ask` begins anew."""
        self.pulls: dict[int, Pull] = {}
        """Those that have not ended."""
        self.ended: dict[int, PullEnded] = {}
        self.unsettled: dict[int, list[int]] = {}
        """Slots in quarantine, by job."""
        self.orphans: set[int] = set()
        """Pulls that were under way when the pool was reset: nobody wants their chunks any more."""
        self.opened: list[FakeReceiver] = []
        self.movers = FakeMovers(self.pool, self.inbox.append, cluster.receiver_of)
        self.wire = FakeWire(address, lambda to: cluster.queue(address, to))
        self.receivers = Receivers(self._open_receiver, clock=cluster.clock)
        self.exchange = Exchange(
            self.wire,
            terms,
            self.index,
            self.receivers,
            self.movers,
            max_peers=cluster.max_peers,
            clock=cluster.clock,
        )
        self.index.listen(self.inbox.extend)

    def __repr__(self) -> str:
        return f"<FakePeer {self.address}: {self.exchange!r}>"

    # --- its pool, and its engine ---

    def hold(self, keys: Sequence[BlockKey]) -> None:
        """Chunks that were computed here."""
        self.reserve(keys)
        self.index.commit(keys)

    def reserve(self, keys: Sequence[BlockKey]) -> None:
        """Chunks on their way into the pool: `index.commit` or `index.abandon` ends that."""
        reserved = self.index.reserve(keys)
        assert reserved is not None, "the test has filled the pool"
        for key, slot in zip(keys, reserved.slots, strict=True):
            self.pool[slot] = bytes(key)

    def post(self, command: Command) -> None:
        self.inbox.append(command)

    def ask(self, source: FakePeer, kv_request_id: str, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.answers.pop((kv_request_id, key), None)
        self.post(Ask(source.address, kv_request_id, tuple(keys)))

    def pull(self, source: FakePeer, kv_request_id: str, keys: Sequence[BlockKey]) -> int:
        """Take slots for `keys`, which are not here, and pull them; the job's id."""
        reserved = self.index.reserve(keys)
        assert reserved is not None, "the test has filled the pool"
        for slot in reserved.slots:
            self.pool[slot] = b"nothing yet"
        job_id = next(self.cluster.jobs)
        pull = Pull(job_id, source.address, kv_request_id, tuple(keys), tuple(reserved.slots))
        self.pulls[job_id] = pull
        self.post(pull)
        return job_id

    def reset(self) -> None:
        """Forget every chunk, as the engine does; nothing may be on its way in but pulls."""
        self.index.clear([key for pull in self.wanted_pulls() for key in pull.keys])
        self.orphans.update(self.pulls)

    def wanted_pulls(self) -> list[Pull]:
        """Those under way that no reset has made pointless."""
        return [pull for job_id, pull in self.pulls.items() if job_id not in self.orphans]

    # --- its service ---

    def hear_of_ends(self) -> bool:
        """It is told of its lines that have broken; whether there were any."""
        broken = list(self.wire.broken)
        for address in broken:
            self.exchange.down(address, self.wire.look(address))
        return bool(broken)

    def turn(self) -> bool:
        """One turn: all that has come in, deadlines, what follows. Whether there may be more to do."""
        for receiver in self.opened:
            receiver.advance(may_open=not self.is_slow_to_open)
        has_new = bool(self.inbox)
        for _ in range(len(self.inbox)):
            item = self.inbox.popleft()
            if isinstance(item, FakeReceiver):
                self.exchange.receiver_changed(item)
            else:
                self.exchange.take(item)
        self.exchange.end_turn()
        for news in self.exchange.take_news():
            self.news.append(news)
            self._hear(news)
        may_open = not self.is_slow_to_open
        return has_new or any(each.is_about_to(may_open=may_open) for each in self.opened)

    def _open_receiver(self, incarnation: str) -> FakeReceiver:
        receiver = FakeReceiver(incarnation, self.inbox.append, self._land)
        receiver.open_to_cma = self.cluster.is_one_host and not self.is_stock
        self.opened.append(receiver)
        return receiver

    def _land(self, slot: int, chunk: bytes) -> None:
        """A peer's bytes arrive."""
        state = self.index.pool.state(slot)
        assert state in (SlotState.FILLING, SlotState.QUARANTINED), f"bytes land in a {state} slot"
        self.pool[slot] = chunk

    def _hear(self, news: News) -> None:
        """As an engine does."""
        if isinstance(news, Answered):
            for key in news.keys:
                name = (news.kv_request_id, key)
                assert name not in self.answers, "answered twice"
                self.answers[name] = key in news.hits
        elif isinstance(news, PullEnded):
            self._end_pull(news)
        else:
            self.index.release(self.unsettled.pop(news.job_id))

    def _end_pull(self, news: PullEnded) -> None:
        pull = self.pulls.pop(news.job_id)
        self.ended[news.job_id] = news
        bad = [key for key, _ in news.failed]
        assert len(set(bad)) == len(bad), "a chunk has failed twice"
        assert set(bad) <= set(pull.keys)
        for key, slot in zip(pull.keys, pull.slots, strict=True):
            assert key in bad or self.pool[slot] == key, "wrong bytes are told to be right"
        if news.job_id in self.orphans:
            slot_of = dict(zip(pull.keys, pull.slots, strict=True))
            kept = [] if news.settled else [slot_of[key] for key in bad]
            self.index.release([slot for slot in pull.slots if slot not in kept])
        else:
            self.index.commit([key for key in pull.keys if key not in bad])
            kept = [] if news.settled else self.index.quarantine(bad)
            if news.settled:
                self.index.abandon(bad)
        if not news.settled:
            self.unsettled[news.job_id] = kept

    # --- proofs ---

    @property
    def is_at_rest(self) -> bool:
        """Nothing is borrowed, watched, asked or pulled, and nobody waits for anything."""
        sessions = self.exchange.sessions
        return not (
            self.index.num_lent
            or len(sessions.watches)
            or len(sessions.keeping)
            or any(asker.busy or asker.num_lost for asker in sessions.askers)
            or any(session.server.busy for session in sessions)
            or self.index.pool.num_quarantined
            or self.index.pool.num_filling
        )

    def check(self) -> None:
        """Prove that the books agree, and that every loan is somebody's."""
        self.index.check()
        sessions = self.exchange.sessions
        for session in sessions:
            session.server.check()
        for asker in sessions.askers:
            asker.check()
        held = Counter(slot for session in sessions for slot in session.server.borrowed())
        held.update(sessions.keeping.borrowed())
        held.update(slot for write in self._writes() for slot in write.slots)
        arrivals = [each for each in self.inbox if isinstance(each, Arrival)]
        held.update(each.slot for each in arrivals if each.slot is not None)
        pool = self.index.pool
        assert self.index.num_lent == len(held), "loans and borrowers disagree"
        assert all(pool.pins(slot) in (0, count) for slot, count in held.items())

    def _writes(self) -> Iterator[Write]:
        """Those that hold loans: ordered, adrift, or ended and not taken in yet."""
        for each in self.inbox:
            if isinstance(each, WriteSettled) or (isinstance(each, Written) and each.settled):
                yield each.write
        yield from (order for order in self.movers.orders if isinstance(order, Write))
        yield from self.movers.adrift
