"""One agent and what it works on: the chunks' memory, a page per trailer, the files of one batch."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.completion import Patience
from pdoffload.agent.descriptors import Descriptors, MemoryKind
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import DeadlineExceeded, PdOffloadError, TransferError
from pdoffload.tiers.base import Verify
from pdoffload.tiers.chunkfile import TRAILER_BYTES, ChunkFormat
from pdoffload.tiers.fs.memory import ChunkMemory, Side
from pdoffload.tiers.fs.paths import Namespace
from pdoffload.tiers.fs.quota import Quota
from pdoffload.tiers.fs.writer import WriterDir
from pdoffload.tiers.pace import Pace
from pdoffload.tiers.parts import Batch

_log = logging.getLogger(__name__)

_AT_A_LOOK = 64
"""Pieces that NIXL POSIX submits, and those whose end it takes in, each time it is asked."""
_CLOSE_S = 1.0
"""For the I/O of a request that an agent lost sight of."""

MakeAgent = Callable[[str], Agent]

_left_behind: list[Lane] = []
"""Lanes whose pages the kernel may still write to: never to be freed."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What all I/O threads of a tier share. Nothing in it changes."""

    memory: ChunkMemory
    space: Namespace
    writer: WriterDir
    quota: Quota | None
    make_agent: MakeAgent
    verify: Verify
    format: ChunkFormat
    sound_sizes: tuple[int, ...]
    """Sizes of a file whose chunk may be loaded."""
    most_chunks: int
    """Of one request."""
    shows_holes: bool
    """The file system tells which parts of a file were never written."""
    open_flags: int
    """`O_DIRECT` or 0, for every chunk file."""
    fsync: bool
    min_free_bytes: int
    timeout_s: float
    clock: Clock

    def time_left_s(self, batch: Batch) -> float:
        """Seconds until the deadline of `batch`."""
        return batch.started_s + self.timeout_s - self.clock.monotonic_s()


class Files:
    """What one batch holds open. Owned by the I/O thread."""

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

    def drop_names(self) -> None:
        """Remove the unfinished files. They stay open: bytes may still move, and nobody must get their
        numbers."""
        for fd, temp in self.open.items():
            if temp is not None:
                remove_quietly(temp)
                self.open[fd] = None


class Lane:
    """An agent that knows the chunks' memory, and a page for the trailer of each chunk of a batch.

    Owned by one I/O thread. After a failure the thread closes it and makes another one: what a NIXL
    queue does after an error differs from queue to queue.
    """

    def __init__(self, terms: Terms, name: str) -> None:
        self._terms = terms
        self.memory = mmap.mmap(-1, terms.most_chunks * TRAILER_BYTES)
        """Page i is for the trailer of the i-th chunk."""
        self._address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self._pace = Pace(terms.clock)
        self.transfers: tuple[Transfer, ...] = ()
        """Those of the last request: one for each kind of memory."""
        terms.memory.enter_thread()
        self.agent = terms.make_agent(name)
        try:
            self.chunks = terms.memory.open(self.agent, terms.most_chunks)
            self.agent.register_memory(self._address, len(self.memory))
        except BaseException:
            self.agent.close()
            raise

    def move(
        self, op: Op, batch: Batch, files: Files, bare: Sequence[bool]
    ) -> PdOffloadError | None:
        """Move the chunks that `chunks` has begun <-> the open files, and page i <-> the trailer of the
        i-th unless `bare[i]`.

        Returns None, or the error of a transfer that failed and is over: which chunk it was nobody tells.
        Raises the error where bytes may still move, `DeadlineExceeded` before anything moved, and what
        the agent raises.
        """
        terms = self._terms
        left_s = terms.time_left_s(batch)
        if left_s <= 0:
            raise DeadlineExceeded(batch.what, terms.timeout_s)
        fds = list(files.open)
        region = self.agent.register_files(fds, [terms.format.file_bytes] * len(fds))
        self.transfers = ()
        most_pieces = 1
        for side in _with_trailers(self.chunks.sides(), self._trailers(bare)):
            remote = side.file
            remote[:, 2] = np.array(fds, dtype=np.uint64)[remote[:, 2].astype(np.intp)]
            transfer = self.agent.submit(
                op,
                Descriptors(side.kind, side.memory),
                Descriptors(MemoryKind.FILE, remote),
                timeout_s=left_s,
                what=batch.what,
            )
            self.transfers = (*self.transfers, transfer)
            most_pieces = max(most_pieces, len(remote))
        for transfer in self.transfers:
            is_over = functools.partial(self._is_over, transfer, most_pieces)
            self._pace.wait(is_over, len(fds))
        for transfer in self.transfers:
            if not transfer.settled:
                raise transfer.error or TransferError(transfer.what)
        region.release()
        return next((each.error for each in self.transfers if each.error is not None), None)

    def _trailers(self, bare: Sequence[bool]) -> Side:
        """A row for each chunk that has a trailer."""
        tailed = np.flatnonzero(~np.array(bare, dtype=np.bool_))
        memory = np.zeros((len(tailed), 3), dtype=np.uint64)
        memory[:, 0] = tailed * TRAILER_BYTES + self._address
        memory[:, 1] = TRAILER_BYTES
        file = np.zeros_like(memory)
        file[:, 0] = self._terms.format.chunk_bytes
        file[:, 1] = TRAILER_BYTES
        file[:, 2] = tailed
        return Side(MemoryKind.DRAM, memory, file)

    def _is_over(self, transfer: Transfer, pieces: int) -> bool:
        """Ask as often as it takes NIXL to submit every piece, or to take in the end of every piece."""
        for _ in range(-(-pieces // _AT_A_LOOK)):
            if transfer.state is not TransferState.RUNNING:
                return True
            self.agent.poll()
        return transfer.state is not TransferState.RUNNING

    @property
    def in_flight(self) -> bool:
        """Bytes of the last request may still move."""
        return not all(transfer.settled for transfer in self.transfers)

    @property
    def failed(self) -> bool:
        """The last request did not end well."""
        return any(transfer.state is not TransferState.DONE for transfer in self.transfers)

    def settle(self, stopping: threading.Event) -> None:
        """Wait until nothing is in flight. Gives up after `timeout_s`, or when the tier is closed: some
        failures leave NIXL without any news to wait for.
        """
        clock = self._terms.clock
        patience = Patience(clock)
        until_s = clock.monotonic_s() + self._terms.timeout_s
        while self.in_flight and not stopping.is_set() and clock.monotonic_s() < until_s:
            self.agent.poll()
            patience.pause()

    def close(self) -> bool:
        """Give the agent back. False where bytes may still move: they are left to the kernel, and this
        lane's memory with them, for as long as the process lives."""
        if not self.agent.close(timeout_s=_CLOSE_S):
            return True
        _left_behind.append(self)
        return False


def _with_trailers(sides: list[Side], trailers: Side) -> list[Side]:
    """`sides`, with the trailers among those of their kind of memory; no side is empty."""
    if not len(trailers.memory):
        return sides
    own = [side for side in sides if side.kind is trailers.kind]
    joined = Side(
        trailers.kind,
        np.concatenate([*(side.memory for side in own), trailers.memory]),
        np.concatenate([*(side.file for side in own), trailers.file]),
    )
    return [*(side for side in sides if side.kind is not trailers.kind), joined]


def remove_quietly(path: str) -> None:
    """Remove a file of ours. A refusal is logged and left to the next sweep."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error)
