"""What tests of an agent stand on: memories with known bytes, and an agent on a clock that stands still."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.peer import Peer
from pdoffload.agent.transfer import Transfer
from pdoffload.clock import Clock
from pdoffload.errors import MisuseError
from pdoffload.testing.clock import FakeClock

PAGE = 4096
SLOTS = 32


class Memory:
    """`SLOTS` pages of private, page-aligned memory, with a page on each side that is not counted."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, (SLOTS + 2) * PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + PAGE
        self.size_bytes = SLOTS * PAGE

    def fill(self, *slots: int) -> None:
        """Put bytes into pages that no other page of any memory has."""
        for slot in slots:
            self._map[(slot + 1) * PAGE : (slot + 2) * PAGE] = os.urandom(PAGE)

    def page(self, slot: int) -> bytes:
        return self._map[(slot + 1) * PAGE : (slot + 2) * PAGE]

    def rows(self, *slots: int, size_bytes: int = PAGE) -> Descriptors:
        """The first `size_bytes` of each of these pages."""
        starts = [self.address + slot * PAGE for slot in slots]
        return pieces(MemoryKind.DRAM, starts, size_bytes)


def file_rows(fd: int, *slots: int, size_bytes: int = PAGE) -> Descriptors:
    """Pages `slots` of the file `fd`."""
    return pieces(MemoryKind.FILE, [slot * PAGE for slot in slots], size_bytes, fd)


def object_rows(device: int, *, size_bytes: int = PAGE) -> Descriptors:
    """The first bytes of the object that is registered as `device`."""
    return pieces(MemoryKind.OBJECT, [0], size_bytes, device)


class AgentRig(ABC):
    """The agent of a test is `agent`, its two memories are `here` and `there`."""

    @abstractmethod
    def make_agent(self, clock: Clock) -> DrivenAgent:
        """A new agent that can copy between memories, and between memory and files."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def agent(self, clock: FakeClock) -> Iterator[DrivenAgent]:
        agent = self.make_agent(clock)
        yield agent
        agent.check()
        assert agent.close() == []
        assert agent.counts.balanced, agent.counts

    @pytest.fixture
    def here(self, agent: DrivenAgent) -> Memory:
        memory = Memory()
        agent.register_memory(memory.address, memory.size_bytes)
        return memory

    @pytest.fixture
    def there(self, agent: DrivenAgent) -> Memory:
        memory = Memory()
        agent.register_memory(memory.address, memory.size_bytes)
        return memory

    @pytest.fixture
    def fd(self, agent: DrivenAgent, tmp_path: Path) -> Iterator[int]:
        """An open, registered file of `SLOTS` pages of zeros."""
        fd = os.open(tmp_path / "chunks", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, SLOTS * PAGE)
        agent.register_files([fd], [SLOTS * PAGE])
        yield fd
        os.close(fd)

    def move(self, agent: DrivenAgent, op: Op, local: Descriptors, remote: Descriptors) -> Transfer:
        return agent.wait(agent.submit(op, local, remote, timeout_s=30, what="a test"))

    def poll_until(self, agent: DrivenAgent, transfer: Transfer) -> list[Transfer]:
        told: list[Transfer] = []
        give_up = threading.Event()
        for _ in range(2000):
            told += agent.poll()
            if transfer.settled:
                break
            give_up.wait(0.001)
        return told

    def refuse(
        self,
        agent: DrivenAgent,
        local: Descriptors,
        remote: Descriptors,
        match: str,
        *,
        op: Op = Op.WRITE,
        timeout_s: float = 30.0,
        peer: Peer | None = None,
    ) -> None:
        before = agent.counts
        with pytest.raises(MisuseError, match=match):
            agent.submit(op, local, remote, timeout_s=timeout_s, what="misuse", peer=peer)
        assert agent.counts == before
