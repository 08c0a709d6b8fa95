"""One peer's questions to us: lookups and fetches, answered from the pool without asking the scheduler.

Runs on the service's thread; no socket, clock or NIXL in it. What is to be done, the owner takes: messages
and writes.

    lookup --> what is ready is lent and reserved for the fetch; what is on its way in is waited for briefly
    fetch  --> GATHERING: chunks come from reservations, keeps and the pool, or are watched for;
               each one that is there is written at once; when all are written: transfer_done
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pdoffload.errors import MisuseError, ProtocolError
from pdoffload.layout import BlockKey
from pdoffload.memory.lending import ABSENT, Lender
from pdoffload.p2p.address import Address
from pdoffload.p2p.keeping import Keeping, Stage
from pdoffload.p2p.messages import (
    AbortAck,
    AbortFetch,
    Fetch,
    Lookup,
    LookupResp,
    Message,
    TransferDone,
)
from pdoffload.p2p.session import SERVE_STEPS, ServeEvent, ServeState
from pdoffload.p2p.terms import LOOKUP_GRACE_S, Deadlines, Target
from pdoffload.p2p.watches import Watches


class Write(msgspec.Struct, frozen=True, eq=False):
    """To do: write pool slot `slots[i]`, which is lent, into the peer's slot `indexes[i]`; then
    `Server.written`."""

    serve: Serve
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    indexes: tuple[int, ...]


class ServeCounts(msgspec.Struct):
    """Counters of one process over all its peers; they never fall."""

    lookups: int = 0
    hits: int = 0
    chunks: int = 0
    refused_fetches: int = 0
    expired_stores: int = 0


class Serve:
    """One fetch being served, from its message to its last byte. Changed by its `Server` alone."""

    __slots__ = (
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
    )

    def __init__(self, server: Server, fetch: Fetch, target: Target, deadline_s: float) -> None:
        self.server = server
        self.fetch = fetch
        self.target = target
        """The memory the fetch meant: the peer's receiving agent of that moment."""
        self.deadline_s = deadline_s
        self.state = ServeState.GATHERING
        self.wanted: dict[BlockKey, int] = dict(zip(fetch.keys, fetch.block_indexes, strict=True))
        """Not written yet, with the peer's slot for each."""
        self.ready: dict[BlockKey, int] = {}
        """Lent to us and not handed to a writer yet."""
        self.writes = 0
        self.settled = True
        self.checksums: dict[BlockKey, bytes] = {}

    def step(self, event: ServeEvent) -> bool:
        """Advance; False where this event means nothing in this state."""
        state = SERVE_STEPS.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True


class _Question:
    """A lookup that waits for chunks on their way into the pool."""

    def __init__(self, server: Server, lookup: Lookup, asked_s: float) -> None:
        self.server = server
        self.lookup = lookup
        self.asked_s = asked_s
        self.deadline_s = asked_s + LOOKUP_GRACE_S
        self.held: dict[BlockKey, int] = {}
        self.awaited: set[BlockKey] = set()

    def arrived(self, key: BlockKey, slot: int | None) -> None:
        self.awaited.discard(key)
        if slot is not None:
            self.held[key] = slot
        if not self.awaited:
            self.server.answer(self)


