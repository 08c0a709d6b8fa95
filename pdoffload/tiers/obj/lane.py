"""One agent and its staging memory: a place for a chunk and its trailer per object in flight.

    staging   | chunk 0 | trailer 0 | chunk 1 | trailer 1 | ...
                 '------ one object ------'

A store takes an object whole, from one piece of memory, and a slot has no room for a trailer.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.completion import Patience
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import DeadlineExceeded, PdOffloadError
from pdoffload.memory.host import HostRegion
from pdoffload.tiers.base import Verify
from pdoffload.tiers.chunkfile import ChunkFormat
from pdoffload.tiers.obj.claims import Claims
from pdoffload.tiers.obj.diagnosis import Why
from pdoffload.tiers.obj.keys import ObjectKeys
from pdoffload.tiers.pace import Pace
from pdoffload.tiers.parts import Batch

_log = logging.getLogger(__name__)

_SETTLE_S = 300.0
"""What a thread that was replaced waits for its requests to end: SDKs give up after minutes."""
_CLOSE_S = 0.1

MakeAgent = Callable[[str], Agent]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What all threads of a tier share. Nothing in it changes but the claims."""

    region: HostRegion
    keys: ObjectKeys
    make_agent: MakeAgent
    make_asking_agent: MakeAgent
    """For lookups: one with more requests at a time."""
    why: Why
    verify: Verify
    format: ChunkFormat
    most_chunks: int
    """Of one batch."""
    timeout_s: float
    clock: Clock
    claims: Claims


class Lane:
    """Owned by one I/O thread, which closes it after a failure and makes another one."""

    def __init__(self, terms: Terms, name: str) -> None:
        self._terms = terms
        self.memory = mmap.mmap(-1, terms.most_chunks * terms.format.file_bytes)
        self._address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self._transfers: list[Transfer] = []
        self._pace = Pace(terms.clock)
        self.agent = terms.make_agent(name)
        try:
            self.agent.register_memory(self._address, len(self.memory))
        except BaseException:
            self.agent.close()
            raise

    def staged(self, number: int) -> memoryview:
        """The staging place of chunk `number` of a batch."""
        size = self._terms.format.file_bytes
        return memoryview(self.memory)[number * size : (number + 1) * size]

    def move(self, op: Op, batch: Batch, numbers: Sequence[int]) -> dict[int, PdOffloadError]:
        """Move the staging places of `numbers` <-> their objects, each by a request of its own.

        Returns the errors of those that failed; `DeadlineExceeded` where bytes may still move. Raises that
        too if no time is left, and what the agent raises.
        """
        terms = self._terms
        left_s = batch.started_s + terms.timeout_s - terms.clock.monotonic_s()
        if left_s <= 0:
            raise DeadlineExceeded(batch.what, terms.timeout_s)
        size = terms.format.file_bytes
        names = [terms.keys.key(batch.keys[number]) for number in numbers]
        # A key that stands twice in a batch (of two jobs) is two registrations: NIXL takes that.
        regions = [self.agent.register_objects([name], [size]) for name in names]
        self._transfers = []
        for number, name, region in zip(numbers, names, regions, strict=True):
            self._transfers.append(
                self.agent.submit(
                    op,
                    pieces(MemoryKind.DRAM, [self._address + number * size], size),
                    pieces(MemoryKind.OBJECT, [0], size, int(region.rows[0, 2])),
                    timeout_s=left_s,
                    what=f"{'store' if op is Op.WRITE else 'load'} of {name}",
                )
            )
        self._pace.wait(self._is_over, len(numbers))
        failed: dict[int, PdOffloadError] = {}
        for number, region, transfer in zip(numbers, regions, self._transfers, strict=True):
            if transfer.error is not None:
                failed[number] = transfer.error
            if transfer.settled:
                region.release()
        return failed

    def _is_over(self) -> bool:
        self.agent.poll()
        return all(transfer.state is not TransferState.RUNNING for transfer in self._transfers)

    @property
    def in_flight(self) -> bool:
        """Bytes may still move."""
        return any(not transfer.settled for transfer in self._transfers)

    def settle(self, stopping: threading.Event) -> None:
        """Wait until nothing is in flight. Gives up after minutes, or when the tier is closed."""
        clock = self._terms.clock
        patience = Patience(clock)
        until_s = clock.monotonic_s() + _SETTLE_S
        while self.in_flight and not stopping.is_set() and clock.monotonic_s() < until_s:
            self.agent.poll()
            patience.pause()

    def close(self) -> bool:
        """Give the agent back. False where bytes may still move: they are left to the store's client."""
        if self.agent.close(timeout_s=_CLOSE_S):
            # A store's client may still read or write the staging memory: it outlives the interpreter.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))
            return False
        return True
