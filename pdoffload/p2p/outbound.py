"""Writes to peers by one NIXL agent: who is connected, what is under way, and when the agent is worn out.

    fresh --first write--> open --a write whose end nobody knows--> worn --nothing under way--> fresh

An agent is also worn when it is lost, or has known `MOST_PEERS`. A worn agent takes no new write. Once it is
closed no byte moves by it any more, and its writes are settled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.peer import Peer
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import (
    MisuseError,
    NixlError,
    PdOffloadError,
    TransferError,
    as_ours,
)
from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.hashing import Hashing
from pdoffload.p2p.receiving import CLOSE_TIMEOUT_S, OpenAgent
from pdoffload.p2p.serving import Write
from pdoffload.p2p.session import ServeState
from pdoffload.p2p.terms import Target

logger = logging.getLogger(__name__)

MOST_PEERS = 200
"""That one agent comes to know before another takes its place: LIBFABRIC tells 255 apart in an agent's life,
and of UCX's connections something stays until the agent is closed."""


class Written(msgspec.Struct, frozen=True):
    """A write has ended. `settled` False: slots are being read still, until `WriteSettled`."""

    write: Write
    error: PdOffloadError | None
    settled: bool
    checksums: dict[BlockKey, bytes]
    transport: str = ""
    """How its bytes went; told with the first good write to a target."""


class WriteSettled(msgspec.Struct, frozen=True):
    """The slots of a write that had not settled are free of it."""

    write: Write


