"""A `PeerEngine` in a process of its own, driven on command, that can stop itself at a given stage.

Commands and answers are lines of JSON over a socket pair; each command has one answer. Told to `Halt`, the
process stops itself (SIGSTOP) the next time it gets to that stage: the test sees it stopped, and lets it go
on or kills it. What runs in the process: `pdoffload.testing.engine_child`.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.p2p.address import Address
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import (
    HOST,
    Chunks,
    EngineOptions,
    Pulled,
    Seen,
    source,
)
from pdoffload.testing.tier_rig import check_counters
from pdoffload.tiers.base import TierStats

ANSWER_TIMEOUT_S = 30.0
PATIENCE_S = 20.0
_PAUSE_S = 0.002
CHILD = "pdoffload.testing.engine_child"
"""What a nursery of such processes is made for."""


PULL, ASK = "remote_prefiller", "remote_kv_source"

_numbers = itertools.count()


class Stage(enum.Enum):
    """Where a process can stop itself. A message that comes is not handled yet."""

    CONNECT_COMES = "connect comes"
    ACK_COMES = "connect_ack comes"
    LOOKUP_COMES = "lookup comes"
    ANSWER_COMES = "lookup_resp comes"
    FETCH_COMES = "fetch comes"
    WRITE_BEGINS = "write begins"
    WRITE_RUNS = "write runs"
    WRITE_ENDED = "transfer_done goes"
    DONE_COMES = "transfer_done comes"
    ABORT_COMES = "abort_fetch comes"


# --- commands; the answer is null where none is named ---


class Begin(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    params: Mapping[str, Any] | None = None


class Reserve(msgspec.Struct, frozen=True, tag=True):
    chunks: Chunks
    request_id: str = ""


class Arrive(msgspec.Struct, frozen=True, tag=True):
    chunks: Chunks
    success: bool = True


class Want(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    params: Mapping[str, Any]
    chunks: Chunks


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Answer: the `Pulled` of a request that wants chunks."""

    request_id: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    pass


class Flip(msgspec.Struct, frozen=True, tag=True):
    chunks: Chunks


class Halt(msgspec.Struct, frozen=True, tag=True):
    stage: Stage | None


class Advance(msgspec.Struct, frozen=True, tag=True):
    duration_s: float


class Look(msgspec.Struct, frozen=True, tag=True):
    """Answer: `Seen`."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close the engine. Answer: the names of Python's threads that are left."""

    timeout_s: float


Command = (
    Begin | Reserve | Arrive | Want | Tell | Finish | Forget | Flip | Halt | Advance | Look | Close
)


