"""Regions: memory and files an agent knows, and the table that finds the region of a descriptor.

One region is one registration with NIXL and is released as a whole. Two live regions of an agent never
share a byte of memory or a file: deregistering one block twice crashes NIXL, and with disjoint regions
every descriptor belongs to exactly one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.errors import MisuseError

Int = npt.NDArray[np.intp]


class Region:
    """What one `register_*` call made known. Made by an agent, used on its thread.

    `rows` are its pieces: (n, 3) of address (0 for files and objects), size in bytes, device, fd or id.
    `generation` is unique in the agent, so that a region of an earlier life of the same address is told
    apart.
    """

    __slots__ = ("_release", "generation", "kind", "released", "rows", "unsettled")

    def __init__(
        self, kind: MemoryKind, rows: Rows, generation: int, release: Callable[[Region], None]
    ) -> None:
        self.kind = kind
        self.rows = rows
        self.generation = generation
        self.released = False
        self.unsettled = 0
        """Transfers that may still touch these bytes; kept by `Transfer`."""
        self._release = release

    @property
    def size_bytes(self) -> int:
        return int(self.rows[:, 1].sum())

    def release(self) -> None:
        """Deregister. The memory and the files are the caller's alone afterwards.

        Raises `MisuseError` while a transfer that is not settled uses the region and for a second
        release (`Agent.close` releases as well), and `NixlError` if NIXL refuses: then the region is
        live as before.
        """
        self._release(self)

    def __repr__(self) -> str:
        state = "released" if self.released else f"live, {self.unsettled} unsettled transfers"
        return (
            f"<Region {self.kind.value} #{self.generation}: "
            f"{len(self.rows)} pieces, {self.size_bytes} B, {state}>"
        )


class _Bounds:
    """The pieces of all regions of one kind as sorted columns: `regions[i]` owns `start[i]:end[i]`.

    Sorted by device, then start. For files every device (fd) has one piece that starts at 0.
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = tuple(region for region in regions for _ in range(len(region.rows)))
        rows = np.concatenate([region.rows for region in dict.fromkeys(self.regions)])
        order = np.lexsort((rows[:, 0], rows[:, 2]))
        self.device = rows[order, 2]
        self.start = rows[order, 0]
        self.end = self.start + rows[order, 1]
        self.owner = order
        self._one_piece_per_device = len(self.device) == len(np.unique(self.device))

    def find(self, rows: Rows) -> Int:
        """For each row the piece that holds all of it, or -1."""
        device = rows[:, 2]
        first = device[0]
        if (device == first).all():
            return self._find_on(first, rows)
        if self._one_piece_per_device:
            return self._confirm(np.searchsorted(self.device, device), rows)
        piece = np.empty(len(rows), dtype=np.intp)
        for each in np.unique(device):
            chosen = device == each
            piece[chosen] = self._find_on(each, rows[chosen])
        return piece

    def _find_on(self, device: np.uint64, rows: Rows) -> Int:
        low = np.searchsorted(self.device, device)
        high = np.searchsorted(self.device, device, side="right")
        piece = np.searchsorted(self.start[low:high], rows[:, 0], side="right") + (low - 1)
        return self._confirm(np.where(piece < low, len(self.device), piece), rows)

    def _confirm(self, piece: Int, rows: Rows) -> Int:
        """`piece`, with -1 where the piece (or none: len) does not hold the row. No sum overflows."""
        there = piece < len(self.device)
        safe = np.where(there, piece, 0)
        start, end = self.start[safe], self.end[safe]
        inside = (rows[:, 0] >= start) & (rows[:, 0] < end) & (rows[:, 1] <= end - rows[:, 0])
        return np.where(there & (self.device[safe] == rows[:, 2]) & inside, piece, -1)


class RegionTable:
    """The live regions of one agent. One thread."""

    def __init__(self) -> None:
        self._live: dict[Region, None] = {}
        self._bounds: dict[MemoryKind, _Bounds | None] = {}

    def __iter__(self) -> Iterator[Region]:
        return iter(tuple(self._live))

    def __len__(self) -> int:
        return len(self._live)

    def add(self, region: Region) -> None:
        self._live[region] = None
        self._bounds.pop(region.kind, None)

    def remove(self, region: Region) -> None:
        del self._live[region]
        self._bounds.pop(region.kind, None)

    def refuse_overlap(self, kind: MemoryKind, rows: Rows) -> None:
        """Raise `MisuseError` if `rows` share a byte or a file among themselves or with a live region."""
        parts = [rows, *(region.rows for region in self._live if region.kind is kind)]
        clash = first_overlap(np.concatenate(parts))
        if clash is not None:
            what = "descriptor" if kind is MemoryKind.FILE else f"{kind.value} at address"
            where = clash[2] if kind is MemoryKind.FILE else f"{clash[0]:#x}"
            raise MisuseError(f"{what} {where} is part of a live region or given twice")

    def owners(self, side: str, descriptors: Descriptors) -> tuple[Region, ...]:
        """The regions `descriptors` lie in; `MisuseError` if a row lies in none (or in parts of two)."""
        kind = descriptors.kind
        if kind not in self._bounds:
            live = [region for region in self._live if region.kind is kind]
            self._bounds[kind] = _Bounds(live) if live else None
        bounds = self._bounds[kind]
        if bounds is None:
            raise MisuseError(f"{side}: no live {kind.value} region in this agent")
        piece = bounds.find(descriptors.rows)
        outside = np.flatnonzero(piece < 0)
        if outside.size:
            address, length, device = (int(n) for n in descriptors.rows[outside[0]])
            raise MisuseError(
                f"{side} row {outside[0]}: {length} bytes at {address:#x} of {kind.value} {device} "
                "lie in no live region of this agent"
            )
        return tuple({bounds.regions[bounds.owner[i]]: None for i in np.unique(piece)})

    def check(self) -> None:
        """Prove that no live region is released and that no two of them share a byte."""
        for kind in MemoryKind:
            parts = [region.rows for region in self._live if region.kind is kind]
            assert not parts or first_overlap(np.concatenate(parts)) is None
        assert not any(region.released or region.unsettled < 0 for region in self._live)


def first_overlap(rows: Rows) -> tuple[int, int, int] | None:
    """A row that shares a byte with another row of the same device, or None."""
    start, length, device = rows[:, 0], rows[:, 1], rows[:, 2]
    ordered = (device[1:] > device[:-1]) | ((device[1:] == device[:-1]) & (start[1:] >= start[:-1]))
    if not ordered.all():
        order = np.lexsort((start, device))
        start, length, device = start[order], length[order], device[order]
    clash = (device[1:] == device[:-1]) & (start[1:] - start[:-1] < length[:-1])
    if not clash.any():
        return None
    at = int(np.argmax(clash)) + 1
    return int(start[at]), int(length[at]), int(device[at])
