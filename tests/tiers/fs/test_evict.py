from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.errors import StorageError
from pdoffload.layout import RunConfig
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.fs.evict import (
    EvictorLock,
    Removal,
    Tally,
    lock_for_reading,
    remove_rows,
    remove_unread,
    resolve_dead,
)
from pdoffload.tiers.fs.ledger import Claim, Ledger, Row
from pdoffload.tiers.fs.paths import Namespace, open_namespace
from pdoffload.tiers.fs.writer import WriterDir

KEYS = keys_of(*range(4))


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)


def test_the_lock_is_one_holders_and_never_waited_for(space: Namespace) -> None:
    one, two = EvictorLock(space), EvictorLock(space)
    assert one.take()
    assert not two.take()
    assert "held" in repr(one)
    one.give()
    one.give()
    assert two.take()
    two.give()


def test_a_lock_that_cannot_be_had_at_all_is_an_error(space: Namespace) -> None:
    Path(space.base, ".evict.lock").symlink_to("/nowhere")
    with pytest.raises(StorageError, match=r"evict\.lock"):
        EvictorLock(space).take()


def test_a_file_is_removed_once_its_last_reader_has_closed_it(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(b"kv")
    with open(path, "rb") as one, open(path, "rb") as two:
        lock_for_reading(one.fileno())
        lock_for_reading(two.fileno())
        assert remove_unread(str(path)) is Removal.BEING_READ
        one.close()
        assert remove_unread(str(path)) is Removal.BEING_READ
    assert remove_unread(str(path)) is Removal.REMOVED
    assert remove_unread(str(path)) is Removal.GONE


def test_a_reader_that_comes_while_the_file_goes_reads_it_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(b"kv")
    with open(path, "rb") as evictor, open(path, "rb") as reader:
        fcntl.flock(evictor, fcntl.LOCK_EX)
        lock_for_reading(reader.fileno())
        path.unlink()
        assert reader.read() == b"kv"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_without_locks_a_file_goes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(b"kv")

    def flock(_fd: int, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with open(path, "rb") as reader:
        lock_for_reading(reader.fileno())
        assert remove_unread(str(path)) is Removal.REMOVED


def test_a_link_in_a_chunks_place_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    link = tmp_path / "chunk"
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        remove_unread(str(link))
    assert target.read_bytes() == b"mine"


def test_a_fifo_does_not_hold_the_evictor(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chunk")
    assert remove_unread(str(tmp_path / "chunk")) is Removal.REMOVED


def test_what_stays_is_told_apart_and_counts_as_used_just_now(space: Namespace) -> None:
    gone, read, folder, plain = KEYS
    for key in (read, folder, plain):
        space.make_parents(space.path(key))
    os.mkdir(space.path(folder))
    for key in (read, plain):
        Path(space.path(key)).write_bytes(b"kv")
    tally = Tally()
    with open(space.path(read), "rb") as reader:
        lock_for_reading(reader.fileno())
        removed, kept = remove_rows(space, [Row(key, 2, 1) for key in KEYS], 77, tally)
    assert [row.key for row in removed] == [gone, plain]
    assert kept == [Row(read, 2, 77), Row(folder, 2, 77)]
    assert (tally.removed, tally.removed_bytes, tally.being_read) == (2, 4, 1)
    assert "1 files cannot be removed" in tally.why()


def test_only_claims_of_the_dead_are_settled(space: Namespace) -> None:
    writer = WriterDir(space)
    ledger = Ledger(space)
    ledger.open()
    space.make_parents(space.path(KEYS[0]))
    Path(space.path(KEYS[0])).write_bytes(bytes(33))
    ledger.claim(Claim.new(writer.owner(), 10, KEYS[2:3]), 10**6)
    ledger.claim(Claim.new("gone-1-abc", 100, KEYS[:2]), 10**6)
    ledger.claim(Claim.new("ours-but-unborn", 1000, KEYS[3:]), 10**6)
    assert resolve_dead(ledger, space, SYSTEM_CLOCK, live={"ours-but-unborn"}) == 1
    assert ledger.usage()[:2] == (33, 1010)
    assert resolve_dead(ledger, space, SYSTEM_CLOCK, live={"ours-but-unborn"}) == 0
    writer.close()
    assert resolve_dead(ledger, space, SYSTEM_CLOCK, live=()) == 2
    assert ledger.usage()[:2] == (33, 0)
    ledger.close()
