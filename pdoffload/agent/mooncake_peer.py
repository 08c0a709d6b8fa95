"""A peer over Mooncake's Transfer Engine, and the first contact with it.

    unknown --reach--> asked --the engine has learnt it--> reached
                         '-----> failed --reach--> asked

The engine waits up to a minute for a peer's first answer. So the peer is asked here before, in a thread of
its own that `leave` ends, and its answer is compared with what its metadata says.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from pdoffload.agent.mooncake_metadata import EngineMetadata
from pdoffload.agent.mooncake_sockets import ask

CONTACT_TIMEOUT_S = 10.0
"""For every single wait of a first contact; how long a transfer waits for it is its own deadline's affair."""
JOIN_TIMEOUT_S = 2.0

OpenSegment = Callable[[str], bool]
"""Has the engine learn how a segment is reached; whether it has."""


class EnginePeer:
    """Used by the agent's thread. What the contact's thread finds out is there when `is_decided` is."""

    def __init__(self, told: EngineMetadata, segment: str) -> None:
        self.told = told
        self.segment = segment
        """Its address, as the engine is given it."""
        self.rows_in_flight = 0
        self.failure = ""
        """Why it cannot be reached; empty: it can, or nobody knows yet."""
        self._thread: threading.Thread | None = None
        self._decided = threading.Event()
        self._left = threading.Event()
        self._connection: socket.socket | None = None

    @property
    def is_decided(self) -> bool:
        """Whether the contact is made, or has failed; until then its requests wait."""
        return self._decided.is_set()

    def reach(self, open_segment: OpenSegment) -> None:
        """Begin the contact, unless it is made or under way. After a failure it is tried anew."""
        if self._thread is not None and not (self.is_decided and self.failure):
            return
        self.failure = ""
        self._decided.clear()
        self._thread = threading.Thread(
            target=self._contact,
            args=(open_segment,),
            name="pdoffload-mooncake-contact",
            daemon=True,
        )
        self._thread.start()

    def leave(self) -> bool:
        """End a contact that is under way; none is made any more. False: the engine is held up in it."""
        self._left.set()
        if self._thread is None:
            return True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it may have ended by itself
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_TIMEOUT_S)
        return not self._thread.is_alive()

    # --- the contact's thread ---

    def _contact(self, open_segment: OpenSegment) -> None:
        try:
            self.failure = self._why_not() or (
                "" if open_segment(self.segment) else f"{self._address} does not answer the engine"
            )
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, requests wait for this
            self.failure = f"{self._address}: {error}"
        self._decided.set()

    def _why_not(self) -> str:
        """What speaks against letting the engine at this peer."""
        try:
            with socket.socket() as connection:
                connection.settimeout(CONTACT_TIMEOUT_S)
                self._connection = connection
                connection.connect((self.told.host, self.told.port))
                contact = ask(connection)
        except (OSError, ValueError) as error:
            return f"no Transfer Engine answers at {self._address}: {error}"
        if (contact.name, contact.tcp_data_port) != (self._address, self.told.data_port):
            return f"another Transfer Engine answers at {self._address}"
        if contact.protocol != "tcp" or not contact.acknowledges:
            return f"the Transfer Engine at {self._address} does not acknowledge writes"
        return "nobody waits for it any more" if self._left.is_set() else ""

    @property
    def _address(self) -> str:
        return f"{self.told.host}:{self.told.port}"
