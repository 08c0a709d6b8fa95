"""The host pool: one piece of shared memory that an engine's scheduler and all its workers map.

    | header      | status                      | slot 0      | slot 1 | ... | slot num_slots-1 |
    | PAGE_BYTES  | uint32[num_slots, copies]   | chunk_bytes |
                    padded to PAGE_BYTES          ^ `address`, page aligned

How the processes find it and why no exit leaks it: `pdoffload.memory.rendezvous`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import io
import mmap
import os
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.config.reading import size_text
from pdoffload.errors import ConfigError, MisuseError, StorageError
from pdoffload.layout import PAGE_BYTES, Geometry, round_up
from pdoffload.memory.rendezvous import (
    Header,
    join,
    no_room,
    region_path,
    remove_if_dead,
    room_for,
    sweep_dead,
)

__all__ = ["HostRegion", "SlotStatus", "sweep_dead"]

CHECKSUM_BYTES = 16
_WORD_BYTES = 4
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
# madvise holds the interpreter lock: some 25 ms per step, and still few calls for a big pool.
_POPULATE_STEP_BYTES = 64 << 20


class SlotStatus(enum.IntEnum):
    """How the last device -> host store of one worker's part of a slot ended."""

    PENDING = 0
    STORED = 1
    FAILED = 2


class _Mapped(msgspec.Struct, frozen=True):
    """Everything that keeps the mapping alive; dropped as one by `close`."""

    mapping: mmap.mmap
    file: io.FileIO | None
    pool: memoryview
    array: npt.NDArray[np.uint8]
    status: npt.NDArray[np.uint32]


