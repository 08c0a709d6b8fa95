"""What NIXL itself can do: one process writes chunks into the memory of another, and nothing else.

No control channel, no checksums, no scheduler. NIXL's progress thread is off; both processes ask again every
0.1 ms, the receiving one for notifications, because over transports without remote memory access in hardware
the bytes only land while it asks.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec
import numpy as np
import xxhash
from chunk_memory import DEADLINE_S, POLL_S, fill, shared_memory
from common import Cost

from pdoffload.agent.ucx import UcxEndpoints

_NOTE = b"written"
_PR_SET_PDEATHSIG = 1


class _Memory(msgspec.Struct, frozen=True):
    """Where the receiver's chunks lie."""

    metadata: bytes
    address: int


class BareWrite:
    """Two processes that write `num_chunks` chunks at a time."""

    def __init__(
        self, *, chunk_bytes: int, num_chunks: int, environment: Mapping[str, str]
    ) -> None:
        shape = (num_chunks, chunk_bytes)
        self._receiver = _Child(_receive, shape, environment)
        self._writer = _Child(_write, shape, environment)
        self._writer.send(self._receiver.answer())
        self._digest = self._writer.answer()
        self.transports: str = self._writer.answer()
        """Over which UCX writes in bulk, such as cma/memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self) -> Cost:
        """One write. Wall seconds from its post to the receiver's knowledge of it; CPU of both."""
        cpu_s = self.cpu_s()
        self._receiver.send(_NOTE)
        assert self._receiver.answer() == "asking"
        self._writer.send(_NOTE)
        began_s = self._writer.answer()
        # Both processes read the same monotonic clock.
        known_s = self._receiver.answer()
        cost = Cost(known_s - began_s, self.cpu_s() - cpu_s)
        self._receiver.send("digest")
        assert self._receiver.answer() == self._digest, "other bytes arrived"
        return cost

    def cpu_s(self) -> float:
        """CPU seconds of both processes so far."""
        return self._receiver.cpu_s() + self._writer.cpu_s()

    def close(self) -> None:
        self._writer.close()
        self._receiver.close()


class _Child:
    """The parent's end of one of the two."""

    def __init__(
        self,
        work: Callable[[Any, np.ndarray], None],
        shape: tuple[int, int],
        environment: Mapping[str, str],
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_child_main, args=(work, theirs, shape, dict(environment)), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def answer(self) -> Any:
        assert self._connection.poll(DEADLINE_S), "a bare NIXL process does not answer"
        return self._connection.recv()

    def cpu_s(self) -> float:
        assert self._process.pid is not None
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def close(self) -> None:
        self._connection.close()
        self._process.join(DEADLINE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def _child_main(
    work: Callable[[Any, np.ndarray], None],
    connection: Any,
    shape: tuple[int, int],
    environment: dict[str, str],
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    try:
        work(connection, shared_memory(shape))
    except EOFError:
        return  # told to end


def _rows(address: int, shape: tuple[int, int]) -> np.ndarray:
    """(address, length, device) of each chunk."""
    rows = np.zeros((shape[0], 3), np.uint64)
    rows[:, 0] = address + shape[1] * np.arange(shape[0], dtype=np.uint64)
    rows[:, 1] = shape[1]
    return rows


def _agent(array: np.ndarray) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = nixl_agent(f"bare-{os.getpid()}", config)
    agent.register_memory(_rows(array.ctypes.data, (1, array.nbytes)), "DRAM")
    return agent


def _receive(connection: Any, array: np.ndarray) -> None:
    agent = _agent(array)
    connection.send(_Memory(agent.get_agent_metadata(), array.ctypes.data))
    while True:
        if connection.recv() == "digest":
            connection.send(xxhash.xxh3_128_digest(array))
            array[:] = 0
            continue
        connection.send("asking")
        deadline_s = time.monotonic() + DEADLINE_S
        while not agent.get_new_notifs():
            assert time.monotonic() < deadline_s
            time.sleep(POLL_S)
        connection.send(time.monotonic())


def _write(connection: Any, array: np.ndarray) -> None:
    fill(array)
    agent = _agent(array)
    memory: _Memory = connection.recv()
    endpoints = UcxEndpoints(agent.name)
    endpoints.expect()
    receiver = agent.add_remote_agent(memory.metadata)
    endpoints.note(receiver)
    local = agent.get_xfer_descs(_rows(array.ctypes.data, array.shape), "DRAM")
    remote = agent.get_xfer_descs(_rows(memory.address, array.shape), "DRAM")
    request = agent.initialize_xfer("WRITE", local, remote, receiver, _NOTE)
    connection.send(xxhash.xxh3_128_digest(array))
    connection.send(endpoints.transport_of(receiver))
    while True:
        connection.recv()
        began_s = time.monotonic()
        state = agent.transfer(request)
        while state == "PROC":
            assert time.monotonic() < began_s + DEADLINE_S
            time.sleep(POLL_S)
            state = agent.check_xfer_state(request)
        assert state == "DONE", state
        connection.send(began_s)
