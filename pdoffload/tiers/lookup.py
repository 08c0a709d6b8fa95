"""Which chunks a medium holds, answered without touching it.

    lookup(key) -- known? --> HIT or MISS
          |
          +-- asks once --> questions --> one thread asks the medium --> answers --> taken in next time

What is known: keys seen there (bounded, least recently used go), keys seen absent (for `ABSENT_S` only:
another process may store them), keys that could not be loaded although something stands there.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from pdoffload.clock import Clock
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Lookup

_log = logging.getLogger(__name__)

ABSENT_S = 1.0
MAX_PRESENT = 32_768
"""Known chunks. One more costs over 100 bytes here, one less a question on the lookup thread."""
MAX_ABSENT = 65_536
MAX_BARRED = 65_536
MAX_PENDING = 65_536

Question = tuple[BlockKey, int]
"""A key and the serial number of the question: an older answer than the last question is void."""
AreThere = Callable[[Sequence[BlockKey]], Sequence[bool]]
"""Asks the medium, on the lookup thread, and waits for it. An exception is logged and counts as absence."""
MakeAsker = Callable[[], AbstractContextManager[AreThere]]
"""Called on the lookup thread, which leaves the context when it ends."""
_V = TypeVar("_V")


class ChunkLookup:
    """The owner's side: every method but `close` belongs to the owner thread.

    `medium` is what hangs where nothing is answered ("the file system"). A thread that hangs is waited for;
    up to `spare_threads` times it is left behind instead, and another one asks.
    """

    def __init__(
        self,
        make_asker: MakeAsker,
        *,
        medium: str,
        thread_name: str,
        timeout_s: float,
        clock: Clock,
        most_keys: int = 1,
        spare_threads: int = 0,
    ) -> None:
        self._medium = medium
        self._spare_threads = spare_threads
        self._timeout_s = timeout_s
        self._clock = clock
        self._present: OrderedDict[BlockKey, None] = OrderedDict()
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        self._barred: OrderedDict[BlockKey, None] = OrderedDict()
        self._pending: dict[BlockKey, tuple[int, float, _Asker]] = {}
        self._serial = 0
        self._stalled = False
        self._new_asker = partial(_Asker, make_asker, thread_name, most_keys)
        self._asker = self._new_asker()

    def __repr__(self) -> str:
        return (
            f"<ChunkLookup {len(self._present)} present, {len(self._barred)} barred, "
            f"{len(self._pending)} pending{', stalled' if self._stalled else ''}>"
        )

    def ask(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        """What is known of each key now; what is not known is asked for."""
        self._take_in()
        now_s = self._clock.monotonic_s()
        return [self._one(key, now_s) for key in keys]

    def _one(self, key: BlockKey, now_s: float) -> Lookup:
        if key in self._present:
            self._present.move_to_end(key)
            return Lookup.HIT
        if key in self._barred or self._absent.get(key, now_s) > now_s:
            return Lookup.MISS
        asked = self._pending.get(key)
        if asked is not None:
            if now_s - asked[1] < self._timeout_s:
                return Lookup.PENDING
            del self._pending[key]
            if asked[2] is self._asker:
                self._stall()
            return Lookup.MISS
        if self._stalled or len(self._pending) >= MAX_PENDING:
            return Lookup.MISS
        self._serial += 1
        self._pending[key] = (self._serial, now_s, self._asker)
        self._asker.ask((key, self._serial))
        return Lookup.PENDING

    def _stall(self) -> None:
        """The thread hangs. Until it comes back, or another one has its place, nothing new is asked."""
        if not self._stalled:
            _log.warning(
                "lookups stopped: no answer from %s in %g s", self._medium, self._timeout_s
            )
        self._stalled = True
        if self._spare_threads:
            self._spare_threads -= 1
            self._asker.leave()
            self._asker = self._new_asker()
            self._stalled = False

    def _take_in(self) -> None:
        answers = self._asker.answers
        if not answers:
            return
        until_s = self._clock.monotonic_s() + ABSENT_S
        self._stalled = False
        while answers:
            (key, serial), found = answers.popleft()
            asked = self._pending.get(key)
            if asked is None or asked[0] != serial:
                continue
            del self._pending[key]
            if found:
                _bounded_add(self._present, key, None, MAX_PRESENT)
            else:
                _bounded_add(self._absent, key, until_s, MAX_ABSENT)

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """These chunks stand there now, whole."""
        for key in keys:
            self._pending.pop(key, None)
            self._absent.pop(key, None)
            self._barred.pop(key, None)
            _bounded_add(self._present, key, None, MAX_PRESENT)

    def gone(self, keys: Iterable[BlockKey]) -> None:
        """These chunks are not there any more."""
        until_s = self._clock.monotonic_s() + ABSENT_S
        for key in keys:
            self._pending.pop(key, None)
            self._present.pop(key, None)
            _bounded_add(self._absent, key, until_s, MAX_ABSENT)

    def failed(self, keys: Iterable[BlockKey]) -> None:
        """Loads of these keys failed: they are not loaded again until they were stored anew."""
        for key in keys:
            self._pending.pop(key, None)
            self._present.pop(key, None)
            _bounded_add(self._barred, key, None, MAX_BARRED)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Whatever was known of these keys may have changed: the next question asks the medium."""
        for key in keys:
            self._pending.pop(key, None)
            for known in (self._present, self._absent, self._barred):
                known.pop(key, None)

    def known(self, key: BlockKey) -> bool:
        """Whether a chunk of this key is known to stand there; nothing is asked for."""
        return key in self._present

    def barred(self, keys: Iterable[BlockKey]) -> frozenset[BlockKey]:
        """Those of `keys` whose chunks, if any are there, are of no use."""
        return (
            frozenset(key for key in keys if key in self._barred) if self._barred else frozenset()
        )

    def close(self, *, timeout_s: float) -> None:
        """Stop the thread; one that hangs is left behind."""
        self._asker.close(timeout_s=timeout_s)