class Outbound:
    """One thread, and nothing raised to it: every write is told of by `report`, exactly once as `Written`."""

    def __init__(
        self,
        purpose: str,
        open_agent: OpenAgent,
        region: HostRegion,
        report: Callable[[Written | WriteSettled], None],
        *,
        clock: Clock,
    ) -> None:
        """No agent is opened before the first write."""
        self._purpose = purpose
        self._open_agent = open_agent
        self._region = region
        self._report = report
        self._clock = clock
        self._agent: Agent | None = None
        self._worn = False
        self._num_known = 0
        """Peers that this agent was told of."""
        self._peers: dict[Target, Peer] = {}
        self._transport_told: set[Target] = set()
        self._gone: set[Target] = set()
        """Forgotten while writes to them were under way."""
        self._under_way: dict[Transfer, Write] = {}
        self._hashings: dict[Write, Hashing] = {}
        """Of writes that have not been told of as `Written`."""
        self._unsettled: dict[object, Write] = {}
        """By transfer, where there is one."""

    def __repr__(self) -> str:
        state = "worn" if self._worn else "open" if self._agent is not None else "fresh"
        return (
            f"<Outbound {self._purpose}: {state}, {len(self._peers)} peers, "
            f"{len(self._under_way)} under way, {len(self._unsettled)} unsettled>"
        )

    @property
    def worn(self) -> bool:
        """Whether the agent is to be replaced: `post` and `forget` have to wait for that."""
        return self._worn

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._under_way or self._worn)

    def post(self, write: Write, deadline_s: float, hashing: Hashing) -> bool:
        """Begin a write, or tell why not. False: nothing is done, the agent has to be replaced first.

        Other threads may go ahead with `hashing`; it ends here.
        """
        if self._worn:
            return False
        self._hashings[write] = hashing
        target = write.serve.target
        what = f"write of {len(write.keys)} chunks to {target.name}"
        timeout_s = deadline_s - self._clock.monotonic_s()
        if write.serve.state is ServeState.STOPPING:
            self._fail(write, TransferError(f"{what}: nobody waits for it any more"))
            return True
        if timeout_s <= 0:
            self._fail(write, TransferError(f"{what}: its deadline passed before its turn came"))
            return True
        try:
            agent = self._opened()
            peer = self._peer(agent, target)
        except BaseException as failure:  # noqa: BLE001 - a plugin may raise anything; the write ends by it
            self._worn = self._agent is not None and self._agent.lost
            self._fail(write, self._unexpected(what, failure))
            return True
        if peer is None:
            self._worn = True
            return False
        self._submit(agent, peer, write, timeout_s, what)
        self._worn = self._worn or agent.lost
        return True

    def _submit(self, agent: Agent, peer: Peer, write: Write, timeout_s: float, what: str) -> None:
        target = write.serve.target
        try:
            transfer = agent.submit(
                Op.WRITE,
                _rows(self._region.address, write.slots, target.chunk_bytes),
                _rows(target.base_address, write.indexes, target.chunk_bytes),
                timeout_s=timeout_s,
                what=what,
                peer=peer,
            )
        except PdOffloadError as error:  # refused before a byte moved
            self._fail(write, error)
        except BaseException as failure:  # noqa: BLE001 - it may have been posted: nobody knows its end
            self._lose(write, write, self._unexpected(what, failure))
        else:
            self._under_way[transfer] = write
            if transfer.state is TransferState.RUNNING:
                self._hashings[write].go_ahead()
            else:
                self._ended(transfer)

    def forget(self, target: Target) -> bool:
        """Let go of the connection to a peer, when no write to it is under way. False as in `post`."""
        if self._worn:
            return False
        self._gone.add(target)
        self._drop_gone()
        return True

    def poll(self) -> None:
        """Look for writes that have ended, and replace the agent if it is time."""
        if self._agent is not None:
            try:
                ended = self._agent.poll()
            except BaseException as failure:  # noqa: BLE001 - then nobody knows how any write stands
                error = self._unexpected(self._purpose, failure)
                for transfer, write in self._under_way.items():
                    self._lose(transfer, write, error)
                self._under_way.clear()
                self._worn, ended = True, []
            for transfer in ended:
                self._look_at(transfer)
        if self._worn and not self._under_way:
            self._replace()
        elif self._gone:
            self._drop_gone()

    def close(self) -> None:
        """Wait `CLOSE_TIMEOUT_S` for what is under way, end the rest as failed, close the agent."""
        self._replace()

    # --- inside ---

    def _look_at(self, transfer: Transfer) -> None:
        if transfer in self._under_way:
            self._ended(transfer)
        elif transfer.settled and transfer in self._unsettled:
            self._report(WriteSettled(self._unsettled.pop(transfer)))

    def _ended(self, transfer: Transfer) -> None:
        write = self._under_way.pop(transfer)
        if transfer.state is not TransferState.DONE:
            error = transfer.error or TransferError(f"{transfer.what}: did not end")
            if transfer.settled:
                self._fail(write, error)
            else:
                self._lose(transfer, write, error)
            return
        try:
            checksums = self._hashings[write].finish()
        except BaseException as failure:  # noqa: BLE001 - without checksums nobody takes the bytes
            self._fail(write, self._unexpected(transfer.what, failure))
        else:
            transport = self._new_transport(write.serve.target)
            self._tell(Written(write, None, True, checksums, transport))

    def _new_transport(self, target: Target) -> str:
        """How bytes go to `target`, the first time that this is known."""
        peer = self._peers.get(target)
        if self._agent is None or peer is None or target in self._transport_told:
            return ""
        self._transport_told.add(target)
        try:
            return self._agent.transport_of(peer)
        except BaseException:  # it is only a label; the bytes are there
            logger.exception("how bytes go to %s cannot be told", target.name)
            return ""

    def _fail(self, write: Write, error: PdOffloadError) -> None:
        """No byte of it moves any more."""
        logger.warning("%s: %s", write.serve.target.name, error)
        self._tell(Written(write, error, True, {}))

    def _lose(self, name: object, write: Write, error: PdOffloadError) -> None:
        """Bytes of it may still move, until the agent is closed."""
        logger.warning("%s: %s", write.serve.target.name, error)
        self._worn = True
        self._unsettled[name] = write
        self._tell(Written(write, error, False, {}))

    def _unexpected(self, what: str, failure: BaseException) -> PdOffloadError:
        error = as_ours(what, failure)
        if error is not failure:
            logger.error("%s", error, exc_info=failure)
        return error

    def _tell(self, written: Written) -> None:
        self._hashings.pop(written.write).stop()
        self._report(written)

    def _opened(self) -> Agent:
        if self._agent is None:
            agent = self._open_agent(self._purpose)
            try:
                agent.register_memory(self._region.address, self._region.size_bytes)
            except BaseException:
                agent.close(timeout_s=CLOSE_TIMEOUT_S)
                raise
            self._agent = agent
        return self._agent

    def _peer(self, agent: Agent, target: Target) -> Peer | None:
        """The peer to write to; None if the agent cannot add it: it has it, by another target, or is full."""
        peer = self._peers.get(target)
        if peer is None:
            if self._num_known >= MOST_PEERS:
                return None
            self._num_known += 1
            try:
                peer = agent.add_peer(target.metadata)
            except MisuseError:
                # It came back before its last writes had ended. In a fresh agent this is an error.
                if not self._peers:
                    raise
                return None
            self._peers[target] = peer
        return peer

    def _drop_gone(self) -> None:
        for target in list(self._gone):
            peer = self._peers.get(target)
            if peer is not None and peer.unsettled:
                continue
            self._gone.discard(target)
            if peer is None:
                continue
            try:
                peer.remove()
            except NixlError as error:
                # The agent goes on knowing it, and could not add it again.
                logger.warning("%s stays connected: %s", target.name, error)
                self._worn = True
            else:
                del self._peers[target]
                self._transport_told.discard(target)

    def _replace(self) -> None:
        """Close the agent: no byte moves by it any more. The next write opens another."""
        agent, self._agent = self._agent, None
        self._num_known = 0
        for state in (self._peers, self._gone, self._transport_told):
            state.clear()
        is_closed = True
        # What is lost has had its time; only at the service's end may something be under way here.
        timeout_s = CLOSE_TIMEOUT_S if self._under_way else 0.0
        try:
            if agent is not None:
                agent.close(timeout_s=timeout_s)
        except BaseException:  # then its bytes may move for ever, and its slots stay lent
            logger.exception(
                "%s: the agent does not close; %d writes keep their slots",
                self._purpose,
                len(self._unsettled),
            )
            is_closed = False
        for transfer in list(self._under_way):
            self._ended(transfer)
        for write in self._unsettled.values() if is_closed else ():
            self._report(WriteSettled(write))
        self._unsettled.clear()
        self._worn = False


def _rows(base_address: int, slots: tuple[int, ...], chunk_bytes: int) -> Descriptors:
    starts = base_address + np.asarray(slots, dtype=np.uint64) * np.uint64(chunk_bytes)
    return pieces(MemoryKind.DRAM, starts, chunk_bytes)
