"""Removing chosen files of a namespace for `pdoffload gc`, as an engine's evictor would."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from pdoffload.clock import Clock
from pdoffload.errors import DeadlineExceeded, StorageError
from pdoffload.layout import BlockKey
from pdoffload.tiers.fs.evict import LOCK_NAME, EvictorLock, Tally, remove_rows, resolve_dead
from pdoffload.tiers.fs.ledger import Claim, Ledger, LedgerBusy, Row
from pdoffload.tiers.fs.paths import Namespace
from pdoffload.tiers.fs.quota import TOUCH_GRAIN_S
from pdoffload.tiers.fs.writer import WriterDir

_BATCH = 64
_PATIENCE_S = 30.0
_PAUSE_S = 0.02
_GRAIN_S = 1.0
"""Times of files are coarser than a clock on some file systems."""
_T = TypeVar("_T")


class Remover:
    """One namespace's removal. Batch by batch, so that an engine's stores come in between.

    Raises `StorageError` where the evictor's lock cannot be had.
    """

    def __init__(self, space: Namespace, clock: Clock) -> None:
        self.tally = Tally()
        self.kept_in_use = 0
        self.problems: list[str] = []
        self._space = space
        self._clock = clock
        self._lock = EvictorLock(space)
        self._writer = WriterDir(space)
        ledger = Ledger(space)
        # Where there is none, no engine with a quota has been here.
        self._ledger = ledger if os.path.exists(ledger.path) else None
        _make_lock_file(space)

    def __repr__(self) -> str:
        return f"<Remover {self._space.base}: {self.tally!r}>"

    def remove(self, used_s: Mapping[BlockKey, float]) -> None:
        """Remove the files of these keys, unless one was used since the time given for it."""
        for keys in _batches(list(used_s)):
            self._patiently(self._take_lock, "the lock of another process, which evicts")
            try:
                self._remove_batch(keys, used_s)
            finally:
                self._lock.give()
        if self.tally.refused:
            self.problems.append(
                f"{len(self.tally.refused)} files cannot be removed: {self.tally.refused[-1]}"
            )
        self.kept_in_use += self.tally.being_read

    def _take_lock(self) -> None:
        if not self._lock.take():
            raise LedgerBusy(self._space.base, "another process evicts")

    def _remove_batch(self, keys: Sequence[BlockKey], used_s: Mapping[BlockKey, float]) -> None:
        now_us = int(self._clock.wall_s() * 1e6)
        ledger = self._ledger
        taken = None
        if ledger is not None:
            try:
                taken = self._patiently(lambda: self._claim(ledger, keys), "the ledger")
            except (StorageError, DeadlineExceeded) as error:
                self._give_up_ledger(error)
        rows = {row.key: row for row in taken[1]} if taken else {}
        written = self._claimed_by_others(keys) - rows.keys()
        unused, kept = [], []
        for key in keys:
            row = rows.get(key)
            if key in written or self._used_since(key, row, used_s[key]):
                self.kept_in_use += 1
                if row is not None:
                    kept.append(row)
            else:
                unused.append(row or Row(key, self._size(key), 0))
        _, stay = remove_rows(self._space, unused, now_us, self.tally)
        if taken is not None and ledger is not None:
            kept += (row for row in stay if row.key in rows)
            claim = taken[0]
            try:
                self._patiently(lambda: ledger.settle((claim.id,), kept), "the ledger")
            except (StorageError, DeadlineExceeded) as error:
                # An engine settles it from the disk, once this process has ended.
                self._give_up_ledger(error)

    def _claim(self, ledger: Ledger, keys: Sequence[BlockKey]) -> tuple[Claim, list[Row]] | None:
        if ledger.open():
            resolve_dead(ledger, self._space, self._clock, live=())
        return ledger.take(self._writer.owner(), keys)

    def _claimed_by_others(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Those that an engine writes anew at this moment."""
        ledger = self._ledger
        if ledger is None:
            return set()
        try:
            claims = self._patiently(ledger.claims, "the ledger")
        except (StorageError, DeadlineExceeded) as error:
            self._give_up_ledger(error)
            return set()
        return {key for claim in claims for key in claim.keys} & set(keys)

    def _give_up_ledger(self, error: Exception) -> None:
        self.problems.append(f"engines learn of it by their next count of the files only: {error}")
        if self._ledger is not None:
            self._ledger.close()
        self._ledger = None

    def _used_since(self, key: BlockKey, row: Row | None, used_s: float) -> bool:
        try:
            status = os.lstat(self._space.path(key))
        except OSError:
            return False
        if row is not None and row.used_us / 1e6 > used_s + TOUCH_GRAIN_S + _GRAIN_S:
            return True
        return status.st_mtime > used_s + _GRAIN_S

    def _size(self, key: BlockKey) -> int:
        try:
            return os.lstat(self._space.path(key)).st_size
        except OSError:
            return 0

    def _patiently(self, work: Callable[[], _T], what: str) -> _T:
        until_s = self._clock.monotonic_s() + _PATIENCE_S
        while True:
            try:
                return work()
            except LedgerBusy as error:
                if self._clock.monotonic_s() > until_s:
                    raise DeadlineExceeded(what, _PATIENCE_S) from error
            self._clock.sleep(_PAUSE_S)

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
        self._writer.close()


def _batches(keys: list[BlockKey]) -> Iterator[list[BlockKey]]:
    for start in itertools.count(0, _BATCH):
        if start >= len(keys):
            return
        yield keys[start : start + _BATCH]


def _make_lock_file(space: Namespace) -> None:
    """The evictor's lock has to stay usable for the engines, whoever runs this."""
    path = f"{space.base}/{LOCK_NAME}"
    owner = os.stat(space.base)
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, space.file_mode)
    except FileExistsError:
        return
    try:
        os.fchmod(fd, space.file_mode)
        if os.geteuid() == 0 and owner.st_uid != 0:
            os.fchown(fd, owner.st_uid, owner.st_gid)
    finally:
        os.close(fd)
