"""The bookkeeping of an agent over any driver: regions, peers, transfers, deadlines, owner, counts.

Everything the contract in `agent.py` promises is kept here, once, for NIXL and for the fake alike.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.completion import Patience
from pdoffload.agent.counts import AgentCounts
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.agent.driver import Driver, Verdict
from pdoffload.agent.peer import Peer, PeerTable
from pdoffload.agent.region import Region, RegionTable
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.agent.validate import (
    LOCAL_KINDS,
    require_disjoint_destination,
    require_matching,
    require_memory,
    require_names,
    require_timeout,
    require_whole_objects,
)
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import DeadlineExceeded, MisuseError, NixlError, TransferError

_log = logging.getLogger(__name__)


class DrivenAgent(Agent):
    """An `Agent` over `driver`; see the contract. `check_overlaps=False` skips one check of `submit`."""

    def __init__(
        self, name: str, driver: Driver, *, clock: Clock = SYSTEM_CLOCK, check_overlaps: bool = True
    ) -> None:
        self.name = name
        self._driver = driver
        self._clock = clock
        self._check_overlaps = check_overlaps
        self._owner = (os.getpid(), threading.get_ident())
        self._closed = False
        self._table = RegionTable()
        self._peers = PeerTable()
        self._registrations: dict[Region, Any] = {}
        self._generation = 0
        self._object_ids = itertools.count(1)
        # Transfers whose memory may still be touched, with their driver handles. Those in `_mute`
        # are UNKNOWN and the driver has nothing more to tell about them: only `close` settles them.
        self._live: dict[Transfer, Any] = {}
        self._mute: set[Transfer] = set()
        self._ended: list[Transfer] = []
        self._unreleased: list[Any] = []
        self._wedged: NixlError | None = None
        self._made = [0] * 6
        self.notifications_dropped = 0
        """What peers have sent besides bytes; nobody here waits for it."""

    # --- regions ---

    def register_memory(
        self,
        address: int,
        size_bytes: int,
        *,
        kind: MemoryKind = MemoryKind.DRAM,
        device_id: int = 0,
    ) -> Region:
        self._enter("register_memory")
        if kind not in LOCAL_KINDS:
            raise MisuseError(f"register_memory: {kind.value} is not memory")
        if address < 1 or size_bytes < 1 or device_id < 0 or address + size_bytes > 2**63:
            raise MisuseError(
                f"register_memory: {size_bytes} bytes at {address:#x} of device {device_id}"
            )
        return self._register(kind, np.array([[address, size_bytes, device_id]], dtype=np.uint64))

    def register_files(self, fds: Sequence[int], sizes_bytes: Sequence[int]) -> Region:
        self._enter("register_files")
        if not fds or len(fds) != len(sizes_bytes):
            raise MisuseError(f"register_files: {len(fds)} files and {len(sizes_bytes)} sizes")
        if min(fds) < 0 or min(sizes_bytes) < 1 or max(sizes_bytes) > 2**63:
            raise MisuseError(f"register_files: fds {list(fds)}, sizes {list(sizes_bytes)}")
        rows = np.zeros((len(fds), 3), dtype=np.uint64)
        rows[:, 1] = sizes_bytes
        rows[:, 2] = fds
        return self._register(MemoryKind.FILE, rows)

    def register_objects(self, names: Sequence[str], sizes_bytes: Sequence[int]) -> Region:
        self._enter("register_objects")
        require_names("register_objects", names)
        if len(names) != len(sizes_bytes) or min(sizes_bytes) < 1 or max(sizes_bytes) > 2**63:
            raise MisuseError(f"register_objects: {len(names)} names, sizes {list(sizes_bytes)}")
        rows = np.zeros((len(names), 3), dtype=np.uint64)
        rows[:, 1] = sizes_bytes
        rows[:, 2] = [next(self._object_ids) for _ in names]
        return self._register(MemoryKind.OBJECT, rows, names)

    def query_objects(self, names: Sequence[str]) -> list[bool]:
        self._enter("query_objects")
        require_names("query_objects", names)
        return self._driver.query(names)

    def _register(self, kind: MemoryKind, rows: Rows, names: Sequence[str] = ()) -> Region:
        self._table.refuse_overlap(kind, rows)
        handle = self._driver.register(kind, rows, names)
        self._made[2] += 1
        self._generation += 1
        rows.flags.writeable = False
        region = Region(kind, rows, self._generation, self._release_region)
        self._table.add(region)
        self._registrations[region] = handle
        return region

    def _release_region(self, region: Region) -> None:
        if region.released:
            raise MisuseError(f"{region!r} is released already")
        self._enter("release of a region")
        if region.unsettled:
            raise MisuseError(f"{region!r} is still in use")
        self._driver.deregister(self._registrations[region])
        self._made[3] += 1
        del self._registrations[region]
        self._table.remove(region)
        region.released = True

    # --- peers ---

    def metadata(self) -> bytes:
        self._enter("metadata")
        return self._driver.metadata()

    def add_peer(self, metadata: bytes) -> Peer:
        self._enter("add_peer")
        name = self._driver.name_in(metadata)
        if name == self.name or name in self._peers:
            which = "this agent itself" if name == self.name else "a peer already"
            raise MisuseError(f"add_peer: {name!r} is {which}")
        self._driver.add_peer(metadata)
        self._made[4] += 1
        peer = Peer(name, self._remove_peer)
        self._peers.add(peer)
        return peer

    def _remove_peer(self, peer: Peer) -> None:
        if not peer.removed:
            self._enter("removal of a peer")
        self._peers.require(peer)
        if peer.unsettled:
            raise MisuseError(f"{peer!r} is still in use")
        self._driver.remove_peer(peer.name)
        self._made[5] += 1
        self._peers.remove(peer)

    def transport_of(self, peer: Peer) -> str:
        self._enter("transport_of")
        self._peers.require(peer)
        return self._driver.transport_of(peer.name)

    def progress(self) -> None:
        self._enter("progress")
        self.notifications_dropped += self._driver.progress()

    # --- transfers ---

    def submit(
        self,
        op: Op,
        local: Descriptors,
        remote: Descriptors,
        *,
        timeout_s: float,
        what: str,
        peer: Peer | None = None,
    ) -> Transfer:
        self._enter("submit")
        require_timeout(timeout_s)
        require_matching(local, remote)
        require_whole_objects(op, remote)
        owners = self._table.owners("local", local)
        if peer is None:
            owners += self._table.owners("remote", remote)
        else:
            self._peers.require(peer)
            require_memory(remote)
        if self._check_overlaps:
            require_disjoint_destination(op, local, remote)
        touches_storage = remote.kind in (MemoryKind.FILE, MemoryKind.OBJECT)
        handle, refusal = None, self._wedged if touches_storage else None
        if refusal is None:
            try:
                handle = self._driver.make(op, local, remote, peer.name if peer else None)
            except NixlError as error:
                refusal = error
        transfer = Transfer(
            what,
            size_bytes=local.size_bytes,
            timeout_s=timeout_s,
            deadline_s=self._clock.monotonic_s() + timeout_s,
            regions=tuple(dict.fromkeys(owners)),
            touches_storage=touches_storage,
            peer=peer,
        )
        if refusal is not None:
            transfer.end(TransferState.FAILED, _transfer_error(what, refusal))
            return transfer
        self._made[0] += 1
        # Tracked before it is posted: whatever interrupts the post, its memory stays in use.
        self._live[transfer] = handle
        verdict = self._ask(self._driver.start, handle)
        self._apply(transfer, verdict)
        if verdict.spreads:
            self._spread(transfer, verdict.error)
        return transfer

    def poll(self) -> list[Transfer]:
        self._enter("poll")
        self._progress()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, transfer: Transfer) -> Transfer:
        self._enter("wait")
        if transfer.state is TransferState.RUNNING and transfer not in self._live:
            raise MisuseError(f"{transfer!r} belongs to another agent")
        patience = Patience(self._clock)
        while transfer.state is TransferState.RUNNING:
            self._progress()
            if transfer.state is TransferState.RUNNING:
                patience.pause(until_s=transfer.deadline_s)
        if transfer in self._ended:
            self._ended.remove(transfer)
        return transfer

    def _progress(self) -> None:
        for transfer in tuple(self._live):
            if transfer in self._live and transfer not in self._mute:
                verdict = self._ask(self._driver.check, self._live[transfer])
                if self._apply(transfer, verdict):
                    self._ended.append(transfer)
                if verdict.spreads:
                    self._spread(transfer, verdict.error)

    def _ask(self, call: Callable[[Any], Verdict], handle: Any) -> Verdict:
        try:
            return call(handle)
        except NixlError as error:
            return Verdict(TransferState.UNKNOWN, error)

    def _apply(self, transfer: Transfer, verdict: Verdict) -> bool:
        """Carry a verdict out; whether the transfer ended or settled by it."""
        error = _transfer_error(transfer.what, verdict.error) if verdict.error else None
        if verdict.state is TransferState.RUNNING:
            return self._expire(transfer)
        if verdict.state is TransferState.UNKNOWN:
            return self._silence(transfer, error)
        if transfer.state is TransferState.RUNNING:
            transfer.end(verdict.state, error)
        else:
            transfer.settle(verdict.state)
        self._give_back(self._live.pop(transfer))
        return True

    def _expire(self, transfer: Transfer) -> bool:
        if transfer.state is not TransferState.RUNNING:
            return False
        if self._clock.monotonic_s() < transfer.deadline_s:
            return False
        transfer.end(TransferState.UNKNOWN, DeadlineExceeded(transfer.what, transfer.timeout_s))
        return True

    def _silence(self, transfer: Transfer, error: TransferError | None) -> bool:
        self._mute.add(transfer)
        if transfer.state is not TransferState.RUNNING:
            return False
        transfer.end(TransferState.UNKNOWN, error or TransferError(transfer.what))
        return True

    def _spread(self, origin: Transfer, cause: NixlError | None) -> None:
        """Nothing more is to be learnt of any transfer of this kind; a queue of files is lost for ever."""
        if origin.touches_storage:
            self._wedged = cause
        for other in tuple(self._live):
            if other.touches_storage is origin.touches_storage and other not in self._mute:
                error = _transfer_error(other.what, cause) if cause else None
                if self._silence(other, error):
                    self._ended.append(other)

    def _give_back(self, handle: Any) -> None:
        try:
            self._driver.release(handle)
        except NixlError as error:
            # The transfer is over all the same; the handle is tried once more when the agent closes.
            _log.warning("agent %s keeps a finished request: %s", self.name, error)
            self._unreleased.append(handle)
        else:
            self._made[1] += 1

    # --- the end ---

    def close(self, *, timeout_s: float = 5.0) -> list[Transfer]:
        if self._closed:
            return list(self._live)
        self._enter("close")
        self._drain(timeout_s)
        # I/O that NIXL cannot account for goes on in the kernel, or in a store's client, whatever is
        # torn down here, and its completion would write into freed memory: then everything stays as it
        # is, for ever. An agent over requests to a store would also wait for them, under the lock.
        stuck = [transfer for transfer in self._live if transfer.touches_storage]
        if not stuck:
            self._tear_down()
        else:
            _log.warning("agent %s leaves %d transfers that do not end", self.name, len(stuck))
            for transfer in self._live:
                self._silence(transfer, None)
        self._closed = True
        self._driver.close(abandon=bool(stuck))
        return list(self._live)

    def _drain(self, timeout_s: float) -> None:
        deadline_s = self._clock.monotonic_s() + timeout_s
        patience = Patience(self._clock)
        while len(self._live) > len(self._mute) and self._clock.monotonic_s() < deadline_s:
            self._progress()
            patience.pause(until_s=deadline_s)

    def _tear_down(self) -> None:
        """Give everything back. Copies between memories end with the agent that makes them."""
        error = TransferError(f"agent {self.name} was closed")
        for transfer in tuple(self._live):
            if transfer.state is TransferState.RUNNING:
                transfer.end(TransferState.FAILED, error)
            else:
                transfer.settle(TransferState.FAILED)
        leftover, self._unreleased = [*self._live.values(), *self._unreleased], []
        self._live.clear()
        self._mute.clear()
        for handle in leftover:
            self._give_back(handle)
        for each in (*self._peers, *self._table):
            try:
                each.remove() if isinstance(each, Peer) else each.release()
            except NixlError as refused:
                _log.warning("agent %s: %r stays: %s", self.name, each, refused)

    def _enter(self, call: str) -> None:
        if self._closed:
            raise MisuseError(f"{call}: agent {self.name} is closed")
        pid, thread = os.getpid(), threading.get_ident()
        if (pid, thread) != self._owner:
            which = "a forked child" if pid != self._owner[0] else "another thread"
            raise MisuseError(f"{call}: {self.name} belongs to its creator, called from {which}")

    # --- what there is to see ---

    @property
    def counts(self) -> AgentCounts:
        return AgentCounts(*self._made)

    def check(self) -> None:
        """Prove that regions, transfers and counts agree; for tests."""
        self._table.check()
        users: dict[Region | Peer, int] = {}
        for transfer in self._live:
            assert not transfer.settled, transfer
            for used in transfer.uses:
                users[used] = users.get(used, 0) + 1
        assert all(each.unsettled == users.get(each, 0) for each in (*self._table, *self._peers))
        assert self._mute <= set(self._live)
        held = len(self._live) + len(self._unreleased)
        assert self.counts.transfers_made - self.counts.transfers_released == held
        assert self.counts.registrations_made - self.counts.registrations_released == len(
            self._registrations
        )
        assert self.counts.peers_added - self.counts.peers_removed == len(self._peers)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "wedged" if self._wedged else "open"
        return (
            f"<{type(self).__name__} {self.name}: {state}, {len(self._table)} regions, "
            f"{len(self._peers)} peers, {len(self._live)} unsettled transfers>"
        )


def _transfer_error(what: str, cause: NixlError) -> TransferError:
    error = TransferError(f"{what}: {cause}")
    # Kept with the transfer, maybe for long: without frames, which hold the driver's requests.
    error.__cause__ = cause.with_traceback(None)
    return error
