"""Links of one process, polled in turn by a test's thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.p2p.address import Address
from pdoffload.p2p.link import Down, Link, Received
from pdoffload.p2p.secret import ClusterSecret

PATIENCE_S = 20.0
ANY_PORT = Address("127.0.0.1", 0)


class Ends:
    """Open links, and what each of them has told so far."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._told: dict[Link, list[Received | Down]] = {}

    def open(
        self, secret: ClusterSecret | None = None, address: Address = ANY_PORT, **options: Any
    ) -> Link:
        link = Link.bind(address, secret=secret, **options)
        self._stack.callback(link.close)
        self._told[link] = []
        return link

    def frames(self, link: Link) -> list[bytes]:
        return [event.frame for event in self._told[link] if isinstance(event, Received)]

    def senders(self, link: Link) -> set[Address]:
        return {event.sender for event in self._told[link] if isinstance(event, Received)}

    def downs(self, link: Link) -> list[Down]:
        return [event for event in self._told[link] if isinstance(event, Down)]

    def until(self, condition: Callable[..., object], besides: Link | None = None) -> None:
        """Poll all links until `condition` holds; `besides` is polled by the condition itself."""
        end_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
        while not condition():
            assert SYSTEM_CLOCK.monotonic_s() < end_s, f"in vain: {self._told}"
            for link, told in list(self._told.items()):
                if link is not besides and "closed" not in repr(link):
                    told.extend(link.poll(0.01))

    def has_come(self, link: Link) -> bool:
        """Wait for a frame that `link` could take, without taking it; whether there is one."""
        router = link._listener.sockets[0]
        return bool(router.poll(round(PATIENCE_S * 1000)))

    def turn(self) -> None:
        """Let every link see what has come."""
        for link, told in self._told.items():
            told.extend(link.poll(0.0))

    def close(self) -> None:
        self._stack.close()
