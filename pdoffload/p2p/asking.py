"""Our questions to one peer: lookups and pulls, from the engine's command to its news. Pure.

A pull is fetched in rounds, each a `fetch` of its own: while one round is checked, the next is being
written, and a round that fails costs its own chunks only. Stock vLLM keeps what it found for a request under
a single round, so there a pull is one round.

    Pull --> WAITING --admitted--> rounds: FETCHING --transfer_done--> checked --> PullEnded, once all are
                                      '--deadline--> ABORTING --abort_ack--'
                                                        '--deadline--> LOST: PullEnded, not settled
                                                                          '--our agent closed--> PullSettled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pdoffload.errors import (
    DeadlineExceeded,
    MisuseError,
    PdOffloadError,
    ProtocolError,
    TransferError,
)
from pdoffload.layout import BlockKey
from pdoffload.p2p.address import Address
from pdoffload.p2p.messages import (
    AbortAck,
    AbortFetch,
    Fetch,
    Lookup,
    LookupResp,
    Message,
    TransferDone,
)
from pdoffload.p2p.news import Answered, News, Pull, PullEnded, PullSettled
from pdoffload.p2p.session import PULL_STEPS, PullEvent, PullState
from pdoffload.p2p.terms import Deadlines

ROUND_BYTES = 8 << 20
"""Of one fetch: small enough that checking it overlaps with the next, large enough to hide its messages."""


class Check(msgspec.Struct, frozen=True):
    """To do: compare the bytes of a round's slots with what the peer says they are, then `checked`."""

    job_id: int
    round_seq: int
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    checksums: tuple[bytes, ...]
    """One per key, or none at all: stock vLLM sends none."""


class _Round:
    __slots__ = ("checked", "keys", "pull", "seq", "slots", "state")

    def __init__(
        self, pull: _LivePull, seq: int, keys: tuple[BlockKey, ...], slots: tuple[int, ...]
    ) -> None:
        self.pull = pull
        self.seq = seq
        self.keys = keys
        self.slots = slots
        self.state = PullState.WAITING
        self.checked = False

    def step(self, event: PullEvent) -> bool:
        """Advance; False where this event means nothing to a round in this state."""
        state = PULL_STEPS.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True


class _LivePull:
    __slots__ = ("deadline_s", "failed", "pull", "rounds", "settled", "verified", "via")

    def __init__(self, pull: Pull, deadline_s: float) -> None:
        self.pull = pull
        self.deadline_s = deadline_s
        self.rounds: dict[int, _Round] = {}
        """Those whose bytes are not known to be right or lost; empty before the fetch is sent."""
        self.failed: list[tuple[BlockKey, PdOffloadError]] = []
        self.settled = True
        self.verified = 0
        self.via: object = None
        """The receiving agent into which all its rounds were asked."""


class AskCounts(msgspec.Struct):
    """Counters of one process over all its peers; they never fall."""

    expired_loads: int = 0
    expired_aborts: int = 0


