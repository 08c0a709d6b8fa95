"""Peers: agents of other processes whose registered memory can be written and read from here.

One peer is one set of metadata that was taken in, and is forgotten as a whole. A process that restarts
is a new peer, even under its old name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdoffload.errors import MisuseError


class Peer:
    """Made by `Agent.add_peer`, used on the agent's thread.

    Nothing here tells whether the other process still lives: its transfers fail when it does not.
    """

    __slots__ = ("_remove", "name", "removed", "unsettled")

    def __init__(self, name: str, remove: Callable[[Peer], None]) -> None:
        self.name = name
        """The other agent's own name, as its metadata gives it: chosen by the other side."""
        self.removed = False
        self.unsettled = 0
        """Transfers that may still move bytes to or from it; kept by `Transfer`."""
        self._remove = remove

    def remove(self) -> None:
        """Forget the metadata; then the same name may be added again, by a process that restarted say.

        Raises `MisuseError` while a transfer that is not settled uses the peer and for a second removal
        (`Agent.close` removes as well), and `NixlError` if NIXL refuses: then the peer is there as before.
        """
        self._remove(self)

    def __repr__(self) -> str:
        state = "removed" if self.removed else f"{self.unsettled} unsettled transfers"
        return f"<Peer {self.name!r}: {state}>"


class PeerTable:
    """The peers of one agent that are not removed, by name. One thread."""

    def __init__(self) -> None:
        self._known: dict[str, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def add(self, peer: Peer) -> None:
        self._known[peer.name] = peer

    def remove(self, peer: Peer) -> None:
        del self._known[peer.name]
        peer.removed = True

    def require(self, peer: Peer) -> None:
        """Raise `MisuseError` unless `peer` is one of these."""
        if self._known.get(peer.name) is not peer:
            state = "removed" if peer.removed else "a peer of another agent"
            raise MisuseError(f"{peer!r} is {state}")
