"""The contract of a NIXL agent: one agent, one lifetime, one owner thread.

An agent knows memory and files that were registered with it and moves bytes between them, and between
its memory and that of its peers. NIXL is told about them in bulk: a registration and a transfer take
whole arrays, and no Python loop runs per descriptor. Foreign errors stop here: callers see
`pdoffload.errors` and `TransferState`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pdoffload.agent.descriptors import Descriptors, MemoryKind
from pdoffload.agent.peer import Peer
from pdoffload.agent.region import Region
from pdoffload.agent.transfer import Transfer


class Op(enum.Enum):
    """Direction, as seen from the local side."""

    READ = "READ"
    """remote -> local"""
    WRITE = "WRITE"
    """local -> remote"""


class Agent(ABC):
    """All calls are made by the thread that created the agent, in the process that created it.

    Any other thread, and a child after `fork`, gets `MisuseError`: a UCX agent used in a forked child
    never finishes a transfer, and the default agent is not thread-safe.
    """

    name: str
    open_to_cma: bool = False
    """Whether processes of the same PID namespace may write by cma into what is registered here: closing
    the agent does not stop them (see `close`)."""

    @property
    def lost(self) -> bool:
        """Whether a call of NIXL's has not returned in time. Every call raises `NixlError` from now on,
        `close` too, since bytes may still move: close and replace this agent."""
        return False

    @abstractmethod
    def register_memory(
        self,
        address: int,
        size_bytes: int,
        *,
        kind: MemoryKind = MemoryKind.DRAM,
        device_id: int = 0,
    ) -> Region:
        """Make `[address, address + size_bytes)` usable as either side of a transfer.

        The memory stays the caller's; it must outlive the region. Raises `NixlError` if NIXL refuses and
        `MisuseError` for a size below 1, an address of 0, or bytes that a live region of this agent has.
        """

    @abstractmethod
    def register_files(self, fds: Sequence[int], sizes_bytes: Sequence[int]) -> Region:
        """Make open files usable as the remote side; a file's descriptor number is its device id.

        The descriptors stay the caller's and must stay open until the region is released. One descriptor
        may be live in one region only: a second registration raises `MisuseError`.
        """

    @abstractmethod
    def register_objects(self, names: Sequence[str], sizes_bytes: Sequence[int]) -> Region:
        """Make objects of the agent's store usable as the remote side; nothing is asked of the store.

        `region.rows[i, 2]` is the device id of `names[i]`, never used by another live region; a row is an
        offset into the object. An object is written whole, by one row that starts at 0, and appears when
        all of it has arrived. A read past its end leaves the bytes there as they were, or fails. Raises
        `MisuseError` for an empty name and for one that is given twice.
        """

    @abstractmethod
    def query_objects(self, names: Sequence[str]) -> list[bool]:
        """Whether the store holds each object, registered or not.

        Waits for the store, without the interpreter lock and without a deadline: seconds where it
        refuses, up to a minute where it is silent. For a thread that may be left behind. Raises
        `NixlError` if the store did not answer for one of them (forbidden, failing, unreachable; which,
        NIXL does not tell) and `MisuseError` for no name or an empty one.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """What another agent needs to reach the memory that is registered here now; see `add_peer`.

        Whoever holds it can read and write that memory, and over transports without memory access in
        hardware any memory of this process. Raises `NixlError` if no backend reaches peers.
        """

    @abstractmethod
    def add_peer(self, metadata: bytes) -> Peer:
        """Make the memory of another agent reachable.

        Waits for nobody: the connection begins here and needs progress on both sides to be made. (With
        LIBFABRIC it is waited for, 5 s at most; then this agent is `lost`.) The first peer of an agent
        costs tens of milliseconds, the others a few. Add a peer once and keep it while its agent lives:
        UCX keeps the connection of a removed one until one of both agents closes.

        Raises `NixlError` for bytes that are no agent's whole metadata, for a peer whose host says that
        nobody listens, and where NIXL refuses for other reasons (after an unusable key the name stays
        refused until this agent is closed), and `MisuseError` for this agent's own and for a
        name that is a peer already. What is wrong deep inside an address can end the process: take
        metadata only from those who may write into this process's memory.
        """

    @abstractmethod
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
        """Start moving `local[i]` <-> `remote[i]` for every i, in one NIXL request.

        Both sides have equal row counts and equal lengths row by row, lie inside live regions of this
        agent, and no destination row overlaps another: `MisuseError` otherwise, before NIXL sees it.
        `what` names the work in errors ("load of 16 chunks"). Copies between two DRAM regions may be
        made by this call itself, in the calling thread, without the interpreter lock.

        With a `peer` the remote rows are addresses in the peer's process; rows outside of the memory its
        metadata named are a FAILED transfer. One that NIXL fails on the way, or posts to a peer that is
        gone, is UNKNOWN and settles when this agent is closed: NIXL tells the first error while other
        rows may still move. `close` ends it for our memory, not for the peer's (see there). So is a
        failed transfer of several objects; one of a single object is FAILED.

        Returns a transfer in any state; a refusal by NIXL is a FAILED transfer, not an exception. One
        that is not RUNNING any more is told by this return alone, `poll` does not repeat it.
        """

    @abstractmethod
    def transport_of(self, peer: Peer) -> str:
        """How bytes go to `peer`, for a log line or a label: its backend, for UCX transports and devices.

        "cma/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1", several joined by "+"; "unknown" where it cannot be
        told. Final once a transfer to the peer is done: before, the connection may still be made.
        """

    @abstractmethod
    def progress(self) -> None:
        """Let bytes land that peers are writing to or reading from this agent's memory.

        Over transports without memory access in hardware (TCP, shared memory without cma) nothing lands
        unless this is called again and again while something is expected; it waits for nothing and costs
        microseconds. Notifications that peers send are counted and dropped. Raises `NixlError` if a
        backend refuses.
        """

    @abstractmethod
    def poll(self) -> list[Transfer]:
        """Make progress; return the transfers that became terminal (DONE, FAILED) or UNKNOWN since the
        last call, except those that `submit` or `wait` returned that way.

        A transfer that turned UNKNOWN is returned a second time when NIXL says it is over (then DONE or
        FAILED in `settled_state`): from then on its memory is free of it.
        """

    @abstractmethod
    def wait(self, transfer: Transfer) -> Transfer:
        """Progress until `transfer` leaves RUNNING; bounded by its own deadline.

        Spins briefly, then sleeps with growing steps up to 1 ms.
        """

    @abstractmethod
    def close(self, *, timeout_s: float = 5.0) -> list[Transfer]:
        """Release every transfer, region, peer and the agent itself; idempotent.

        Waits up to `timeout_s` for what still runs. Copies between memories end here at the latest: those
        transfers are settled afterwards. I/O of files and objects does not: a transfer whose I/O was not
        seen to end is returned, UNKNOWN and unsettled for ever, with its agent left standing; the
        memory and the files of it must not be freed or used again in this process. The list is empty in
        ordinary life.

        A peer that is stopped or gone does not hold this up beyond `timeout_s`. Peers' access to the
        memory registered here ends too, with one exception: where they write by cma (`transport_of`,
        same host), the kernel copies into this process without asking this agent. A write by cma that
        its process had begun goes on after this, until that process says so or has ended.
        """