class Asker:
    """The asking half of one session. One thread.

    What is to be done, the owner takes: messages, checks and news. Before `admit` everything waits; the
    owner calls `tick` at `next_deadline_s` or earlier.
    """

    def __init__(
        self, peer: Address, deadlines: Deadlines, chunk_bytes: int, counts: AskCounts
    ) -> None:
        self._outbox: list[Message] = []
        self._checks: list[Check] = []
        self._news: list[News] = []
        self._counts = counts
        self._peer = peer
        self._deadlines = deadlines
        self._chunk_bytes = chunk_bytes
        self._via: object = None
        """The receiving agent the peer knows now; None: nothing may be sent."""
        self._whole = True
        self._asked: dict[str, dict[BlockKey, None]] = {}
        """Keys without an answer, by id."""
        self._unsent: dict[str, list[BlockKey]] = {}
        self._open: set[str] = set()
        """Ids under which the peer may hold chunks for us that no fetch has taken."""
        self._next_round: dict[str, int] = {}
        self._pulls: dict[int, _LivePull] = {}
        self._rounds: dict[tuple[str, int], _Round] = {}
        """On the wire: FETCHING or ABORTING."""
        self._lost: dict[int, object] = {}
        """Jobs told as not settled, with the agent through which their bytes may still land."""

    def __repr__(self) -> str:
        return (
            f"<Asker of {self._peer}: {len(self._pulls)} pulls, {len(self._rounds)} rounds under way, "
            f"{sum(map(len, self._asked.values()))} keys asked, {len(self._lost)} lost>"
        )

    @property
    def busy(self) -> bool:
        """Whether anything is asked or pulled."""
        return bool(self._asked or self._pulls)

    def under_way(self, via: object) -> int:
        """Fetches after which bytes may arrive through this agent at any time."""
        return sum(round_.pull.via is via for round_ in self._rounds.values())

    def unsettled(self, via: object) -> bool:
        """Whether slots are in quarantine until this agent is closed."""
        return any(each is via for each in self._lost.values()) or any(
            live.via is via and not live.settled for live in self._pulls.values()
        )

    @property
    def num_lost(self) -> int:
        """Jobs whose slots are in quarantine."""
        return len(self._lost)

    @property
    def next_deadline_s(self) -> float | None:
        return min((pull.deadline_s for pull in self._pulls.values()), default=None)

    def take_messages(self) -> list[Message]:
        taken, self._outbox = self._outbox, []
        return taken

    def take_checks(self) -> list[Check]:
        taken, self._checks = self._checks, []
        return taken

    def take_news(self) -> list[News]:
        taken, self._news = self._news, []
        return taken

    # --- what the engine wants ---

    def ask(self, kv_request_id: str, keys: Sequence[BlockKey]) -> None:
        """Ask the peer for `keys`; the `Answered` may come in parts."""
        self._asked.setdefault(kv_request_id, {}).update(dict.fromkeys(keys))
        self._unsent.setdefault(kv_request_id, []).extend(keys)
        self._flush()

    def pull(self, pull: Pull, now_s: float) -> None:
        """Fetch chunks. `MisuseError` for a job that is live already."""
        if pull.job_id in self._pulls:
            raise MisuseError(f"pull {pull.job_id} is live already")
        self._pulls[pull.job_id] = _LivePull(pull, now_s + self._deadlines.load_timeout_s)
        self._flush()

    def leave(self, kv_request_id: str) -> None:
        """The engine asks nothing more under this id; what is being pulled goes on."""
        self._asked.pop(kv_request_id, None)
        self._unsent.pop(kv_request_id, None)
        if kv_request_id in self._open and self._via is not None:
            round_seq = self._next_round.get(kv_request_id, 0)
            self._outbox.append(Fetch(kv_request_id, (), (), round_seq))
        self._open.discard(kv_request_id)
        if not any(live.pull.kv_request_id == kv_request_id for live in self._pulls.values()):
            self._next_round.pop(kv_request_id, None)

    # --- what the peer says ---

    def admit(self, via: object, *, whole: bool) -> None:
        """The peer knows our receiving agent `via`. `whole`: it wants each pull in one round."""
        self._via = via
        self._whole = whole
        self._flush()

    def wait(self) -> None:
        """Another receiving agent is being introduced: send nothing new until `admit`."""
        self._via = None

    def on_lookup_resp(self, message: LookupResp) -> None:
        """Answers. Those to questions that nobody waits for any more are ignored."""
        waiting = self._asked.get(message.kv_request_id, {})
        pairs = zip(message.keys, message.hits, strict=True)
        answers = {key: hit for key, hit in pairs if key in waiting}
        for key in answers:
            del waiting[key]
        if not waiting:
            self._asked.pop(message.kv_request_id, None)
        if answers:
            self._answer(message.kv_request_id, answers)

    def on_transfer_done(self, message: TransferDone) -> bool:
        """A round has ended over there. False: no such round (late, or told twice)."""
        round_ = self._rounds.get((message.kv_request_id, message.round_seq))
        if round_ is None or not round_.step(PullEvent.DONE):
            return False
        checksums = message.checksums
        if message.success and checksums and len(checksums) != len(round_.keys):
            self._fail(
                round_, ProtocolError(f"{len(checksums)} checksums for {len(round_.keys)} keys")
            )
        elif message.success:
            del self._rounds[(message.kv_request_id, message.round_seq)]
            job_id = round_.pull.pull.job_id
            self._checks.append(Check(job_id, round_.seq, round_.keys, round_.slots, checksums))
        else:
            error = TransferError(f"{self._peer} could not send all {len(round_.keys)} chunks")
            self._fail(round_, error, settled=message.settled)
        return True

    def on_abort_ack(self, message: AbortAck, *, trusted: bool) -> bool:
        """The peer has stopped. Unless `trusted`, it may have let go of a transfer that still moves."""
        round_ = self._rounds.get((message.kv_request_id, message.round_seq))
        if round_ is None or not round_.step(PullEvent.ACKNOWLEDGED):
            return False
        error = DeadlineExceeded(self._what(round_), self._deadlines.load_timeout_s)
        self._fail(round_, error, settled=trusted and message.settled)
        return True

    def checked(
        self, job_id: int, round_seq: int, bad: Mapping[BlockKey, PdOffloadError], verified: int
    ) -> None:
        """How a `Check` went: `bad` chunks do not count as loaded."""
        live = self._pulls.get(job_id)
        if live is None or round_seq not in live.rounds:
            raise MisuseError(f"round {round_seq} of pull {job_id} was not being checked")
        live.failed += bad.items()
        live.verified += verified
        self._round_ended(live, round_seq)

    # --- time, and the end ---

    def tick(self, now_s: float) -> None:
        """Let deadlines pass."""
        for live in [live for live in self._pulls.values() if now_s >= live.deadline_s]:
            live.deadline_s = now_s + self._deadlines.abort_timeout_s
            if not live.rounds:
                self._counts.expired_loads += 1
                error = DeadlineExceeded(
                    f"the handshake with {self._peer}", self._deadlines.load_timeout_s
                )
                self._fail_unsent(live, error)
            for round_ in self._on_the_wire(live):
                self._expire(round_)

    def lose(self, reason: str, *, settled: bool = False) -> None:
        """The peer is gone: everything asked is answered no, everything pulled has failed.

        `settled`: so is our own receiving agent, and nothing can land any more.
        """
        self._via = None
        error = TransferError(f"{self._peer} is lost: {reason}")
        for kv_request_id, keys in list(self._asked.items()):
            self._answer(kv_request_id, dict.fromkeys(keys, False))
        for live in list(self._pulls.values()):
            if not live.rounds:
                self._fail_unsent(live, error)
            for round_ in self._on_the_wire(live):
                round_.step(PullEvent.PEER_LOST)
                self._fail(round_, error, settled=settled)
        for state in (self._asked, self._unsent, self._open, self._next_round):
            state.clear()

    def settle(self, via: object) -> None:
        """Our receiving agent `via` is closed: nothing can land through it any more."""
        for job_id in [job_id for job_id, agent in self._lost.items() if agent is via]:
            del self._lost[job_id]
            self._news.append(PullSettled(job_id))
        for live in self._pulls.values():
            if live.via is via:
                live.settled = True

    # --- inside ---

    def _flush(self) -> None:
        if self._via is None:
            return
        for kv_request_id, keys in self._unsent.items():
            round_seq = self._next_round.get(kv_request_id, 0)
            self._outbox.append(Lookup(kv_request_id, tuple(keys), round_seq))
            self._open.add(kv_request_id)
        self._unsent.clear()
        for live in self._pulls.values():
            if not live.rounds and not live.failed:
                self._send_rounds(live)

    def _send_rounds(self, live: _LivePull) -> None:
        keys, slots, kv_id = live.pull.keys, live.pull.slots, live.pull.kv_request_id
        live.via = self._via
        size = len(keys) if self._whole else max(1, ROUND_BYTES // self._chunk_bytes)
        for start in range(0, len(keys), size):
            seq = self._next_round.get(kv_id, 0)
            self._next_round[kv_id] = seq + 1
            round_ = _Round(live, seq, keys[start : start + size], slots[start : start + size])
            round_.step(PullEvent.SENT)
            live.rounds[seq] = round_
            self._rounds[(kv_id, seq)] = round_
            self._outbox.append(Fetch(kv_id, round_.keys, round_.slots, seq))
        if self._whole:
            self._open.discard(kv_id)  # a fetch closes its round over there
        else:
            self._open.add(kv_id)

    def _on_the_wire(self, live: _LivePull) -> list[_Round]:
        under_way = (PullState.FETCHING, PullState.ABORTING)
        return [round_ for round_ in live.rounds.values() if round_.state in under_way]

    def _expire(self, round_: _Round) -> None:
        was = round_.state
        round_.step(PullEvent.DEADLINE)
        if was is PullState.FETCHING:
            self._counts.expired_loads += 1
            self._outbox.append(AbortFetch(round_.pull.pull.kv_request_id, round_.seq))
            return
        self._counts.expired_aborts += 1
        error = DeadlineExceeded(self._what(round_), self._deadlines.load_timeout_s)
        self._fail(round_, error, settled=False)

    def _what(self, round_: _Round) -> str:
        return f"{len(round_.keys)} chunks from {self._peer}"

    def _fail_unsent(self, live: _LivePull, error: PdOffloadError) -> None:
        live.failed += ((key, error) for key in live.pull.keys)
        self._end(live)

    def _fail(self, round_: _Round, error: PdOffloadError, *, settled: bool = True) -> None:
        live = round_.pull
        self._rounds.pop((live.pull.kv_request_id, round_.seq), None)
        live.failed += ((key, error) for key in round_.keys)
        live.settled = live.settled and settled
        self._round_ended(live, round_.seq)

    def _round_ended(self, live: _LivePull, seq: int) -> None:
        live.rounds[seq].checked = True
        if all(round_.checked for round_ in live.rounds.values()):
            self._end(live)

    def _end(self, live: _LivePull) -> None:
        pull = live.pull
        del self._pulls[pull.job_id]
        if not live.settled:
            self._lost[pull.job_id] = live.via
        self._news.append(
            PullEnded(
                job_id=pull.job_id,
                failed=tuple(live.failed),
                settled=live.settled,
                moved_bytes=(len(pull.keys) - len(live.failed)) * self._chunk_bytes,
                verified=live.verified,
            )
        )

    def _answer(self, kv_request_id: str, answers: Mapping[BlockKey, bool]) -> None:
        hits = frozenset(key for key, hit in answers.items() if hit)
        self._news.append(Answered(self._peer, kv_request_id, tuple(answers), hits))

    def check(self) -> None:
        """Prove that rounds and pulls explain each other; for tests."""
        listed = {id(r) for r in self._rounds.values()}
        under_way = {id(r) for live in self._pulls.values() for r in self._on_the_wire(live)}
        assert listed == under_way
        assert all(
            not live.rounds or any(not r.checked for r in live.rounds.values())
            for live in self._pulls.values()
        )
        assert not self._lost.keys() & self._pulls.keys()
