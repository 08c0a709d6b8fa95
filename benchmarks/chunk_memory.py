"""Chunks as host pools hold them, and how long to wait: the same for all that writes between two processes.

Needs numpy and nothing else: it is imported in environments that hold little more.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

DEADLINE_S = 60.0
POLL_S = 0.0001
"""Between two questions of a process that expects something."""


def shared_memory(shape: tuple[int, int]) -> np.ndarray:
    """(num_chunks, chunk_bytes) as host pools are: pages of /dev/shm, all of them present. Memory that only a
    process of its own has may be in huge pages, in which copies are faster."""
    size_bytes = shape[0] * shape[1]
    fd, path = tempfile.mkstemp(prefix="bare-", dir="/dev/shm")
    os.unlink(path)
    os.ftruncate(fd, size_bytes)
    array = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8).reshape(shape)
    os.close(fd)
    array[:] = 1
    return array


def fill(array: np.ndarray) -> None:
    """Bytes that no memory holds by chance, the same in every process that sends."""
    array[:] = np.random.default_rng(7).integers(0, 256, array.shape, np.uint8)
