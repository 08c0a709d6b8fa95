"""One peer's questions to us: lookups and fetches, answered from the pool without asking the scheduler.

Runs on the service's thread; no socket, clock or NIXL in it. What is to be done, the owner takes: messages
and writes.

    fetch  --> GATHERING: chunks come from reservations, keeps and the pool, or are watched for; what is there
               is written when the owner takes it; when all are written: transfer_done
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from pdoffload.errors import MisuseError, ProtocolError
from pdoffload.layout import BlockKey
from pdoffload.memory.lending import ABSENT, Lender
from pdoffload.p2p.address import Address
from pdoffload.p2p.keeping import Keeping, Stage
from pdoffload.p2p.lookups import Lookups
from pdoffload.p2p.messages import AbortAck, AbortFetch, Fetch, Lookup, Message, TransferDone
from pdoffload.p2p.session import SERVE_STEPS, ServeEvent, ServeState
from pdoffload.p2p.stats import ServeCounts
from pdoffload.p2p.terms import Deadlines, Target
from pdoffload.p2p.watches import Watches


class Write(msgspec.Struct, frozen=True, eq=False):
    """To do: write pool slot `slots[i]`, which is lent, into the peer's slot `indexes[i]`; then
    `Server.written`."""

    serve: Serve
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    indexes: tuple[int, ...]


class Serve:
    """One fetch being served, from its message to its last byte. Changed by its `Server` alone.

    What it borrows is not held to `Lender.num_to_spare`, as it is for lookups and keeps: no chunk waits for
    another. Each goes to a writer in the turn in which it is ready, whoever fetches, and back to the pool as
    soon as its write has settled. Writes have a deadline.
    """

    __slots__ = (
        "aborted",
        "checksums",
        "deadline_s",
        "fetch",
        "ready",
        "server",
        "settled",
        "state",
        "target",
        "wanted",
        "writes",
        "writes_begun",
    )

    def __init__(self, server: Server, fetch: Fetch, target: Target, deadline_s: float) -> None:
        self.server = server
        self.fetch = fetch
        self.target = target
        """The memory the fetch meant: the peer's receiving agent of that moment."""
        self.deadline_s = deadline_s
        self.state = ServeState.GATHERING
        self.wanted: dict[BlockKey, int] = dict(zip(fetch.keys, fetch.block_indexes, strict=True))
        """Not handed to a writer yet, with the peer's slot for each."""
        self.ready: dict[BlockKey, int] = {}
        """Those of `wanted` that are lent to us."""
        self.writes = 0
        """Under way."""
        self.writes_begun = 0
        self.aborted = False
        self.settled = True
        self.checksums: dict[BlockKey, bytes] = {}

    @property
    def name(self) -> tuple[str, int]:
        """How both sides call this fetch: id and round."""
        return self.fetch.kv_request_id, self.fetch.round_seq

    def step(self, event: ServeEvent) -> bool:
        """Advance; False where this event means nothing in this state."""
        state = SERVE_STEPS.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True

    def arrived(self, key: BlockKey, slot: int | None) -> None:
        """As a `Waiter`: a chunk is lent to this fetch, or will not come."""
        self.server.arrived(self, key, slot)


