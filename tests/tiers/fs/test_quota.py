from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.errors import DeadlineExceeded, StorageError, StorageFull
from pdoffload.layout import BlockKey, RunConfig
from pdoffload.testing.tier_rig import PATIENCE_S, ShiftedClock, keys_of
from pdoffload.tiers.fs import recount as recount_module
from pdoffload.tiers.fs.evict import LOCK_NAME, lock_for_reading
from pdoffload.tiers.fs.ledger import Claim, Ledger, Usage
from pdoffload.tiers.fs.paths import Namespace, open_namespace
from pdoffload.tiers.fs.quota import AHEAD_SHARE, COUNT_EVERY_S, TOUCH_GRAIN_S, Quota
from pdoffload.tiers.fs.writer import WriterDir

SIZE = 1000
KEYS = keys_of(*range(60))


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)


@contextlib.contextmanager
def quota_of(space: Namespace, chunks: float, clock: ShiftedClock | None = None) -> Iterator[Quota]:
    writer = WriterDir(space)
    quota = Quota(space, writer, int(chunks * SIZE), clock or ShiftedClock())
    try:
        yield quota
    finally:
        quota.close(timeout_s=10)
        writer.close()


def write(space: Namespace, keys: Sequence[BlockKey], first_age_s: int = 10_000) -> None:
    """A file per key, as another program would write it, each used a second after the one before."""
    for number, key in enumerate(keys):
        path = space.path(key)
        space.make_parents(path)
        Path(path).write_bytes(bytes(SIZE))
        used_s = SYSTEM_CLOCK.wall_s() - first_age_s + number
        os.utime(path, (used_s, used_s))


def store(space: Namespace, quota: Quota, *keys: BlockKey) -> None:
    """As the tier stores: claim, write, tell."""
    claim = quota.reserve(keys, len(keys) * SIZE, timeout_s=PATIENCE_S)
    write(space, keys, first_age_s=0)
    quota.wrote(claim, keys, SIZE)


def fits(quota: Quota, chunks: int, timeout_s: float = PATIENCE_S) -> None:
    """Ask for room and give it back: what had to go for it has gone then."""
    quota.wrote(quota.reserve(keys_of("fits"), chunks * SIZE, timeout_s=timeout_s), (), SIZE)


def mark_used(quota: Quota, *keys: BlockKey) -> None:
    """Say that they were used, and wait until that is written down: an ask may be granted in a turn of the
    quota's thread that began before; the next one is not."""
    quota.used(keys)
    fits(quota, 1)
    fits(quota, 1)


def left(space: Namespace) -> set[BlockKey]:
    return {key for key in KEYS if os.path.exists(space.path(key))}


def usage(space: Namespace) -> Usage:
    """What the ledger counts at this moment."""
    ledger = Ledger(space)
    ledger.open()
    try:
        return ledger.usage()
    finally:
        ledger.close()


def until_used(space: Namespace, chunks: int) -> None:
    until_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
    while (found := usage(space))[:2] != (chunks * SIZE, 0):
        assert SYSTEM_CLOCK.monotonic_s() < until_s, found
        SYSTEM_CLOCK.sleep(0.005)


# --- least recently used first ---


def test_the_least_recently_used_files_go_first_and_a_little_ahead(space: Namespace) -> None:
    write(space, KEYS[:20])
    with quota_of(space, 20) as quota:
        fits(quota, 1)
        until_used(space, 19 - int(20 * AHEAD_SHARE))
        kept = left(space)
        assert kept == set(KEYS[20 - len(kept) : 20])
        assert set(quota.evicted) == set(KEYS[:20]) - kept


def test_there_is_room_for_what_was_asked_even_beyond_what_is_made_ahead(space: Namespace) -> None:
    write(space, KEYS[:20])
    with quota_of(space, 20) as quota:
        fits(quota, 8)
        assert left(space) <= set(KEYS[8:20])


def test_nothing_is_evicted_while_there_is_room(space: Namespace) -> None:
    write(space, KEYS[:10])
    with quota_of(space, 20) as quota:
        fits(quota, 10)
        assert len(left(space)) == 10
        until_used(space, 10)


def test_a_quota_that_is_passed_when_the_tier_opens_is_kept_without_any_store(
    space: Namespace,
) -> None:
    write(space, KEYS[:30])
    with quota_of(space, 10):
        until_used(space, 9)
        assert left(space) == set(KEYS[21:30])


