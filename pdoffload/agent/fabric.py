"""What LIBFABRIC does otherwise than UCX, and what its users are spared of it.

Read in the source of NIXL's plugin and tried with 1.4.1 over libfabric 2.5's TCP provider:

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

import socket
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pdoffload.agent.descriptors import Rows
from pdoffload.agent.metadata import Metadata
from pdoffload.errors import NixlError

NAME = "LIBFABRIC"

_ENDPOINT = b"dest_data_ep_0"
_MOST_ERRORS_IN_A_ROW = 100
"""More than peers that can break off between two calls: then nothing works any more."""


class ParkedPeers:
    """Peers that were removed and that NIXL goes on knowing, with their metadata."""

    def __init__(self) -> None:
        self._metadata: dict[str, bytes] = {}
        self._addresses: dict[str, Mapping[str, bytes]] = {}

    def add(
        self, peer: Metadata, metadata: bytes, add: Callable[[], None], remove: Callable[[], None]
    ) -> None:
        """Take it up again, or `add` it: with other memory than before, or for the first time.

        If it is another agent of the same name, `remove` the one before.
        """
        before = self._addresses.get(peer.name, peer.addresses)
        if before != peer.addresses:
            self._metadata.pop(peer.name)
            self._addresses.pop(peer.name)
            remove()
        if self._metadata.get(peer.name) != metadata:
            add()
            self._metadata[peer.name] = metadata
            self._addresses[peer.name] = peer.addresses

    def __repr__(self) -> str:
        return f"<ParkedPeers {len(self._metadata)} known>"


class ForgivingProgress:
    """Lets an error pass that tells of a peer's broken connection, and no endless row of them."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def __call__(self, progress: Callable[[], Any]) -> Any:
        """What `progress` answers; None if it told of a broken connection."""
        try:
            answer = progress()
        except NixlError:
            self._in_a_row += 1
            if self._in_a_row >= _MOST_ERRORS_IN_A_ROW:
                raise
            return None
        self._in_a_row = 0
        return answer


def tail_of(rows: Rows) -> Rows:
    """The last byte of the last row."""
    address, size_bytes, device = rows[-1]
    return np.array([[address + size_bytes - 1, 1, device]], dtype=rows.dtype)


def transport_to(peer: Metadata) -> str:
    """`LIBFABRIC/tcp` where the peer's endpoint is a socket's address; other providers are not told apart."""
    _, _, rest = peer.addresses[NAME].partition(_ENDPOINT)
    family = int.from_bytes(rest[8:10], "little")
    return f"{NAME}/tcp" if family in (socket.AF_INET, socket.AF_INET6) else NAME
