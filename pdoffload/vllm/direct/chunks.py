"""The engine's device caches as the memory of a tier: every chunk in the pieces it is scattered over.

    chunk (and file)   | t0 b0 | t0 b1 | t1 b0 | t1 b1 | padding |
    memory             device   device  scratch  device  scratch

The order is the host pool's, computed by the same arithmetic. What of a chunk has no place on the device
(padding, tensors that its KV-cache group does not use, blocks at its ends that this job leaves out) stands in
a scratch of the I/O thread: zeros on the way out; on the way in whatever the file holds there, which the
checksum covers too.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.backends import Backend, UcxBackend
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows, coalesce
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import MisuseError, TransferError
from pdoffload.layout import PAGE_BYTES, round_up
from pdoffload.tiers.fs.memory import ChunkMemory, LaneMemory, Side
from pdoffload.vllm.copies import BlockRun, HostPart, describe_copy

if TYPE_CHECKING:
    from pdoffload.memory.device import DeviceCaches

_Int = npt.NDArray[np.int64]


class JobPieces:
    """Where the chunks of one job lie on the device: worked out once, by the thread that needs it first.

    `runs` are the job's blocks, one run per KV-cache group; `ready` waits for what the device has still to
    do with them. Raises `MisuseError` from `rows_of` for blocks that do not make up `num_chunks`.
    """

    def __init__(
        self,
        caches: DeviceCaches,
        runs: Sequence[BlockRun],
        num_chunks: int,
        *,
        chunk_bytes: int,
        blocks_per_chunk: int,
        ready: Callable[[], None],
    ) -> None:
        self._caches = caches
        self._runs = runs
        # As a pool would have them, one slot after the other, with a gap so that no piece spans two.
        self._pool = HostPart(
            address=0,
            chunk_bytes=round_up(chunk_bytes + 1, PAGE_BYTES),
            offset_bytes=0,
            blocks_per_chunk=blocks_per_chunk,
            num_slots=num_chunks,
        )
        self._ready = ready
        self._lock = threading.Lock()
        self._chunks: list[Rows] | None = None

    def rows_of(self, index: int) -> Rows:
        """(address, length, offset in the chunk) of each piece of the chunk, by offset."""
        with self._lock:
            if self._chunks is None:
                self._ready()
                self._chunks = self._describe()
        return self._chunks[index]

    def _describe(self) -> list[Rows]:
        count, stride = self._pool.num_slots, np.uint64(self._pool.chunk_bytes)
        device, pool = describe_copy(self._caches, self._pool, self._runs, np.arange(count))
        order = np.argsort(pool.rows[:, 0])
        device, pool = coalesce(
            Descriptors(device.kind, device.rows[order]), Descriptors(pool.kind, pool.rows[order])
        )
        numbers = (pool.rows[:, 0] // stride).astype(np.intp)
        rows = device.rows.copy()
        rows[:, 2] = pool.rows[:, 0] % stride
        return np.split(rows, np.searchsorted(numbers, np.arange(1, count)))


class DeviceMemory(ChunkMemory):
    """One worker's caches. The engine's thread hands out slots per job: `add`, and `drop` when it is over.

    A GPU's bytes are hashed in host memory: each I/O thread copies its chunks into its scratch for that,
    by an agent that can do so beside reaching files. Nothing else passes through the host.
    """

    def __init__(
        self,
        caches: DeviceCaches,
        *,
        chunk_bytes: int,
        blocks_per_chunk: int,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`enter_thread` is called first on every I/O thread: a GPU's context belongs to a thread."""
        needed = caches.block_bytes * blocks_per_chunk
        if needed > chunk_bytes:
            raise MisuseError(f"a chunk of this worker takes {needed} bytes, a file {chunk_bytes}")
        self.chunk_bytes = chunk_bytes
        self.num_slots = max(1, min(t.num_blocks for t in caches.tensors) // blocks_per_chunk)
        self.kind = MemoryKind.VRAM if caches.on_gpu else MemoryKind.DRAM
        # Each block of each tensor, and as many gaps between them, and one behind.
        self.most_pieces = 2 * blocks_per_chunk * max(map(len, caches.groups)) + 1
        self.blocks_per_chunk = blocks_per_chunk
        self.caches = caches
        self._enter_thread = enter_thread
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._places: dict[int, tuple[JobPieces, int]] = {}
        self._claimed: set[int] = set()
        """Slots whose bytes have been asked of NIXL, or are about to be."""

    def __repr__(self) -> str:
        return f"<DeviceMemory {self.kind.value}, {len(self._places)} chunks in jobs>"

    def add(
        self, runs: Sequence[BlockRun], num_chunks: int, ready: Callable[[], None]
    ) -> tuple[int, ...]:
        """Slots for the chunks of a job, in the runs' order."""
        pieces = JobPieces(
            self.caches,
            runs,
            num_chunks,
            chunk_bytes=self.chunk_bytes,
            blocks_per_chunk=self.blocks_per_chunk,
            ready=ready,
        )
        slots = tuple(itertools.islice(self._serial, num_chunks))
        self._places.update((slot, (pieces, index)) for index, slot in enumerate(slots))
        return slots

    def drop(self, slots: Sequence[int]) -> None:
        """No byte moves for these any more."""
        with self._lock:
            for slot in slots:
                self._places.pop(slot, None)
                self._claimed.discard(slot)

    def withdraw(self, slots: Sequence[int]) -> bool:
        """Drop `slots` if nothing has been asked of NIXL for any of them; from then on nothing can be.

        False, and nothing changes, where bytes may be moving or have moved.
        """
        with self._lock:
            if not self._claimed.isdisjoint(slots):
                return False
            for slot in slots:
                self._places.pop(slot, None)
            return True

    def claim(self, slots: Sequence[int]) -> None:
        """NIXL is about to be asked to move these. Raises `TransferError` where one was withdrawn."""
        with self._lock:
            for slot in slots:
                self._require(slot)
            self._claimed.update(slots)

    def rows_of(self, slot: int) -> Rows:
        """As `JobPieces.rows_of`. Raises `TransferError` for a slot that was dropped or withdrawn."""
        pieces, index = self._require(slot)
        return pieces.rows_of(index)

    def _require(self, slot: int) -> tuple[JobPieces, int]:
        place = self._places.get(slot)
        if place is None:
            raise TransferError(f"the job of device chunk {slot} was given up before it began")
        return place

    def misaligned(self) -> str:
        for number, tensor in enumerate(self.caches.tensors):
            if tensor.address % PAGE_BYTES:
                return f"cache tensor {number} at {tensor.address:#x} is not on a page"
            for name, size in (("page", tensor.page_bytes), ("stride", tensor.stride_bytes)):
                if size % PAGE_BYTES:
                    return f"the {name} of cache tensor {number} has {size} bytes, no whole page"
        for refs in self.caches.groups:
            for ref in refs:
                if ref.page_bytes % PAGE_BYTES:
                    return f"a layer uses {ref.page_bytes} bytes of a page, no whole page"
        return ""

    def enter_thread(self) -> None:
        self._enter_thread()

    def open(self, agent: Agent, most_chunks: int) -> LaneMemory:
        for address, size_bytes in self.caches.storages:
            agent.register_memory(
                address, size_bytes, kind=self.kind, device_id=self.caches.device_id
            )
        return _DeviceLane(self, agent, most_chunks)

    def more_backends(self) -> tuple[Backend, ...]:
        return (UcxBackend(),) if self.kind is MemoryKind.VRAM else ()


class _DeviceLane(LaneMemory):
    """The chunks of one request, and a scratch in which chunk i of it has the i-th `chunk_bytes`.

    Pages of the scratch that were never used take up no memory: on a CPU that is all but the gaps.
    """

    def __init__(self, memory: DeviceMemory, agent: Agent, most_chunks: int) -> None:
        self._memory = memory
        self._agent = agent
        self._scratch = mmap.mmap(-1, most_chunks * memory.chunk_bytes)
        self._address = int(np.frombuffer(self._scratch, np.uint8).ctypes.data)
        agent.register_memory(self._address, len(self._scratch))
        self._slots: Sequence[int] = ()
        self._chunks: list[tuple[Rows, Rows]] = []
        """Of each chunk (address, length, offset) on the device, and the same in the scratch."""

    def begin(self, op: Op, slots: Sequence[int]) -> None:
        self._slots = slots
        self._chunks = []
        for number, slot in enumerate(slots):
            rows = self._memory.rows_of(slot)
            start = number * self._memory.chunk_bytes
            gaps = _gaps(rows, self._memory.chunk_bytes)
            if op is Op.WRITE:
                for _, length, offset in gaps.tolist():
                    ctypes.memset(self._address + start + offset, 0, length)
            gaps[:, 0] += np.uint64(self._address + start)
            self._chunks.append((rows, gaps))

    def sides(self) -> list[Side]:
        self._memory.claim(self._slots)
        device = _side(self._memory.kind, [rows for rows, _ in self._chunks])
        device.memory[:, 2] = self._memory.caches.device_id
        scratch = _side(MemoryKind.DRAM, [gaps for _, gaps in self._chunks])
        if self._memory.kind is not MemoryKind.DRAM:
            return [side for side in (device, scratch) if len(side.memory)]
        memory = np.concatenate([device.memory, scratch.memory])
        return [Side(MemoryKind.DRAM, memory, np.concatenate([device.file, scratch.file]))]

    def checksum(self, number: int) -> bytes:
        rows, gaps = self._chunks[number]
        if self._memory.kind is MemoryKind.VRAM:
            return self._checksum_of_copy(number, rows)
        digest = xxhash.xxh3_128()
        pieces = np.concatenate([rows, gaps])
        for address, length, _ in pieces[np.argsort(pieces[:, 2])].tolist():
            digest.update((ctypes.c_char * length).from_address(address))
        return digest.digest()

    def matches(self, number: int, digest: bytes) -> bool:
        return self.checksum(number) == digest

    def _checksum_of_copy(self, number: int, rows: Rows) -> bytes:
        """Copy the chunk's device pieces between its gaps in the scratch, and hash it there."""
        start = number * self._memory.chunk_bytes
        local = rows.copy()
        local[:, 2] = self._memory.caches.device_id
        remote = np.zeros_like(rows)
        remote[:, 0] = rows[:, 2] + np.uint64(self._address + start)
        remote[:, 1] = rows[:, 1]
        copy = self._agent.wait(
            self._agent.submit(
                Op.WRITE,
                Descriptors(self._memory.kind, local),
                Descriptors(MemoryKind.DRAM, remote),
                timeout_s=COPY_TIMEOUT_S,
                what="copy of a chunk to be hashed",
            )
        )
        if copy.state is not TransferState.DONE:
            raise copy.error or TransferError(copy.what)
        chunk = memoryview(self._scratch)[start : start + self._memory.chunk_bytes]
        digest: bytes = xxhash.xxh3_128_digest(chunk)
        return digest


COPY_TIMEOUT_S = 5.0
"""For the copy of one chunk from a GPU, which takes milliseconds at worst."""


def _gaps(rows: Rows, chunk_bytes: int) -> Rows:
    """What `rows` leave out of a chunk, as rows of (0 + offset, length, offset)."""
    starts = np.concatenate([np.zeros(1, np.uint64), rows[:, 2] + rows[:, 1]])
    ends = np.concatenate([rows[:, 2], np.array([chunk_bytes], np.uint64)])
    some = ends > starts
    gaps = np.empty((int(some.sum()), 3), dtype=np.uint64)
    gaps[:, 0] = gaps[:, 2] = starts[some]
    gaps[:, 1] = ends[some] - starts[some]
    return gaps


def _side(kind: MemoryKind, chunks: list[Rows]) -> Side:
    """Rows of (address, length, offset) per chunk, as memory and file."""
    memory = np.concatenate(chunks)
    file = np.empty_like(memory)
    file[:, 0], file[:, 1] = memory[:, 2], memory[:, 1]
    file[:, 2] = np.repeat(np.arange(len(chunks)), [len(rows) for rows in chunks])
    memory[:, 2] = 0
    return Side(kind, memory, file)
