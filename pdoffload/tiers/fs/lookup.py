"""Which chunks stand on the disk, answered without touching it.

    lookup(key) -- known? --> HIT or MISS
          |
          +-- asks once --> questions --> one thread: stat() --> answers --> taken in at the next lookup

What is known: keys seen there (bounded, least recently used go), keys seen absent (for `ABSENT_S` only:
another process may store them), keys that could not be loaded although a file stands there.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pdoffload.clock import Clock
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Lookup
from pdoffload.tiers.fs.paths import Namespace, is_chunk_file

_log = logging.getLogger(__name__)

ABSENT_S = 1.0
MAX_PRESENT = 32_768
"""Known files. One more costs over 100 bytes here, one less a `stat` on the lookup thread."""
MAX_ABSENT = 65_536
MAX_BARRED = 65_536
MAX_PENDING = 65_536

Question = tuple[BlockKey, int]
"""A key and the serial number of the question: an older answer than the last question is void."""
Stat = Callable[[str], os.stat_result]
_V = TypeVar("_V")


class FileLookup:
    """The owner's side: every method but `close` belongs to the owner thread."""

    def __init__(
        self,
        space: Namespace,
        sizes_bytes: tuple[int, ...],
        *,
        timeout_s: float,
        clock: Clock,
        stat: Stat = os.stat,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._present: OrderedDict[BlockKey, None] = OrderedDict()
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        self._barred: OrderedDict[BlockKey, None] = OrderedDict()
        self._pending: dict[BlockKey, tuple[int, float]] = {}
        self._serial = 0
        self._stalled = False
        self._asker = _Asker(space, sizes_bytes, stat)

    def __repr__(self) -> str:
        return (
            f"<FileLookup {len(self._present)} present, {len(self._barred)} barred, "
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
            # The thread hangs in the file system. Until it comes back nothing new is asked.
            if not self._stalled:
                _log.warning(
                    "lookups stopped: no answer from the file system in %g s", self._timeout_s
                )
            self._stalled = True
            del self._pending[key]
            return Lookup.MISS
        if self._stalled or len(self._pending) >= MAX_PENDING:
            return Lookup.MISS
        self._serial += 1
        self._pending[key] = (self._serial, now_s)
        self._asker.ask((key, self._serial))
        return Lookup.PENDING

    def _take_in(self) -> None:
        answers = self._asker.answers
        if not answers:
            return
        until_s = self._clock.monotonic_s() + ABSENT_S
        self._stalled = False
        while answers:
            (key, serial), found = answers.popleft()
            if self._pending.get(key, (0, 0.0))[0] != serial:
                continue
            del self._pending[key]
            if found:
                _bounded_add(self._present, key, None, MAX_PRESENT)
            else:
                _bounded_add(self._absent, key, until_s, MAX_ABSENT)

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """Files of these keys stand there now, whole."""
        for key in keys:
            self._pending.pop(key, None)
            self._absent.pop(key, None)
            self._barred.pop(key, None)
            _bounded_add(self._present, key, None, MAX_PRESENT)

    def gone(self, keys: Iterable[BlockKey]) -> None:
        """Files of these keys were removed, by us."""
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
        """Whatever was known of these keys may have changed: the next question asks the file system."""
        for key in keys:
            for known in (self._pending, self._present, self._absent, self._barred):
                known.pop(key, None)

    def known(self, key: BlockKey) -> bool:
        """Whether a file of this key is known to stand there; nothing is asked for."""
        return key in self._present

    def barred(self, keys: Iterable[BlockKey]) -> frozenset[BlockKey]:
        """Those of `keys` whose files, if any, are of no use."""
        return (
            frozenset(key for key in keys if key in self._barred) if self._barred else frozenset()
        )

    def close(self, *, timeout_s: float) -> None:
        """Stop the thread; one that hangs in the file system is left behind."""
        self._asker.close(timeout_s=timeout_s)


class _Asker:
    """The thread that asks the file system. Started by the first question."""

    def __init__(self, space: Namespace, sizes_bytes: tuple[int, ...], stat: Stat) -> None:
        self.answers: deque[tuple[Question, bool]] = deque()
        self._space = space
        self._sizes_bytes = sizes_bytes
        self._stat = stat
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, question: Question) -> None:
        self._questions.put(question)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="pdoffload-fs-lookup", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            self.answers.append((question, self._is_there(question[0])))

    def _is_there(self, key: BlockKey) -> bool:
        path = self._space.path(key)
        try:
            return is_chunk_file(self._stat(path), self._sizes_bytes)
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.debug("lookup of %s: %s", path, error)
            return False

    def close(self, *, timeout_s: float) -> None:
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join(timeout_s)


def _bounded_add(into: OrderedDict[BlockKey, _V], key: BlockKey, value: _V, most: int) -> None:
    into[key] = value
    into.move_to_end(key)
    if len(into) > most:
        into.popitem(last=False)
