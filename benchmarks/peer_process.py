"""A process that holds one peer, ours or vLLM's own, and the driver of it. Needs no vLLM itself.

The process stands in for an engine: one thread steps an `OffloadingManager` as vLLM's scheduler does, with
a forward pass that does nothing, sleeps, or keeps the interpreter busy. Both sides are built from the same
`kv_connector_extra_config` and driven by the same code (`peer_engine.py`).

All such processes are forked from one that has imported vLLM, so that each starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import hashlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from pdoffload.layout import make_key

HOST = "127.0.0.1"
_START_DEADLINE_S = 180.0
_ANSWER_DEADLINE_S = 60.0
_END_DEADLINE_S = 20.0
_PRELOAD = ["vllm.v1.kv_offload.tiering.spec", "pdoffload.vllm.spec"]
_PR_SET_PDEATHSIG = 1
_CLOCK_OF_A_PROCESS = 2


class Who(enum.Enum):
    """Whose implementation a process runs."""

    OURS = "ours"
    STOCK = "stock"
    """vLLM's own `TieringOffloadingManager` with its `P2PSecondaryTierManager`."""


class Forward(enum.Enum):
    """What an engine does between two steps of its scheduler."""

    IDLE = "idle"
    """Nothing: it steps once a millisecond while work is pending, and else waits for a command."""
    SLEEP = "sleep"
    """Waits, as for a device."""
    SPIN = "spin"
    """Runs Python all the time."""


class PeerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One process: whose peer, how big its pool, and the settings a user would write."""

    who: Who
    chunk_bytes: int
    num_slots: int
    port: int
    with_tier: bool = True
    """False: a host pool alone, to see what the tier adds."""
    tier: Mapping[str, Any] = {}
    """More keys of the tier's table."""
    extra_config: Mapping[str, Any] = {}
    """More keys of `kv_connector_extra_config`."""
    environment: Mapping[str, str] = {}
    """Variables set before NIXL is loaded, such as UCX_TLS."""


class Request(msgspec.Struct, frozen=True):
    """One request as the scheduler sees it."""

    request_id: str
    keys: Sequence[bytes]
    params: Mapping[str, Any] | None = None
    """Its `kv_transfer_params`."""


# --- Commands, and what each is answered with ---


class Fill(msgspec.Struct, frozen=True):
    """Store random bytes under the keys of `request`, as if a device had. Answer: their digests."""

    request: Request
    seed: int


class Pull(msgspec.Struct, frozen=True):
    """Look all `requests` up, step after step, until each is loaded. Answer: a list of `Pulled`."""

    requests: Sequence[Request]
    deadline_s: float = 30.0


class Pulled(msgspec.Struct, frozen=True):
    """How one request ended: its first `num_loaded` chunks lie in the pool."""

    num_loaded: int
    took_s: float
    """From its first lookup to the lookup that found the last of them."""
    in_time: bool


class Read(msgspec.Struct, frozen=True):
    """Answer: the digest of each chunk in the pool, None for one that is not there. No tier is asked."""

    keys: Sequence[bytes]


class SetForward(msgspec.Struct, frozen=True):
    """From now on every step is followed by this. Answer: None."""

    forward: Forward
    step_s: float = 0.0


class Forget(msgspec.Struct, frozen=True):
    """Empty the pool. Answer: None."""


class Look(msgspec.Struct, frozen=True):
    """Answer: a `Seen`; the longest step and the log begin anew."""


class Seen(msgspec.Struct, frozen=True):
    longest_step_s: float
    """Of the scheduler's thread, its forward pass left out."""
    warnings: list[str]
    """What pdoffload and vLLM logged at level WARNING or above."""


class Stop(msgspec.Struct, frozen=True):
    """Close the manager and end. No answer."""


class Ready(msgspec.Struct, frozen=True):
    """Comes once, unasked."""

    start_s: float
    """What building the manager took."""


Command = Fill | Pull | Read | SetForward | Forget | Look | Stop