class EngineProcess:
    """The parent's end. One thread; every wait has a deadline and ends in an `AssertionError`."""

    def __init__(self, nursery: Nursery, options: EngineOptions) -> None:
        self.options = options
        self._nursery = nursery
        self.pid, self._socket = nursery.start(msgspec.msgpack.encode(options))
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        self._lines = self._socket.makefile("rb")
        try:
            self.address = Address(HOST, self._answer(int))
        except AssertionError:
            self.hang_up()
            raise
        self._counted = TierStats()
        self.logged: list[str] = []
        """What it has logged at INFO or above until the last look."""

    def __repr__(self) -> str:
        return f"<EngineProcess {self.pid}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        code = self.end()
        assert code in (0, -signal.SIGKILL), f"{self!r} ended with {code}"

    # --- what its engine does ---

    def source(self, kv_request_id: str) -> dict[str, Any]:
        """What the table of a role says about this engine."""
        return source(self.address, kv_request_id)

    def begin(self, request_id: str, params: Mapping[str, Any] | None = None) -> None:
        self.ask(Begin(request_id, params))

    def hold(self, chunks: Chunks, request_id: str = "") -> None:
        """Have these chunks in the pool, computed for a request."""
        self.ask(Reserve(chunks, request_id))
        self.ask(Arrive(chunks))

    def keep(self, kv_request_id: str, chunks: Chunks) -> None:
        """Compute these chunks for a decoder, in a request of its own that ends."""
        self.begin(
            f"computes {kv_request_id}", {"remote_decoder": {"kv_request_id": kv_request_id}}
        )
        self.hold(chunks, f"computes {kv_request_id}")
        self.finish(f"computes {kv_request_id}")

    def want(self, role: str, producer: EngineProcess, kv_request_id: str, chunks: Chunks) -> None:
        """A request begins that wants chunks of `producer`. Its own id is the other one."""
        params = {role: producer.source(kv_request_id)}
        self.ask(Want(kv_request_id, params, chunks))

    def tell(self, request_id: str) -> Pulled:
        pulled: Pulled = self.ask(Tell(request_id), Pulled)
        return pulled

    def pulled(self, request_id: str, within_s: float = PATIENCE_S) -> Pulled:
        """How the request ended, which is then forgotten."""
        self.until(lambda: self.tell(request_id).ended, f"the end of {request_id}", within_s)
        pulled = self.tell(request_id)
        self.finish(request_id)
        return pulled

    def pull(
        self, role: str, producer: EngineProcess, kv_request_id: str, chunks: Chunks
    ) -> Pulled:
        self.want(role, producer, kv_request_id, chunks)
        return self.pulled(kv_request_id)

    def finish(self, request_id: str) -> None:
        self.ask(Finish(request_id))

    def forget(self) -> None:
        self.ask(Forget())

    def flip(self, chunks: Chunks) -> None:
        """Flip a bit in each of these chunks, after its checksum was taken."""
        self.ask(Flip(chunks))

    def look(self) -> Seen:
        """Also proves that no counter has fallen."""
        seen: Seen = self.ask(Look(), Seen)
        self._counted = check_counters(self._counted, seen.stats)
        self.logged += seen.log
        return seen

    def close(self, timeout_s: float = 10.0) -> list[str]:
        """Close the engine; Python's threads that are left."""
        left: list[str] = self.ask(Close(timeout_s), list[str])
        return left

    def ask(self, command: Command, kind: Any = None) -> Any:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # told by the answer's lack
            self._socket.sendall(msgspec.json.encode(command) + b"\n")
        return self._answer(kind)

    def works_with(self, producer: EngineProcess) -> None:
        """A pull of new chunks succeeds at the first try, every byte right."""
        name = f"proof {next(_numbers)}"
        chunks = Chunks(name, 3)
        producer.hold(chunks)
        pulled = self.pull(ASK, producer, name, chunks)
        assert (pulled.num_loaded, pulled.num_right) == (3, 3), self.look()

    def at_rest(self) -> Seen:
        """Wait until nothing is lent, in quarantine or under way."""
        seen: list[Seen] = []

        def rests() -> bool:
            seen[:] = [self.look()]
            return not (seen[0].num_lent or seen[0].num_quarantined or seen[0].num_jobs)

        self.until(rests, "an engine at rest")
        return seen[0]

    def advance(self, duration_s: float) -> None:
        """Let time pass for this engine."""
        self.ask(Advance(duration_s))

    def let_pass(self, condition: Callable[[], object], what: str, limit_s: float) -> float:
        """Let time pass for this engine, at most `limit_s`, until `condition()` holds, and holds on when its
        threads have taken what came meanwhile; how much time it took."""
        passed_s = 0.0
        while passed_s < limit_s and not self._holds_on(condition):
            self.advance(1.0)
            passed_s += 1.0
            SYSTEM_CLOCK.sleep(_PAUSE_S)
        # Its threads carry out in real time what the deadlines have decided.
        self.until(condition, f"{what} when {limit_s:g} s had passed")
        return passed_s

    def _holds_on(self, condition: Callable[[], object]) -> bool:
        if not condition():
            return False
        self.advance(0.0)
        return bool(condition())

    def until(
        self, condition: Callable[[], object], what: str, within_s: float = PATIENCE_S
    ) -> None:
        """Wait until `condition()`."""
        give_up_s = SYSTEM_CLOCK.monotonic_s() + within_s
        while not condition():
            assert SYSTEM_CLOCK.monotonic_s() < give_up_s, f"waited {within_s:g} s for {what}"
            SYSTEM_CLOCK.sleep(_PAUSE_S)

    # --- the process ---

    def halt_at(self, stage: Stage) -> None:
        self.ask(Halt(stage))

    def halted(self) -> None:
        """Wait until it has stopped itself."""
        self.until(lambda: self._state() == "T", f"{self!r} to stop")

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.halted()

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self._nursery.exit_code(self.pid, PATIENCE_S) == -signal.SIGKILL

    def end(self) -> int:
        """Let it end by itself; how it did. One that does not is killed."""
        self.hang_up()
        code = self._nursery.exit_code(self.pid, 0.0)
        if code is None:
            self.go_on()
            code = self._nursery.exit_code(self.pid, PATIENCE_S)
        if code is None:
            self.kill()
            raise AssertionError(f"{self!r} did not end by itself")
        return code

    def hang_up(self) -> None:
        """Close the connection to it: it ends as soon as it sees that."""
        self._lines.close()
        self._socket.close()

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _answer(self, kind: Any) -> Any:
        line = b""
        with contextlib.suppress(ConnectionResetError):
            line = self._lines.readline()
        assert line, f"{self!r} ended with {self._nursery.exit_code(self.pid, PATIENCE_S)}"
        return msgspec.json.decode(line, type=kind)
