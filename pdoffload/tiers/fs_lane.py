"""One agent and what it works on: the pool, a page per trailer, the files of one batch."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.completion import Patience
from pdoffload.agent.descriptors import Descriptors, MemoryKind
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import DeadlineExceeded, TransferError
from pdoffload.memory.host import HostRegion
from pdoffload.tiers.base import Verify
from pdoffload.tiers.batches import Batch, Limits
from pdoffload.tiers.chunkfile import TRAILER_BYTES
from pdoffload.tiers.paths import Namespace
from pdoffload.tiers.quota import Quota
from pdoffload.tiers.writer import WriterDir

_log = logging.getLogger(__name__)

_CLOSE_S = 1.0
"""For the I/O of a request that an agent lost sight of."""

MakeAgent = Callable[[str], Agent]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What all I/O threads of a tier share. Nothing in it changes."""

    region: HostRegion
    space: Namespace
    writer: WriterDir
    quota: Quota | None
    make_agent: MakeAgent
    verify: Verify
    fingerprint: bytes
    limits: Limits
    shows_holes: bool
    """The file system tells which parts of a file were never written."""
    open_flags: int
    """`O_DIRECT` or 0, for every chunk file."""
    fsync: bool
    min_free_bytes: int
    timeout_s: float
    clock: Clock

    @property
    def chunk_bytes(self) -> int:
        return self.region.geometry.chunk_bytes

    @property
    def file_bytes(self) -> int:
        return self.chunk_bytes + TRAILER_BYTES

    @property
    def sound_sizes(self) -> tuple[int, ...]:
        """Sizes of a file whose chunk may be loaded."""
        if self.verify is Verify.ALWAYS:
            return (self.file_bytes,)
        return (self.file_bytes, self.chunk_bytes)


class Files:
    """What one batch holds open. Owned by the I/O thread; `close` or `abandon` ends it."""

    def __init__(self) -> None:
        self.open: dict[int, str | None] = {}
        """fd -> name of the unfinished file that goes unless it is published, or None."""

    def close_one(self, fd: int) -> None:
        """Close `fd`, and remove its unfinished file if it is still there. `OSError` of the close."""
        temp = self.open.pop(fd)
        try:
            os.close(fd)
        finally:
            if temp is not None:
                remove_quietly(temp)

    def publish(self, fd: int, path: str) -> None:
        """Give the file of `fd` the final name `path`, then close it. `OSError` if either is refused.

        A file system may tell of a lost write only when the file is closed: then the name goes again.
        """
        temp = self.open[fd]
        assert temp is not None
        os.rename(temp, path)
        self.open[fd] = path
        os.close(fd)
        del self.open[fd]

    def close(self) -> None:
        """Let go of everything that is left."""
        for fd in tuple(self.open):
            try:
                self.close_one(fd)
            except OSError as error:
                _log.warning("closing a chunk file: %s", error)

    def abandon(self) -> None:
        """Bytes may still move for ever: the files stay open, so that nobody gets their numbers."""
        for temp in self.open.values():
            if temp is not None:
                remove_quietly(temp)


class Lane:
    """An agent that knows the pool, and a page for the trailer of each chunk of a batch.

    Owned by one I/O thread. After a failure the thread closes it and makes another one: what a NIXL
    queue does after an error differs from queue to queue.
    """

    def __init__(self, terms: Terms, name: str) -> None:
        self._terms = terms
        pages = terms.limits.chunks
        self.memory = mmap.mmap(-1, pages * TRAILER_BYTES)
        """Page i is for the trailer of the i-th chunk."""
        self._address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self.transfer: Transfer | None = None
        """The last one."""
        self.agent = terms.make_agent(name)
        try:
            self.agent.register_memory(terms.region.address, terms.region.size_bytes)
            self.agent.register_memory(self._address, len(self.memory))
        except BaseException:
            self.agent.close()
            raise

    def move(
        self, op: Op, batch: Batch, files: Files, slots: Sequence[int], bare: Sequence[bool]
    ) -> Transfer:
        """Move `slots[i]` <-> the i-th open file, and page i <-> its trailer unless `bare[i]`.

        Returns a transfer that is DONE or FAILED. Raises the transfer's error where bytes may still
        move, `DeadlineExceeded` before anything moved, and what the agent raises.
        """
        terms = self._terms
        left_s = time_left_s(terms, batch)
        if left_s <= 0:
            raise DeadlineExceeded(batch.what, terms.timeout_s)
        chunk_bytes = terms.chunk_bytes
        fds = np.array(list(files.open), dtype=np.uint64)
        tailed = np.flatnonzero(~np.array(bare, dtype=np.bool_))
        addresses = np.array(slots, dtype=np.uint64) * chunk_bytes + terms.region.address
        pages = tailed * TRAILER_BYTES + self._address
        local = _rows(addresses, chunk_bytes, 0, pages, 0)
        remote = _rows(
            np.zeros_like(fds), chunk_bytes, fds, np.full_like(tailed, chunk_bytes), fds[tailed]
        )
        region = self.agent.register_files(list(files.open), [terms.file_bytes] * len(files.open))
        self.transfer = transfer = self.agent.submit(
            op,
            Descriptors(MemoryKind.DRAM, local),
            Descriptors(MemoryKind.FILE, remote),
            timeout_s=left_s,
            what=batch.what,
        )
        self.agent.wait(transfer)
        if not transfer.settled:
            raise transfer.error or TransferError(transfer.what)
        region.release()
        return transfer

    @property
    def in_flight(self) -> bool:
        """Bytes of the last transfer may still move."""
        return self.transfer is not None and not self.transfer.settled

    @property
    def failed(self) -> bool:
        """The last transfer did not end well."""
        return self.transfer is not None and self.transfer.state is not TransferState.DONE

    def settle(self, stopping: threading.Event) -> None:
        """Wait until nothing is in flight, for as long as it takes, or until the tier closes."""
        patience = Patience(self._terms.clock)
        while self.in_flight and not stopping.is_set():
            self.agent.poll()
            patience.pause()

    def close(self) -> bool:
        """Give the agent back. False where bytes may still move: they are left to the kernel."""
        return not self.agent.close(timeout_s=_CLOSE_S)


def _rows(
    chunk_starts: npt.NDArray[np.uint64],
    chunk_bytes: int,
    chunk_devices: npt.NDArray[np.uint64] | int,
    tail_starts: npt.NDArray[np.integer],
    tail_devices: npt.NDArray[np.uint64] | int,
) -> npt.NDArray[np.uint64]:
    """One side of a batch: a row per chunk, then a row per trailer."""
    chunks = len(chunk_starts)
    rows = np.empty((chunks + len(tail_starts), 3), dtype=np.uint64)
    rows[:chunks, 0] = chunk_starts
    rows[:chunks, 1] = chunk_bytes
    rows[:chunks, 2] = chunk_devices
    rows[chunks:, 0] = tail_starts
    rows[chunks:, 1] = TRAILER_BYTES
    rows[chunks:, 2] = tail_devices
    return rows


def time_left_s(terms: Terms, batch: Batch) -> float:
    """Seconds until the deadline of `batch`."""
    assert batch.started_s is not None
    return batch.started_s + terms.timeout_s - terms.clock.monotonic_s()


def remove_quietly(path: str) -> None:
    """Remove a file of ours. A refusal is logged and left to the next sweep."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error)
