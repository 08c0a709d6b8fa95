"""What NIXL costs over UCX itself: the same chunks, once by a bare NIXL write, once by UCX alone.

Two processes of each kind, pages of /dev/shm on both ends, no control channel, no checksums within the
measurement. UCX is driven through ucxx, in an environment of its own (`make ucxx`), once by puts into the
other's memory, which is what a NIXL WRITE is made of, and once by tagged messages. What arrived is compared
outside the measurement.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
from bare_write import BareWrite
from chunk_memory import DEADLINE_S
from common import GB, MIB, Cost, Row, Run, Spread, alternate, parser, ratios, started
from ucx_child import Command, Connect, Connected, Digest, Expect, Opened, Operation, Shape, Write

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-ucxx" / "bin" / "python"
ENVIRONMENTS: tuple[dict[str, str], ...] = ({}, {"UCX_TLS": "tcp"})
"""UCX's choice, and TCP, which is what two hosts without RDMA have."""

_END_S = 5.0


def missing() -> str:
    """Why UCX cannot be measured here, with the remedy; nothing if it can."""
    return "" if PYTHON.exists() else "ucxx is not installed: make ucxx"


class RawUcx:
    """Two processes in which UCX moves `num_chunks` chunks at a time; used like a `BareWrite`."""

    def __init__(
        self,
        operation: Operation,
        *,
        chunk_bytes: int,
        num_chunks: int,
        environment: Mapping[str, str],
    ) -> None:
        self.children: list[_Child] = []
        try:
            for receives in (True, False):
                shape = Shape(operation, num_chunks, chunk_bytes, receives)
                self.children.append(_Child(shape, environment))
            self._receiver, self._writer = self.children
            receiver: Opened = self._receiver.answer(Opened)
            self._writer.answer(Opened)
            self._writer.send(Connect(receiver))
            # Some connections are made by both ends; the receiver works at its end when it expects.
            self._receiver.send(Expect())
            self._receiver.answer(None)
            self.connected: Connected = self._writer.answer(Connected)
            self._finish()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self) -> Cost:
        """All chunks once. Wall seconds from the first post to the receiver's knowledge of the last byte; CPU
        of both processes."""
        cpu_s = self.cpu_s()
        self._receiver.send(Expect())
        self._receiver.answer(None)
        return self._finish(cpu_s)

    def cpu_s(self) -> float:
        """CPU seconds of both processes so far."""
        return sum(child.cpu_s() for child in self.children)

    def close(self) -> None:
        for child in reversed(self.children):
            child.close()

    def _finish(self, cpu_s: float = 0.0) -> Cost:
        """The writer's part, when the receiver expects it."""
        self._writer.send(Write())
        began_s = self._writer.answer(float)
        # Both processes read the same monotonic clock.
        known_s = self._receiver.answer(float)
        cost = Cost(known_s - began_s, self.cpu_s() - cpu_s)
        self._receiver.send(Digest())
        assert self._receiver.answer(str) == self.connected.digest, "other bytes arrived"
        return cost


class _Child:
    """The parent's end of one of the two."""

    def __init__(self, shape: Shape, environment: Mapping[str, str]) -> None:
        reason = missing()
        if reason:
            raise RuntimeError(reason)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(DEADLINE_S)
        self._lines = self._socket.makefile("rb")
        with theirs:
            self.process = subprocess.Popen(
                [PYTHON, Path(__file__).with_name("ucx_child.py"), str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # where UCX warns
                pass_fds=[theirs.fileno()],
            )
        self._say(shape)

    def send(self, command: Command) -> None:
        self._say(command)

    def answer(self, kind: Any) -> Any:
        line = b""
        with contextlib.suppress(ConnectionResetError):
            line = self._lines.readline()
        assert line, f"a UCX process ended with {self.process.wait(DEADLINE_S)}"
        return msgspec.json.decode(line, type=kind)

    def cpu_s(self) -> float:
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def close(self) -> None:
        """It ends when it sees that nobody asks any more; one that waits for the other is killed."""
        self._lines.close()
        self._socket.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _say(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # told by the answer's lack
            self._socket.sendall(msgspec.json.encode(message) + b"\n")


def measure(
    run: Run, environment: dict[str, str], *, chunk_bytes: int, num_chunks: int, rounds: int
) -> None:
    """NIXL, puts and messages take turns over one transport."""
    shape = {"chunk_bytes": chunk_bytes, "num_chunks": num_chunks, "environment": environment}
    with ExitStack() as stack:
        nixl = stack.enter_context(BareWrite(**shape))
        raw = {each: stack.enter_context(RawUcx(each, **shape)) for each in Operation}
        costs = alternate(
            {"nixl": nixl.write} | {f"ucx_{each.value}": raw[each].write for each in Operation},
            rounds,
        )
        seen = raw[Operation.PUT].connected
    if nixl.transports != seen.transports:
        run.remarks.append(
            f"Not the same transports: NIXL writes by {nixl.transports}, UCX {seen.ucx_version} by "
            f"{seen.transports}."
        )
    run.add(
        Row(
            case={
                "UCX_TLS": transports_wanted(environment),
                "transports": seen.transports,
                "ucx": seen.ucx_version,
                "chunk_KiB": chunk_bytes >> 10,
                "chunks": num_chunks,
            },
            figures=_figures(costs, num_chunks * chunk_bytes / GB),
        )
    )


def transports_wanted(environment: Mapping[str, str]) -> str:
    return environment.get("UCX_TLS") or os.environ.get("UCX_TLS", "UCX's choice")


def _figures(costs: Mapping[str, list[Cost]], size_gb: float) -> dict[str, Spread]:
    wall_s = {name: [cost.wall_s for cost in each] for name, each in costs.items()}
    figures = {f"{name}_GBps": Spread.of([size_gb / s for s in wall_s[name]]) for name in wall_s}
    for name in ("ucx_put", "ucx_tag"):
        figures[f"nixl_over_{name}"] = Spread.of(ratios(wall_s[name], wall_s["nixl"]))
    for name, each in costs.items():
        figures[f"{name}_cpu_s_per_GB"] = Spread.of([cost.cpu_s / size_gb for cost in each])
    return figures


def main() -> None:
    options = parser(__doc__).parse_args()
    if missing():
        sys.exit(missing())
    run = started("raw_ucx", options, sys.argv[1:])
    sizes, total_bytes, rounds = (2 * MIB, 256 << 10, 64 << 10), 64 * MIB, options.rounds or 40
    if options.smoke:
        sizes, total_bytes, rounds = (64 << 10,), MIB, options.rounds or 2
    for environment in ENVIRONMENTS:
        for chunk_bytes in sizes:
            measure(
                run,
                environment,
                chunk_bytes=chunk_bytes,
                num_chunks=total_bytes // chunk_bytes,
                rounds=rounds,
            )
    run.finish(Path(tempfile.gettempdir()))


if __name__ == "__main__":
    main()
