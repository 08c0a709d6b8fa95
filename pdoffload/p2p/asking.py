"""Our questions to one peer: lookups and pulls, from the engine's command to its news. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pdoffload.errors import PdOffloadError, TransferError
from pdoffload.layout import BlockKey
from pdoffload.p2p.address import Address
from pdoffload.p2p.messages import AbortAck, Fetch, Lookup, LookupResp, Message, TransferDone
from pdoffload.p2p.news import Answered, News, Pull
from pdoffload.p2p.pulling import Check, Pulls
from pdoffload.p2p.questions import Questions
from pdoffload.p2p.rounds import Numbers
from pdoffload.p2p.stats import AskCounts
from pdoffload.p2p.terms import Deadlines


class Asker:
    """The asking half of one session. One thread.

    What is to be done, the owner takes: messages, checks and news. Before `admit` everything waits; the
    owner calls `tick` at `next_deadline_s` or earlier.
    """

    def __init__(
        self,
        peer: Address,
        deadlines: Deadlines,
        chunk_bytes: int,
        serials: Iterator[int],
        counts: AskCounts,
    ) -> None:
        """`serials` are shared by all askers of a process, see `Numbers`."""
        self._outbox: list[Message] = []
        self._news: list[News] = []
        self._counts = counts
        self._peer = peer
        self._deadlines = deadlines
        self._via: object = None
        self._numbers = Numbers(serials)
        self._questions = Questions()
        self._pulls = Pulls(
            peer, deadlines, chunk_bytes, self._numbers, counts, self._send, self._tell
        )
        self._open: set[str] = set()
        """Ids under which the peer may hold chunks for us that no fetch has taken."""
        self._left: set[str] = set()
        """Ids of which the engine wants nothing more, and of which the peer was not told yet."""

    def __repr__(self) -> str:
        return f"<Asker of {self._peer}: {len(self._questions)} keys asked, {self._pulls!r}>"

    @property
    def busy(self) -> bool:
        """Whether anything is asked or pulled."""
        return bool(len(self._questions) or len(self._pulls))

    @property
    def via(self) -> object:
        """The receiving agent that the peer is asked to write into; None: nothing new is sent."""
        return self._via

    def under_way(self, via: object) -> int:
        """Fetches after which bytes may arrive through this agent at any time."""
        return self._pulls.under_way(via)

    def unsettled(self, via: object) -> bool:
        """Whether slots are in quarantine until this agent is closed."""
        return self._pulls.unsettled(via)

    @property
    def num_lost(self) -> int:
        """Jobs whose slots are in quarantine."""
        return self._pulls.num_lost

    @property
    def waits_for_writer(self) -> bool:
        """Whether slots are in quarantine only because the peer, a neighbour, may still write by itself."""
        return self._pulls.waits_for_writer

    @property
    def peer(self) -> Address:
        return self._peer

    @property
    def next_deadline_s(self) -> float | None:
        instants = (self._questions.next_deadline_s, self._pulls.next_deadline_s)
        return min((each for each in instants if each is not None), default=None)

    def take_messages(self) -> list[Message]:
        if self._via is not None:
            self._bid_farewell()
        taken, self._outbox = self._outbox, []
        return taken

    def take_checks(self) -> list[Check]:
        return self._pulls.take_checks()

    def take_news(self) -> list[News]:
        taken, self._news = self._news, []
        return taken

    # --- what the engine wants ---

    def ask(self, kv_request_id: str, keys: Sequence[BlockKey], now_s: float) -> None:
        """Ask the peer for `keys`; the `Answered` may come in parts."""
        self._left.discard(kv_request_id)
        self._questions.add(kv_request_id, keys, now_s + self._deadlines.lookup_timeout_s)
        self._flush()

    def pull(self, pull: Pull, now_s: float) -> None:
        """Fetch chunks. `MisuseError` for a job that is live already."""
        self._pulls.add(pull, now_s)
        self._left.discard(pull.kv_request_id)
        self._flush()

    def leave(self, kv_request_id: str) -> None:
        """The engine asks nothing more under this id. What is being pulled goes on; then the peer is told."""
        self._questions.drop(kv_request_id)
        self._left.add(kv_request_id)

    # --- what the peer says ---

    def admit(self, via: object, *, whole: bool) -> None:
        """The peer knows our receiving agent `via`. `whole`: it is stock vLLM, which wants each pull in one
        round, and whose word that nothing moves any more is not enough."""
        self._via = via
        self._numbers.whole = whole
        self._flush()

    def know_writer(self, process: str) -> None:
        """Which process the peer is: one of this host may write behind our agent's back."""
        self._pulls.know_writer(process)

    def on_rest(self, process: str) -> None:
        """The session is over, and `process` says that nothing is under way which it had begun in it."""
        self._pulls.on_rest(process)

    def wait(self) -> None:
        """Another receiving agent is to be introduced: send nothing new until `admit`."""
        self._via = None

    def on_lookup_resp(self, message: LookupResp) -> None:
        """Answers. Those to questions that nobody waits for any more are ignored."""
        kv_id, answers = message.kv_request_id, {}
        for key, hit in zip(message.keys, message.hits, strict=True):
            question = self._questions.take(kv_id, key)
            if question is not None:
                answers[key] = hit and self._numbers.note_hit(kv_id, key, question.round_seq)
        if answers:
            self._answer(kv_id, answers)

    def on_transfer_done(self, message: TransferDone) -> bool:
        """A round has ended over there. False: no such round (late, or told twice)."""
        return self._pulls.on_transfer_done(message)

    def on_abort_ack(self, message: AbortAck) -> bool:
        """The peer has stopped a round. False as above."""
        return self._pulls.on_abort_ack(message)

    def checked(
        self, job_id: int, round_seq: int, bad: Mapping[BlockKey, PdOffloadError], verified: int
    ) -> None:
        """How a `Check` went: `bad` chunks do not count as loaded. `MisuseError` if it was not asked for."""
        self._pulls.checked(job_id, round_seq, bad, verified)

    # --- time, and the end ---

    def tick(self, now_s: float) -> None:
        """Let deadlines pass."""
        for question in self._questions.late(now_s):
            self._counts.expired_lookups += len(question.keys)
            self._answer(question.kv_request_id, dict.fromkeys(question.keys, False))
        self._pulls.tick(now_s)

    def lose(self, reason: str, *, settled: bool = False) -> None:
        """The peer is gone: everything asked is answered no, everything pulled has failed.

        `settled`: so is our own receiving agent, and nothing can land any more.
        """
        self.give_up(reason)
        self._pulls.lose(TransferError(f"{self._peer} is lost: {reason}"), settled=settled)
        self._open.clear()
        self._left.clear()
        self._numbers.clear()

    def give_up(self, reason: str) -> None:
        """There is no receiving agent to wait for: what is not being fetched already has failed."""
        self._via = None
        for question in self._questions.clear():
            self._answer(question.kv_request_id, dict.fromkeys(question.keys, False))
        self._pulls.give_up(TransferError(f"nothing is fetched from {self._peer}: {reason}"))

    def settle(self, via: object, *, open_to_cma: bool) -> None:
        """Our receiving agent `via` is closed: nothing can land through it any more, but for what a neighbour
        has begun to write by cma."""
        if self._via is via:
            self._via = None
        self._pulls.settle(via, open_to_cma=open_to_cma)

    # --- inside ---

    def _flush(self) -> None:
        if self._via is None:
            return
        for question in self._questions.unsent():
            kv_id = question.kv_request_id
            question.round_seq = self._numbers.for_lookup(kv_id)
            self._send(Lookup(kv_id, tuple(question.keys), question.round_seq))
            self._open.add(kv_id)
        fetched = self._pulls.send_all(self._via)
        if self._numbers.whole:
            self._open -= fetched  # a fetch closes its round over there
        else:
            self._open |= fetched

    def _bid_farewell(self) -> None:
        """Tell the peer of ids that are left, as soon as nothing is pulled under them; forget them."""
        for kv_id in [each for each in self._left if not self._pulls.any_under(each)]:
            self._left.discard(kv_id)
            round_seq = self._numbers.leave(kv_id)
            if kv_id in self._open:
                self._open.discard(kv_id)
                self._send(Fetch(kv_id, (), (), round_seq))

    def _send(self, message: Message) -> None:
        self._outbox.append(message)

    def _tell(self, news: News) -> None:
        self._news.append(news)

    def _answer(self, kv_request_id: str, answers: Mapping[BlockKey, bool]) -> None:
        hits = frozenset(key for key, hit in answers.items() if hit)
        self._tell(Answered(self._peer, kv_request_id, tuple(answers), hits))

    def check(self) -> None:
        """Prove that the books agree; for tests."""
        self._pulls.check()
        self._questions.check()