def test_a_use_counts_whether_the_file_was_stored_here_or_found(space: Namespace) -> None:
    write(space, KEYS[:5])
    with quota_of(space, 12) as quota:
        store(space, quota, *KEYS[5:10])
        mark_used(quota, KEYS[0], KEYS[5], *keys_of("absent"))
        fits(quota, 10)
        assert left(space) <= {KEYS[0], KEYS[5]}
        assert left(space)


def test_a_use_is_written_on_the_file_too_but_not_every_time(space: Namespace) -> None:
    clock = ShiftedClock()
    clock.shift_s = TOUCH_GRAIN_S - clock.wall_s() % TOUCH_GRAIN_S
    write(space, KEYS[:1])
    path = space.path(KEYS[0])
    with quota_of(space, 10, clock) as quota:
        fits(quota, 1)
        mark_used(quota, KEYS[0])
        first_s = os.stat(path).st_mtime
        assert SYSTEM_CLOCK.wall_s() - first_s < 60
        os.utime(path, (7, 7))
        mark_used(quota, KEYS[0])
        assert os.stat(path).st_mtime == 7
        clock.shift_s += TOUCH_GRAIN_S
        mark_used(quota, KEYS[0])
        assert os.stat(path).st_mtime > 7


# --- exactness ---


def test_claims_count_until_they_are_written_or_void(space: Namespace) -> None:
    with quota_of(space, 10) as quota:
        claim = quota.reserve(KEYS[:6], 6 * SIZE, timeout_s=PATIENCE_S)
        with pytest.raises(StorageFull, match="being read or written") as caught:
            quota.reserve(KEYS[6:12], 6 * SIZE, timeout_s=PATIENCE_S)
        assert caught.value.errno == errno.EDQUOT
        quota.wrote(claim, (), SIZE)
        store(space, quota, *KEYS[:6])
        until_used(space, 6)
        assert "of 10000 bytes used" in repr(quota)


def test_what_can_never_fit_is_refused_at_once(space: Namespace) -> None:
    write(space, KEYS[:5])
    with quota_of(space, 10) as quota:
        with pytest.raises(StorageFull, match=r"11000 .* 10000"):
            quota.reserve(KEYS[:11], 11 * SIZE, timeout_s=PATIENCE_S)
        assert len(left(space)) == 5


def test_a_claim_that_came_too_late_is_void(space: Namespace) -> None:
    """Nobody waits for it any more, so nobody would ever say that it was written."""
    with quota_of(space, 10) as quota:
        with contextlib.suppress(DeadlineExceeded):
            quota.wrote(quota.reserve(KEYS[:4], 4 * SIZE, timeout_s=0.0), (), SIZE)
        until_used(space, 0)


def test_two_quotas_on_one_root_count_together(space: Namespace) -> None:
    with quota_of(space, 10) as one, quota_of(space, 10) as two:
        store(space, one, *KEYS[:5])
        store(space, two, *KEYS[5:10])
        until_used(space, 10)
        store(space, one, KEYS[10])
        assert len(left(space)) <= 10
        gone = {*KEYS[:11]} - left(space)
        assert gone <= {*KEYS[:5]}, "the oldest, whoever stored it"
        assert KEYS[4] in gone, "and of those the end of the prefix"


def test_usage_is_exact_after_a_restart_without_any_walk(space: Namespace) -> None:
    with quota_of(space, 10) as quota:
        store(space, quota, *KEYS[:7])
    assert usage(space)[:2] == (7 * SIZE, 0)


def test_files_that_another_program_put_there_or_removed_are_counted_in_the_end(
    space: Namespace,
) -> None:
    clock = ShiftedClock()
    with quota_of(space, 100, clock) as quota:
        store(space, quota, *KEYS[:10])
        until_used(space, 10)
        write(space, KEYS[20:25])
        for key in KEYS[:3]:
            os.unlink(space.path(key))
        clock.shift_s = COUNT_EVERY_S + 1
        store(space, quota, KEYS[11])
        until_used(space, 10 - 3 + 5 + 1)


def test_a_file_that_was_found_missing_is_no_longer_counted(space: Namespace) -> None:
    with quota_of(space, 10) as quota:
        store(space, quota, *KEYS[:3])
        os.unlink(space.path(KEYS[0]))
        quota.gone(KEYS[:2])
        until_used(space, 2)


