"""Processes that start in a fraction of a second, forked from one that has done the slow part.

Importing NIXL takes seconds, most of them PyTorch's, and the first agent of a process half a second, in
which UCX looks at the machine. A nursery does both once; its agent is closed again, since a UCX agent does
not survive a fork. It imports a module, calls its `prepare()`, and in each process its `main`:

    def main(connection: socket.socket, options: bytes) -> None: ...

with one end of a socket pair. A process dies with its nursery, also while it is stopped. What it prints goes
to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import msgspec

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.testing.interpreter import Interpreter, this_one

_START_TIMEOUT_S = 90.0
_PAUSE_S = 0.002
_LONGEST_ORDER_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1


class _Start(msgspec.Struct, frozen=True, tag=True):
    """Fork a process for the socket that comes along. Answer: its pid."""

    options: bytes


class _Reap(msgspec.Struct, frozen=True, tag=True):
    """Answer: how the process ended, as `subprocess` tells it; None while it runs."""

    pid: int


class Nursery:
    """The parent's end. One thread; every wait has a deadline."""

    def __init__(self, module: str, interpreter: Interpreter | None = None) -> None:
        """`module` is that whose `prepare` and `main` are called, by another Python if one is given."""
        self._module = module
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START_TIMEOUT_S)
        # Their threads would not be there after a fork.
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        interpreter = interpreter or this_one()
        code = "from pdoffload.testing.nursery import nurse; nurse()"
        self._process = subprocess.Popen(
            [interpreter.python, "-c", code, module],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env=interpreter.environ(**single),
        )
        theirs.close()

    def start(self, options: bytes) -> tuple[int, socket.socket]:
        """The pid of a process that runs `main`, and this end of its socket pair."""
        ours, theirs = socket.socketpair()
        order = msgspec.msgpack.encode(_Start(options))
        with theirs:
            socket.send_fds(self._control, [order], [theirs.fileno()])
        pid: int = self._answer()
        return pid, ours

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """How the process ended (0 or more: its status; less: a signal); None if it runs on."""
        give_up_s = SYSTEM_CLOCK.monotonic_s() + timeout_s
        while True:
            self._control.send(msgspec.msgpack.encode(_Reap(pid)))
            code: int | None = self._answer()
            if code is not None or SYSTEM_CLOCK.monotonic_s() >= give_up_s:
                return code
            SYSTEM_CLOCK.sleep(_PAUSE_S)

    def close(self) -> None:
        """End it, and with it whatever it has started."""
        self._control.close()
        self._process.wait(_START_TIMEOUT_S)

    def _answer(self) -> Any:
        return msgspec.msgpack.decode(self._control.recv(_LONGEST_ORDER_BYTES))


def nurse() -> None:
    """The process itself; standard input is its control socket."""
    module = importlib.import_module(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    module.prepare()
    ended: dict[int, int] = {}
    running: set[int] = set()
    orders = msgspec.msgpack.Decoder(_Start | _Reap)
    while True:
        frame, fds, _, _ = socket.recv_fds(control, _LONGEST_ORDER_BYTES, 1)
        if not frame:
            break
        order = orders.decode(frame)
        if isinstance(order, _Start):
            pid = os.fork()
            if not pid:
                control.close()
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                module.main(socket.socket(fileno=fds[0]), order.options)
                return
            os.close(fds[0])
            running.add(pid)
            control.send(msgspec.msgpack.encode(pid))
            continue
        if order.pid in running:
            pid, status = os.waitpid(order.pid, os.WNOHANG)
            if pid:
                running.discard(pid)
                ended[pid] = os.waitstatus_to_exitcode(status)
        control.send(msgspec.msgpack.encode(ended.get(order.pid)))
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)
