"""Descriptor lists: N pieces of memory or of files, as one integer array.

           address | offset    length    device | fd
rows[0]    0x7f..00            65536     0
rows[1]    0x7f..00 + 65536    65536     0
"""

from __future__ import annotations

import enum

import msgspec
import numpy as np
import numpy.typing as npt

from pdoffload.errors import MisuseError

Rows = npt.NDArray[np.uint64]


class MemoryKind(enum.Enum):
    """What a descriptor points into; the values are NIXL's own segment names."""

    DRAM = "DRAM"
    VRAM = "VRAM"
    FILE = "FILE"
    OBJECT = "OBJ"


class Descriptors(msgspec.Struct, frozen=True):
    """`rows` is C-contiguous uint64 of shape (n, 3), n >= 1: address or offset, length > 0,
    device, fd or the id of an object.

    The array is not copied: the caller leaves it alone until the transfer has been submitted.
    """

    kind: MemoryKind
    rows: Rows

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    @property
    def size_bytes(self) -> int:
        return int(self.rows[:, 1].sum())


def pieces(
    kind: MemoryKind,
    starts: npt.NDArray[np.integer] | list[int],
    lengths: int | npt.NDArray[np.integer] | list[int],
    device: int | npt.NDArray[np.integer] | list[int] = 0,
) -> Descriptors:
    """Descriptors from integer arrays; `lengths` and `device` may be one value for all.

    Raises `MisuseError` for floats, bools and negative numbers, which NIXL itself accepts silently, and
    for arrays of different lengths.
    """
    count = np.asarray(starts).size
    rows = np.empty((count, 3), dtype=np.uint64)
    for column, name, values in (
        (0, "starts", starts),
        (1, "lengths", lengths),
        (2, "device", device),
    ):
        array = _integers(name, values)
        if array.ndim > 1 or array.size not in (1, count):
            raise MisuseError(f"{name}: shape {array.shape} for {count} rows")
        rows[:, column] = array
    if not rows.size or not rows[:, 1].all():
        raise MisuseError("a descriptor list needs at least one row, and every length above 0")
    return Descriptors(kind, rows)


def _integers(name: str, values: object) -> npt.NDArray[np.integer]:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise MisuseError(f"{name}: wanted integers, got {array.dtype}")
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        raise MisuseError(f"{name}: {int(array.min())} is negative")
    return array


def coalesce(local: Descriptors, remote: Descriptors) -> tuple[Descriptors, Descriptors]:
    """Join row i+1 to row i wherever both sides continue; the bytes and their order stay the same.

    local   [0,4) [4,8) [8,12)        local   [0,8) [8,12)
    remote  [0,4) [4,8) [20,24)   ->  remote  [0,8) [20,24)
    """
    a, b = local.rows, remote.rows
    joins = (
        (a[:-1, 0] + a[:-1, 1] == a[1:, 0])
        & (b[:-1, 0] + b[:-1, 1] == b[1:, 0])
        & (a[:-1, 2] == a[1:, 2])
        & (b[:-1, 2] == b[1:, 2])
    )
    if not joins.any():
        return local, remote
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    lengths = np.add.reduceat(a[:, 1], heads)
    joined = []
    for side in (local, remote):
        rows = side.rows[heads]
        rows[:, 1] = lengths
        joined.append(Descriptors(side.kind, rows))
    return joined[0], joined[1]
