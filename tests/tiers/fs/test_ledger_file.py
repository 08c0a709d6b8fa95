from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.errors import StorageError, StorageFull
from pdoffload.layout import RunConfig
from pdoffload.tiers.fs import ledger_file
from pdoffload.tiers.fs.ledger_file import LedgerBusy, LedgerDamaged, LedgerFile, LedgerReplaced
from pdoffload.tiers.fs.paths import Namespace, open_namespace


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o640)


@pytest.fixture
def ledger(space: Namespace) -> Iterator[LedgerFile]:
    made = LedgerFile(space)
    yield made
    made.close()


def test_it_is_made_once_and_opened_again(ledger: LedgerFile) -> None:
    assert ledger.open()
    assert not ledger.open()
    ledger.close()
    assert "closed" in repr(ledger)
    assert ledger.open()


def test_it_has_the_mode_of_chunk_files_whatever_the_umask(space: Namespace) -> None:
    before = os.umask(0o077)
    try:
        ledger = LedgerFile(Namespace.found(space.base, 0o640))
        ledger.open()
        ledger.close()
    finally:
        os.umask(before)
    assert os.stat(ledger.path).st_mode & 0o777 == 0o640


def test_a_transaction_is_all_or_nothing(ledger: LedgerFile) -> None:
    ledger.open()
    with contextlib.suppress(ZeroDivisionError), ledger.changing() as db:
        db.execute("UPDATE state SET counted_us = 7")
        raise ZeroDivisionError
    with ledger.changing() as db:
        assert db.execute("SELECT counted_us FROM state").fetchone() == (0,)


@pytest.mark.parametrize("content", [b"no database" * 99, bytes(8192), b"SQLite format 3\0" * 300])
def test_what_is_no_ledger_is_damaged_and_can_be_removed(
    ledger: LedgerFile, content: bytes
) -> None:
    Path(ledger.path).write_bytes(content)
    with pytest.raises(LedgerDamaged):
        ledger.open()
    ledger.remove()
    assert ledger.open()


def test_a_ledger_without_its_tables_is_damaged(ledger: LedgerFile) -> None:
    db = sqlite3.connect(ledger.path, isolation_level=None)
    db.execute("PRAGMA user_version = 1")
    db.execute("CREATE TABLE something (other)")
    db.close()
    with pytest.raises(LedgerDamaged, match="no such table"):
        ledger.open()


def test_after_a_start_of_the_machine_it_is_checked(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.open()
    with ledger.changing() as db:
        db.executemany(
            "INSERT INTO chunks VALUES (?, 1, ?)", ((b"%020d" % each, each) for each in range(5000))
        )
    ledger.close()
    size = os.path.getsize(ledger.path)
    with open(ledger.path, "r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(os.urandom(4096))
    ledger.open()
    ledger.close()
    monkeypatch.setattr(ledger_file, "_boot_id", lambda: "another start")
    with pytest.raises(LedgerDamaged):
        ledger.open()


def test_a_file_that_was_replaced_is_noticed(ledger: LedgerFile) -> None:
    with pytest.raises(LedgerReplaced, match="not open"), ledger.changing():
        pass
    ledger.open()
    Path(f"{ledger.path}.new").touch()
    os.replace(f"{ledger.path}.new", ledger.path)
    with pytest.raises(LedgerReplaced, match="made anew"), ledger.changing():
        pass
    assert ledger.open()


def test_a_lock_is_waited_for_a_moment_only(ledger: LedgerFile) -> None:
    ledger.open()
    holder = sqlite3.connect(ledger.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusy), ledger.changing():
        pass
    holder.close()
    with ledger.changing():
        pass


@pytest.mark.parametrize(
    ("code", "kind", "number"),
    [
        (sqlite3.SQLITE_FULL, StorageFull, errno.ENOSPC),
        (sqlite3.SQLITE_READONLY, StorageError, errno.EROFS),
        (sqlite3.SQLITE_IOERR_FSYNC, StorageError, errno.EIO),
        (sqlite3.SQLITE_CANTOPEN, StorageError, errno.EIO),
        (sqlite3.SQLITE_CORRUPT_INDEX, LedgerDamaged, None),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, LedgerBusy, errno.EAGAIN),
    ],
)
def test_what_sqlite_says_becomes_an_error_of_ours(
    ledger: LedgerFile, code: int, kind: type[StorageError], number: int | None
) -> None:
    error = sqlite3.OperationalError("so it is")
    error.sqlite_errorcode = code
    with pytest.raises(StorageError) as caught, ledger.mapped():
        raise error
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert ledger.path in str(caught.value)


def test_a_namespace_that_is_gone_is_made_again(space: Namespace, ledger: LedgerFile) -> None:
    os.rmdir(f"{space.base}/.tmp")
    os.rmdir(space.base)
    ledger.open()
    assert os.path.exists(ledger.path)
