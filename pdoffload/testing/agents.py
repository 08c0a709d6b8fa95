"""A fake agent: the bookkeeping of the real one over a driver that moves the bytes itself.

`FakeDriver` really copies, with memmove between memories, pread/pwrite to files and a dictionary of
objects, so that a test built on it sees wrong bytes. It can be told to refuse, to fail, to take time and
to hang, at any call:

    fake = FakeDriver()
    agent = FakeAgent(driver=fake)
    fake.script("check", NixlError("check_xfer_state", "lost"))   # the next check raises that
    fake.script("check", Verdict(TransferState.FAILED, error))    # ... or answers that
    fake.hold(1)                                                  # the next one stays RUNNING
    fake.let_go()

Fake agents of one process are peers to each other through a `FakeNetwork`, as NIXL's are through UCX:

    peer = writer.add_peer(reader.metadata())
    reader.driver.dead = True                                     # what is written to it now is UNKNOWN
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.driver import DONE, RUNNING, Verdict
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import MisuseError, NixlError

FakeCall = Literal[
    "register",
    "deregister",
    "metadata",
    "add_peer",
    "remove_peer",
    "progress",
    "query",
    "make",
    "start",
    "check",
    "release",
    "close",
]
Scripted = NixlError | Verdict


class FakeMetadata(msgspec.Struct, frozen=True):
    """What a fake agent tells its peers: its name and the pieces of memory registered at that time."""

    name: str
    rows: list[tuple[int, int, int]]


class FakeNetwork:
    """The fake agents that can reach each other, by name. Those of one process share one by default."""

    def __init__(self) -> None:
        self.members: dict[str, FakeDriver] = {}


_NETWORK = FakeNetwork()


class FakeStore:
    """A bucket: what lies in it, by name. Those who share one share its objects."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.names: dict[int, str] = {}
        """Device id -> name, of the registrations of one driver."""

    def of_one_driver(self) -> FakeStore:
        """The same objects, with registrations of its own."""
        other = FakeStore()
        other.objects = self.objects
        return other

    def move(self, op: Op, address: int, size: int, offset: int, device: int) -> None:
        """One row. As from a store, a read gets what lies in the range, and fails where nothing does."""
        name = self.names[device]
        if op is Op.WRITE:
            self.objects[name] = ctypes.string_at(address, size)
            return
        found = self.objects.get(name, b"")[offset : offset + size]
        if not found:
            raise OSError(f"{name}: nothing there")
        ctypes.memmove(address, found, len(found))


