"""Which bytes of the device belong to which bytes of the host pool.

A chunk is `blocks_per_chunk` consecutive blocks of one KV-cache group. The first and the last chunk of a
copy may be covered only in part, when the device already holds some of its blocks:

    blocks_per_chunk = 3, first block index 4 (position in the request), 6 blocks
    chunk of the request      1            2            3
    its blocks            [3  4  5]    [6  7  8]    [9 10 11]
    copied                    4  5      6  7  8      9            sub-block within the chunk: 1 2 0 1 2 0
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pdoffload.agent.descriptors import Descriptors, MemoryKind, coalesce
from pdoffload.errors import MisuseError
from pdoffload.memory.device import DeviceCaches

Integers = npt.NDArray[np.integer]


class HostPart(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of every chunk in the host pool."""

    address: int
    """Of slot 0."""
    chunk_bytes: int
    offset_bytes: int
    """From a slot's start to this worker's part."""
    blocks_per_chunk: int
    num_slots: int


class BlockRun(msgspec.Struct, frozen=True):
    """Device blocks of one KV-cache group, consecutive in the request from `first_index` on."""

    blocks: Integers
    first_index: int


def block_runs(
    group_sizes: Sequence[int], first_indices: Sequence[int], blocks: Integers
) -> list[BlockRun]:
    """One run per group of `blocks`, which holds the groups one after the other, as vLLM lists them."""
    runs, start = [], 0
    for size, first in zip(group_sizes, first_indices, strict=True):
        runs.append(BlockRun(blocks[start : start + size], first))
        start += size
    return runs


def chunks_of(run: BlockRun, blocks_per_chunk: int) -> int:
    """How many chunks `run` touches."""
    if not len(run.blocks):
        return 0
    return -(-(run.first_index % blocks_per_chunk + len(run.blocks)) // blocks_per_chunk)


def chunk_positions(runs: Sequence[BlockRun], blocks_per_chunk: int) -> Integers:
    """For every block of every run, the position of its chunk in the copy's list of slots."""
    parts, base = [], 0
    for run in runs:
        sub = run.first_index % blocks_per_chunk + np.arange(len(run.blocks))
        parts.append(base + sub // blocks_per_chunk)
        base += chunks_of(run, blocks_per_chunk)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def describe_copy(
    caches: DeviceCaches, host: HostPart, runs: Sequence[BlockRun], slots: Integers
) -> tuple[Descriptors, Descriptors]:
    """(device side, host side), piece by piece, of a copy of `runs` (one per group) to or from `slots`.

    `slots` are the chunks' slots, group after group. Raises `MisuseError` where counts or numbers do
    not fit the caches or the pool: a wrong index would move foreign memory.
    """
    _check(caches, host, runs, slots)
    bpc = host.blocks_per_chunk
    positions = chunk_positions(runs, bpc)
    tensor_offset = np.concatenate(([0], np.cumsum([t.page_bytes for t in caches.tensors]))) * bpc
    device_parts, host_parts, length_parts = [], [], []
    start = 0
    for run, refs in zip(runs, caches.groups, strict=True):
        count = len(run.blocks)
        if not count:
            continue
        blocks = run.blocks.astype(np.int64)
        slot = slots[positions[start : start + count]].astype(np.int64)
        sub = (run.first_index + np.arange(count)) % bpc
        start += count
        chunk = host.address + host.offset_bytes + slot * host.chunk_bytes
        for ref in refs:
            tensor = caches.tensors[ref.tensor]
            device_parts.append(tensor.address + blocks * tensor.stride_bytes)
            host_parts.append(chunk + tensor_offset[ref.tensor] + sub * tensor.page_bytes)
            length_parts.append(np.full(count, ref.page_bytes, dtype=np.int64))
    lengths = np.concatenate(length_parts)
    kind = MemoryKind.VRAM if caches.on_gpu else MemoryKind.DRAM
    return coalesce(
        _rows(kind, np.concatenate(device_parts), lengths, caches.device_id),
        _rows(MemoryKind.DRAM, np.concatenate(host_parts), lengths, 0),
    )


def _rows(kind: MemoryKind, starts: Integers, lengths: Integers, device: int) -> Descriptors:
    rows = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = starts, lengths, device
    return Descriptors(kind, rows)


def _check(caches: DeviceCaches, host: HostPart, runs: Sequence[BlockRun], slots: Integers) -> None:
    if len(runs) != len(caches.groups):
        raise MisuseError(f"{len(runs)} runs for {len(caches.groups)} KV-cache groups")
    wanted = sum(chunks_of(run, host.blocks_per_chunk) for run in runs)
    if wanted != len(slots) or not wanted:
        raise MisuseError(f"the blocks cover {wanted} chunks, but {len(slots)} slots are named")
    if int(slots.min()) < 0 or int(slots.max()) >= host.num_slots:
        raise MisuseError(f"slot {int(slots.max())} outside a pool of {host.num_slots}")
    num_blocks = min(tensor.num_blocks for tensor in caches.tensors)
    for run in runs:
        if len(run.blocks) and not 0 <= int(run.blocks.min()) <= int(run.blocks.max()) < num_blocks:
            raise MisuseError(f"block {int(run.blocks.max())} outside a cache of {num_blocks}")
