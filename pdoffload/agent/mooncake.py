"""Mooncake's Transfer Engine by its own Python package: a driver that stands where NIXL's does.

NIXL has a plugin for it, which its wheels leave out; this is the same engine behind the same interface, by
TCP alone. What follows was read in its source and tried on 0.3.13, between processes over TCP:

- Two threads of the engine's own move the bytes of both directions; nobody has to make progress, and an idle
  engine uses no measurable CPU. Calls that wait do so without the interpreter lock, but the destruction of an
  engine holds it (`mooncake_sockets.rouse` makes that short).
- A status is told per batch, and only for its first row without waiting: every row is a batch of its own
  here, and a status must not be asked again once the row is over, for its batch is gone then.
- A write is done when its peer has acknowledged that the bytes are in its memory (protocol 2 of the engine;
  one that speaks protocol 1 alone is refused: there, done means sent).
- A peer that is killed or closes its engine fails the rows under way at once, those queued behind them within
  a second. A stopped one leaves them in progress, for half a minute at the least, and gets all bytes when it
  goes on before. No row can be cancelled. After a failed write the peer's kernel may hold bytes that have yet
  to land: it is UNKNOWN. A failed read is over when the engine says so.
- The first contact with a peer waits up to a minute for its answer, under a lock that every post takes.
  Therefore the peer is asked here first, in a thread of its own; the engine is only let at one that answers.
- What an engine has learnt of an address it never asks again, although another engine may listen there
  since. A port with one more leading zero is another address to it.
- The connections that a queue of rows is sent by (`MC_TCP_ENABLE_CONNECTION_POOL`) are made without
  waiting; without them every row makes one in the post itself. The queue takes 1024 rows a peer, and rows
  that wait for a place in it fail after a second: fewer are posted at a time.
- An engine listens on all interfaces and asks nobody who they are: see `pdoffload.agent.mooncake_sockets`.
"""

from __future__ import annotations

import functools
import socket
from collections import deque
from collections.abc import Sequence

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.driver import DONE, RUNNING, Verdict
from pdoffload.agent.mooncake_engine import (
    MooncakeError,
    call,
    make_engine,
    opcodes,
    open_segment,
    warn_of_open_ports,
)
from pdoffload.agent.mooncake_metadata import EngineMetadata, Garbled, decode
from pdoffload.agent.mooncake_peer import CONTACT_TIMEOUT_S, EnginePeer
from pdoffload.agent.mooncake_sockets import ask, hang_up, keep_to_loopback, rouse
from pdoffload.agent.nixl import unique_name
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.config.hosts import Reach, reach_of
from pdoffload.errors import BackendUnusable, NixlError

MAX_ROWS_IN_FLIGHT = 256
"""Of one peer."""

_FAILED = -1
_OVER = (1, _FAILED)
"""Answers of `transfer_check_status` after which its batch is gone."""


class MooncakeAgent(DrivenAgent):
    """An agent over a Transfer Engine that peers reach at `host`, as it is; `BackendUnusable` if none works.

    Belongs to the thread that creates it. The name is made unique among all hosts.
    """

    def __init__(self, name: str, host: str = "localhost", *, clock: Clock = SYSTEM_CLOCK) -> None:
        unique = unique_name(name)
        super().__init__(unique, MooncakeDriver(unique, host), clock=clock)