def test_only_chunk_files_are_counted_and_evicted(space: Namespace) -> None:
    write(space, KEYS[:4])
    folder = os.path.dirname(space.path(KEYS[0]))
    strangers = [
        Path(folder, "notes.txt"),
        Path(folder, "abc.bin.1.tmp"),
        Path(folder, f"{'00' * 32}.bin"),
        Path(space.base, "README"),
        Path(space.base, ".tmp", "0.part"),
        Path(space.config_dir, "config.json"),
    ]
    for path in strangers:
        path.write_bytes(bytes(10 * SIZE))
        os.utime(path, (1, 1))
    with quota_of(space, 4) as quota:
        fits(quota, 4)
        assert left(space) == set()
        assert all(path.exists() for path in strangers)


# --- what is being read or written ---


def test_files_about_to_be_read_here_are_never_evicted(space: Namespace) -> None:
    write(space, KEYS[:10])
    with quota_of(space, 10) as quota:
        quota.hold(KEYS[:3])
        quota.hold(KEYS[:1])
        fits(quota, 7)
        assert left(space) == set(KEYS[:3])
        with pytest.raises(StorageFull):
            fits(quota, 8)
        quota.let_go(KEYS[:3])
        fits(quota, 9)
        assert left(space) == set(KEYS[:1]), "held twice, let go once"


def test_a_file_that_anybody_reads_is_not_evicted(space: Namespace) -> None:
    write(space, KEYS[:10])
    with quota_of(space, 10) as quota, open(space.path(KEYS[0]), "rb") as reader:
        lock_for_reading(reader.fileno())
        fits(quota, 9)
        assert left(space) == {KEYS[0]}
        with pytest.raises(StorageFull, match="1 met"):
            fits(quota, 10)
        reader.close()
        fits(quota, 10)
        assert left(space) == set()


def test_a_chunk_that_is_written_anew_is_not_evicted_meanwhile(space: Namespace) -> None:
    with quota_of(space, 10) as quota:
        store(space, quota, *KEYS[:2])
        claim = quota.reserve(KEYS[:1], SIZE, timeout_s=PATIENCE_S)
        fits(quota, 8)
        assert left(space) == {KEYS[0]}
        quota.wrote(claim, KEYS[:1], SIZE)
        until_used(space, 1)


# --- one evictor, and one that is stuck ---


