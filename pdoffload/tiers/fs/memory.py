"""Where the chunks of a job lie in memory: what the I/O threads move to and from.

The host pool is one such place (`PoolMemory`): a chunk is one piece. An engine's device caches are another
(`pdoffload.vllm.direct`): a chunk's bytes are scattered there, and some of them may stand nowhere at all.
A file knows no difference: its bytes are the chunk's, in the pool's order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.backends import Backend
from pdoffload.agent.descriptors import MemoryKind, Rows
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.layout import PAGE_BYTES, RunConfig
from pdoffload.memory.host import HostRegion
from pdoffload.tiers.base import TierContext, Verify


class Side(msgspec.Struct, frozen=True):
    """Pieces of memory of one kind and their places in the files, row by row.

    `memory` rows are (address, length, device), `file` rows (offset, length, number of the chunk).
    """

    kind: MemoryKind
    memory: Rows
    file: Rows


class LaneMemory(ABC):
    """One I/O thread's hold on the memory. `begin` names the chunks of the thread's next request; the
    other methods speak of them by their number in it."""

    @abstractmethod
    def begin(self, op: Op, slots: Sequence[int]) -> None:
        """Make `slots` the chunks to move; returns when the device has done with their bytes."""

    @abstractmethod
    def sides(self) -> list[Side]:
        """Every byte of every chunk that was begun, once, at most one side for each kind of memory."""

    @abstractmethod
    def checksum(self, number: int) -> bytes:
        """The xxh3-128 of the chunk, over the bytes `sides` names in the file's order."""

    @abstractmethod
    def matches(self, number: int, digest: bytes) -> bool:
        """Whether that is the checksum of the chunk that has just been loaded."""


class ChunkMemory(ABC):
    """The memory that a tier's jobs name slots of. Any thread, for different slots."""

    chunk_bytes: int
    num_slots: int
    """How many chunks there can be at a time."""
    most_pieces: int = 1
    """Of one chunk."""
    kind: MemoryKind = MemoryKind.DRAM

    @abstractmethod
    def misaligned(self) -> str:
        """Why direct I/O cannot take these addresses, or empty."""

    def enter_thread(self) -> None:  # noqa: B027 - only a GPU needs it
        """Called first on every I/O thread, before it opens an agent."""

    @abstractmethod
    def open(self, agent: Agent, most_chunks: int) -> LaneMemory:
        """Make it known to `agent`, for requests of up to `most_chunks`."""

    def forget(self, slots: Sequence[int]) -> None:  # noqa: B027 - not every memory keeps checksums
        """New bytes are about to come into `slots`."""

    def more_backends(self) -> tuple[Backend, ...]:
        """Backends that an agent needs here beside the one that reaches files."""
        return ()


class FsContext(msgspec.Struct, frozen=True, kw_only=True):
    """A `TierContext` for whichever memory."""

    memory: ChunkMemory
    run_config: RunConfig
    verify: Verify = Verify.ALWAYS
    transfer_timeout_s: float = 30.0
    clock: Clock = SYSTEM_CLOCK


def fs_context(context: TierContext | FsContext) -> FsContext:
    """The same terms, with the host pool as one kind of memory."""
    if isinstance(context, FsContext):
        return context
    return FsContext(
        memory=PoolMemory(context.region),
        run_config=context.run_config,
        verify=context.verify,
        transfer_timeout_s=context.transfer_timeout_s,
        clock=context.clock,
    )


class PoolMemory(ChunkMemory):
    """The host pool: chunk i of a slot's number is the slot."""

    def __init__(self, region: HostRegion) -> None:
        self.chunk_bytes = region.geometry.chunk_bytes
        self.num_slots = region.geometry.num_slots
        self._region = region

    def misaligned(self) -> str:
        address = self._region.address
        return f"the pool at {address:#x} is not on a page" if address % PAGE_BYTES else ""

    def open(self, agent: Agent, most_chunks: int) -> LaneMemory:
        agent.register_memory(self._region.address, self._region.size_bytes)
        return _PoolLane(self._region)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._region.forget_checksum(slot)


class _PoolLane(LaneMemory):
    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._slots: Sequence[int] = ()

    def begin(self, op: Op, slots: Sequence[int]) -> None:
        self._slots = slots

    def sides(self) -> list[Side]:
        chunk_bytes, count = self._region.geometry.chunk_bytes, len(self._slots)
        memory = np.zeros((count, 3), dtype=np.uint64)
        memory[:, 0] = self._slots
        memory[:, 0] *= np.uint64(chunk_bytes)
        memory[:, 0] += np.uint64(self._region.address)
        memory[:, 1] = chunk_bytes
        file = np.zeros_like(memory)
        file[:, 1] = chunk_bytes
        file[:, 2] = np.arange(count)
        return [Side(MemoryKind.DRAM, memory, file)]

    def checksum(self, number: int) -> bytes:
        return self._region.checksum(self._slots[number])

    def matches(self, number: int, digest: bytes) -> bool:
        slot = self._slots[number]
        if xxhash.xxh3_128_digest(self._region.slot_view(slot)) != digest:
            return False
        self._region.set_checksum(slot, digest)
        return True