class MooncakeDriver:
    """One Transfer Engine; see `Driver`.

    If `host` is of the loopback, so are its ports. Else everybody who reaches the host reaches the memory
    that is registered here: it is said aloud, once a process.
    """

    def __init__(self, name: str, host: str) -> None:
        self._name = name
        self._host = host
        self._engine = make_engine(host)
        self._opcodes = opcodes()
        self._port = int(self._engine.get_rpc_port())
        self._data_port = self._own_data_port()
        self._ports = (self._port, self._data_port)
        if reach_of(host) is Reach.LOOPBACK:
            try:
                keep_to_loopback(self._ports)
            except OSError as error:
                reason = f"the ports of a Transfer Engine cannot be tied to the loopback: {error}"
                raise BackendUnusable("initialize", reason) from error
        else:
            warn_of_open_ports(host)
        self._regions: dict[int, int] = {}
        self._peers: dict[str, EnginePeer] = {}
        self._removed_in_contact: list[EnginePeer] = []
        self._learnt: dict[tuple[str, int], list[int]] = {}
        """Data ports that the engine has been told of for an address; the last one is in force."""

    def _own_data_port(self) -> int:
        # The engine does not tell it in any other way.
        try:
            with socket.create_connection(
                ("127.0.0.1", self._port), CONTACT_TIMEOUT_S
            ) as connection:
                contact = ask(connection)
        except (OSError, ValueError) as error:
            reason = f"the Transfer Engine made here does not answer: {error}"
            raise BackendUnusable("initialize", reason) from error
        if contact.protocol != "tcp" or not contact.tcp_data_port or not contact.acknowledges:
            reason = (
                f"this Transfer Engine moves bytes by {contact.protocol!r}, protocol "
                f"{contact.tcp_proto_version}; want tcp, 2: Mooncake 0.3.13 or later has it"
            )
            raise BackendUnusable("initialize", reason)
        return contact.tcp_data_port

    # --- memory ---

    def register(self, kind: MemoryKind, rows: Rows, names: Sequence[str] = ()) -> list[int]:
        if kind is not MemoryKind.DRAM:
            raise MooncakeError("register_memory", f"{kind.value} is not host memory")
        done: list[int] = []
        for address, size_bytes, _ in rows.tolist():
            code = call("register_memory", self._engine.register_memory, address, size_bytes)
            if code:
                self.deregister(done)
                raise MooncakeError("register_memory", f"code {code} for {size_bytes} bytes")
            self._regions[address] = size_bytes
            done.append(address)
        return done

    def query(self, names: Sequence[str]) -> list[bool]:
        raise MooncakeError("query_memory", "a Transfer Engine has no objects")

    def deregister(self, handle: list[int]) -> None:
        while handle:
            code = call("unregister_memory", self._engine.unregister_memory, handle[-1])
            if code:
                raise MooncakeError("unregister_memory", f"code {code}")
            del self._regions[handle.pop()]

    # --- peers ---

    def metadata(self) -> bytes:
        regions = list(self._regions.items())
        return EngineMetadata.of(
            self._name, self._host, self._port, self._data_port, regions
        ).encode()

    def name_in(self, metadata: bytes) -> str:
        return _decoded(metadata).name

    def add_peer(self, metadata: bytes) -> None:
        told = _decoded(metadata)
        ports = self._learnt.setdefault((told.host, told.port), [])
        if told.data_port not in ports[-1:]:
            ports.append(told.data_port)
        zeros = "0" * (len(ports) - 1)
        self._peers[told.name] = EnginePeer(told, f"{told.host}:{zeros}{told.port}")

    def remove_peer(self, name: str) -> None:
        peer = self._peers.pop(name)
        if not peer.leave():
            self._removed_in_contact.append(peer)

    def transport_of(self, name: str) -> str:
        return "MOONCAKE/tcp"

    def progress(self) -> int:
        """Nothing to do: the engine's threads let bytes land."""
        return 0

    # --- transfers ---

    def make(self, op: Op, local: Descriptors, remote: Descriptors, peer: str | None) -> _Request:
        if peer is None:
            raise MooncakeError("transfer", "it moves bytes between peers alone")
        known = self._peers[peer]
        if not (remote.kind is local.kind is MemoryKind.DRAM and known.told.holds(remote.rows)):
            raise MooncakeError("transfer", f"rows outside of the memory that {peer} has named")
        rows = zip(local.rows[:, 0].tolist(), remote.rows.tolist(), strict=True)
        return _Request(op, known, deque((here, there, size) for here, (there, size, _) in rows))

    def start(self, handle: _Request) -> Verdict:
        handle.peer.reach(functools.partial(open_segment, self._engine))
        return self.check(handle)

    def check(self, handle: _Request) -> Verdict:
        peer = handle.peer
        if not peer.is_decided:
            return RUNNING
        if peer.failure:  # then no row has been posted
            return Verdict(TransferState.FAILED, MooncakeError("openSegment", peer.failure))
        self._collect(handle)
        while handle.rows and handle.error is None and peer.rows_in_flight < MAX_ROWS_IN_FLIGHT:
            self._post(handle)
        if handle.under_way:
            return RUNNING
        if handle.error is None:
            return RUNNING if handle.rows else DONE
        lands_here = handle.op is Op.READ or not handle.posted
        state = TransferState.FAILED if lands_here else TransferState.UNKNOWN
        return Verdict(state, handle.error)

    def _collect(self, request: _Request) -> None:
        """Look for rows that have ended. They end in order, so that one is asked about in vain."""
        while request.under_way:
            status = call(
                "transfer_check_status",
                self._engine.transfer_check_status,
                request.under_way[0],
            )
            if status not in _OVER:
                return
            request.under_way.popleft()
            request.peer.rows_in_flight -= 1
            if status == _FAILED and request.error is None:
                request.error = MooncakeError(
                    "transfer_check_status", f"a row did not reach {request.peer.told.name}"
                )

    def _post(self, request: _Request) -> None:
        here, there, size_bytes = request.rows.popleft()
        batch = call(
            "batch_transfer_async",
            self._engine.batch_transfer_async,
            request.peer.segment,
            [here],
            [there],
            [size_bytes],
            self._opcodes[request.op],
        )
        if not batch:
            request.error = MooncakeError("batch_transfer_async", "the engine takes no row")
            return
        request.posted = True
        request.under_way.append(batch)
        request.peer.rows_in_flight += 1

    def release(self, handle: _Request) -> None:
        """Nothing: a row that is over has been freed, one that is not ends with the engine."""

    def close(self, *, abandon: bool) -> None:
        """Raises `MooncakeError` if a peer that stopped in a first contact holds the engine up."""
        peers = [*self._peers.values(), *self._removed_in_contact]
        held_up_by = [peer.told.name for peer in peers if not peer.leave()]
        self._peers.clear()
        hang_up(self._ports)
        rouse(self._port)
        del self._engine
        if held_up_by:
            reason = f"the engine waits for {', '.join(held_up_by)} yet, a minute at most"
            raise MooncakeError("close", reason)


class _Request:
    """Rows to one peer: those that have yet to be posted, and the engine's batches of those under way."""

    __slots__ = ("error", "op", "peer", "posted", "rows", "under_way")

    def __init__(self, op: Op, peer: EnginePeer, rows: deque[tuple[int, int, int]]) -> None:
        self.op = op
        self.peer = peer
        self.rows = rows
        """Address here, address there, length."""
        self.under_way: deque[int] = deque()
        self.posted = False
        """Whether any row ever was."""
        self.error: NixlError | None = None


def _decoded(metadata: bytes) -> EngineMetadata:
    try:
        return decode(metadata)
    except Garbled as error:
        raise MooncakeError("openSegment", f"metadata is garbled: {error}") from None
