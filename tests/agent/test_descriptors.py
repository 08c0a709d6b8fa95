"""Descriptor lists refuse what NIXL would take without a word, and joining them changes no byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.agent.descriptors import MemoryKind, coalesce, pieces
from pdoffload.errors import MisuseError


def test_one_length_and_one_device_serve_all_rows() -> None:
    made = pieces(MemoryKind.DRAM, [4096, 0], 512, 3)
    assert made.rows.tolist() == [[4096, 512, 3], [0, 512, 3]]
    assert made.rows.dtype == np.uint64
    assert (len(made), made.size_bytes) == (2, 1024)


def test_addresses_of_the_upper_half_are_kept() -> None:
    made = pieces(MemoryKind.VRAM, np.array([2**63 + 8], dtype=np.uint64), 1)
    assert int(made.rows[0, 0]) == 2**63 + 8


@pytest.mark.parametrize(
    ("starts", "lengths", "device"),
    [
        ([0.5], 1, 0),
        ([1.0], 1, 0),
        ([True], 1, 0),
        ([-1], 1, 0),
        ([0], -1, 0),
        ([0], 0, 0),
        ([0, 8], [8, 0], 0),
        ([0], 1, -1),
        ([0], 1, [0.0]),
        ([], 1, 0),
        ([0, 8, 16], [8, 8], 0),
        ([0, 8, 16], 8, [0, 1]),
        ([[0, 8], [16, 24]], 8, 0),
        (["0"], 8, 0),
    ],
)
def test_what_is_no_list_of_pieces_is_refused(starts, lengths, device) -> None:
    with pytest.raises(MisuseError):
        pieces(MemoryKind.DRAM, starts, lengths, device)


def expand(local, remote) -> list[tuple[int, ...]]:
    """Every byte that would move, in order: local place, remote place."""
    return [
        (int(a[0]) + i, int(a[2]), int(b[0]) + i, int(b[2]))
        for a, b in zip(local.rows, remote.rows, strict=True)
        for i in range(int(a[1]))
    ]


steps = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 0, 5]), st.sampled_from([0, 0, 0, 7])),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(steps=steps, devices=st.lists(st.integers(0, 1), min_size=12, max_size=12))
def test_joining_moves_the_same_bytes_in_the_same_order(steps, devices) -> None:
    a, b, left, right = 0, 1000, [], []
    for length, gap_a, gap_b in steps:
        a, b = a + gap_a, b + gap_b
        left.append(a)
        right.append(b)
        a, b = a + length, b + length
    lengths = [length for length, _, _ in steps]
    local = pieces(MemoryKind.DRAM, left, lengths, devices[: len(left)])
    remote = pieces(MemoryKind.FILE, right, lengths)
    joined = coalesce(local, remote)
    assert expand(*joined) == expand(local, remote)
    again = coalesce(*joined)
    assert len(again[0]) == len(joined[0]), "nothing is left to join"


def test_neighbours_on_both_sides_become_one() -> None:
    local = pieces(MemoryKind.DRAM, [0, 4, 8], 4)
    remote = pieces(MemoryKind.DRAM, [0, 4, 20], 4)
    a, b = coalesce(local, remote)
    assert a.rows.tolist() == [[0, 8, 0], [8, 4, 0]]
    assert b.rows.tolist() == [[0, 8, 0], [20, 4, 0]]
