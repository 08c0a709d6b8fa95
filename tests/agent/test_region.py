"""The table of regions answers as a search of every region would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.agent.descriptors import Descriptors, MemoryKind
from pdoffload.agent.region import Region, RegionTable, first_overlap
from pdoffload.errors import MisuseError

Piece = tuple[int, int, int]

rows_of = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=8
)


def array(rows: list[Piece]) -> np.ndarray:
    return np.array(rows, dtype=np.uint64)


def overlaps(a: Piece, b: Piece) -> bool:
    return a[2] == b[2] and a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


def region(kind: MemoryKind, rows: list[Piece], generation: int = 1) -> Region:
    return Region(kind, array(rows), generation, lambda each: None)


def any_overlap(rows: list[Piece]) -> bool:
    return any(overlaps(a, b) for i, a in enumerate(rows) for b in rows[:i])


@settings(deadline=None)
@given(rows=rows_of)
def test_an_overlap_is_found_if_and_only_if_there_is_one(rows: list[Piece]) -> None:
    assert (first_overlap(array(rows)) is not None) == any_overlap(rows)


@settings(deadline=None)
@given(asked=rows_of, tables=st.lists(rows_of, min_size=1, max_size=4))
def test_owners_are_the_regions_that_hold_each_row_whole(
    asked: list[Piece], tables: list[list[Piece]]
) -> None:
    table = RegionTable()
    live: list[Region] = []
    for rows in tables:
        try:
            table.refuse_overlap(MemoryKind.DRAM, array(rows))
        except MisuseError:
            assert any_overlap([*rows, *(r for each in live for r in each.rows.tolist())])
            continue
        live.append(region(MemoryKind.DRAM, rows, len(live)))
        table.add(live[-1])
    table.check()
    holders = [
        [
            each
            for each in live
            for start, size, device in each.rows.tolist()
            if device == row[2] and start <= row[0] and row[0] + row[1] <= start + size
        ]
        for row in asked
    ]
    descriptors = Descriptors(MemoryKind.DRAM, array(asked))
    if live and all(holders):
        assert set(table.owners("local", descriptors)) == {found[0] for found in holders}
    else:
        with pytest.raises(MisuseError):
            table.owners("local", descriptors)


def test_files_are_found_by_their_descriptor() -> None:
    table = RegionTable()
    first = region(MemoryKind.FILE, [(0, 100, 7), (0, 50, 3)])
    second = region(MemoryKind.FILE, [(0, 10, 5)], 2)
    table.add(first)
    table.add(second)
    ask = array([(90, 10, 7), (0, 10, 5), (0, 50, 3)])
    assert set(table.owners("remote", Descriptors(MemoryKind.FILE, ask))) == {first, second}
    for bad in ((91, 10, 7), (0, 11, 5), (0, 1, 4), (0, 1, 99)):
        with pytest.raises(MisuseError, match="remote row 1"):
            table.owners("remote", Descriptors(MemoryKind.FILE, array([(0, 1, 7), bad])))


def test_a_row_across_two_neighbouring_regions_is_refused() -> None:
    table = RegionTable()
    for i, start in enumerate((0, 10)):
        table.add(region(MemoryKind.DRAM, [(start, 10, 0)], i))
    with pytest.raises(MisuseError):
        table.owners("local", Descriptors(MemoryKind.DRAM, array([(5, 10, 0)])))


def test_a_removed_region_owns_nothing() -> None:
    table = RegionTable()
    gone = region(MemoryKind.DRAM, [(0, 10, 0)])
    table.add(gone)
    ask = Descriptors(MemoryKind.DRAM, array([(0, 10, 0)]))
    assert table.owners("local", ask) == (gone,)
    table.remove(gone)
    with pytest.raises(MisuseError, match="no live DRAM region"):
        table.owners("local", ask)
    table.refuse_overlap(MemoryKind.DRAM, array([(0, 10, 0)]))


def test_memory_and_files_of_equal_numbers_do_not_clash() -> None:
    table = RegionTable()
    table.add(region(MemoryKind.DRAM, [(0, 10, 3)]))
    table.refuse_overlap(MemoryKind.FILE, array([(0, 10, 3)]))
    table.refuse_overlap(MemoryKind.DRAM, array([(0, 10, 4)]))
