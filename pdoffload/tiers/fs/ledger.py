"""The ledger of a namespace: which chunk files stand there, how big they are, when each was last used.

    <base>/.ledger-v1.sqlite          (-journal)  one SQLite file, shared by every process of this host

    chunks   key, size, last use      one row per file; the least recently used first, by an index
    claims   owner, size, keys        what is being written or removed at this moment
    state    sum of the sizes         kept by triggers, so that it is exact with every change

A *claim* bridges what SQLite cannot do in one step with the disk. A writer claims the room before it opens
a file, and the rows take the claim's place after the rename. An evictor turns rows into a claim, unlinks,
and drops the claim. Whoever dies in between leaves a claim whose owner holds no lock any more: the next
evictor looks at its keys on the disk and enters what is really there. So files are counted before they
exist and until they are gone: what a crash leaves counts too much for a while, never too little.

Key order is hash order, so the rows of one folder `<hhh>` stand together.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from pdoffload.layout import BlockKey
from pdoffload.tiers.fs.ledger_file import LedgerBusy as LedgerBusy
from pdoffload.tiers.fs.ledger_file import LedgerDamaged as LedgerDamaged
from pdoffload.tiers.fs.ledger_file import LedgerFile, ended
from pdoffload.tiers.fs.ledger_file import LedgerReplaced as LedgerReplaced

_UPSERT = """
INSERT INTO chunks VALUES (?, ?, ?) ON CONFLICT (key)
DO UPDATE SET size_bytes = excluded.size_bytes, used_us = max(used_us, excluded.used_us)
"""


class Row(NamedTuple):
    """A chunk file as the ledger knows it."""

    key: BlockKey
    size_bytes: int
    used_us: int


class Claim(msgspec.Struct, frozen=True):
    """Room for `keys`, counted while they are written or removed. `owner` is a writer's folder."""

    id: int
    owner: str
    size_bytes: int
    keys: tuple[BlockKey, ...]

    @classmethod
    def new(cls, owner: str, size_bytes: int, keys: Iterable[BlockKey]) -> Claim:
        return cls(uuid.uuid4().int >> 65, owner, size_bytes, tuple(keys))


class Usage(NamedTuple):
    """What the ledger counts. `counted_us` is when the disk was last compared with it; 0: never."""

    used_bytes: int
    claimed_bytes: int
    counted_us: int

    @property
    def total_bytes(self) -> int:
        return self.used_bytes + self.claimed_bytes


