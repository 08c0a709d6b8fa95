"""A process with one NIXL agent and one memory, driven on command, for tests between real processes.

    python -m pdoffload.testing.peer_child SIZE_BYTES

reads one command a line and answers with one JSON object a line:

    open [NAME]            makes the agent; its name is NAME exactly, if given
    metadata               what a peer needs, and where the memory lies
    add METADATA           adds a peer; METADATA in hex
    write ADDRESS SIZE COUNT TIMEOUT
                           starts writing COUNT pieces of SIZE bytes to ADDRESS of the last peer
    wait                   how that write ended
    serve, rest            makes progress between commands from now on; stops doing so
    digest                 xxh3-128 of the memory
    close                  closes the agent

The memory is filled with bytes that come from the process's pid.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import xxhash

from pdoffload.agent.agent import Op
from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.nixl import NixlAgent
from pdoffload.agent.peer import Peer
from pdoffload.agent.transfer import Transfer

_PROGRESS_S = 0.0002


class Bulk:
    """`size_bytes` of memory with known bytes."""

    def __init__(self, size_bytes: int, seed: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size_bytes = size_bytes
        self.view = np.frombuffer(self._map, dtype=np.uint8)
        self.view[:] = np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.view.data)


def row_of_pieces(address: int, size_bytes: int, count: int) -> Descriptors:
    """`count` pieces of `size_bytes` that follow each other."""
    return pieces(MemoryKind.DRAM, [address + i * size_bytes for i in range(count)], size_bytes)


class PeerChild:
    """The parent's end: starts the process and talks to it."""

    def __init__(self, size_bytes: int, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdoffload.testing.peer_child", str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        )

    def __enter__(self) -> PeerChild:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end by itself, or kill it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")

    def answer(self) -> dict[str, Any]:
        """The next answer. `AssertionError` if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(30)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        self.send(command)
        return self.answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()


class _Child:
    """The process itself."""

    def __init__(self, size_bytes: int) -> None:
        # UCX writes its log to standard output: answers go through a descriptor of their own.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._bulk = Bulk(size_bytes, os.getpid())
        self._agent: NixlAgent | None = None
        self._peer: Peer | None = None
        self._write: Transfer | None = None
        self._serving = False

    def run(self) -> None:
        buffer = b""
        while True:
            if select.select([0], [], [], _PROGRESS_S if self._serving else None)[0]:
                chunk = os.read(0, 65536)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    self._answers.write(json.dumps(self._obey(*line.decode().split())) + "\n")
            if self._serving and self._agent is not None:
                self._agent.progress()
        self._close()

    def _obey(self, verb: str, *words: str) -> dict[str, Any]:
        if verb == "open":
            self._agent = NixlAgent(words[0] if words else "child", [UcxBackend(reach="network")])
            self._agent.register_memory(self._bulk.address, self._bulk.size_bytes)
            return {"name": self._agent.name}
        if verb == "digest":
            return {"digest": self._bulk.digest()}
        if verb in ("serve", "rest"):
            self._serving = verb == "serve"
            return {}
        agent = self._agent
        if agent is None:
            return {"error": "no agent is open"}
        if verb == "metadata":
            return {"metadata": agent.metadata().hex(), "address": self._bulk.address}
        if verb == "add":
            self._peer = agent.add_peer(bytes.fromhex(words[0]))
            return {"peer": self._peer.name}
        if verb == "write":
            address, size, count = (int(word) for word in words[:3])
            self._write = agent.submit(
                Op.WRITE,
                row_of_pieces(self._bulk.address, size, count),
                row_of_pieces(address, size, count),
                timeout_s=float(words[3]),
                what="write of the child",
                peer=self._peer,
            )
            return {"state": self._write.state.value}
        if verb == "wait":
            assert self._write is not None
            agent.wait(self._write)
            return {"state": self._write.state.value, "error": str(self._write.error or "")}
        self._close()
        return {"closed": True}

    def _close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = self._peer = None


if __name__ == "__main__":
    _Child(int(sys.argv[1])).run()
