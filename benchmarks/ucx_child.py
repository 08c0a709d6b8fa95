"""One of two processes that move chunks by UCX alone, through ucxx. Run by `raw_ucx.py` with the Python of
`.venv-ucxx`: NIXL brings a UCX of its own, and two of them in one process do not mix.

Commands and answers are lines of JSON over a socket that the parent hands down. Progress is made as the bare
NIXL processes make it: all there is, then 0.1 ms of sleep. This module is imported by the parent as well, for
the messages; ucxx is imported by the process itself.
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import xxhash
from chunk_memory import DEADLINE_S, POLL_S, fill, shared_memory

_NOTE_TAG, _FIRST_CHUNK_TAG = 1, 1 << 32
_PR_SET_PDEATHSIG = 1


class Operation(enum.Enum):
    """How the bytes go."""

    PUT = "put"
    """One side writes into the memory of the other, then sends a note: what a NIXL WRITE does."""
    TAG = "tag"
    """A message per chunk, for which the other side has named the place: what ucxx itself offers."""


class Shape(msgspec.Struct, frozen=True):
    """The first line to either process. Answer: `Opened`."""

    operation: Operation
    num_chunks: int
    chunk_bytes: int
    receives: bool


class Opened(msgspec.Struct, frozen=True):
    """Where a process is reached, and its chunks."""

    worker_address: bytes
    memory_address: int
    remote_key: bytes


class Connect(msgspec.Struct, frozen=True, tag=True):
    """To the writer: the receiver's. Answer: `Connected`."""

    receiver: Opened


class Connected(msgspec.Struct, frozen=True):
    digest: str
    """Of all chunks to be written."""
    transports: str
    """Over which UCX writes in bulk, such as cma/memory."""
    ucx_version: str


class Write(msgspec.Struct, frozen=True, tag=True):
    """To the writer: write all chunks once. Answer: when it began, in seconds of the monotonic clock."""


class Expect(msgspec.Struct, frozen=True, tag=True):
    """To the receiver. Answers: null when it is ready, then when it knew that all had arrived."""


class Digest(msgspec.Struct, frozen=True, tag=True):
    """To the receiver, which then clears its chunks. Answer: the digest of what had arrived."""


Command = Connect | Write | Expect | Digest


class _Process:
    """A UCX context, its worker, and chunks that it knows."""

    def __init__(self, shape: Shape) -> None:
        ucx = _ucxx()
        from ucx_rma import Registration

        self.shape = shape
        self.chunks = shared_memory((shape.num_chunks, shape.chunk_bytes))
        # Kept here: UCX reads and writes it after the call that names it.
        self.note = np.ones(1, np.uint8)
        features = (ucx.Feature.TAG, ucx.Feature.RMA)
        self.context = ucx.UCXContext({}, feature_flags=features)
        self.worker = ucx.UCXWorker(self.context)
        self.memory = Registration(self.context.handle, self.chunks.ctypes.data, self.chunks.nbytes)

    def opened(self) -> Opened:
        return Opened(
            worker_address=bytes(self.worker.address),
            memory_address=self.chunks.ctypes.data,
            remote_key=self.memory.remote_key(),
        )

    def wait(self, condition: Callable[[], bool]) -> None:
        """Make progress until `condition()`."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            self.worker.progress()
            if condition():
                return
            assert time.monotonic() < deadline_s, "the chunks did not arrive"
            time.sleep(POLL_S)


class _Receiver(_Process):
    def serve(self, answer: Callable[[Any], None], command: Command) -> None:
        match command:
            case Expect():
                requests = self._expect()
                answer(None)
                self.wait(lambda: all(request.completed for request in requests))
                answer(time.monotonic())
                for request in requests:
                    request.check_error()
            case Digest():
                answer(xxhash.xxh3_128_hexdigest(self.chunks))
                self.chunks[:] = 0

    def _expect(self) -> list[Any]:
        ucx = _ucxx()
        if self.shape.operation is Operation.TAG:
            rows, first = list(self.chunks), _FIRST_CHUNK_TAG
        else:
            rows, first = [self.note], _NOTE_TAG
        return [
            self.worker.tag_recv(_array(row), ucx.UCXXTag(first + number))
            for number, row in enumerate(rows)
        ]


class _Writer(_Process):
    def serve(self, answer: Callable[[Any], None], command: Command) -> None:
        match command:
            case Connect(receiver):
                answer(self._connect(receiver))
            case Write():
                began_s = time.monotonic()
                {Operation.PUT: self._put, Operation.TAG: self._send}[self.shape.operation]()
                answer(began_s)

    def _connect(self, receiver: Opened) -> Connected:
        ucx = _ucxx()
        from ucx_rma import Puts, version

        from pdoffload.agent.ucx import bulk_transports

        fill(self.chunks)
        # NIXL asks to hear of a peer's errors. Asked for that, UCX before 1.23 does without cma and sends
        # puts as messages over TCP, at a sixth of the speed; not asked, it takes what NIXL's UCX takes.
        self._endpoint = ucx.UCXEndpoint.create_from_worker_address(
            self.worker,
            ucx.UCXAddress.create_from_buffer(receiver.worker_address),
            endpoint_error_handling=False,
        )
        self._puts = Puts(self._endpoint.handle, receiver.remote_key, self.memory)
        self._remote_address = receiver.memory_address
        self._puts.flush()
        self.wait(self._puts.done)
        return Connected(
            digest=xxhash.xxh3_128_hexdigest(self.chunks),
            transports=bulk_transports(self._endpoint.handle),
            ucx_version=version(),
        )

    def _put(self) -> None:
        here, size_bytes = self.chunks.ctypes.data, self.shape.chunk_bytes
        for offset in range(0, self.chunks.nbytes, size_bytes):
            self._puts.post(here + offset, self._remote_address + offset, size_bytes)
        self._puts.flush()
        self.wait(self._puts.done)
        self._wait_for([self._sent(self.note, _NOTE_TAG)])

    def _send(self) -> None:
        self._wait_for(
            [self._sent(row, _FIRST_CHUNK_TAG + number) for number, row in enumerate(self.chunks)]
        )

    def _sent(self, row: np.ndarray, tag: int) -> Any:
        return self._endpoint.tag_send(_array(row), _ucxx().UCXXTag(tag))

    def _wait_for(self, requests: list[Any]) -> None:
        self.wait(lambda: all(request.completed for request in requests))
        for request in requests:
            request.check_error()


def _array(row: np.ndarray) -> Any:
    from ucxx._lib.arr import Array

    return Array(row)


def _ucxx() -> Any:
    """ucxx's core. Importing ucxx sets variables that change what UCX does; they are taken back, so that it
    is measured as it comes, and as NIXL has it."""
    before = dict(os.environ)
    import ucxx._lib.libucxx

    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    return ucxx._lib.libucxx


def main() -> None:
    """The process itself; its argument is the number of the socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rb") as lines:

        def answer(value: Any) -> None:
            connection.sendall(msgspec.json.encode(value) + b"\n")

        shape = msgspec.json.decode(lines.readline(), type=Shape)
        process = _Receiver(shape) if shape.receives else _Writer(shape)
        answer(process.opened())
        for line in lines:
            process.serve(answer, msgspec.json.decode(line, type=Command))
    # UCX's own end would wait for the other process, which ends as well.
    os._exit(0)


if __name__ == "__main__":
    main()
