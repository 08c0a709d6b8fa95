"""What has a thread or a socket in the peer service, as fakes that a test drives: lines, agents, writers.

`pdoffload.testing.peer_rig` puts them together. The bytes of a chunk are its key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import xxhash

from pdoffload.errors import CorruptChunk, PdOffloadError, TransferError
from pdoffload.layout import BlockKey
from pdoffload.p2p.address import Address
from pdoffload.p2p.checking import Checked
from pdoffload.p2p.messages import AbortAck, Connect, ConnectAck, Message, TransferDone
from pdoffload.p2p.outbound import WriteSettled, Written
from pdoffload.p2p.pulling import Check
from pdoffload.p2p.receiving import Stage
from pdoffload.p2p.serving import Write
from pdoffload.p2p.terms import Target
from pdoffload.p2p.writing import Outcome


def checksum_of(chunk: bytes) -> bytes:
    """As peers send it."""
    digest: bytes = xxhash.xxh3_128_digest(chunk)
    return digest


def without_ours(message: Message) -> Message:
    """`message` as stock vLLM would send it: without the fields that are ours."""
    if isinstance(message, Connect):
        return msgspec.structs.replace(message, incarnation="", guards={}, process="")
    if isinstance(message, ConnectAck):
        return msgspec.structs.replace(message, incarnation="", process="")
    if isinstance(message, TransferDone):
        return msgspec.structs.replace(message, checksums=(), settled=True)
    if isinstance(message, AbortAck):
        return msgspec.structs.replace(message, settled=True)
    return message


class FakeWire:
    """One peer's lines, as `Wire` asks for them. A line that its owner closes still delivers what is queued.

    `queue_to` is where frames to an address wait, None if nobody listens there.
    """

    def __init__(
        self, address: Address, queue_to: Callable[[Address], deque[bytes] | None]
    ) -> None:
        self.address = address
        self.lines: set[Address] = set()
        self.broken: dict[Address, None] = {}
        """Those of `lines` that have ended, of which the owner has not heard: frames on them are lost."""
        self.is_full = False
        """As if no peer read what it is sent."""
        self._queue_to = queue_to

    def connect(self, address: Address) -> None:
        if address not in self.lines:
            self.lines.add(address)
            if self._queue_to(address) is None:
                self.break_line(address)

    def send(self, address: Address, frame: bytes) -> bool:
        if address not in self.lines or self.is_full:
            return False
        queue = self._queue_to(address)
        if queue is not None and address not in self.broken:
            queue.append(frame)
        return True

    def look(self, address: Address) -> str:
        if address not in self.broken:
            return ""
        self.close_line(address)
        return "the line broke"

    def close_line(self, address: Address) -> None:
        self.lines.discard(address)
        self.broken.pop(address, None)

    def break_line(self, address: Address) -> None:
        """The line to `address` ends, if there is one; its owner has not heard of it."""
        if address in self.lines:
            self.broken[address] = None


class FakeReceiver:
    """A receiving agent. What its thread would do, it does in `advance`."""

    def __init__(
        self,
        incarnation: str,
        changed: Callable[[FakeReceiver], None],
        land: Callable[[int, bytes], None],
    ) -> None:
        """`land` puts bytes into a slot of its pool."""
        self.incarnation = incarnation
        self.metadata = incarnation.encode()
        self.open_to_cma = False
        self.stage = Stage.OPENING
        self.error: PdOffloadError | None = None
        self.expected = 0
        self.retired = False
        self.land = land
        self._changed = changed

    def __repr__(self) -> str:
        return f"<FakeReceiver {self.incarnation} {self.stage.value}, {self.expected} expected>"

    def expect(self, transfers: int) -> None:
        self.expected = transfers

    def retire(self) -> None:
        self.retired = True

    def join(self, timeout_s: float) -> bool:
        if self.stage is not Stage.FAILED:
            self._become(Stage.CLOSED)
        return True

    def fail(self, error: PdOffloadError) -> None:
        """It cannot be opened, or makes no progress any more and is closed."""
        self.error = error
        self._become(Stage.FAILED if self.stage is Stage.OPENING else Stage.CLOSED)

    def is_about_to(self, *, may_open: bool = True) -> bool:
        """Whether `advance` would do something."""
        opens = self.stage is Stage.OPENING and may_open
        return opens or (self.stage is Stage.OPEN and self.retired)

    def advance(self, *, may_open: bool = True) -> None:
        """Open if it is to be opened, close if it is retired."""
        if self.stage is Stage.OPENING and may_open:
            self._become(Stage.OPEN)
        if self.stage is Stage.OPEN and self.retired:
            self._become(Stage.CLOSED)

    def _become(self, stage: Stage) -> None:
        if self.stage is not stage:
            self.stage = stage
            self._changed(self)


class FakeMovers:
    """Writers of one peer. Orders wait for `advance`, or for `work`."""

    def __init__(
        self,
        pool: list[bytes],
        tell: Callable[[Outcome], None],
        find: Callable[[bytes], FakeReceiver | None],
    ) -> None:
        """`find` gives the receiving agent of some metadata, if its process lives."""
        self.orders: deque[Write | tuple[Check, object]] = deque()
        self.is_stuck = False
        """Nothing is written by `work`: orders to do so wait."""
        self.uses_cma = True
        """Where the other side is open to it."""
        self.forgotten: list[Target] = []
        self.adrift: list[Write] = []
        """Writes told as not settled: their bytes may land until `settle`."""
        self.faults: deque[str] = deque()
        """How the next writes go wrong: `refused`, no byte moves; `lost`, nobody knows its end;
        `garbled`, a wrong byte arrives."""
        self._pool = pool
        self._tell = tell
        self._find = find

    def write(self, write: Write, timeout_s: float) -> None:
        self.orders.append(write)

    def check(self, check: Check, owner: object) -> None:
        self.orders.append((check, owner))

    def forget(self, target: Target) -> None:
        self.forgotten.append(target)

    def advance(self) -> bool:
        """Carry out the order that waits longest; whether there was one."""
        if not self.orders:
            return False
        order = self.orders.popleft()
        if isinstance(order, Write):
            self._write(order)
        else:
            self._compare(*order)
        return True

    @property
    def has_work(self) -> bool:
        return any(not (self.is_stuck and isinstance(order, Write)) for order in self.orders)

    def work(self) -> bool:
        """Carry out every order, but for writes that are stuck; whether there was one."""
        had_work = self.has_work
        for _ in range(len(self.orders)):
            if self.is_stuck and isinstance(self.orders[0], Write):
                self.orders.rotate(-1)
            else:
                self.advance()
        return had_work

    def land(self) -> None:
        """Bytes of writes that are adrift arrive after all, where the other side still has its agent."""
        for write in self.adrift:
            self._move(write)

    def settle(self) -> None:
        """The agent of the writes that are adrift is closed."""
        for write in self.adrift:
            self._tell(WriteSettled(write))
        self.adrift.clear()

    def _write(self, write: Write) -> None:
        fault = self.faults.popleft() if self.faults else ""
        error = TransferError("a fault of the test")
        if fault == "refused":
            self._tell(Written(write, error, True, {}))
        elif fault == "lost" or not self._move(write, garbled=fault == "garbled"):
            self.adrift.append(write)
            self._tell(Written(write, error, False, {}))
        else:
            pairs = zip(write.keys, write.slots, strict=True)
            sums = {key: checksum_of(self._pool[slot]) for key, slot in pairs}
            self._tell(Written(write, None, True, sums))

    def _move(self, write: Write, *, garbled: bool = False) -> bool:
        receiver = self._find(write.serve.target.metadata)
        if receiver is None:
            return False
        # By cma a write that has begun goes on without the other side's agent.
        by_cma = self.uses_cma and receiver.open_to_cma and write in self.adrift
        if receiver.stage is not Stage.OPEN and not by_cma:
            return False
        for key, slot, index in zip(write.keys, write.slots, write.indexes, strict=True):
            assert self._pool[slot] == key, "a slot on loan has other bytes"
            receiver.land(index, b"garbled" if garbled else self._pool[slot])
        return True

    def _compare(self, check: Check, owner: object) -> None:
        bad: dict[BlockKey, PdOffloadError] = {}
        for key, slot, told in zip(check.keys, check.slots, check.checksums, strict=False):
            if checksum_of(self._pool[slot]) != told:
                bad[key] = CorruptChunk(key.hex(), "wrong bytes")
        verified = len(check.checksums) - len(bad)
        self._tell(Checked(check, owner, bad, verified))
