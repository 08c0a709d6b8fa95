"""The quota of a namespace, exact across the processes of a host: the side of one process.

    I/O threads                     quota thread, which owns a ledger
    reserve(keys) ---- ask ------>  claim in the ledger --- does not fit ---> take the evictor's lock:
      waits <-------- claim ------                                              settle what the dead claimed,
    wrote(claim, keys) ---------->  rows instead of the claim                   remove the oldest files
    used, gone ------------------>  time of last use; no such file

Files that stand, that are being written and that are being removed are never more than `max_bytes` together,
whoever stores and whoever dies: see `ledger`. What the ledger cannot know are files of other programs, and of
engines without a quota: a count of the disk finds them when the tier opens and every `COUNT_EVERY_S` while
something is stored.

What one store costs does not depend on the number of files. Trouble with the ledger ends reservations with
its reason, at their deadline or before; it never reaches loads.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from pdoffload.clock import Clock
from pdoffload.errors import DeadlineExceeded, PdOffloadError, StorageError, StorageFull
from pdoffload.layout import BlockKey
from pdoffload.tiers.fs.claims import Claims
from pdoffload.tiers.fs.evict import EvictorLock, Tally, remove_rows, resolve_dead
from pdoffload.tiers.fs.ledger import (
    Claim,
    LedgerBusy,
    LedgerDamaged,
    LedgerReplaced,
    Row,
    Usage,
)
from pdoffload.tiers.fs.paths import Namespace
from pdoffload.tiers.fs.recount import CountThread
from pdoffload.tiers.fs.writer import WriterDir

_log = logging.getLogger(__name__)

AHEAD_SHARE = 0.05
AHEAD_BYTES = 256 << 20
"""An eviction makes this much room ahead, the smaller of the two, so that not every store begins one."""
COUNT_EVERY_S = 600.0
TOUCH_GRAIN_S = 60.0
"""A file's own time of last use, from which a lost ledger is made anew, is written once in so long."""
_ROUND_FILES = 64
_MOST_REFUSED = 64
"""Files the system does not let go, after which one eviction gives up."""
_MAX_TOLD = 16_384
_RETRY_S = 0.02
_TROUBLE_RETRY_S = 1.0
_PASSING = (LedgerBusy, LedgerReplaced)


class _Ask:
    """One reservation. Ends, under the condition, by `granted` or `error`."""

    __slots__ = ("claim", "error", "granted", "why")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.why = "its ledger"
        """What it waits for."""
        self.granted = False
        self.error: PdOffloadError | None = None