@contextlib.contextmanager
def locked(space: Namespace, name: str) -> Iterator[None]:
    fd = os.open(f"{space.base}/{name}", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def test_only_one_process_evicts_at_a_time(space: Namespace) -> None:
    write(space, KEYS[:10])
    with quota_of(space, 10) as quota:
        fits(quota, 0)
        with locked(space, LOCK_NAME):
            with pytest.raises(DeadlineExceeded, match="another process, which evicts"):
                fits(quota, 1, timeout_s=0.5)
            assert len(left(space)) == 10
        fits(quota, 1)
        assert len(left(space)) < 10


def test_an_evictor_that_hangs_does_not_stop_a_store_that_fits(space: Namespace) -> None:
    write(space, KEYS[:10])
    with locked(space, LOCK_NAME), quota_of(space, 20) as quota:
        fits(quota, 1)


def test_closing_lets_writers_go(space: Namespace) -> None:
    write(space, KEYS[:10])
    errors: list[BaseException] = []

    def ask(quota: Quota) -> None:
        try:
            quota.reserve(KEYS[20:21], SIZE, timeout_s=60)
        except StorageError as error:
            errors.append(error)

    with locked(space, LOCK_NAME):
        with quota_of(space, 10) as quota:
            writer = threading.Thread(target=ask, args=(quota,))
            writer.start()
        writer.join(10)
    assert "closed" in str(errors)


def test_a_quota_that_refuses_still_takes_in_what_was_written(space: Namespace) -> None:
    """So a tier that closes does not wait for who waits for room, and forgets no file."""
    with quota_of(space, 10) as quota:
        claim = quota.reserve(KEYS[:3], 3 * SIZE, timeout_s=PATIENCE_S)
        quota.refuse()
        with pytest.raises(StorageError, match="closed"):
            quota.reserve(KEYS[3:4], SIZE, timeout_s=PATIENCE_S)
        write(space, KEYS[:3])
        quota.wrote(claim, KEYS[:3], SIZE)
        until_used(space, 3)


# --- the dead ---


def test_what_a_dead_process_claimed_is_settled_by_the_next_eviction(space: Namespace) -> None:
    """It had written one file of three when it died, and removed one of two."""
    ledger = Ledger(space)
    ledger.open()
    writing = Claim.new("host-1-dead", 3 * SIZE, KEYS[:3])
    removing = Claim.new("host-1-dead", 2 * SIZE, KEYS[3:5])
    assert ledger.claim(writing, 10 * SIZE)
    assert ledger.claim(removing, 10 * SIZE)
    ledger.close()
    write(space, (KEYS[0], KEYS[3]))
    folder = Path(space.base, ".tmp", "host-1-dead")
    folder.mkdir()
    Path(folder, ".lock").touch()
    with quota_of(space, 10) as quota:
        fits(quota, 7)
        until_used(space, 2)
        assert left(space) == {KEYS[0], KEYS[3]}


def test_what_a_living_process_claimed_is_not(space: Namespace) -> None:
    other = WriterDir(space)
    ledger = Ledger(space)
    ledger.open()
    assert ledger.claim(Claim.new(other.owner(), 5 * SIZE, KEYS[:5]), 10 * SIZE)
    ledger.close()
    with quota_of(space, 10) as quota:
        with pytest.raises(StorageFull):
            fits(quota, 8)
        other.close()
        fits(quota, 8)


# --- a ledger in trouble ---


def test_a_damaged_ledger_is_made_anew_from_the_disk(
    space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    with quota_of(space, 10) as quota:
        store(space, quota, *KEYS[:4])
        path = Ledger(space).path
    Path(path).write_bytes(b"not a database at all" * 500)
    with quota_of(space, 10) as quota:
        fits(quota, 1)
        until_used(space, 4)
    assert "made anew" in caplog.text


@pytest.mark.parametrize("how", ["damaged", "removed", "emptied", "replaced"])
def test_a_ledger_that_is_spoilt_while_it_is_in_use_costs_a_count(
    space: Namespace, how: str
) -> None:
    with quota_of(space, 20) as one, quota_of(space, 20) as two:
        store(space, one, *KEYS[:4])
        claim = two.reserve(KEYS[4:8], 4 * SIZE, timeout_s=PATIENCE_S)
        until_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
        while usage(space)[:2] != (4 * SIZE, 4 * SIZE):
            assert SYSTEM_CLOCK.monotonic_s() < until_s
        path = Path(Ledger(space).path)
        if how == "damaged":
            with open(path, "r+b") as file:
                file.write(b"\0" * path.stat().st_size)
        elif how == "removed":
            path.unlink()
        elif how == "emptied":
            os.truncate(path, 0)
        else:
            Path(f"{path}.new").write_bytes(b"")
            os.replace(f"{path}.new", path)
        fits(one, 1)
        write(space, KEYS[4:8], first_age_s=0)
        two.wrote(claim, KEYS[4:8], SIZE)
        fits(two, 1)
        until_used(space, 8)


def test_a_ledger_that_somebody_keeps_locked_ends_stores_at_their_deadline(
    space: Namespace,
) -> None:
    with quota_of(space, 10) as quota:
        fits(quota, 1)
        holder = sqlite3.connect(Ledger(space).path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(DeadlineExceeded, match="keeps it locked"):
            quota.reserve(KEYS[:1], SIZE, timeout_s=1.0)
        holder.execute("ROLLBACK")
        holder.close()
        store(space, quota, KEYS[0])
        until_used(space, 1)


def test_a_ledger_that_cannot_be_made_ends_stores_at_once_with_the_reason(
    space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    path = Ledger(space).path
    os.mkdir(path)
    caplog.set_level("INFO")
    with quota_of(space, 10) as quota:
        for number in range(3):
            with pytest.raises(StorageError, match=r"\.ledger"):
                quota.reserve(KEYS[number : number + 1], SIZE, timeout_s=PATIENCE_S)
        assert caplog.text.count("cannot be kept now") == 1
        os.rmdir(path)
        fits(quota, 1)
        assert "kept again" in caplog.text


def test_stores_wait_for_the_first_count_and_say_so(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(space, recount_module.LOCK_NAME), quota_of(space, 10) as quota:
        with pytest.raises(DeadlineExceeded, match="its files to be counted"):
            fits(quota, 1, timeout_s=0.3)
        assert "being counted" in repr(quota)
    with quota_of(space, 10) as quota:
        fits(quota, 1)


# --- files that do not go ---


def test_files_that_the_system_does_not_let_go_are_named_and_not_tried_for_ever(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(space, KEYS[:10])
    real = os.unlink

    def unlink(path: str, **how: int) -> None:
        if str(path).endswith(".bin"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        real(path, **how)

    with quota_of(space, 10) as quota:
        monkeypatch.setattr(os, "unlink", unlink)
        with pytest.raises(StorageFull, match=r"10 files cannot be removed: .*not permitted"):
            fits(quota, 1)
        monkeypatch.undo()
        fits(quota, 1)
        assert len(left(space)) < 10
