"""One peer's lookups, and the chunks that are reserved for the fetch which should follow.

lookup --> what is ready is lent; what is on its way into the pool is waited for, LOOKUP_GRACE_S at most
       --> lookup_resp; the hits are reserved for `store_timeout_s`, counted from the lookup
       --> let go, and the id remembered for REMEMBER_S: a fetch that comes too late learns it at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pdoffload.layout import BlockKey
from pdoffload.memory.lending import Lender
from pdoffload.p2p.messages import Lookup, LookupResp, Message
from pdoffload.p2p.stats import ServeCounts
from pdoffload.p2p.terms import LOOKUP_GRACE_S, REMEMBER_S, Deadlines
from pdoffload.p2p.watches import Watches

# An answer is a little longer than its question, which may be as long as a frame can be.
_KEYS_PER_ANSWER = 2**16


class _Question:
    """A lookup that waits for chunks on their way into the pool."""

    def __init__(self, lookups: Lookups, message: Lookup, asked_s: float) -> None:
        self.message = message
        self.asked_s = asked_s
        self.deadline_s = asked_s + LOOKUP_GRACE_S
        self.held: dict[BlockKey, int] = {}
        self.awaited: set[BlockKey] = set()
        self._lookups = lookups

    def arrived(self, key: BlockKey, slot: int | None) -> None:
        self.awaited.discard(key)
        if slot is not None:
            self.held[key] = slot
        if not self.awaited:
            self._lookups.answer(self)


class _Reservation:
    """What the lookups of a round found. `spent`: let go of, and only remembered."""

    def __init__(self) -> None:
        self.loans: dict[BlockKey, int] = {}
        self.due_s = 0.0
        self.spent = False


class Lookups:
    """Questions and reservations of one session. One thread. `send` queues a message."""

    def __init__(
        self,
        deadlines: Deadlines,
        lender: Lender,
        watches: Watches,
        counts: ServeCounts,
        send: Callable[[Message], None],
    ) -> None:
        self._timeout_s = deadlines.store_timeout_s
        self._lender = lender
        self._watches = watches
        self._counts = counts
        self._send = send
        self._questions: dict[_Question, None] = {}
        self._reserved: dict[str, dict[int, _Reservation]] = {}
        """By id and round."""

    def __repr__(self) -> str:
        return f"<Lookups {len(self._questions)} waiting, {len(self._reserved)} ids>"

    def __len__(self) -> int:
        """Questions that wait, and ids that are known."""
        return len(self._questions) + len(self._reserved)

    @property
    def next_deadline_s(self) -> float | None:
        instants = [question.deadline_s for question in self._questions]
        instants += [each.due_s for rounds in self._reserved.values() for each in rounds.values()]
        return min(instants, default=None)

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
            self._questions[question] = None
        else:
            self.answer(question)

    def answer(self, question: _Question) -> None:
        """All is known, or time is up: say so, and hold the hits for the fetch."""
        self._forget(question)
        message = question.message
        rounds = self._reserved.setdefault(message.kv_request_id, {})
        reservation = rounds.setdefault(message.round_seq, _Reservation())
        due_s = question.asked_s + self._timeout_s
        reservation.due_s = due_s if reservation.spent else max(due_s, reservation.due_s)
        reservation.spent = False
        doubles = [slot for key, slot in question.held.items() if key in reservation.loans]
        reservation.loans = {**question.held, **reservation.loans}
        self._lender.give_back(doubles)
        hits = [key in question.held for key in message.keys]
        self._counts.hits += sum(hits)
        for start in range(0, len(hits), _KEYS_PER_ANSWER):
            part = slice(start, start + _KEYS_PER_ANSWER)
            self._send(LookupResp(message.kv_request_id, message.keys[part], tuple(hits[part])))

    def take(
        self, kv_request_id: str, keys: Sequence[BlockKey], *, closes: int | None
    ) -> tuple[dict[BlockKey, int], bool]:
        """What is reserved of `keys`, whose loans go over to the caller, and whether this id was looked up.

        `closes`: with this fetch the round of that number is over, and what else it holds is let go.
        """
        rounds = self._reserved.get(kv_request_id, {})
        found: dict[BlockKey, int] = {}
        for reservation in rounds.values():
            for key in keys:
                if key not in found and key in reservation.loans:
                    found[key] = reservation.loans.pop(key)
        looked_up = bool(rounds)
        closed = rounds.pop(closes, None) if closes is not None else None
        if closed is not None:
            self._lender.give_back(closed.loans.values())
            if not rounds:
                del self._reserved[kv_request_id]
        return found, looked_up

    def drop(self, kv_request_id: str) -> None:
        """The peer wants nothing more under this id."""
        for question in [q for q in self._questions if q.message.kv_request_id == kv_request_id]:
            self._forget(question)
            self._lender.give_back(question.held.values())
        for reservation in self._reserved.pop(kv_request_id, {}).values():
            self._lender.give_back(reservation.loans.values())

    def tick(self, now_s: float) -> None:
        """Let deadlines pass."""
        for question in [each for each in self._questions if now_s >= each.deadline_s]:
            self.answer(question)
        for kv_request_id, rounds in list(self._reserved.items()):
            for seq, reservation in list(rounds.items()):
                if now_s < reservation.due_s:
                    continue
                self._lender.give_back(reservation.loans.values())
                reservation.loans.clear()
                if reservation.spent:
                    del rounds[seq]
                reservation.spent = True
                reservation.due_s = now_s + REMEMBER_S
            if not rounds:
                del self._reserved[kv_request_id]

    def close(self) -> None:
        """The peer is gone."""
        ids = {question.message.kv_request_id for question in self._questions} | set(self._reserved)
        for kv_request_id in ids:
            self.drop(kv_request_id)

    def borrowed(self) -> Iterator[int]:
        """Every slot on loan here, once per loan; for tests."""
        for rounds in self._reserved.values():
            for reservation in rounds.values():
                yield from reservation.loans.values()
        for question in self._questions:
            yield from question.held.values()

    def _forget(self, question: _Question) -> None:
        self._questions.pop(question, None)
        self._watches.drop(question.awaited, question)