def keys_of(name: str, count: int) -> list[bytes]:
    """`count` keys as long as vLLM's own; the same for the same name."""
    names = (f"{name} {number}" for number in range(count))
    return [make_key(hashlib.sha256(each.encode()).digest(), 0) for each in names]


def from_source(source: Peer, request_id: str) -> dict[str, Any]:
    """`kv_transfer_params` of a request that asks `source` what it has."""
    return {"remote_kv_source": source.role(request_id)}


def from_prefiller(source: Peer, request_id: str) -> dict[str, Any]:
    """`kv_transfer_params` of a request whose chunks `source` keeps for it."""
    return {"remote_prefiller": source.role(request_id)}


def for_decoder(request_id: str) -> dict[str, Any]:
    """`kv_transfer_params` of a request whose chunks are kept for a decoder."""
    return {"remote_decoder": {"kv_request_id": request_id}}


def free_port() -> int:
    """A loopback port that nobody holds now."""
    with socket.socket() as held:
        held.bind((HOST, 0))
        return int(held.getsockname()[1])


class Peer:
    """The parent's end of one process. One thread; every wait has a deadline."""

    def __init__(self, who: Who, *, chunk_bytes: int, num_slots: int, **options: Any) -> None:
        """Starts it and returns at once; see `PeerOptions` for `options`."""
        self.options = PeerOptions(
            who=who, chunk_bytes=chunk_bytes, num_slots=num_slots, port=free_port(), **options
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_child_main, args=(theirs, self.options), name=repr(self), daemon=True
        )
        self.process.start()
        theirs.close()
        self._ready: Ready | None = None

    def __repr__(self) -> str:
        return f"<Peer {self.options.who.value} {self.options.port}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def start_s(self) -> float:
        """What building its manager took; waits until it has."""
        if self._ready is None:
            self._ready = self._receive(_START_DEADLINE_S)
            assert isinstance(self._ready, Ready)
        return self._ready.start_s

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def role(self, kv_request_id: str) -> dict[str, Any]:
        """What the table of a role says about this peer as a source."""
        return {
            "kv_request_id": kv_request_id,
            "remote_host": HOST,
            "remote_port": self.options.port,
        }

    def send(self, command: Command) -> None:
        assert self.start_s >= 0
        self._connection.send(command)

    def answer(self, timeout_s: float = _ANSWER_DEADLINE_S) -> Any:
        """The answer to the oldest command not yet answered. `AssertionError` if none comes."""
        return self._receive(timeout_s)

    def ask(self, command: Command) -> Any:
        self.send(command)
        return self.answer()

    def fill(self, request: Request, seed: int) -> list[bytes]:
        digests: list[bytes] = self.ask(Fill(request, seed))
        return digests

    def pull(self, *requests: Request, deadline_s: float = 30.0) -> list[Pulled]:
        pulled: list[Pulled] = self.ask(Pull(requests, deadline_s))
        return pulled

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        digests: list[bytes | None] = self.ask(Read(keys))
        return digests

    def look(self) -> Seen:
        seen: Seen = self.ask(Look())
        return seen

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, asked of the kernel: also while it is paused."""
        return time.clock_gettime(~self.pid << 3 | _CLOCK_OF_A_PROCESS)

    def pause(self) -> None:
        """Stop all its threads, so that it takes nothing from whoever is measured."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Let it end by itself, or kill it."""
        with contextlib.suppress(OSError):
            self.resume()
            self._connection.send(Stop())
        self.process.join(_END_DEADLINE_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self._connection.close()

    def _receive(self, timeout_s: float) -> Any:
        try:
            assert self._connection.poll(timeout_s), f"{self!r} did not answer in {timeout_s:g} s"
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(_END_DEADLINE_S)
            raise AssertionError(f"{self!r} ended with {self.process.exitcode}") from None


def _child_main(connection: Any, options: PeerOptions) -> None:
    """The process itself."""
    # Also when it is stopped: a test run that is shot dead leaves nobody behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(options.environment)
    from peer_engine import run

    run(connection, options)