class FakeRequest:
    """One posted or unposted request. The arrays are copied: NIXL too takes a copy of the lists."""

    def __init__(
        self, op: Op, local: Descriptors, remote: Descriptors, peer: str | None = None
    ) -> None:
        self.op = op
        self.local = local.rows.tolist()
        self.remote = remote.rows.tolist()
        self.peer = peer
        self.kind = remote.kind
        self.posted_s: float | None = None
        self.held = False

    @property
    def at_once(self) -> bool:
        """NIXL moves the bytes while it posts."""
        return self.kind not in (MemoryKind.FILE, MemoryKind.OBJECT)

    def move(self, store: FakeStore) -> None:
        """Copy every row now. Raises `OSError` for a failed I/O and for a short one."""
        for (address, size, _), (place, _, fd) in zip(self.local, self.remote, strict=True):
            if self.kind is MemoryKind.OBJECT:
                store.move(self.op, address, size, place, fd)
                continue
            if self.at_once:
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

    Like NIXL, it copies between memories inside `start`, and moves bytes of files and objects while it is
    checked.
    Misuse that would crash NIXL (a handle given back twice) raises `MisuseError`.
    """

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM_CLOCK,
        delay_s: float = 0.0,
        network: FakeNetwork = _NETWORK,
        store: FakeStore | None = None,
    ) -> None:
        self.calls: list[str] = []
        """Every call so far, by name."""
        self.dead = False
        """As if the process were gone: whatever moves to or from its memory is UNKNOWN."""
        self.notifications = 0
        """How many the next `progress` finds."""
        self.store = store.of_one_driver() if store else FakeStore()
        self._name = ""
        self._network = network
        self._peers: dict[str, FakeMetadata] = {}
        self._clock = clock
        self._delay_s = delay_s
        self._holding = 0.0
        self._scripts: dict[str, deque[Scripted]] = {}
        self._requests: set[FakeRequest] = set()
        self._registrations: dict[int, Rows | None] = {}
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
        """Requests, registrations and peers made and not given back."""
        return len(self._requests) + len(self._registrations) + len(self._peers)

    # --- what an agent asks ---

    def join(self, name: str) -> None:
        """Become reachable in the network under the name of the agent."""
        self._name = name
        self._network.members[name] = self

    def register(self, kind: MemoryKind, rows: Rows, names: Sequence[str] = ()) -> int:
        self._play("register")
        handle = next(self._next_registration)
        in_memory = kind not in (MemoryKind.FILE, MemoryKind.OBJECT)
        self._registrations[handle] = rows if in_memory else None
        if kind is MemoryKind.OBJECT:
            self.store.names |= dict(zip(rows[:, 2].tolist(), names, strict=True))
        return handle

    def query(self, names: Sequence[str]) -> list[bool]:
        self._play("query")
        return [name in self.store.objects for name in names]

    def deregister(self, handle: int) -> None:
        self._play("deregister")
        if handle not in self._registrations:
            raise MisuseError(f"registration {handle} is given back twice: NIXL would crash")
        del self._registrations[handle]

    def metadata(self) -> bytes:
        self._play("metadata")
        return msgspec.json.encode(FakeMetadata(self._name, self._memory()))

    def name_in(self, metadata: bytes) -> str:
        return _read(metadata).name

    def add_peer(self, metadata: bytes) -> None:
        self._play("add_peer")
        told = _read(metadata)
        if told.name in self._peers:
            raise MisuseError(f"{told.name} is loaded twice: NIXL would refuse or lose the first")
        self._peers[told.name] = told

    def remove_peer(self, name: str) -> None:
        self._play("remove_peer")
        if any(request.peer == name for request in self._requests):
            raise MisuseError(f"{name} is removed under a request: NIXL would lose its end")
        del self._peers[name]

    def transport_of(self, name: str) -> str:
        return "fake"

    def progress(self) -> int:
        self._play("progress")
        found, self.notifications = self.notifications, 0
        return found

    def make(
        self, op: Op, local: Descriptors, remote: Descriptors, peer: str | None
    ) -> FakeRequest:
        self._play("make")
        if peer is not None and not _covers(self._peers[peer].rows, remote.rows):
            raise NixlError("initialize_xfer", "NIXL_ERR_NOT_FOUND")
        request = FakeRequest(op, local, remote, peer)
        self._requests.add(request)
        return request

    def start(self, handle: FakeRequest) -> Verdict:
        scripted = self._play("start")
        handle.posted_s = self._clock.monotonic_s()
        handle.held = self._holding > 0
        self._holding -= handle.held
        if scripted is not None:
            return scripted
        return self._advance(handle) if handle.at_once else RUNNING

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
        self._network.members.pop(self._name, None)

    def _memory(self) -> list[tuple[int, int, int]]:
        known = [rows for rows in self._registrations.values() if rows is not None]
        return [tuple(row) for rows in known for row in rows.tolist()]

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
        if request.peer is not None:
            peer = self._network.members.get(request.peer)
            rows = np.array(request.remote, dtype=np.uint64)
            if peer is None or peer.dead or not _covers(peer._memory(), rows):
                raise NixlError("check_xfer_state", "NIXL_ERR_REMOTE_DISCONNECT")
        try:
            request.move(self.store)
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
        unique = f"{name}-{uuid.uuid4().hex[:12]}"
        self.driver.join(unique)
        super().__init__(unique, self.driver, clock=clock, check_overlaps=check_overlaps)


def _read(metadata: bytes) -> FakeMetadata:
    try:
        return msgspec.json.decode(metadata, type=FakeMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NixlError("add_remote_agent", f"metadata is garbled: {error}") from error


def _covers(pieces: list[tuple[int, int, int]], rows: Rows) -> bool:
    return all(
        any(
            start <= address and address + size <= start + length and device == on
            for start, length, device in pieces
        )
        for address, size, on in rows.tolist()
    )