class Server:
    """The answering half of one session. One thread."""

    def __init__(
        self,
        peer: Address,
        deadlines: Deadlines,
        lender: Lender,
        watches: Watches,
        keeping: Keeping,
        counts: ServeCounts,
    ) -> None:
        self._outbox: list[Message] = []
        self._peer = peer
        self._deadlines = deadlines
        self._lender = lender
        self._watches = watches
        self._keeping = keeping
        self._counts = counts
        self._open = True
        self._target: Target | None = None
        self._patient = False
        self._lookups = Lookups(deadlines, lender, watches, counts, self._send)
        self._serves: dict[tuple[str, int], Serve] = {}
        self._to_write: dict[Serve, None] = {}
        """Fetches with chunks that no writer has yet."""
        self._filling: dict[Target, set[int]] = {}
        """The peer's slots that live fetches write into, by its memory."""

    def __repr__(self) -> str:
        return f"<Server of {self._peer}: {len(self._serves)} fetches, {self._lookups!r}>"

    @property
    def busy(self) -> bool:
        return bool(len(self._lookups) or self._serves)

    @property
    def next_deadline_s(self) -> float | None:
        instants = [serve.deadline_s for serve in self._serves.values() if serve.wanted]
        if self._lookups.next_deadline_s is not None:
            instants.append(self._lookups.next_deadline_s)
        return min(instants, default=None)

    def greet(self, target: Target, *, leaves: bool) -> None:
        """The peer has introduced itself: fetches from now on go into `target`. `leaves`: it may fetch a
        request in several rounds, and says when it is done with it."""
        self._target = target
        self._patient = leaves

    def writes_into(self, target: Target) -> bool:
        """Whether a fetch is being served that may still write there."""
        return target is self._target or target in self._filling

    def serves(self, kv_request_id: str) -> bool:
        """Whether a fetch under this id is being served."""
        return any(serve.fetch.kv_request_id == kv_request_id for serve in self._serves.values())

    def take_messages(self) -> list[Message]:
        taken, self._outbox = self._outbox, []
        return taken

    # --- what the peer says ---

    def on_lookup(self, message: Lookup, now_s: float) -> None:
        """Answer what is known, wait a little for what is on its way in."""
        self._lookups.on_lookup(message, now_s)

    def on_fetch(self, message: Fetch, now_s: float) -> None:
        """Serve it, or end what its id holds if it names no key. `ProtocolError`: a broken rule."""
        kv_request_id, round_seq = message.kv_request_id, message.round_seq
        if not message.keys:
            self._lookups.drop(kv_request_id)
            self._keeping.release(kv_request_id, now_s)
            return
        target = self._target
        if target is None:
            raise MisuseError(f"{self!r} serves a peer that has not introduced itself")
        self._require_fair(message, target)
        if self._keeping.stage(kv_request_id) is Stage.EXPIRED:
            self._counts.refused_fetches += 1
            self._send(TransferDone(kv_request_id, False, round_seq))
            return
        serve = Serve(self, message, target, now_s + self._deadlines.store_timeout_s)
        self._serves[serve.name] = serve
        self._filling.setdefault(target, set()).update(message.block_indexes)
        # Stock vLLM closes a lookup's round by its fetch, and says nothing at the request's end.
        closes = None if self._patient else round_seq
        found, looked_up = self._lookups.take(kv_request_id, message.keys, closes=closes)
        kept = self._keeping.bind(kv_request_id, message.keys, now_s, only=not self._patient)
        self._lender.give_back(slot for key, slot in kept.items() if key in found)
        serve.ready = {**kept, **found}
        self._gather(serve, looked_up=looked_up)

    def _require_fair(self, message: Fetch, target: Target) -> None:
        name = f"round {message.round_seq} of {message.kv_request_id!r}"
        if (message.kv_request_id, message.round_seq) in self._serves:
            raise ProtocolError(f"a second fetch for {name}")
        if max(message.block_indexes) >= target.num_slots:
            raise ProtocolError(
                f"{name} names slot {max(message.block_indexes)} of {target.num_slots}"
            )
        if not self._filling.get(target, set()).isdisjoint(message.block_indexes):
            raise ProtocolError(f"{name} names a slot that another fetch is filling")
        if len(set(message.keys)) != len(message.keys):
            raise ProtocolError(f"{name} names a key twice")

    def _gather(self, serve: Serve, *, looked_up: bool) -> None:
        """Borrow or watch what no reservation and no keep had."""
        missing = [key for key in serve.wanted if key not in serve.ready]
        if missing:
            serve.ready.update(self._watches.wait(missing, serve))
        self._give_up_hope(serve, known=looked_up)
        self._advance(serve)

    def _give_up_hope(self, serve: Serve, *, known: bool) -> None:
        """End a fetch of which a chunk is neither here nor on its way, if none will be computed.

        `known`: its id is known here. If it is not, its request may still come and compute.
        """
        stage = self._keeping.stage(serve.fetch.kv_request_id)
        if stage is Stage.COMPUTING or (stage is Stage.UNKNOWN and not known):
            return
        missing = (key for key in serve.wanted if key not in serve.ready)
        if any(self._lender.find(key) is ABSENT for key in missing):
            serve.step(ServeEvent.MISSING)

    def on_computed(self, kv_request_id: str) -> None:
        """The request that computed chunks for this id has ended."""
        for serve in list(self._serves.values()):
            if serve.fetch.kv_request_id == kv_request_id and serve.state is ServeState.GATHERING:
                self._give_up_hope(serve, known=True)
                self._advance(serve)

    def arrived(self, serve: Serve, key: BlockKey, slot: int | None) -> None:
        """A chunk that a fetch waits for is lent to it, or will not come."""
        if slot is None:
            serve.step(ServeEvent.MISSING)
        elif serve.state is ServeState.GATHERING and key in serve.wanted:
            serve.ready[key] = slot
        else:
            self._lender.give_back([slot])
        self._advance(serve)

    def on_abort_fetch(self, message: AbortFetch) -> None:
        """Stop, and say so when no write is under way. A fetch that has ended is stopped already."""
        serve = self._serves.get((message.kv_request_id, message.round_seq))
        if serve is None:
            self._send(AbortAck(message.kv_request_id, message.round_seq))
            return
        serve.aborted = True
        serve.step(ServeEvent.ABORTED)
        self._advance(serve)

    # --- writes ---

    def take_writes(self) -> list[Write]:
        """Chunks to write, one `Write` per fetch at most; their loans go with them."""
        taken = []
        for serve in self._to_write:
            keys = tuple(key for key in serve.wanted if key in serve.ready)
            slots = tuple(serve.ready.pop(key) for key in keys)
            taken.append(Write(serve, keys, slots, tuple(serve.wanted.pop(key) for key in keys)))
            serve.writes += 1
            serve.writes_begun += 1
            if not serve.wanted:
                serve.step(ServeEvent.GATHERED)
        self._to_write.clear()
        return taken

    def written(
        self, write: Write, checksums: Mapping[BlockKey, bytes], *, failed: bool, settled: bool
    ) -> None:
        """A write has ended. The caller gives its slots back as soon as they are settled."""
        serve = write.serve
        serve.writes -= 1
        serve.settled = serve.settled and settled
        if failed:
            serve.step(ServeEvent.WRITE_FAILED)
        else:
            serve.checksums.update(checksums)
            self._counts.chunks += len(write.keys)
        self._advance(serve)

    def _advance(self, serve: Serve) -> None:
        """Mark what is ready for writing; end the fetch if it is over."""
        if serve.state is ServeState.GATHERING and serve.ready:
            self._to_write[serve] = None
        if serve.state is ServeState.STOPPING:
            self._let_go(serve)
        if not serve.writes and serve.step(ServeEvent.IDLE):
            self._end(serve)

    def _let_go(self, serve: Serve) -> None:
        """Nothing more is written for this fetch."""
        self._to_write.pop(serve, None)
        self._watches.drop(serve.wanted, serve)
        serve.wanted.clear()
        self._lender.give_back(serve.ready.values())
        serve.ready.clear()

    def _end(self, serve: Serve) -> None:
        fetch = serve.fetch
        del self._serves[serve.name]
        filling = self._filling[serve.target]
        filling.difference_update(fetch.block_indexes)
        if not filling:
            del self._filling[serve.target]
        if not self._open:
            return
        if serve.aborted:
            self._send(AbortAck(*serve.name, settled=serve.settled))
            return
        complete = len(serve.checksums) == len(fetch.keys)
        if not serve.writes_begun:
            self._counts.refused_fetches += 1
        self._send(
            TransferDone(
                fetch.kv_request_id,
                complete,
                fetch.round_seq,
                checksums=tuple(serve.checksums[key] for key in fetch.keys) if complete else (),
                settled=serve.settled,
            )
        )

    # --- time, and the end ---

    def tick(self, now_s: float) -> None:
        """Let deadlines pass."""
        self._lookups.tick(now_s)
        for serve in list(self._serves.values()):
            if serve.wanted and now_s >= serve.deadline_s and serve.step(ServeEvent.DEADLINE):
                self._counts.expired_stores += 1
                self._advance(serve)

    def close(self) -> None:
        """The peer is gone: let go of all but what is being written right now."""
        self._open = False
        self._lookups.close()
        for serve in list(self._serves.values()):
            serve.step(ServeEvent.ABORTED)
            self._advance(serve)
        self._outbox.clear()

    def _send(self, message: Message) -> None:
        self._outbox.append(message)

    def borrowed(self) -> Iterator[int]:
        """Every slot on loan here, once per loan, less those of writes under way; for tests."""
        yield from self._lookups.borrowed()
        for serve in self._serves.values():
            yield from serve.ready.values()

    def check(self) -> None:
        """Prove that the books agree; for tests."""
        for name, serve in self._serves.items():
            assert serve.name == name
            assert serve.state is not ServeState.ENDED, "a fetch has ended and is kept"
            assert serve.ready.keys() <= serve.wanted.keys()
            assert bool(serve.ready) == (serve in self._to_write)
            assert not serve.wanted or serve.state is ServeState.GATHERING
        filling = {(t, i) for t, indexes in self._filling.items() for i in indexes}
        served = [(s.target, i) for s in self._serves.values() for i in s.fetch.block_indexes]
        assert filling == set(served), "slots are being filled for no fetch"
        assert len(filling) == len(served), "two fetches fill one slot"
