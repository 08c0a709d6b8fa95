"""Pulls from one peer: fetches in rounds, their deadlines, and what is in quarantine because of them. Pure.

A pull is fetched in rounds, each a `fetch` of its own: while one round is checked, the next is being
written, and a round that fails costs its own chunks only. Stock vLLM keeps what it found for a request under
a single round, so there a pull is one round.

    Pull --> WAITING --admitted--> rounds: FETCHING --transfer_done--> checked --> PullEnded, once all are
                                      '--deadline--> ABORTING --abort_ack--'
                                                        '--deadline--> LOST: PullEnded, not settled
                         our agent closed, and no neighbour that may still write --> PullSettled <--'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
from pdoffload.p2p.messages import AbortAck, AbortFetch, Fetch, Message, TransferDone
from pdoffload.p2p.neighbours import UNKNOWN, may_still_write
from pdoffload.p2p.news import News, Pull, PullEnded, PullSettled
from pdoffload.p2p.rounds import Numbers
from pdoffload.p2p.session import PULL_STEPS, PullEvent, PullState
from pdoffload.p2p.stats import AskCounts
from pdoffload.p2p.terms import Deadlines

ROUND_BYTES = 8 << 20
"""Of one fetch: small enough that checking it overlaps with the next, large enough to hide its messages."""
_UNSENT = -1
_LOOK_S = 1.0
"""How often a neighbour is looked at that may still write."""
_CLOSED = object()
"""In place of an agent: it is closed, and only its writer's own end is waited for."""
_UNDER_WAY = (PullState.FETCHING, PullState.ABORTING)


class Check(msgspec.Struct, frozen=True):
    """To do: compare the bytes of a round's slots with what the peer says they are, then `checked`."""

    job_id: int
    round_seq: int
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    checksums: tuple[bytes, ...]
    """One per key, or none at all: stock vLLM sends none."""


class _Round:
    __slots__ = ("keys", "pull", "seq", "slots", "state")

    def __init__(
        self, pull: _LivePull, seq: int, keys: tuple[BlockKey, ...], slots: tuple[int, ...]
    ) -> None:
        self.pull = pull
        self.seq = seq
        self.keys = keys
        self.slots = slots
        self.state = PullState.WAITING

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
        self.rounds = {_UNSENT: _Round(self, _UNSENT, pull.keys, pull.slots)}
        """Those whose bytes are not known to be right or lost; before anything is sent, all in one."""
        self.failed: list[tuple[BlockKey, PdOffloadError]] = []
        self.settled = True
        self.verified = 0
        self.via: object = None
        """The receiving agent into which all its rounds were asked."""