class Ledger(LedgerFile):
    """The rows and claims. Every method is one transaction, and raises as `LedgerFile` says."""

    # --- what is counted ---

    def usage(self) -> Usage:
        with self.mapped():
            return _usage(self.current())

    def claim(self, claim: Claim, max_bytes: int) -> bool:
        """Set the room of `claim` aside, if everything stays within `max_bytes` by it."""
        with self.changing() as db:
            if _usage(db).total_bytes + claim.size_bytes > max_bytes:
                return False
            _enter(db, claim)
        return True

    def claim_again(self, claims: Iterable[Claim]) -> None:
        """Enter claims of this process in a ledger that was made anew."""
        with self.changing() as db:
            for claim in claims:
                _enter(db, claim)

    def settle(self, claims: Iterable[int], rows: Iterable[Row]) -> None:
        """Drop these claims, and enter what stands on the disk instead."""
        with self.changing() as db:
            db.executemany("DELETE FROM claims WHERE id = ?", ((number,) for number in claims))
            db.executemany(_UPSERT, rows)

    def mark_used(self, keys: Collection[BlockKey], used_us: int) -> list[Row]:
        """These were used at that time. The rows of those that are known, as they were before."""
        with self.changing() as db:
            known = _rows(db, keys)
            db.executemany(
                "UPDATE chunks SET used_us = max(used_us, ?) WHERE key = ?",
                ((used_us, row.key) for row in known),
            )
        return known

    def forget(self, keys: Iterable[BlockKey], seen_us: int) -> None:
        """No file of these keys was there at that time. What was stored since, or is being, stays."""
        with self.changing() as db:
            claimed = _claimed_keys(db)
            db.executemany(
                "DELETE FROM chunks WHERE key = ? AND used_us <= ?",
                ((key, seen_us) for key in keys if key not in claimed),
            )

    # --- what has to go ---

    def take_oldest(
        self,
        owner: str,
        goal_bytes: int,
        *,
        spared: Collection[BlockKey],
        before_us: int,
        most: int,
    ) -> tuple[Claim, list[Row]] | None:
        """Claim the least recently used chunks, until without them all is within `goal_bytes`.

        At most `most` of them, last used before `before_us`; neither `spared` ones nor those somebody
        claims. The spared ones count as used just then, so that they are not met again and again. None if
        nothing has to go, or nothing can.
        """
        with self.changing() as db:
            excess_bytes = _usage(db).total_bytes - goal_bytes
            claimed = _claimed_keys(db)
            taken: list[Row] = []
            passed: list[BlockKey] = []
            oldest = db.execute(
                "SELECT key, size_bytes, used_us FROM chunks WHERE used_us < ? ORDER BY used_us",
                (before_us,),
            )
            for key, size_bytes, used_us in oldest:
                if excess_bytes <= 0 or len(taken) >= most:
                    break
                if key in spared or key in claimed:
                    passed.append(key)
                    continue
                taken.append(Row(key, size_bytes, used_us))
                excess_bytes -= size_bytes
            oldest.close()
            db.executemany(
                "UPDATE chunks SET used_us = ? WHERE key = ?", ((before_us, key) for key in passed)
            )
            return _take(db, owner, taken)

    def take(self, owner: str, keys: Collection[BlockKey]) -> tuple[Claim, list[Row]] | None:
        """As `take_oldest`, for these keys as far as they are known and nobody claims them."""
        with self.changing() as db:
            claimed = _claimed_keys(db)
            return _take(db, owner, _rows(db, [key for key in keys if key not in claimed]))

    def claims(self) -> list[Claim]:
        """Everybody's. Few: one for each batch that is being written."""
        with self.mapped():
            rows = self.current().execute("SELECT id, owner, size_bytes, keys FROM claims")
            return [Claim(number, owner, size, _unpack(keys)) for number, owner, size, keys in rows]

    # --- comparing with the disk ---

    def between(self, first: str, last: str) -> tuple[dict[BlockKey, Row], set[BlockKey]]:
        """Rows of the chunks in the folders `first` to `last`, three hex digits each, and all that is
        claimed."""
        low, high = bytes.fromhex(f"{first}0"), int(last, 16) + 1
        until = bytes.fromhex(f"{high:03x}0") if high < 0x1000 else b"\xff" * 256
        with self.mapped():
            db = self.current()
            db.execute("BEGIN")
            with ended(db):
                rows = db.execute("SELECT * FROM chunks WHERE key >= ? AND key < ?", (low, until))
                return {row[0]: Row(*row) for row in rows}, _claimed_keys(db)

    def correct(self, there: Iterable[Row], gone: Iterable[Row]) -> None:
        """Enter files nobody had entered, and drop rows whose file is gone, unless they changed since."""
        with self.changing() as db:
            claimed = _claimed_keys(db)
            db.executemany(
                "DELETE FROM chunks WHERE key = ? AND used_us = ?",
                ((row.key, row.used_us) for row in gone if row.key not in claimed),
            )
            db.executemany(
                "INSERT OR IGNORE INTO chunks VALUES (?, ?, ?)",
                (row for row in there if row.key not in claimed),
            )

    def counted(self, now_us: int) -> None:
        """The whole disk was compared with the ledger."""
        with self.changing() as db:
            db.execute("UPDATE state SET counted_us = ?", (now_us,))


def _usage(db: sqlite3.Connection) -> Usage:
    found = db.execute(
        "SELECT used_bytes, (SELECT coalesce(sum(size_bytes), 0) FROM claims), counted_us FROM state"
    ).fetchone()
    return Usage(*found)


def _enter(db: sqlite3.Connection, claim: Claim) -> None:
    row = (claim.id, claim.owner, claim.size_bytes, msgspec.msgpack.encode(claim.keys))
    db.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?)", row)


def _unpack(keys: bytes) -> tuple[BlockKey, ...]:
    return tuple(map(BlockKey, msgspec.msgpack.decode(keys, type=tuple[bytes, ...])))


def _claimed_keys(db: sqlite3.Connection) -> set[BlockKey]:
    rows = db.execute("SELECT keys FROM claims").fetchall()
    return {key for (keys,) in rows for key in _unpack(keys)}


def _rows(db: sqlite3.Connection, keys: Iterable[BlockKey]) -> list[Row]:
    found = (db.execute("SELECT * FROM chunks WHERE key = ?", (key,)).fetchone() for key in keys)
    return [Row(*row) for row in found if row is not None]


def _take(db: sqlite3.Connection, owner: str, taken: list[Row]) -> tuple[Claim, list[Row]] | None:
    if not taken:
        return None
    claim = Claim.new(owner, sum(row.size_bytes for row in taken), (row.key for row in taken))
    db.executemany("DELETE FROM chunks WHERE key = ?", ((row.key,) for row in taken))
    _enter(db, claim)
    return claim, taken
