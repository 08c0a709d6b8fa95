"""The claims of one process in the ledger, over everything that may become of the ledger meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from pdoffload.clock import Clock
from pdoffload.errors import StorageError
from pdoffload.layout import BlockKey
from pdoffload.tiers.fs.evict import EvictorLock
from pdoffload.tiers.fs.ledger import Claim, Ledger, LedgerDamaged, Row
from pdoffload.tiers.fs.paths import Namespace
from pdoffload.tiers.fs.writer import sweep

_log = logging.getLogger(__name__)


class Claims:
    """A ledger, and what this process has claimed in it. One thread.

    A claim lives until its settlement stands in the ledger; a settlement that could not be written is kept
    and goes with the next. Where the ledger was made anew, what lives is claimed in it again. Methods raise
    `StorageError` as the ledger's do.
    """

    def __init__(self, space: Namespace) -> None:
        self.ledger = Ledger(space)
        self._space = space
        self._live: dict[int, Claim] = {}
        self._unsettled: dict[int, list[Row]] = {}

    def __repr__(self) -> str:
        return f"<Claims {len(self._live)} live, {len(self._unsettled)} to be settled>"

    @property
    def owners(self) -> set[str]:
        """Owners known to live, because they are us."""
        return {claim.owner for claim in self._live.values()}

    @property
    def wait(self) -> bool:
        """Something could not be written down yet."""
        return bool(self._unsettled)

    def open(self) -> None:
        """Open the ledger if it is not open."""
        if not self.ledger.open() or not self._live:
            return
        try:
            self.ledger.claim_again(self._live.values())
        except StorageError:
            self.ledger.close()
            raise

    def claim(self, claim: Claim, max_bytes: int) -> bool:
        """As `Ledger.claim`."""
        granted = self.ledger.claim(claim, max_bytes)
        if granted:
            self._live[claim.id] = claim
        return granted

    def take_oldest(
        self,
        owner: str,
        goal_bytes: int,
        *,
        spared: Collection[BlockKey],
        before_us: int,
        most: int,
    ) -> tuple[Claim, list[Row]] | None:
        """As `Ledger.take_oldest`."""
        taken = self.ledger.take_oldest(
            owner, goal_bytes, spared=spared, before_us=before_us, most=most
        )
        if taken is not None:
            self._live[taken[0].id] = taken[0]
        return taken

    def settle(self, settled: Mapping[int, Iterable[Row]]) -> None:
        """Enter what stands on the disk instead of these claims, by their numbers."""
        self._unsettled |= {number: list(rows) for number, rows in settled.items()}
        if not self._unsettled:
            return
        rows = [row for each in self._unsettled.values() for row in each]
        self.ledger.settle(self._unsettled, rows)
        for number in self._unsettled:
            self._live.pop(number, None)
        self._unsettled = {}

    def make_anew(self, error: LedgerDamaged, lock: EvictorLock, clock: Clock) -> None:
        """Take a damaged ledger away, unless another process is just about to.

        What dead processes claimed in it is lost, so their unfinished files go now.
        """
        self.ledger.close()
        if not lock.take():
            return
        try:
            _log.warning("%s; it is made anew from the files there are", error)
            self.ledger.remove()
            sweep(self._space, clock)
        finally:
            lock.give()