class Pulls:
    """All pulls of one session. One thread.

    `send` queues a message, `tell` a piece of news; checks are taken by the owner, who calls `tick` at
    `next_deadline_s` or earlier.
    """

    def __init__(
        self,
        peer: Address,
        deadlines: Deadlines,
        chunk_bytes: int,
        numbers: Numbers,
        counts: AskCounts,
        send: Callable[[Message], None],
        tell: Callable[[News], None],
    ) -> None:
        self._peer = peer
        self._deadlines = deadlines
        self._chunk_bytes = chunk_bytes
        self._numbers = numbers
        self._counts = counts
        self._send = send
        self._tell = tell
        self._checks: list[Check] = []
        self._live: dict[int, _LivePull] = {}
        self._rounds: dict[tuple[str, int], _Round] = {}
        """On the wire: FETCHING or ABORTING."""
        self._lost: dict[int, object] = {}
        """Jobs told as not settled, with the agent through which their bytes may still land."""
        self._writer = UNKNOWN
        self._writer_rests = False
        self._open_to_cma = False
        """Whether the peer may write behind a closed agent's back, if it is a neighbour."""
        self._look_s = 0.0

    def __repr__(self) -> str:
        return f"<Pulls {len(self._live)}, {len(self._rounds)} rounds under way, {len(self._lost)} lost>"

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_lost(self) -> int:
        return len(self._lost)

    def under_way(self, via: object) -> int:
        """Fetches after which bytes may arrive through this agent at any time."""
        return sum(round_.pull.via is via for round_ in self._rounds.values())

    def unsettled(self, via: object) -> bool:
        """Whether slots are in quarantine until this agent is closed."""
        return any(each is via for each in self._lost.values()) or any(
            live.via is via and not live.settled for live in self._live.values()
        )

    def any_under(self, kv_request_id: str) -> bool:
        """Whether anything is being pulled under this id."""
        return any(live.pull.kv_request_id == kv_request_id for live in self._live.values())

    @property
    def next_deadline_s(self) -> float | None:
        instants = [live.deadline_s for live in self._live.values()]
        if self.waits_for_writer:
            instants.append(self._look_s)
        return min(instants, default=None)

    @property
    def waits_for_writer(self) -> bool:
        """Whether slots are in quarantine only because the peer, a neighbour, may still write by itself."""
        return any(each is _CLOSED for each in self._lost.values())

    def take_checks(self) -> list[Check]:
        taken, self._checks = self._checks, []
        return taken

    def add(self, pull: Pull, now_s: float) -> None:
        """Not sent before `send_all`. `MisuseError` for a job that is live already."""
        if pull.job_id in self._live or pull.job_id in self._lost:
            raise MisuseError(f"pull {pull.job_id} is live already")
        self._live[pull.job_id] = _LivePull(pull, now_s + self._deadlines.load_timeout_s)

    def know_writer(self, process: str) -> None:
        """Which process the peer is, as `pdoffload.p2p.neighbours` marks it."""
        self._writer = process

    def send_all(self, via: object) -> set[str]:
        """Fetch what waits, into the receiving agent `via`, which the peer knows; under which ids."""
        waiting = [live for live in self._live.values() if _UNSENT in live.rounds]
        for live in waiting:
            live.via = via
            self._fetch(live)
        return {live.pull.kv_request_id for live in waiting if live.rounds}

    # --- what the peer says; False: no such round (late, or told twice) ---

    def on_transfer_done(self, message: TransferDone) -> bool:
        """A round has ended over there."""
        round_ = self._rounds.get((message.kv_request_id, message.round_seq))
        if round_ is None or not round_.step(PullEvent.DONE):
            return False
        checksums = message.checksums
        if not message.success:
            error = TransferError(f"{self._peer} could not send all {len(round_.keys)} chunks")
            self._fail(round_, error, settled=self._is_settled(message))
        elif checksums and len(checksums) != len(round_.keys):
            self._fail(
                round_, ProtocolError(f"{len(checksums)} checksums for {len(round_.keys)} keys")
            )
        else:
            del self._rounds[(message.kv_request_id, message.round_seq)]
            job_id = round_.pull.pull.job_id
            self._checks.append(Check(job_id, round_.seq, round_.keys, round_.slots, checksums))
        return True

    def on_abort_ack(self, message: AbortAck) -> bool:
        """The peer has stopped."""
        round_ = self._rounds.get((message.kv_request_id, message.round_seq))
        if round_ is None or not round_.step(PullEvent.ACKNOWLEDGED):
            return False
        error = DeadlineExceeded(self._what(round_), self._deadlines.load_timeout_s)
        self._fail(round_, error, settled=self._is_settled(message))
        return True

    def _is_settled(self, message: TransferDone | AbortAck) -> bool:
        """After a failure stock vLLM drops NIXL requests whose bytes may still move, and does not say so."""
        return message.settled and not self._numbers.whole

    def checked(
        self, job_id: int, round_seq: int, bad: Mapping[BlockKey, PdOffloadError], verified: int
    ) -> None:
        """How a `Check` went: `bad` chunks do not count as loaded."""
        live = self._live.get(job_id)
        round_ = live.rounds.get(round_seq) if live is not None else None
        if live is None or round_ is None or round_.state is not PullState.ENDED:
            raise MisuseError(f"round {round_seq} of pull {job_id} was not being checked")
        live.failed += bad.items()
        live.verified += verified
        self._forget(round_)

    # --- time, and the end ---

    def tick(self, now_s: float) -> None:
        """Let deadlines pass."""
        for live in [live for live in self._live.values() if now_s >= live.deadline_s]:
            live.deadline_s = now_s + self._deadlines.abort_timeout_s
            for round_ in list(live.rounds.values()):
                self._expire(round_)
        if self.waits_for_writer and now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            self._settle_closed()

    def on_rest(self, process: str) -> None:
        """The session is over, and `process` says that nothing is under way which it had begun in it."""
        if process == self._writer:
            self._writer_rests = True
            self._settle_closed()

    def _may_still_write(self) -> bool:
        by_itself = self._open_to_cma and not self._writer_rests
        return by_itself and may_still_write(self._writer)

    def _settle_closed(self) -> None:
        """Nothing is left of what went into closed agents, unless the peer itself may still write."""
        if self._may_still_write():
            return
        for job_id in [job_id for job_id, agent in self._lost.items() if agent is _CLOSED]:
            del self._lost[job_id]
            self._tell(PullSettled(job_id))
        for live in self._live.values():
            if live.via is _CLOSED:
                live.settled = True

    def _expire(self, round_: _Round) -> None:
        was = round_.state
        if not round_.step(PullEvent.DEADLINE):
            return
        timeout_s = self._deadlines.load_timeout_s
        if was is PullState.WAITING:
            self._counts.expired_loads += 1
            self._fail(round_, DeadlineExceeded(f"the handshake with {self._peer}", timeout_s))
        elif was is PullState.FETCHING:
            self._counts.expired_loads += 1
            self._send(AbortFetch(round_.pull.pull.kv_request_id, round_.seq))
        else:
            self._counts.expired_aborts += 1
            self._fail(round_, DeadlineExceeded(self._what(round_), timeout_s), settled=False)

    def lose(self, error: PdOffloadError, *, settled: bool) -> None:
        """The peer is gone: what is not being checked has failed. `settled`: nothing can land any more."""
        for live in list(self._live.values()):
            self._end_rounds(live, PullEvent.PEER_LOST, error, settled=settled)

    def give_up(self, error: PdOffloadError) -> None:
        """What is not sent yet has failed."""
        for live in [live for live in self._live.values() if _UNSENT in live.rounds]:
            self._end_rounds(live, PullEvent.AGENT_CLOSED, error, settled=True)

    def settle(self, via: object, *, open_to_cma: bool) -> None:
        """Our receiving agent `via` is closed: nothing can land through it any more, but for what the peer
        may have begun to write by cma."""
        self._open_to_cma = self._open_to_cma or open_to_cma
        for job_id in [job_id for job_id, agent in self._lost.items() if agent is via]:
            self._lost[job_id] = _CLOSED
        closed = [live for live in self._live.values() if live.via is via]
        for live in closed:
            live.via = _CLOSED
        self._settle_closed()
        error, rests = TransferError("our receiving agent was closed"), not self._may_still_write()
        for live in closed:
            self._end_rounds(live, PullEvent.AGENT_CLOSED, error, settled=rests)

    def _end_rounds(
        self, live: _LivePull, event: PullEvent, error: PdOffloadError, *, settled: bool
    ) -> None:
        for round_ in list(live.rounds.values()):
            was_sent = round_.state in _UNDER_WAY
            if round_.step(event):
                self._fail(round_, error, settled=settled or not was_sent)

    # --- inside ---

    def _fetch(self, live: _LivePull) -> None:
        all_in_one, kv_id = live.rounds.pop(_UNSENT), live.pull.kv_request_id
        pairs = self._still_promised(live, all_in_one)
        size = len(pairs) if self._numbers.whole else max(1, ROUND_BYTES // self._chunk_bytes)
        for start in range(0, len(pairs), size or 1):
            keys, slots = zip(*pairs[start : start + size], strict=True)
            round_ = _Round(live, self._numbers.for_fetch(kv_id), keys, slots)
            round_.step(PullEvent.SENT)
            live.rounds[round_.seq] = round_
            self._rounds[(kv_id, round_.seq)] = round_
            self._send(Fetch(kv_id, keys, slots, round_.seq))
        if not pairs:
            self._end(live)

    def _still_promised(self, live: _LivePull, round_: _Round) -> list[tuple[BlockKey, int]]:
        """Keys and slots to fetch. What the peer has let go of since it said that it holds it, fails now:
        asked for all the same, it would keep us waiting until the deadline."""
        kv_id = live.pull.kv_request_id
        error = TransferError(
            f"{self._peer} holds it no longer: another fetch has closed its round"
        )
        pairs = []
        for key, slot in zip(round_.keys, round_.slots, strict=True):
            if self._numbers.may_fetch(kv_id, key):
                pairs.append((key, slot))
            else:
                live.failed.append((key, error))
        return pairs

    def _what(self, round_: _Round) -> str:
        return f"{len(round_.keys)} chunks from {self._peer}"

    def _fail(self, round_: _Round, error: PdOffloadError, *, settled: bool = True) -> None:
        live = round_.pull
        self._rounds.pop((live.pull.kv_request_id, round_.seq), None)
        live.failed += ((key, error) for key in round_.keys)
        live.settled = live.settled and settled
        self._forget(round_)

    def _forget(self, round_: _Round) -> None:
        """All is known about this round."""
        live = round_.pull
        del live.rounds[round_.seq]
        if not live.rounds:
            self._end(live)

    def _end(self, live: _LivePull) -> None:
        pull = live.pull
        del self._live[pull.job_id]
        if not live.settled:
            self._lost[pull.job_id] = live.via
        self._tell(
            PullEnded(
                job_id=pull.job_id,
                failed=tuple(live.failed),
                settled=live.settled,
                moved_bytes=(len(pull.keys) - len(live.failed)) * self._chunk_bytes,
                verified=live.verified,
            )
        )

    def check(self) -> None:
        """Prove that rounds and pulls explain each other; for tests."""
        rounds = [each for live in self._live.values() for each in live.rounds.values()]
        under_way = {id(each) for each in rounds if each.state in _UNDER_WAY}
        assert {id(each) for each in self._rounds.values()} == under_way
        assert all(live.rounds for live in self._live.values()), "a pull has ended and is kept"
        assert not self._lost.keys() & self._live.keys()