class _Asker:
    """The thread that asks the medium, up to `most_keys` at once. Started by the first question."""

    def __init__(self, make_asker: MakeAsker, thread_name: str, most_keys: int) -> None:
        self.answers: deque[tuple[Question, bool]] = deque()
        self._make_asker = make_asker
        self._thread_name = thread_name
        self._most_keys = most_keys
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = False

    def ask(self, question: Question) -> None:
        self._questions.put(question)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self._make_asker() as are_there:
            self._answer(are_there)

    def _answer(self, are_there: AreThere) -> None:
        while (first := self._questions.get()) is not None and not self._left:
            asked, last = self._gather(first)
            try:
                found = are_there([key for key, _ in asked])
            except Exception as error:  # noqa: BLE001 - a question is answered, whatever happens
                _log.error("a lookup ended unexpectedly", exc_info=error)
                found = [False] * len(asked)
            self.answers.extend(zip(asked, found, strict=True))
            if last:
                return

    def _gather(self, first: Question) -> tuple[list[Question], bool]:
        """What can be asked together, and whether the end was asked for meanwhile."""
        asked = [first]
        while len(asked) < self._most_keys:
            try:
                question = self._questions.get_nowait()
            except queue.Empty:
                break
            if question is None:
                return asked, True
            asked.append(question)
        return asked, False

    def leave(self) -> None:
        """Another one has its place: the thread ends after the question that holds it."""
        self._left = True
        self._questions.put(None)

    def close(self, *, timeout_s: float) -> None:
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join(timeout_s)


def _bounded_add(into: OrderedDict[BlockKey, _V], key: BlockKey, value: _V, most: int) -> None:
    into[key] = value
    into.move_to_end(key)
    if len(into) > most:
        into.popitem(last=False)