class _Reservation:
    """Chunks that the lookups of a round found, held for the fetch that should follow."""

    def __init__(self) -> None:
        self.expires_s = 0.0
        self.loans: dict[BlockKey, int] = {}


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
        self._writes: list[Write] = []
        self._peer = peer
        self._deadlines = deadlines
        self._lender = lender
        self._watches = watches
        self._keeping = keeping
        self._counts = counts
        self._open = True
        self._target: Target | None = None
        self._patient = False
        self._questions: list[_Question] = []
        self._reserved: dict[str, dict[int, _Reservation]] = {}
        self._serves: dict[tuple[str, int], Serve] = {}
        self._targets: set[int] = set()
        """The peer's slots that live fetches write into."""
        self._stopping: set[tuple[str, int]] = set()
        """Fetches whose abort waits for writes under way."""

    def __repr__(self) -> str:
        return (
            f"<Server of {self._peer}: {len(self._serves)} fetches, {len(self._questions)} lookups, "
            f"{sum(map(len, self._reserved.values()))} reservations>"
        )

    @property
    def busy(self) -> bool:
        return bool(self._questions or self._reserved or self._serves)

    @property
    def next_deadline_s(self) -> float | None:
        instants = [serve.deadline_s for serve in self._serves.values() if serve.wanted]
        instants += [question.deadline_s for question in self._questions]
        instants += [r.expires_s for rounds in self._reserved.values() for r in rounds.values()]
        return min(instants, default=None)

    def greet(self, target: Target, *, leaves: bool) -> None:
        """The peer has introduced itself: fetches from now on go into `target`. `leaves`: it may fetch a
        request in several rounds, and says when it is done with it."""
        self._target = target
        self._patient = leaves

    # --- lookups ---

    def on_lookup(self, message: Lookup, now_s: float) -> None:
        """Answer what is known, wait a little for what is on its way in."""
        self._counts.lookups += len(message.keys)
        question = _Question(self, message, now_s)
        # Not more than the pool can spare: a question must not keep the engine from storing.
        keys = list(dict.fromkeys(message.keys))[: max(0, self._lender.num_to_spare)]
        loan = self._lender.lend(keys)
        question.held = {
            key: slot for key, slot in zip(keys, loan.slots, strict=True) if slot is not None
        }
        if loan.filling:
            arriving = [key for key in keys if key in loan.filling]
            ready = self._watches.wait(arriving, question)
            question.held.update(ready)
            question.awaited.update(key for key in arriving if key not in ready)
        if question.awaited:
            self._questions.append(question)
        else:
            self.answer(question)

    def answer(self, question: _Question) -> None:
        """All is known, or time is up: say so, and hold the hits for the fetch."""
        if question in self._questions:
            self._questions.remove(question)
        self._watches.drop(question.awaited, question)
        if not self._open:
            self._lender.give_back(question.held.values())
            return
        lookup = question.lookup
        hits = tuple(key in question.held for key in lookup.keys)
        rounds = self._reserved.setdefault(lookup.kv_request_id, {})
        reservation = rounds.setdefault(lookup.round_seq, _Reservation())
        reservation.expires_s = question.asked_s + self._deadlines.store_timeout_s
        for key, slot in question.held.items():
            if key in reservation.loans:
                self._lender.give_back([slot])
            else:
                reservation.loans[key] = slot
        self._counts.hits += sum(hits)
        self._outbox.append(LookupResp(lookup.kv_request_id, lookup.keys, hits))

    # --- fetches ---

    def on_fetch(self, message: Fetch, now_s: float) -> None:
        """Serve it, or end what its id holds if it names no key. `ProtocolError`: a broken rule."""
        kv_request_id, round_seq = message.kv_request_id, message.round_seq
        if not message.keys:
            self._drop_request(kv_request_id)
            return
        target = self._target
        if target is None:
            raise MisuseError(f"{self!r} serves a peer that has not introduced itself")
        self._require_fair(message, target)
        if self._keeping.stage(kv_request_id) is Stage.EXPIRED:
            self._counts.refused_fetches += 1
            self._outbox.append(TransferDone(kv_request_id, False, round_seq))
            return
        serve = Serve(self, message, target, now_s + self._deadlines.store_timeout_s)
        self._serves[(kv_request_id, round_seq)] = serve
        self._targets.update(message.block_indexes)
        found, looked_up = self._from_reservations(message)
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
        if not self._targets.isdisjoint(message.block_indexes):
            raise ProtocolError(f"{name} names a slot that another fetch is filling")
        if len(set(message.keys)) != len(message.keys):
            raise ProtocolError(f"{name} names a key twice")

    def _from_reservations(self, message: Fetch) -> tuple[dict[BlockKey, int], bool]:
        """What lookups under this id have reserved of the fetch's keys; whether there was a lookup."""
        rounds = self._reserved.get(message.kv_request_id, {})
        wanted = set(message.keys)
        found: dict[BlockKey, int] = {}
        for reservation in rounds.values():
            for key in wanted & reservation.loans.keys():
                if key in found:
                    continue
                found[key] = reservation.loans.pop(key)
        looked_up = bool(rounds)
        if not self._patient:
            # Stock vLLM closes a lookup's round by its fetch, and says nothing at the request's end.
            closed = rounds.pop(message.round_seq, None)
            if closed is not None:
                self._lender.give_back(closed.loans.values())
            if not rounds:
                self._reserved.pop(message.kv_request_id, None)
        return found, looked_up

    def _gather(self, serve: Serve, *, looked_up: bool) -> None:
        """Borrow or watch what no reservation and no keep had."""
        missing = [key for key in serve.wanted if key not in serve.ready]
        serve.ready.update(self._watches.wait(missing, _Gatherer(self, serve)) if missing else {})
        if looked_up or self._keeping.stage(serve.fetch.kv_request_id) is not Stage.COMPUTING:
            self._give_up_hope(serve, known=looked_up)
        self._advance(serve)

    def _give_up_hope(self, serve: Serve, *, known: bool) -> None:
        """End a fetch of which a chunk is neither here nor on its way, if none will be computed.

        Where nobody has heard of the id yet (`known` False and UNKNOWN), its request may still come.
        """
        stage = self._keeping.stage(serve.fetch.kv_request_id)
        if not known and stage is Stage.UNKNOWN:
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
            return
        self._advance(serve)

    def on_abort_fetch(self, message: AbortFetch) -> None:
        """Stop, and say so when no write is under way. A fetch that has ended is stopped already."""
        name = (message.kv_request_id, message.round_seq)
        serve = self._serves.get(name)
        if serve is None:
            self._outbox.append(AbortAck(*name))
            return
        self._stopping.add(name)
        serve.step(ServeEvent.ABORTED)
        self._advance(serve)

    # --- writes ---

    def take_writes(self) -> list[Write]:
        """Chunks to write, one `Write` per fetch at most; their loans go with them."""
        taken, self._writes = self._writes, []
        return taken

    def take_messages(self) -> list[Message]:
        taken, self._outbox = self._outbox, []
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
        """Hand on what is ready; end the fetch if it is over."""
        if serve.state is ServeState.GATHERING and serve.ready:
            keys = tuple(serve.ready)
            slots = tuple(serve.ready.values())
            serve.ready = {}
            indexes = tuple(serve.wanted.pop(key) for key in keys)
            serve.writes += 1
            self._writes.append(Write(serve, keys, slots, indexes))
        if serve.state is ServeState.GATHERING and not serve.wanted:
            serve.step(ServeEvent.GATHERED)
        if serve.state is ServeState.STOPPING:
            self._let_go(serve)
        if not serve.writes and serve.step(ServeEvent.IDLE):
            self._end(serve)

    def _end(self, serve: Serve) -> None:
        fetch = serve.fetch
        name = (fetch.kv_request_id, fetch.round_seq)
        del self._serves[name]
        self._targets.difference_update(fetch.block_indexes)
        if not self._open:
            return
        complete = len(serve.checksums) == len(fetch.keys)
        if name in self._stopping:
            self._stopping.discard(name)
            self._outbox.append(AbortAck(*name, settled=serve.settled))
            return
        if not complete:
            self._counts.refused_fetches += 1
        checksums = tuple(serve.checksums[key] for key in fetch.keys) if complete else ()
        self._outbox.append(
            TransferDone(
                fetch.kv_request_id,
                complete,
                fetch.round_seq,
                checksums=checksums,
                settled=serve.settled,
            )
        )

    def _let_go(self, serve: Serve) -> None:
        """Nothing more is written for this fetch."""
        self._watches.drop(serve.wanted, _Gatherer(self, serve))
        serve.wanted.clear()
        self._lender.give_back(serve.ready.values())
        serve.ready.clear()

    # --- time, and the end ---

    def tick(self, now_s: float) -> None:
        """Let deadlines pass."""
        for question in [each for each in self._questions if now_s >= each.deadline_s]:
            self.answer(question)
        for serve in list(self._serves.values()):
            if serve.wanted and now_s >= serve.deadline_s and serve.step(ServeEvent.DEADLINE):
                self._counts.expired_stores += 1
                self._advance(serve)
        for kv_request_id, rounds in list(self._reserved.items()):
            for seq in [seq for seq, each in rounds.items() if now_s >= each.expires_s]:
                self._lender.give_back(rounds.pop(seq).loans.values())
            if not rounds:
                del self._reserved[kv_request_id]

    def close(self) -> None:
        """The peer is gone: let go of all but what is being written right now."""
        self._open = False
        for question in list(self._questions):
            self.answer(question)
        for kv_request_id in list(self._reserved):
            self._drop_reservations(kv_request_id)
        for write in self.take_writes():
            self._lender.give_back(write.slots)
            self.written(write, {}, failed=True, settled=True)
        for serve in list(self._serves.values()):
            serve.step(ServeEvent.ABORTED)
            self._advance(serve)
        self._outbox.clear()

    def _drop_request(self, kv_request_id: str) -> None:
        for question in [q for q in self._questions if q.lookup.kv_request_id == kv_request_id]:
            self._questions.remove(question)
            self._watches.drop(question.awaited, question)
            self._lender.give_back(question.held.values())
        self._drop_reservations(kv_request_id)
        self._keeping.release(kv_request_id)

    def _drop_reservations(self, kv_request_id: str) -> None:
        for reservation in self._reserved.pop(kv_request_id, {}).values():
            self._lender.give_back(reservation.loans.values())

    def borrowed(self) -> Iterable[int]:
        """Every slot on loan here, once per loan, less those of writes under way; for tests."""
        for rounds in self._reserved.values():
            for reservation in rounds.values():
                yield from reservation.loans.values()
        for question in self._questions:
            yield from question.held.values()
        for serve in self._serves.values():
            yield from serve.ready.values()


class _Gatherer:
    """A fetch as one who waits for chunks. Equal for equal fetches, so that it can be dropped again."""

    __slots__ = ("_serve", "_server")

    def __init__(self, server: Server, serve: Serve) -> None:
        self._server = server
        self._serve = serve

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Gatherer) and other._serve is self._serve

    def __hash__(self) -> int:
        return id(self._serve)

    def arrived(self, key: BlockKey, slot: int | None) -> None:
        self._server.arrived(self._serve, key, slot)
