"""The threads that move and check bytes for the peer service: `num_threads` writers.

Each writer owns a NIXL agent, opened at its first write and never shared; a peer is served by one writer, so
that it connects to this process once. A write whose end NIXL does not know makes its writer wait for the
others under way, close the agent, which ends them all, and open a new one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import xxhash

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.completion import Patience
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.peer import Peer
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.config import Verify
from pdoffload.errors import CorruptChunk, MisuseError, PdOffloadError, TransferError
from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.asking import Check
from pdoffload.p2p.receiving import CLOSE_TIMEOUT_S, OpenAgent
from pdoffload.p2p.serving import Write
from pdoffload.p2p.terms import Target

logger = logging.getLogger(__name__)


class Written(msgspec.Struct, frozen=True):
    """A write has ended. `settled` False: slots are being read still, until `WriteSettled`."""

    write: Write
    error: PdOffloadError | None
    settled: bool
    checksums: dict[BlockKey, bytes]
    transport: str = ""


class WriteSettled(msgspec.Struct, frozen=True):
    """The slots of a write that had not settled are free of it."""

    write: Write


class Checked(msgspec.Struct, frozen=True):
    """How a check went: what arrived wrong, and how many chunks were compared."""

    check: Check
    owner: object
    bad: dict[BlockKey, PdOffloadError]
    verified: int


Outcome = Written | WriteSettled | Checked
Report = Callable[[Outcome], None]


class Writers:
    """The pool. Called by the service's thread; `report` is called on the writers' threads."""

    def __init__(
        self,
        num_threads: int,
        open_agent: OpenAgent,
        region: HostRegion,
        report: Report,
        *,
        verify: Verify,
        clock: Clock,
    ) -> None:
        self._writers = [
            _Writer(number, open_agent, region, report, verify=verify, clock=clock)
            for number in range(num_threads)
        ]
        self._of_target: dict[Target, _Writer] = {}
        self._next_check = 0

    def __repr__(self) -> str:
        return f"<Writers {len(self._writers)} threads, {len(self._of_target)} peers>"

    def write(self, write: Write, timeout_s: float) -> None:
        """Queue a write; it is reported as `Written` within its deadline and the tear-down."""
        target = write.serve.target
        writer = self._of_target.get(target)
        if writer is None:
            writer = min(self._writers, key=lambda each: each.num_targets)
            writer.num_targets += 1
            self._of_target[target] = writer
        writer.put(_Post(write, timeout_s))

    def check(self, check: Check, owner: object) -> None:
        """Queue a comparison; it is reported as `Checked` with the same `owner`."""
        self._next_check = (self._next_check + 1) % len(self._writers)
        self._writers[self._next_check].put(_Compare(check, owner))

    def forget(self, target: Target) -> None:
        """The peer is gone; its connection is closed when no write to it is under way."""
        writer = self._of_target.pop(target, None)
        if writer is not None:
            writer.num_targets -= 1
            writer.put(_Forget(target))

    def close(self, timeout_s: float) -> bool:
        """End what is queued as failed, wait for what is under way, stop the threads. Whether all did."""
        for writer in self._writers:
            writer.put(None)
        ended = [writer.join(timeout_s) for writer in self._writers]
        return all(ended)


class _Post(msgspec.Struct, frozen=True):
    write: Write
    timeout_s: float

    @property
    def target(self) -> Target:
        return self.write.serve.target


class _Compare(msgspec.Struct, frozen=True):
    check: Check
    owner: object


class _Forget(msgspec.Struct, frozen=True):
    target: Target


_Order = _Post | _Compare | _Forget | None
"""None: stop."""


class _Writer:
    """One thread and its agent. Everything below `_run` runs on that thread."""

    def __init__(
        self,
        number: int,
        open_agent: OpenAgent,
        region: HostRegion,
        report: Report,
        *,
        verify: Verify,
        clock: Clock,
    ) -> None:
        self.num_targets = 0
        self._number = number
        self._open_agent = open_agent
        self._region = region
        self._report = report
        self._verify = verify
        self._clock = clock
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._waiting: deque[_Order] = deque()
        self._agent: Agent | None = None
        self._peers: dict[Target, Peer] = {}
        self._gone: set[Target] = set()
        self._under_way: dict[Transfer, _Post] = {}
        self._unsettled: dict[Transfer, Write] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"pdoffload-p2p-writer-{number}", daemon=True
        )
        self._started = False

    def put(self, order: _Order) -> None:
        """By the service's thread."""
        if not self._started:
            if order is None or isinstance(order, _Forget):
                return
            self._started = True
            self._thread.start()
        self._orders.put(order)

    def join(self, timeout_s: float) -> bool:
        if not self._started:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        patience = Patience(self._clock)
        stopping = False
        while not stopping or self._under_way:
            order: _Order = None
            try:
                # While an agent is to be replaced, what comes waits for the new one.
                if self._waiting and not self._unsettled:
                    order = self._waiting.popleft()
                else:
                    order = self._orders.get(block=not self._under_way and not self._unsettled)
            except queue.Empty:
                self._poll()
                patience.pause()
                continue
            patience.reset()
            if order is None:
                stopping = True
            elif isinstance(order, _Post) and self._unsettled:
                self._waiting.append(order)
            else:
                self._carry_out(order, stopping=stopping)
            self._poll()
        self._stop()

    def _carry_out(self, order: _Post | _Compare | _Forget, *, stopping: bool) -> None:
        try:
            self._do(order, stopping=stopping)
        except (
            Exception
        ) as failure:  # whatever it was, the order ends with it and the thread does not
            logger.exception("writer %d", self._number)
            error = TransferError(f"{type(failure).__name__}: {failure}")
            if isinstance(order, _Compare):
                bad: dict[BlockKey, PdOffloadError] = dict.fromkeys(order.check.keys, error)
                self._report(Checked(order.check, order.owner, bad, 0))
            elif isinstance(order, _Post) and not self._is_under_way(order):
                self._failed(order, error)

    def _is_under_way(self, order: _Post) -> bool:
        return any(each is order for each in self._under_way.values())

    def _do(self, order: _Post | _Compare | _Forget, *, stopping: bool) -> None:
        if isinstance(order, _Compare):
            self._report(self._compare(order))
        elif isinstance(order, _Forget):
            self._gone.add(order.target)
            self._drop_gone()
        elif stopping:
            self._failed(order, TransferError("the peer service is closing"))
        else:
            self._post(order)

    # --- writes ---

    def _post(self, order: _Post) -> None:
        write, target = order.write, order.target
        what = f"write of {len(write.keys)} chunks to {target.name}"
        try:
            agent = self._opened()
            peer = self._peer(agent, target)
            transfer = agent.submit(
                Op.WRITE,
                self._rows(self._region.address, write.slots, target.chunk_bytes),
                self._rows(target.base_address, write.indexes, target.chunk_bytes),
                timeout_s=order.timeout_s,
                what=what,
                peer=peer,
            )
        except PdOffloadError as error:
            self._failed(order, error)
            return
        self._under_way[transfer] = order
        if transfer.state is not TransferState.RUNNING:
            self._ended(transfer)

    @staticmethod
    def _rows(base_address: int, slots: tuple[int, ...], chunk_bytes: int) -> Descriptors:
        starts = base_address + np.asarray(slots, dtype=np.uint64) * np.uint64(chunk_bytes)
        return pieces(MemoryKind.DRAM, starts, chunk_bytes)

    def _opened(self) -> Agent:
        if self._agent is None:
            agent = self._open_agent(f"write-{self._number}")
            try:
                agent.register_memory(self._region.address, self._region.size_bytes)
            except BaseException:
                agent.close(timeout_s=CLOSE_TIMEOUT_S)
                raise
            self._agent = agent
        return self._agent

    def _peer(self, agent: Agent, target: Target) -> Peer:
        peer = self._peers.get(target)
        if peer is None:
            try:
                peer = agent.add_peer(target.metadata)
            except MisuseError:
                # A peer of that name whose last write has not settled: begin with a fresh agent.
                if self._under_way:
                    raise
                self._replace_agent()
                agent = self._opened()
                peer = agent.add_peer(target.metadata)
            self._peers[target] = peer
        return peer

    def _poll(self) -> None:
        if self._agent is None:
            return
        for transfer in self._agent.poll():
            if transfer in self._under_way:
                self._ended(transfer)
            elif transfer.settled and transfer in self._unsettled:
                self._report(WriteSettled(self._unsettled.pop(transfer)))
        if self._unsettled and not self._under_way:
            self._replace_agent()
        elif self._gone:
            self._drop_gone()

    def _ended(self, transfer: Transfer) -> None:
        order = self._under_way.pop(transfer)
        if transfer.state is not TransferState.DONE:
            logger.warning("%s: %s", order.target.name, transfer.error)
            if not transfer.settled:
                self._unsettled[transfer] = order.write
            self._report(Written(order.write, transfer.error, transfer.settled, {}))
            return
        write = order.write
        checksums = {
            key: self._region.checksum(slot)
            for key, slot in zip(write.keys, write.slots, strict=True)
        }
        self._report(Written(write, None, True, checksums))

    def _failed(self, order: _Post, error: PdOffloadError) -> None:
        logger.warning("%s: %s", order.target.name, error)
        self._report(Written(order.write, error, True, {}))

    # --- agents and peers ---

    def _replace_agent(self) -> None:
        """No byte moves by the old agent any more once it is closed; the next write opens another."""
        agent, self._agent = self._agent, None
        self._peers.clear()
        self._gone.clear()
        if agent is not None:
            agent.close(timeout_s=CLOSE_TIMEOUT_S)
        for write in self._unsettled.values():
            self._report(WriteSettled(write))
        self._unsettled.clear()

    def _drop_gone(self) -> None:
        for target in list(self._gone):
            peer = self._peers.get(target)
            if peer is not None and peer.unsettled:
                continue
            self._gone.discard(target)
            if peer is None:
                continue
            del self._peers[target]
            if not peer.removed:
                peer.remove()

    def _stop(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
            if order is not None:
                self._carry_out(order, stopping=True)
        self._replace_agent()

    # --- checks ---

    def _compare(self, order: _Compare) -> Checked:
        check = order.check
        bad: dict[BlockKey, PdOffloadError] = {}
        verified = 0
        if not check.checksums:
            if self._verify is Verify.ALWAYS:
                error = TransferError("the peer sends no checksums, and verify is always")
                bad = dict.fromkeys(check.keys, error)
            return Checked(check, order.owner, bad, 0)
        if self._verify is Verify.OFF:
            return Checked(check, order.owner, bad, 0)
        for key, slot, told in zip(check.keys, check.slots, check.checksums, strict=True):
            found: bytes = xxhash.xxh3_128_digest(self._region.slot_view(slot))
            if found == told:
                self._region.set_checksum(slot, found)
                verified += 1
            else:
                bad[key] = CorruptChunk(key.hex(), "does not match the checksum its peer sent")
        return Checked(check, order.owner, bad, verified)