class Quota:
    """Keeps the chunk files of one namespace within `max_bytes`. A thread of its own; methods from any."""

    def __init__(self, space: Namespace, writer: WriterDir, max_bytes: int, clock: Clock) -> None:
        self.evicted: deque[BlockKey] = deque()
        """Keys whose files this process removed; the owner takes them out."""
        self._space = space
        self._writer = writer
        self._max_bytes = max_bytes
        self._low_bytes = max_bytes - min(int(max_bytes * AHEAD_SHARE), AHEAD_BYTES)
        self._clock = clock
        # Kept under the condition: what was told, and who asks.
        self._changed = threading.Condition(threading.Lock())
        self._told = True
        self._asks: list[_Ask] = []
        self._settled: dict[int, list[Row]] = {}
        self._used: dict[BlockKey, None] = {}
        self._gone: dict[BlockKey, int] = {}
        self._held: Counter[BlockKey] = Counter()
        self._refusing = False
        self._closed = False
        # The quota thread's alone.
        self._claims = Claims(space)
        self._lock = EvictorLock(space)
        self._usage = Usage(0, 0, 0)
        self._trouble: StorageError | None = None
        self._counter = CountThread(space, clock, self._wake)
        self._thread = threading.Thread(target=self._run, name="pdoffload-fs-quota", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        used, claimed, counted = self._usage
        state = f", {self._trouble}" if self._trouble else "" if counted else ", being counted"
        return f"<Quota {used} of {self._max_bytes} bytes used, {claimed} claimed{state}>"

    # --- the writers' side ---

    def reserve(self, keys: Sequence[BlockKey], size_bytes: int, *, timeout_s: float) -> int:
        """Set `size_bytes` aside for files of `keys`, after an eviction if need be; the claim's number.

        Blocks its thread until `timeout_s` at most; `wrote` ends the claim. Raises `StorageFull` where
        there is no room, and another `StorageError` or `DeadlineExceeded` where nobody can tell.
        """
        if size_bytes > self._max_bytes:
            reason = f"{size_bytes} bytes at once are more than the quota, {self._max_bytes}"
            raise StorageFull(self._space.base, reason, errno.EDQUOT)
        claim = Claim.new(self._writer.owner(), size_bytes, keys)
        ask = _Ask(claim)
        with self._changed:
            self._asks.append(ask)
            self._tell()
            self._changed.wait_for(
                lambda: ask.granted or ask.error is not None or self._refusing,
                max(0.0, timeout_s),
            )
            if ask.granted:
                return claim.id
            if ask in self._asks:
                self._asks.remove(ask)
            # It may be granted this very moment, for nobody: void it.
            self._settled[claim.id] = []
            self._tell()
        if ask.error is not None:
            raise ask.error
        if self._refusing:
            raise StorageError(self._space.base, "the tier was closed before there was room")
        raise DeadlineExceeded(f"room in {self._space.base}, and for {ask.why}", timeout_s)

    def wrote(self, claim_id: int, keys: Iterable[BlockKey], file_bytes: int) -> None:
        """Of what was claimed these have files now, of so many bytes each; the rest is void.

        Of one batch the last goes first: a prefix is of use without what follows it, not the other way.
        """
        now_us = self._now_us()
        with self._changed:
            self._settled[claim_id] = [
                Row(key, file_bytes, now_us - place) for place, key in enumerate(keys)
            ]
            self._tell()

    # --- the owner's side, and the readers' ---

    def hold(self, keys: Iterable[BlockKey]) -> None:
        """These are about to be read here: not to be evicted by this process."""
        with self._changed:
            self._held.update(keys)

    def let_go(self, keys: Iterable[BlockKey]) -> None:
        """They have been read."""
        with self._changed:
            self._held.subtract(keys)
            self._held = +self._held

    def used(self, keys: Iterable[BlockKey]) -> None:
        """These were used again. Best effort: beyond a bound some are left out."""
        with self._changed:
            if len(self._used) < _MAX_TOLD:
                self._used.update(dict.fromkeys(keys))
                self._tell()

    def gone(self, keys: Iterable[BlockKey]) -> None:
        """There is no file of these any more, or was none just now. Best effort, as `used`."""
        now_us = self._now_us()
        with self._changed:
            if len(self._gone) < _MAX_TOLD:
                self._gone.update(dict.fromkeys(keys, now_us))
                self._tell()

    def refuse(self) -> None:
        """Let go everybody who waits for room, and who comes from now on. What is claimed can be settled."""
        with self._changed:
            self._refusing = True
            self._tell()

    def close(self, *, timeout_s: float) -> None:
        """Write down what was told and stop; a thread that hangs in the file system is left behind."""
        with self._changed:
            self._refusing = self._closed = True
            self._tell()
        self._counter.stop()
        self._thread.join(timeout_s)
        self._counter.close(timeout_s=timeout_s)

    def _tell(self) -> None:
        """Under the condition."""
        self._told = True
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._tell()

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._told or self._closed, self._pause_s())
                self._told, closing = False, self._closed
            try:
                self._work(closing)
            except StorageError as error:
                self._take_trouble(error)
            except Exception as error:  # noqa: BLE001
                # Whatever it is: stores have to end with a reason, and the thread has to go on.
                _log.debug("%s: %r", self._space.base, error, exc_info=error)
                self._take_trouble(_as_storage_error(self._space.base, error))
            if closing:
                self._claims.ledger.close()
                return

    def _pause_s(self) -> float | None:
        """How long until the next look although nothing new was told; None: not before."""
        if not self._asks and not self._claims.wait:
            return None
        lasting = self._trouble is not None and not isinstance(self._trouble, _PASSING)
        return _TROUBLE_RETRY_S if lasting else _RETRY_S

    def _work(self, closing: bool) -> None:
        self._claims.open()
        stored = self._write_down()
        if closing:
            return
        self._usage = self._claims.ledger.usage()
        if self._trouble is not None:
            if not isinstance(self._trouble, _PASSING):
                _log.info("%s: its quota is kept again", self._space.base)
            self._trouble = None
        counted_s = self._usage.counted_us / 1e6
        old = self._clock.wall_s() - counted_s > COUNT_EVERY_S
        self._counter.look(due=not counted_s or (stored and old))
        # Before the first count the oldest files are not known.
        too_much = counted_s and self._usage.total_bytes > self._max_bytes
        if self._grant() or too_much:
            self._make_room()

    def _write_down(self) -> bool:
        """Enter what was told; whether something was stored. What fails is tried again or left out."""
        with self._changed:
            settled, self._settled = self._settled, {}
            used, self._used = self._used, {}
            gone, self._gone = self._gone, {}
        self._claims.settle(settled)
        ledger = self._claims.ledger
        if used:
            now_us = self._now_us()
            known = {row.key: row.used_us for row in ledger.mark_used(used, now_us)}
            grain_us = int(TOUCH_GRAIN_S * 1e6)
            for key in used:
                if known.get(key, 0) // grain_us < now_us // grain_us:
                    _mark_used(self._space.path(key))
        for key, seen_us in gone.items():
            if not os.path.lexists(self._space.path(key)):
                ledger.forget((key,), seen_us)
        return any(settled.values())

    def _grant(self) -> list[_Ask]:
        """Answer the asks for which there is room, in their order; the others."""
        with self._changed:
            asks = list(self._asks)
        waiting: list[_Ask] = []
        for ask in asks:
            if not self._usage.counted_us:
                ask.why = "its files to be counted"
            elif not waiting and self._claims.claim(ask.claim, self._max_bytes):
                self._end(ask)
            else:
                ask.why = "other files to be removed"
                waiting.append(ask)
        return waiting

    def _end(self, ask: _Ask, error: PdOffloadError | None = None) -> None:
        with self._changed:
            if ask in self._asks:
                self._asks.remove(ask)
                ask.granted, ask.error = error is None, error
                self._changed.notify_all()

    def _make_room(self) -> None:
        """Evict until all that is asked for fits, and a little ahead."""
        if not self._lock.take():
            for ask in tuple(self._asks):
                ask.why = "another process, which evicts"
            return
        try:
            claims = self._claims
            resolve_dead(claims.ledger, self._space, self._clock, live=claims.owners)
            tally = self._evict()
        finally:
            self._lock.give()
        if tally.removed:
            _log.info(
                "%s: evicted %d files, %d bytes",
                self._space.base,
                tally.removed,
                tally.removed_bytes,
            )
            return
        if tally.refused:
            _log.info("%s: files cannot be evicted: %s", self._space.base, tally.refused[-1])
        for ask in self._grant():
            reason = f"no room for {ask.claim.size_bytes} bytes in {self!r}: {tally.why()}"
            self._end(ask, StorageFull(self._space.base, reason, errno.EDQUOT))

    def _evict(self) -> Tally:
        """Rounds of a few files each; those who have asked are served between two.

        What is stored meanwhile is not touched by this eviction.
        """
        begun_us, tally = self._now_us(), Tally()
        while len(tally.refused) < _MOST_REFUSED:
            wanted_bytes = sum(ask.claim.size_bytes for ask in self._grant())
            with self._changed:
                held, closed = set(self._held), self._closed
            if closed:
                break
            taken = self._claims.take_oldest(
                self._writer.owner(),
                min(self._low_bytes, self._max_bytes - wanted_bytes),
                spared=held,
                before_us=begun_us,
                most=_ROUND_FILES,
            )
            if taken is None:
                break
            claim, rows = taken
            removed, kept = remove_rows(self._space, rows, self._now_us(), tally)
            self._claims.settle({claim.id: kept})
            self.evicted.extend(row.key for row in removed)
        self._usage = self._claims.ledger.usage()
        return tally

    def _take_trouble(self, error: StorageError) -> None:
        for ask in tuple(self._asks):
            ask.why = str(error)
            if not isinstance(error, (*_PASSING, LedgerDamaged)):
                self._end(ask, error)
        if isinstance(error, LedgerDamaged):
            try:
                self._claims.make_anew(error, self._lock, self._clock)
            except StorageError as second:
                _log.warning("%s: its ledger cannot be made anew: %s", self._space.base, second)
        elif not isinstance(error, _PASSING):
            self._claims.ledger.close()
            if type(self._trouble) is not type(error):
                # Stores that fail by it say so loudly, once.
                _log.info("%s: the quota cannot be kept now: %s", self._space.base, error)
        self._trouble = error

    def _now_us(self) -> int:
        return int(self._clock.wall_s() * 1e6)


def _as_storage_error(path: str, error: Exception) -> StorageError:
    if isinstance(error, OSError):
        return StorageError.from_os_error(str(error.filename or path), error)
    return StorageError(path, f"{type(error).__name__}: {error}")


def _mark_used(path: str) -> None:
    try:
        os.utime(path)
    except OSError as error:
        _log.debug("%s cannot be marked as used: %s", path, error)