class HostRegion:
    """The pool's memory, the status words and the checksums of its slots.

    Memory: the mapping lives until `close` was called and the last array or memoryview taken from it is
    gone. An address keeps nothing alive: whoever was given one (a NIXL agent) is closed first.

    Threads: any, for different slots. Calls for one slot need the caller to own it or to have it pinned.
    A forked child shares the region and counts as alive in it; it must not call `close`.
    """

    def __init__(self, geometry: Geometry, mapping: mmap.mmap, file: io.FileIO | None) -> None:
        """Takes ownership of `mapping`, which has `region_bytes(geometry)` bytes, and of `file`."""
        # Copies by the kernel, as cma's, are 1.7 times as fast in huge pages. Whether they are given for
        # /dev/shm, the machine says: /sys/kernel/mm/transparent_hugepage/shmem_enabled, "advise" or more.
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        words = geometry.num_slots * geometry.num_copies
        start = region_bytes(geometry) - geometry.pool_bytes
        status = np.frombuffer(mapping, np.uint32, words, PAGE_BYTES)
        array = np.frombuffer(mapping, np.uint8, geometry.pool_bytes, start)
        self.geometry = geometry
        self.size_bytes = geometry.pool_bytes
        self.address: int = int(array.ctypes.data)
        """Of slot 0, in this process."""
        self.created = False
        """Whether this process made the region: it is the one to call `populate`."""
        self._path = ""
        self._mapped: _Mapped | None = _Mapped(
            mapping=mapping,
            file=file,
            pool=memoryview(mapping)[start:],
            array=array,
            status=status.reshape(geometry.num_slots, geometry.num_copies),
        )
        self._stored_words = struct.pack(
            f"={geometry.num_copies}I", *[SlotStatus.STORED] * geometry.num_copies
        )
        # 17 bytes per slot; of this process alone.
        self._digests = np.zeros((geometry.num_slots, CHECKSUM_BYTES), np.uint8)
        self._digest_known = np.zeros(geometry.num_slots, np.bool_)

    @classmethod
    def open(
        cls,
        engine_id: str,
        geometry: Geometry,
        *,
        member: int,
        members: int,
        timeout_s: float = 60.0,
        directory: str = "/dev/shm",
        clock: Clock = SYSTEM_CLOCK,
    ) -> HostRegion:
        """Create the region of `engine_id`, or join it; the first to come creates. Never waits for others.

        `members` processes (all workers and the scheduler) open it once each, as 0 .. members - 1. Dead
        regions of this user are removed first. Pages cost memory from their first use on: `populate`.

        Raises `ConfigError` where memory lacks, geometry differs or a member comes twice,
        `DeadlineExceeded` when others hold a lock for `timeout_s`, `StorageError` for what the file
        system refuses. After a failure nothing is left.
        """
        size_bytes = _checked_size(geometry)
        sweep_dead(directory)
        path = region_path(directory, engine_id)
        header = Header(
            members=members,
            num_slots=geometry.num_slots,
            worker_bytes=geometry.worker_bytes,
            num_copies=geometry.num_copies,
            size_bytes=size_bytes,
        )
        fd, created = join(path, header, member, engine_id, timeout_s=timeout_s, clock=clock)
        file = io.FileIO(fd, "r+")
        try:
            region = cls(geometry, mmap.mmap(fd, size_bytes), file)
        except OSError as error:
            file.close()
            remove_if_dead(path)
            raise StorageError.from_os_error(path, error) from error
        region.created = created
        region._path = path
        return region

    @classmethod
    def private(cls, geometry: Geometry) -> HostRegion:
        """A region of this process alone, without a file: for tests and for use without an engine."""
        region = cls(geometry, mmap.mmap(-1, _checked_size(geometry)), None)
        region.created = True
        return region

    def __repr__(self) -> str:
        state = "open" if self._mapped is not None else "closed"
        return (
            f"<HostRegion {state}, {self.geometry.num_slots} slots of {self.geometry.chunk_bytes} "
            f"bytes, {int(self._digest_known.sum())} checksums>"
        )

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The pool: uint8 of shape (size_bytes,), writable, shared."""
        return self._live().array

    @property
    def status(self) -> npt.NDArray[np.uint32]:
        """`SlotStatus` of each worker's part: shape (num_slots, num_copies), writable, shared.

        Worker w sets `[slot, w]` when its store into the slot has ended; the scheduler resets the slot
        when it is reserved and reads it when the store is said to be complete.
        """
        return self._live().status

    def slot_address(self, slot: int) -> int:
        """Where `slot` begins, in this process."""
        return self.address + self._checked(slot) * self.geometry.chunk_bytes

    def slot_view(self, slot: int) -> memoryview:
        """The `chunk_bytes` bytes of `slot`, writable, shared, not copied."""
        start = self._checked(slot) * self.geometry.chunk_bytes
        return self._live().pool[start : start + self.geometry.chunk_bytes]

    def reset_status(self, slots: Sequence[int]) -> None:
        """Set all parts of `slots` to PENDING. By the scheduler, before any worker may write there."""
        for slot in slots:
            self._checked(slot)
        self._live().status[list(slots)] = SlotStatus.PENDING

    def all_stored(self, slot: int) -> bool:
        """Whether every worker has stored its part of `slot`."""
        return self._status_words(slot) == self._stored_words

    def failed_among(self, slots: Sequence[int]) -> list[int]:
        """Those of `slots` of which some worker has marked its part FAILED, in order."""
        for slot in slots:
            self._checked(slot)
        words = self._live().status[list(slots)]
        failed = (words == SlotStatus.FAILED).any(axis=1)
        return [slots[number] for number in failed.nonzero()[0].tolist()]

    def checksum(self, slot: int) -> bytes:
        """The xxh3-128 of the slot's bytes (16 bytes, canonical order), kept until forgotten.

        Computed at the first call, without the interpreter lock; the slot must be pinned meanwhile.
        """
        if self._digest_known[self._checked(slot)]:
            return bytes(self._digests[slot])
        digest: bytes = xxhash.xxh3_128_digest(self.slot_view(slot))
        self.set_checksum(slot, digest)
        return digest

    def set_checksum(self, slot: int, digest: bytes) -> None:
        """Keep a checksum that was computed or compared elsewhere over the slot's present bytes."""
        if len(digest) != CHECKSUM_BYTES:
            raise MisuseError(f"a checksum has {CHECKSUM_BYTES} bytes, not {len(digest)}")
        self._digests[self._checked(slot)] = np.frombuffer(digest, np.uint8)
        self._digest_known[slot] = True  # last: another thread may be reading

    def forget_checksum(self, slot: int) -> None:
        """The slot's bytes are about to change."""
        self._digest_known[self._checked(slot)] = False

    def populate(self) -> None:
        """Fault in every page now, so that no transfer pays for it and lack of memory shows at start.

        Changes no byte; for the process that created the region, or again, cheaply, for any other.
        Holds the interpreter lock for steps of 64 MiB. Raises `ConfigError` when memory runs out.
        """
        mapped = self._live()
        total = len(mapped.mapping)
        try:
            for start in range(0, total, _POPULATE_STEP_BYTES):
                length = min(_POPULATE_STEP_BYTES, total - start)
                mapped.mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._no_memory(error) from error
            self._populate_on_an_old_kernel(mapped)

    def _populate_on_an_old_kernel(self, mapped: _Mapped) -> None:
        if mapped.file is not None:
            try:
                # Touching pages that /dev/shm cannot give would kill the process by SIGBUS.
                os.posix_fallocate(mapped.file.fileno(), 0, len(mapped.mapping))
            except OSError as error:
                raise self._no_memory(error) from error
        # Reading is enough for shared memory, and cannot undo what another process writes meanwhile.
        mapped.array[::PAGE_BYTES].max()

    def _no_memory(self, error: OSError) -> ConfigError:
        needed_bytes, file = region_bytes(self.geometry), self._live().file
        if file is None:
            return ConfigError(
                [f"cpu_bytes_to_use: cannot get {size_text(needed_bytes)} of memory: {error}"]
            )
        return no_room(os.path.dirname(self._path), needed_bytes, room_for(file.fileno()))

    def close(self) -> None:
        """Let go of the memory; idempotent. See the class for what must be closed before."""
        mapped, self._mapped = self._mapped, None
        if mapped is None:
            return
        if mapped.file is not None:
            # The mapping holds the lock that says "I live" as long as any view of it is left.
            fcntl.flock(mapped.file, fcntl.LOCK_UN)
            mapped.file.close()
            remove_if_dead(self._path)

    def _live(self) -> _Mapped:
        if self._mapped is None:
            raise MisuseError("the host region is closed")
        return self._mapped

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.geometry.num_slots:
            raise MisuseError(f"slot {slot} does not exist: there are {self.geometry.num_slots}")
        return slot

    def _status_words(self, slot: int) -> bytes:
        size_bytes = _WORD_BYTES * self.geometry.num_copies
        start = PAGE_BYTES + self._checked(slot) * size_bytes
        return self._live().mapping[start : start + size_bytes]


def region_bytes(geometry: Geometry) -> int:
    """Bytes of the whole region: header, status words, pool."""
    words = geometry.num_slots * geometry.num_copies
    return PAGE_BYTES + round_up(_WORD_BYTES * words, PAGE_BYTES) + geometry.pool_bytes


def _checked_size(geometry: Geometry) -> int:
    if geometry.worker_bytes < 1 or geometry.num_copies < 1:
        raise MisuseError(f"a chunk needs bytes and copies above 0: {geometry}")
    if geometry.num_slots < 1:
        raise ConfigError(
            [
                f"cpu_bytes_to_use: gives {geometry.num_slots} slots, but at least one chunk of "
                f"{size_text(geometry.chunk_bytes)} must fit"
            ]
        )
    return region_bytes(geometry)
