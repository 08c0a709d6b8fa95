"""Descriptor arithmetic, against a copy made piece by piece the slow way."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.errors import MisuseError
from pdoffload.memory.device import CacheTensor, DeviceCaches, LayerRef
from pdoffload.vllm.copies import BlockRun, HostPart, chunks_of, describe_copy

NUM_BLOCKS, NUM_SLOTS = 12, 8


class Machine:
    """Two cache tensors, two KV-cache groups over them, and the part of worker 1 of 2 in a pool."""

    def __init__(self, blocks_per_chunk: int) -> None:
        rng = np.random.default_rng(7)
        self.tensors = [
            rng.integers(0, 256, (NUM_BLOCKS, stride), dtype=np.uint8) for stride in (64, 96)
        ]
        pages = (64, 80)
        part = sum(pages) * blocks_per_chunk
        self.pool = np.zeros((NUM_SLOTS, 4096), dtype=np.uint8)
        self.pages = pages
        self.caches = DeviceCaches(
            tensors=tuple(
                CacheTensor(
                    address=tensor.ctypes.data,
                    num_blocks=NUM_BLOCKS,
                    page_bytes=page,
                    stride_bytes=tensor.strides[0],
                )
                for tensor, page in zip(self.tensors, pages, strict=True)
            ),
            groups=((LayerRef(0, 64), LayerRef(1, 80)), (LayerRef(1, 48),)),
            storages=(),
        )
        self.host = HostPart(
            address=self.pool.ctypes.data,
            chunk_bytes=4096,
            offset_bytes=part,
            blocks_per_chunk=blocks_per_chunk,
            num_slots=NUM_SLOTS,
        )

    def store(self, runs, slots):
        device, host = describe_copy(self.caches, self.host, runs, np.asarray(slots))
        for (source, length, _), (target, _, _) in zip(device.rows, host.rows, strict=True):
            ctypes.memmove(int(target), int(source), int(length))
        return device

    def expected(self, runs, slots):
        """The pool after the copy, from the layout's own words."""
        pool = np.zeros_like(self.pool)
        bpc, base = self.host.blocks_per_chunk, 0
        for run, refs in zip(runs, self.caches.groups, strict=True):
            for i, block in enumerate(run.blocks):
                sub = (run.first_index + i) % bpc
                slot = slots[base + (run.first_index % bpc + i) // bpc]
                for ref in refs:
                    at = self.host.offset_bytes + sub * self.pages[ref.tensor]
                    at += sum(self.pages[: ref.tensor]) * bpc
                    pool[slot, at : at + ref.page_bytes] = self.tensors[ref.tensor][
                        block, : ref.page_bytes
                    ]
            base += chunks_of(run, bpc)
        return pool


@settings(max_examples=150, deadline=None)
@given(data=st.data(), blocks_per_chunk=st.integers(1, 4))
def test_every_byte_lands_where_the_layout_says(data, blocks_per_chunk):
    machine = Machine(blocks_per_chunk)
    runs, wanted = [], 0
    for _ in machine.caches.groups:
        count = data.draw(st.integers(0, 5))
        blocks = data.draw(st.permutations(range(NUM_BLOCKS)))[:count]
        runs.append(BlockRun(np.array(blocks, dtype=np.int32), data.draw(st.integers(0, 9))))
        wanted += chunks_of(runs[-1], blocks_per_chunk)
    if not 0 < wanted <= NUM_SLOTS:
        return
    slots = data.draw(st.permutations(range(NUM_SLOTS)))[:wanted]
    machine.store(runs, slots)
    np.testing.assert_array_equal(machine.pool, machine.expected(runs, slots))


def test_neighbours_on_both_sides_become_one_piece():
    machine = Machine(4)
    runs = [BlockRun(np.arange(4, 8), 0), BlockRun(np.empty(0, dtype=np.int32), 0)]
    device = machine.store(runs, [3])
    # Tensor 0: four 64-byte pages without gaps on either side. Tensor 1: a gap after each page.
    assert sorted(int(length) for length in device.rows[:, 1]) == [80, 80, 80, 80, 256]


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ([1, 2], [0], "cover 2 chunks, but 1 slots"),
        ([1], [NUM_SLOTS], f"slot {NUM_SLOTS} outside"),
        ([NUM_BLOCKS], [0], f"block {NUM_BLOCKS} outside"),
        ([-1], [0], "outside a cache"),
        ([1], [-1], "outside a pool"),
    ],
)
def test_a_number_that_does_not_fit_moves_nothing(blocks, slots, message):
    machine = Machine(1)
    runs = [BlockRun(np.array(blocks), 0), BlockRun(np.empty(0, dtype=np.int32), 0)]
    with pytest.raises(MisuseError, match=message):
        machine.store(runs, slots)
    assert not machine.pool.any()
