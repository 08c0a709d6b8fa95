from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import BlockKey, RunConfig
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.fs import recount as recount_module
from pdoffload.tiers.fs.ledger import Claim, Ledger, Row
from pdoffload.tiers.fs.paths import Namespace, open_namespace
from pdoffload.tiers.fs.recount import Count, recount

KEYS = keys_of(*range(50))
SIZE = 100


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)


@pytest.fixture
def ledger(space: Namespace) -> Iterator[Ledger]:
    made = Ledger(space)
    made.open()
    yield made
    made.close()


def write(space: Namespace, keys: tuple[BlockKey, ...], size_bytes: int = SIZE) -> None:
    for key in keys:
        path = space.path(key)
        space.make_parents(path)
        Path(path).write_bytes(bytes(size_bytes))
        os.utime(path, (50, 50))


def count(ledger: Ledger, space: Namespace) -> Count | None:
    return recount(ledger, space, SYSTEM_CLOCK, stopping=lambda: False)


def rows(*keys: BlockKey, used_us: int = 7) -> list[Row]:
    return [Row(key, SIZE, used_us) for key in keys]


def test_an_empty_ledger_becomes_what_is_on_the_disk(space: Namespace, ledger: Ledger) -> None:
    write(space, KEYS)
    assert count(ledger, space) == Count(50, 50, 0)
    used, claimed, counted = ledger.usage()
    assert (used, claimed) == (50 * SIZE, 0)
    assert counted > 0
    assert count(ledger, space) == Count(50, 0, 0), "and then nothing is left to do"


def test_rows_without_a_file_are_dropped_and_another_size_is_seen(
    space: Namespace, ledger: Ledger
) -> None:
    ledger.settle((), rows(*KEYS[:10]))
    write(space, KEYS[:6])
    write(space, KEYS[5:6], 3 * SIZE)
    assert count(ledger, space) == Count(6, 1, 5)
    assert ledger.usage().used_bytes == (5 + 3) * SIZE


def test_what_is_claimed_is_left_to_its_owner(space: Namespace, ledger: Ledger) -> None:
    ledger.claim(Claim.new("o", 5 * SIZE, KEYS[:5]), 100 * SIZE)
    ledger.settle((), rows(KEYS[1]))
    write(space, KEYS[2:3])
    count(ledger, space)
    assert ledger.usage()[:2] == (SIZE, 5 * SIZE)


def while_the_disk_is_read(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None], *, after: bool
) -> None:
    """`happens` once, between the reading of the ledger and the corrections."""
    real, left = recount_module.files_in, [True]

    def files_in(base: str, prefix: str) -> list[object]:
        if prefix == KEYS[0].hex()[:3] and left:
            left.clear()
            if after:
                found = list(real(base, prefix))
                happens()
                return found  # type: ignore[return-value]
            happens()
        return list(real(base, prefix))  # type: ignore[return-value]

    monkeypatch.setattr(recount_module, "files_in", files_in)


@pytest.mark.parametrize("after", [True, False])
def test_a_chunk_stored_meanwhile_stays_counted_once(
    space: Namespace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    space.make_parents(space.path(KEYS[0]))

    def happens() -> None:
        claim = Claim.new("o", SIZE, KEYS[:1])
        ledger.claim(claim, 100 * SIZE)
        write(space, KEYS[:1])
        ledger.settle((claim.id,), rows(KEYS[0]))

    while_the_disk_is_read(monkeypatch, happens, after=after)
    count(ledger, space)
    assert ledger.usage()[:2] == (SIZE, 0)


@pytest.mark.parametrize("after", [True, False])
def test_a_chunk_evicted_meanwhile_is_not_entered_again(
    space: Namespace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    write(space, KEYS[:1])
    ledger.settle((), rows(KEYS[0]))

    def happens() -> None:
        taken = ledger.take("o", KEYS[:1])
        assert taken is not None
        os.unlink(space.path(KEYS[0]))
        ledger.settle((taken[0].id,), ())

    while_the_disk_is_read(monkeypatch, happens, after=after)
    count(ledger, space)
    assert ledger.usage()[:2] == (0, 0)


def test_a_chunk_whose_eviction_was_under_way_before_is_not_entered_again(
    space: Namespace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(space, KEYS[:1])
    ledger.settle((), rows(KEYS[0]))
    taken = ledger.take("o", KEYS[:1])
    assert taken is not None

    def happens() -> None:
        os.unlink(space.path(KEYS[0]))
        ledger.settle((taken[0].id,), ())

    while_the_disk_is_read(monkeypatch, happens, after=True)
    count(ledger, space)
    assert ledger.usage()[:2] == (0, 0)


def test_a_chunk_that_was_missing_and_is_stored_anew_meanwhile_stays(
    space: Namespace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.settle((), rows(KEYS[0], used_us=7))

    def happens() -> None:
        write(space, KEYS[:1])
        ledger.settle((), rows(KEYS[0], used_us=9))

    while_the_disk_is_read(monkeypatch, happens, after=True)
    count(ledger, space)
    assert ledger.usage().used_bytes == SIZE


def test_one_process_counts_at_a_time(space: Namespace, ledger: Ledger) -> None:
    inner: list[object] = []

    def stopping() -> bool:
        if not inner:
            inner.append("being asked")
            inner.append(count(ledger, space))
        return False

    assert recount(ledger, space, SYSTEM_CLOCK, stopping=stopping) == Count(0, 0, 0)
    assert inner[1:] == [None]


def test_a_count_can_be_stopped_and_is_none_then(space: Namespace, ledger: Ledger) -> None:
    assert recount(ledger, space, SYSTEM_CLOCK, stopping=lambda: True) is None
    assert ledger.usage().counted_us == 0
