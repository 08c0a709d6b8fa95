"""A fake agent: the bookkeeping of the real one over a driver that moves the bytes itself.

`FakeDriver` really copies, with memmove between memories and pread/pwrite to files, so that a test built
on it sees wrong bytes. It can be told to refuse, to fail, to take time and to hang, at any call:

    fake = FakeDriver()
    agent = FakeAgent(driver=fake)
    fake.script("check", NixlError("check_xfer_state", "lost"))   # the next check raises that
    fake.script("check", Verdict(TransferState.FAILED, error))    # ... or answers that
    fake.hold(1)                                                  # the next one stays RUNNING
    fake.let_go()
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections import deque
from typing import Literal

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.driver import DONE, RUNNING, Verdict
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import MisuseError, NixlError

FakeCall = Literal["register", "deregister", "make", "start", "check", "release", "close"]
Scripted = NixlError | Verdict

_serial = itertools.count(1)


class FakeRequest:
    """One posted or unposted request. The arrays are copied: NIXL too takes a copy of the lists."""

    def __init__(self, op: Op, local: Descriptors, remote: Descriptors) -> None:
        self.op = op
        self.local = local.rows.tolist()
        self.remote = remote.rows.tolist()
        self.to_file = remote.kind is MemoryKind.FILE
        self.posted_s: float | None = None
        self.held = False

    def move(self) -> None:
        """Copy every row now. Raises `OSError` for a failed I/O and for a short one."""
        for (address, size, _), (place, _, fd) in zip(self.local, self.remote, strict=True):
            if not self.to_file:
                source, target = (address, place) if self.op is Op.WRITE else (place, address)
                ctypes.memmove(target, source, size)
                continue
            memory = (ctypes.c_char * size).from_address(address)
            moved = (
                os.pwrite(fd, memory, place)
                if self.op is Op.WRITE
                else os.preadv(fd, [memory], place)
            )
            if moved != size:
                raise OSError(f"{moved} of {size} bytes")


class FakeDriver:
    """A `Driver` without NIXL. May be scripted from any thread; driven by its agent's thread.

    Like NIXL, it copies between memories inside `start`, and moves file bytes while it is checked.
    Misuse that would crash NIXL (a handle given back twice) raises `MisuseError`.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, delay_s: float = 0.0) -> None:
        self.calls: list[str] = []
        """Every call so far, by name."""
        self._clock = clock
        self._delay_s = delay_s
        self._holding = 0.0
        self._scripts: dict[str, deque[Scripted]] = {}
        self._requests: set[FakeRequest] = set()
        self._registrations: set[int] = set()
        self._next_registration = itertools.count(1)

    # --- what a test says ---

    def script(self, call: FakeCall, outcome: Scripted, *, times: int = 1) -> None:
        """The next `times` calls of that name raise the error, or (start, check) answer the verdict."""
        if isinstance(outcome, Verdict) and call not in ("start", "check"):
            raise MisuseError(f"{call} does not answer with a verdict")
        self._scripts.setdefault(call, deque()).extend([outcome] * times)

    def hold(self, requests: float = math.inf) -> None:
        """The next so many requests that are posted stay RUNNING, moving no byte, until `let_go`."""
        self._holding = requests

    def let_go(self) -> None:
        """Requests that are held move their bytes when they are next checked."""
        self._holding = 0.0
        for request in tuple(self._requests):
            request.held = False

    @property
    def open_handles(self) -> int:
        """Requests and registrations made and not given back."""
        return len(self._requests) + len(self._registrations)

    # --- what an agent asks ---

    def register(self, kind: MemoryKind, rows: Rows) -> int:
        self._play("register")
        handle = next(self._next_registration)
        self._registrations.add(handle)
        return handle

    def deregister(self, handle: int) -> None:
        self._play("deregister")
        if handle not in self._registrations:
            raise MisuseError(f"registration {handle} is given back twice: NIXL would crash")
        self._registrations.remove(handle)

    def make(self, op: Op, local: Descriptors, remote: Descriptors) -> FakeRequest:
        self._play("make")
        request = FakeRequest(op, local, remote)
        self._requests.add(request)
        return request

    def start(self, handle: FakeRequest) -> Verdict:
        scripted = self._play("start")
        handle.posted_s = self._clock.monotonic_s()
        handle.held = self._holding > 0
        self._holding -= handle.held
        if scripted is not None:
            return scripted
        return RUNNING if handle.to_file else self._advance(handle)

    def check(self, handle: FakeRequest) -> Verdict:
        scripted = self._play("check")
        if handle not in self._requests or handle.posted_s is None:
            raise MisuseError("a check of a request that was given back or never posted")
        return scripted if scripted is not None else self._advance(handle)

    def release(self, handle: FakeRequest) -> None:
        self._play("release")
        if handle not in self._requests:
            raise MisuseError("a request is given back twice")
        self._requests.remove(handle)

    def close(self, *, abandon: bool) -> None:
        self._play("close")

    def _play(self, call: FakeCall) -> Verdict | None:
        self.calls.append(call)
        waiting = self._scripts.get(call)
        if not waiting:
            return None
        outcome = waiting.popleft()
        if isinstance(outcome, NixlError):
            raise outcome
        return outcome

    def _advance(self, request: FakeRequest) -> Verdict:
        posted_s = request.posted_s or 0.0
        if request.held or self._clock.monotonic_s() < posted_s + self._delay_s:
            return RUNNING
        try:
            request.move()
        except OSError as error:
            return Verdict(TransferState.FAILED, NixlError("check_xfer_state", str(error)))
        return DONE


class FakeAgent(DrivenAgent):
    """An `Agent` that needs no NIXL; `driver` is where a test scripts it."""

    driver: FakeDriver

    def __init__(
        self,
        name: str = "fake",
        *,
        driver: FakeDriver | None = None,
        clock: Clock = SYSTEM_CLOCK,
        check_overlaps: bool = True,
    ) -> None:
        self.driver = driver or FakeDriver(clock=clock)
        unique = f"{name}-{os.getpid()}-{next(_serial)}"
        super().__init__(unique, self.driver, clock=clock, check_overlaps=check_overlaps)
