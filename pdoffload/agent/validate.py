"""What must hold of two descriptor lists before NIXL sees them.

NIXL accepts floats as integers, and two sources into one destination, without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind
from pdoffload.agent.region import first_overlap
from pdoffload.errors import MisuseError

LOCAL_KINDS = (MemoryKind.DRAM, MemoryKind.VRAM)
REMOTE_KINDS = (MemoryKind.DRAM, MemoryKind.VRAM, MemoryKind.FILE, MemoryKind.OBJECT)


def require_matching(local: Descriptors, remote: Descriptors) -> None:
    """Raise `MisuseError` unless both are well-formed lists of equal lengths, row by row."""
    for side, descriptors, kinds in (
        ("local", local, LOCAL_KINDS),
        ("remote", remote, REMOTE_KINDS),
    ):
        rows = descriptors.rows
        if descriptors.kind not in kinds:
            raise MisuseError(f"{side}: {descriptors.kind.value} cannot be this side")
        if rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] != 3 or not len(rows):
            raise MisuseError(f"{side}: rows of {rows.dtype} {rows.shape}, want uint64 (n, 3)")
    if len(local) != len(remote):
        raise MisuseError(f"{len(local)} local rows and {len(remote)} remote rows")
    lengths = local.rows[:, 1]
    if not ((lengths == remote.rows[:, 1]) & (lengths > 0)).all():
        raise MisuseError("the two sides differ in the length of a row, or one is empty")


def require_memory(remote: Descriptors) -> None:
    """Raise `MisuseError` unless `remote` is memory: files of a peer are out of reach."""
    if remote.kind not in LOCAL_KINDS:
        raise MisuseError(f"remote: {remote.kind.value} of a peer cannot be reached")


def require_disjoint_destination(op: Op, local: Descriptors, remote: Descriptors) -> None:
    """Raise `MisuseError` if two rows write to the same bytes."""
    clash = first_overlap((local if op is Op.READ else remote).rows)
    if clash is not None:
        raise MisuseError(f"two rows write to the same bytes, at {clash[0]:#x}")


def require_whole_objects(op: Op, remote: Descriptors) -> None:
    """Raise `MisuseError` for a write into the middle of an object: stores replace objects whole."""
    if op is Op.WRITE and remote.kind is MemoryKind.OBJECT and remote.rows[:, 0].any():
        raise MisuseError("remote: an object is written from its first byte on")


def require_names(call: str, names: Sequence[str]) -> None:
    """Raise `MisuseError` unless `names` are names of objects, each given once."""
    if not names or not all(names) or len(set(names)) != len(names):
        raise MisuseError(f"{call}: wanted names, each once, got {list(names)!r:.200}")


def require_timeout(timeout_s: float) -> None:
    """Raise `MisuseError` unless `timeout_s` is a positive, finite number: nothing waits for ever."""
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise MisuseError(f"timeout_s {timeout_s!r} is not a positive number")
