"""A process with one NIXL agent and one memory, driven on command, for tests between real processes.

    python -m pdoffload.testing.peer_child SIZE_BYTES BACKEND HOST

reads one command a line and answers with one JSON object a line:

    open [NAME]            makes the agent; NAME is its whole name if given
    metadata               what a peer needs, in hex, and where the memory lies
    add METADATA           adds a peer
    write ADDRESS BYTES COUNT TIMEOUT_S
                           starts writing COUNT pieces of BYTES to ADDRESS of the peer added last
    wait                   how that write ended, and by which transport it went if it is done
    remove                 removes the peer added last
    cycle METADATA ADDRESS COUNT
                           COUNT times: adds a peer, writes one page to it, removes it; how the
                           first write ended that was not done, if there was one
    serve, rest            makes progress between commands from now on; stops doing so
    digest                 xxh3-128 of the memory
    close                  closes the agent, waiting 0.2 s at most
    fds                    open file descriptors of the process

The memory is filled with bytes that come from the process's pid. Nothing here waits for a peer without
end: a peer that makes no progress leaves a write UNKNOWN after TIMEOUT_S.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from pdoffload.agent import mooncake, nixl
from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.opening import open_agent, peer_backends
from pdoffload.agent.peer import Peer
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.errors import PdOffloadError
from pdoffload.testing.child import LineChild
from pdoffload.testing.interpreter import Interpreter, this_one

PAGE = 4096
_PROGRESS_S = 0.0002


class PeerChild(LineChild):
    """The parent's end. `env` is added to this process's own; `host` is told to its peers, where that counts.

    `inside`: what stands before the command, of a network namespace say.
    """

    def __init__(
        self,
        size_bytes: int,
        backend: str = "UCX",
        *,
        interpreter: Interpreter | None = None,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
        **env: str,
    ) -> None:
        interpreter = interpreter or this_one()
        module = "pdoffload.testing.peer_child"
        super().__init__(
            [*inside, interpreter.python, "-m", module, str(size_bytes), backend, host],
            env=interpreter.environ(**env),
            stderr=subprocess.DEVNULL,
        )


class _Child:
    """The process itself."""

    def __init__(self, size_bytes: int, backend: str, host: str) -> None:
        # UCX writes its log to standard output: answers go through a descriptor of their own.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._map = mmap.mmap(-1, size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        filling = np.random.default_rng(os.getpid())
        self._map[:] = filling.bytes(size_bytes)
        self._backends = peer_backends([backend], host=host)
        self._agent: DrivenAgent | None = None
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
        try:
            if verb == "open":
                return self._open(*words)
            if verb == "digest":
                return {"digest": xxhash.xxh3_128_hexdigest(self._map)}
            if verb == "fds":
                return {"fds": len(os.listdir("/proc/self/fd"))}
            if verb in ("serve", "rest"):
                self._serving = verb == "serve"
                return {}
            if verb == "close":
                self._close()
                return {}
            assert self._agent is not None, "no agent is open"
            return self._ask_agent(self._agent, verb, *words)
        except PdOffloadError as error:
            return {"error": str(error)}

    def _open(self, name: str = "") -> dict[str, Any]:
        if name:
            # As another program may name its agents: the same after a restart.
            for module in (nixl, mooncake):
                setattr(module, "unique_name", lambda _: name)  # noqa: B010
        self._agent = open_agent("child", self._backends)
        self._agent.register_memory(self._address, len(self._map))
        return {"name": self._agent.name}

    def _ask_agent(self, agent: DrivenAgent, verb: str, *words: str) -> dict[str, Any]:
        if verb == "metadata":
            return {"metadata": agent.metadata().hex(), "address": self._address}
        if verb == "add":
            self._peer = agent.add_peer(bytes.fromhex(words[0]))
            return {"peer": self._peer.name}
        if verb == "write":
            address, size, count = (int(word) for word in words[:3])
            self._submit(agent, address, size, count, float(words[3]))
            return self._told(agent)
        if verb == "wait":
            assert self._write is not None
            agent.wait(self._write)
            return self._told(agent)
        if verb == "remove":
            assert self._peer is not None
            self._peer.remove()
            return {}
        for _ in range(int(words[2])):
            self._peer = agent.add_peer(bytes.fromhex(words[0]))
            agent.wait(self._submit(agent, int(words[1]), PAGE, 1, 30))
            if self._write is None or self._write.state is not TransferState.DONE:
                return self._told(agent)
            self._peer.remove()
        return {"balanced": agent.counts.transfers_made == agent.counts.transfers_released}

    def _submit(
        self, agent: DrivenAgent, address: int, size: int, count: int, timeout_s: float
    ) -> Transfer:
        self._write = agent.submit(
            Op.WRITE,
            _in_a_row(self._address, size, count),
            _in_a_row(address, size, count),
            timeout_s=timeout_s,
            what="write of the child",
            peer=self._peer,
        )
        return self._write

    def _told(self, agent: DrivenAgent) -> dict[str, Any]:
        assert self._write is not None
        assert self._peer is not None
        is_done = self._write.state is TransferState.DONE
        return {
            "state": self._write.state.value,
            "error": str(self._write.error or ""),
            "transport": agent.transport_of(self._peer) if is_done else "",
        }

    def _close(self) -> None:
        agent, self._agent, self._peer = self._agent, None, None
        if agent is not None:
            agent.close(timeout_s=0.2)


def _in_a_row(address: int, size_bytes: int, count: int) -> Descriptors:
    return pieces(MemoryKind.DRAM, [address + i * size_bytes for i in range(count)], size_bytes)


if __name__ == "__main__":
    # NIXL would load it for its version alone, which takes seconds.
    sys.modules["torch"] = None  # type: ignore[assignment]
    _Child(int(sys.argv[1]), *sys.argv[2:4]).run()
