"""What LIBFABRIC does otherwise than UCX, and what its users are spared of it.

Read in the source of NIXL's plugin and tried with 1.4.1 over libfabric 2.5's TCP provider:

- Adding a peer greets it, and spins until a connection is there: for ever, if it is gone or stopped. So it is
  asked first whether anybody listens, and the calls are bounded (`pdoffload.agent.bounded`).
- So does the side that is greeted, when it answers: one that had stood still and goes on may find the
  greeting of an agent that has been given up meanwhile; then its `progress` is late, and its agent lost as
  well. That happened in two of 54 tries.
- A write is DONE when its bytes have left: a reader that was stopped (SIGSTOP) had 1 MiB "written" to it.
  A byte of what was written is read back therefore, before a write counts as done. TCP carries both in one
  stream, so what is read comes after all that was written. On several rails (EFA) nothing orders them:
  that has to be looked at again where there are any.
- A peer that was removed and is added again is not greeted a second time: the first post to it waits 60 s
  for the greeting and fails. So a removed peer stays connected, and is taken up again as it is.
- An agent can know 255 others in its life, removed ones included; the next is refused.
- A broken connection is told once, as an error of whichever call makes progress next, be it about another
  peer. So an error of one request makes all of them UNKNOWN, and one of `progress` is let pass.
- NIXL asks for interfaces that reach other hosts: with the loopback alone the backend does not start.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable, Mapping

import numpy as np

from pdoffload.agent.descriptors import Rows
from pdoffload.agent.metadata import Metadata
from pdoffload.errors import NixlError

logger = logging.getLogger(__name__)

NAME = "LIBFABRIC"

_ENDPOINT = b"dest_data_ep_0"
_CONNECT_TIMEOUT_S = 2.0
_MOST_ERRORS_IN_A_ROW = 100
"""More than peers that can break off between two calls: then nothing works any more."""


class ParkedPeers:
    """Peers that were removed and that NIXL goes on knowing, with their metadata."""

    def __init__(self) -> None:
        self._metadata: dict[str, bytes] = {}
        self._addresses: dict[str, Mapping[str, bytes]] = {}

    def add(
        self,
        peer: Metadata,
        metadata: bytes,
        add: Callable[[bytes], None],
        remove: Callable[[str], None],
    ) -> None:
        """Take it up again, or `add` its metadata: it has other memory than before, or is new.

        If it is another agent of the same name, `remove` the one before.
        """
        before = self._addresses.get(peer.name, peer.addresses)
        if before != peer.addresses:
            self._metadata.pop(peer.name)
            self._addresses.pop(peer.name)
            remove(peer.name)
        if self._metadata.get(peer.name) != metadata:
            add(metadata)
            self._metadata[peer.name] = metadata
            self._addresses[peer.name] = peer.addresses

    def __repr__(self) -> str:
        return f"<ParkedPeers {len(self._metadata)} known>"


class BrokenConnections:
    """Errors of progress, each of which tells of a peer's broken connection; not an endless row of them."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, error: NixlError) -> None:
        """Let it pass, or raise it: something else is wrong."""
        self._in_a_row += 1
        if self._in_a_row >= _MOST_ERRORS_IN_A_ROW:
            raise error

    def clear(self) -> None:
        """Progress was made."""
        self._in_a_row = 0


class LandingPad:
    """A byte of ours for what is read back, and its row. To be kept as long as its agent."""

    def __init__(self) -> None:
        self._byte = np.zeros(1, dtype=np.uint8)
        self.rows: Rows = np.array([[self._byte.ctypes.data, 1, 0]], dtype=np.uint64)


def tail_of(rows: Rows) -> Rows:
    """The last byte of the last row."""
    address, size_bytes, device = rows[-1]
    return np.array([[address + size_bytes - 1, 1, device]], dtype=rows.dtype)


def transport_to(peer: Metadata) -> str:
    """`LIBFABRIC/tcp` where the peer's endpoint is a socket's address; other providers are not told apart."""
    return NAME if _socket_of(peer) is None else f"{NAME}/tcp"


def require_listener(peer: Metadata) -> None:
    """Raise `NixlError` if the peer's endpoint is a socket's address at which nobody listens.

    NIXL would try to connect for ever. Takes `_CONNECT_TIMEOUT_S` at most. A process that is stopped
    listens all the same.
    """
    address = _socket_of(peer)
    if address is None:
        _say_what_was_never_tried()
        return
    try:
        socket.create_connection(address, _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        host, port = address
        reason = f"nobody listens at {host} port {port}: {error.strerror or error}"
        raise NixlError("add_remote_agent", reason) from error


@functools.cache
def _say_what_was_never_tried() -> None:
    logger.warning(
        "LIBFABRIC reaches peers by another provider than TCP, by which pdoffload has never been run: that "
        "the bytes of a write have landed when it counts as done is not known there"
    )


def _socket_of(peer: Metadata) -> tuple[str, int] | None:
    """Host and port of the first endpoint, a C `sockaddr_in` or `sockaddr_in6`; None if it is neither."""
    _, _, field = peer.addresses[NAME].partition(_ENDPOINT)
    endpoint = field[8:]
    family, port = int.from_bytes(endpoint[:2], "little"), int.from_bytes(endpoint[2:4], "big")
    if family == socket.AF_INET and len(endpoint) >= 8:
        return socket.inet_ntop(socket.AF_INET, endpoint[4:8]), port
    if family == socket.AF_INET6 and len(endpoint) >= 24:
        return socket.inet_ntop(socket.AF_INET6, endpoint[8:24]), port
    return None
