"""The ledger's file: made, opened, checked, locked. What stands in it is `ledger`'s.

Rollback journal and not WAL: WAL keeps its index in a mapped file, and a mapped file that somebody cuts, or
whose disk goes away, is a SIGBUS for the engine instead of an error. Nothing is synced: a killed process
loses nothing by that, and the first opener after a start of the machine checks the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator

from pdoffload.errors import StorageError, StorageFull
from pdoffload.tiers.fs.mounts import host_name, network_type
from pdoffload.tiers.fs.paths import Namespace

_BUSY_S = 0.25
"""How long one attempt waits for another process's transaction, which takes a millisecond."""
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE chunks (
    key BLOB PRIMARY KEY, size_bytes INTEGER NOT NULL, used_us INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX chunks_by_use ON chunks (used_us);
CREATE TABLE claims (
    id INTEGER PRIMARY KEY, owner TEXT NOT NULL, size_bytes INTEGER NOT NULL, keys BLOB NOT NULL
);
CREATE TABLE state (used_bytes INTEGER NOT NULL, counted_us INTEGER NOT NULL, boot TEXT NOT NULL);
INSERT INTO state VALUES (0, 0, '');
CREATE TRIGGER chunk_added AFTER INSERT ON chunks
BEGIN UPDATE state SET used_bytes = used_bytes + new.size_bytes; END;
CREATE TRIGGER chunk_removed AFTER DELETE ON chunks
BEGIN UPDATE state SET used_bytes = used_bytes - old.size_bytes; END;
CREATE TRIGGER chunk_resized AFTER UPDATE OF size_bytes ON chunks
BEGIN UPDATE state SET used_bytes = used_bytes + new.size_bytes - old.size_bytes; END;
"""


class LedgerDamaged(StorageError):
    """The file is no ledger, or not a sound one. It has to be made anew from the disk."""


class LedgerBusy(StorageError):
    """Another process keeps the ledger locked."""


class LedgerReplaced(StorageError):
    """The file was removed or made anew by somebody: what was claimed in it has to be claimed again."""


def ledger_path(space: Namespace) -> str:
    """Where the ledger lies. On a network file system each host has its own: SQLite's locks, and those
    that tell whether an owner lives, hold on one host."""
    host = f"-{host_name()}" if network_type(space.base) else ""
    return f"{space.base}/.ledger-v{_SCHEMA_VERSION}{host}.sqlite"


class LedgerFile:
    """One connection. Owned by the thread that opens it; another thread opens another one.

    Every method raises `StorageError` as SQLite or the system says (`StorageFull` where the disk is full),
    and the three classes above. After any of them the ledger is as it was before the call.
    """

    def __init__(self, space: Namespace) -> None:
        self.path = ledger_path(space)
        self._space = space
        self._inode = 0
        self._db: sqlite3.Connection | None = None

    def __repr__(self) -> str:
        return f"<Ledger {self.path}{'' if self._db else ': closed'}>"

    def open(self) -> bool:
        """Open the file, or make it. False where it is open already."""
        if self._db is not None:
            return False
        self._create_file()
        with self.mapped():
            db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
            try:
                self._set_up(db)
                self._inode = os.stat(self.path).st_ino
            except BaseException:
                db.close()
                raise
            self._db = db
        return True

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _create_file(self) -> None:
        # Never opened and closed here once it exists: closing any descriptor of a file drops the locks
        # that SQLite holds on it for this process.
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        with self.mapped():
            try:
                # A namespace that somebody removed is made again, as by the first store without a quota.
                self._space.make_dir(self._space.base)
                fd = os.open(self.path, flags, self._space.file_mode)
            except FileExistsError:
                return
            try:
                if self._space.chmod_needed:
                    os.fchmod(fd, self._space.file_mode)
            finally:
                os.close(fd)

    def _set_up(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA journal_mode = TRUNCATE")
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute("BEGIN IMMEDIATE")
        with ended(db):
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if not version:
                for statement in _statements(_SCHEMA):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            (boot,) = db.execute("SELECT boot FROM state").fetchone()
            now = _boot_id()
            if boot != now:
                # The machine was started since: after a power failure pages may be missing.
                (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
                if found != "ok":
                    raise LedgerDamaged(self.path, f"is damaged: {found}")
                db.execute("UPDATE state SET boot = ?", (now,))

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it or nothing."""
        with self.mapped():
            db = self.current()
            db.execute("BEGIN IMMEDIATE")
            with ended(db):
                yield db

    def current(self) -> sqlite3.Connection:
        if self._db is None:
            raise LedgerReplaced(self.path, "is not open")
        try:
            inode = os.stat(self.path).st_ino
        except FileNotFoundError:
            inode = 0
        if inode != self._inode:
            self.close()
            raise LedgerReplaced(self.path, "was removed or made anew by somebody")
        return self._db

    @contextlib.contextmanager
    def mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _ours(self.path, error) from error
        except OSError as error:
            raise StorageError.from_os_error(self.path, error) from error

    def remove(self) -> None:
        """Take the damaged file away; the next `open` makes a new one. Under the evictor's lock."""
        self.close()
        for path in (f"{self.path}-journal", self.path):
            with self.mapped(), contextlib.suppress(FileNotFoundError):
                os.unlink(path)


@contextlib.contextmanager
def ended(db: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """Its statements one by one: SQLite's own way to run a script ends the transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _boot_id() -> str:
    """Changes when the machine is started anew. Always the same where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def _ours(path: str, error: sqlite3.Error) -> StorageError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LedgerBusy(path, "another process keeps it locked", errno.EAGAIN)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
        return LedgerDamaged(path, f"is damaged: {error}")
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(path, str(error), errno.ENOSPC)
    if code == sqlite3.SQLITE_READONLY or _is_read_only(path):
        # Which SQLite may call an I/O error, when the disk turned read-only under an open file.
        return StorageError(path, os.strerror(errno.EROFS), errno.EROFS)
    return StorageError(path, str(error), errno.EIO)


def _is_read_only(path: str) -> bool:
    try:
        return bool(os.statvfs(os.path.dirname(path)).f_flag & os.ST_RDONLY)
    except OSError:
        return False
