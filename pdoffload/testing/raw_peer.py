"""A peer that says whatever a test wants, by bare ZeroMQ sockets, and by another MessagePack than ours."""

from __future__ import annotations

import contextlib
from typing import Any, Self

import msgpack  # type: ignore[import-untyped]
import zmq

from pdoffload.agent.agent import Agent
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import BlockKey, Geometry
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.address import Address
from pdoffload.testing.peer_engine import PeerEngine

HOST = "127.0.0.1"
PATIENCE_S = 20.0
LINGER_MS = 1000


class RawPeer:
    """Listens at a port of its own, and talks to one engine at a time. Nothing is checked."""

    def __init__(self, identity: bytes | None = None, *, handover: bool = True) -> None:
        """`identity`: what it calls itself, if not by its own address. `handover`: whether a connection
        under a name that is known replaces the other one; stock vLLM does without, and is deaf to it."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, int(handover))
        self.address = Address(HOST, self._router.bind_to_random_port(f"tcp://{HOST}"))
        self.identity = self.address.identity if identity is None else identity
        self._dealer: zmq.Socket[bytes] | None = None
        self.heard: list[dict[str, Any]] = []
        """Every message that has come so far, oldest first."""
        self._unread = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dial(self, engine: Address) -> None:
        """Connect to an engine, anew if need be."""
        self.hang_up()
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        if self.identity:
            dealer.setsockopt(zmq.ROUTING_ID, self.identity)
        dealer.connect(f"tcp://{engine}")

    def hang_up(self) -> None:
        """Close the connection; what was said still goes out."""
        if self._dealer is not None:
            self._dealer.close(linger=LINGER_MS)
        self._dealer = None

    def say(self, **message: Any) -> None:
        self.say_bytes(msgpack.packb(message))

    def say_bytes(self, *frames: bytes) -> None:
        """Lost where the engine has refused the connection."""
        assert self._dealer is not None, "dial comes first"
        with contextlib.suppress(zmq.Again):
            self._dealer.send_multipart(list(frames), zmq.NOBLOCK)

    def hear(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for a message of this type and with these fields; those before it are passed over."""
        give_up_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
        while SYSTEM_CLOCK.monotonic_s() < give_up_s:
            message = self.next(kind, **fields)
            if message is not None:
                return message
        raise AssertionError(f"no {kind} has come; but {[each['type'] for each in self.heard]}")

    def next(self, kind: str, **fields: Any) -> dict[str, Any] | None:
        """As `hear`, without waiting: None if it has not come."""
        self.listen()
        wanted = {"type": kind, **fields}
        while self._unread < len(self.heard):
            message = self.heard[self._unread]
            self._unread += 1
            if all(message.get(name) == value for name, value in wanted.items()):
                return message
        return None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Every message of this type that has come so far."""
        return [message for message in self.heard if message["type"] == kind]

    def listen(self, timeout_s: float = 0.01) -> None:
        """Take what has come; wait a little if there is nothing."""
        wait_ms = round(timeout_s * 1000)
        while self._router.poll(wait_ms):
            _, frame = self._router.recv_multipart()
            self.heard.append(msgpack.unpackb(frame))
            wait_ms = 0

    def close(self) -> None:
        self.hang_up()
        self._router.close(linger=0)
        self._context.term()


class RawConsumer:
    """A raw peer with memory that an engine can write into, and what it takes to introduce itself to it."""

    def __init__(self, raw: RawPeer, engine: PeerEngine, agent: Agent) -> None:
        """`agent` is new; it may be closed when the test is over."""
        self.raw = raw
        self.engine = engine
        self.geometry = Geometry(
            num_slots=16, worker_bytes=engine.options.chunk_bytes, num_copies=1
        )
        self.region = HostRegion.private(self.geometry)
        self.agent = agent
        agent.register_memory(self.region.address, self.region.size_bytes)

    def introduction(self, **changes: Any) -> dict[str, Any]:
        """A right `connect`, but for the changes."""
        return {
            "type": "connect",
            "peer_id": str(self.raw.address),
            "agent_metadata": self.agent.metadata(),
            "base_addr": self.region.address,
            "num_blocks": self.geometry.num_slots,
            "block_len": self.geometry.chunk_bytes,
            "config_fingerprint": "",
            "hash_seed": self.engine.options.hash_seed,
            "incarnation": "raw.1",
            **changes,
        }

    def introduce(self, **changes: Any) -> None:
        """Dial the engine and be let in."""
        self.raw.dial(self.engine.address)
        self.raw.say(**self.introduction(**changes))
        self.raw.hear("connect_ack")


def lookup(**changes: Any) -> dict[str, Any]:
    """A right message, but for the changes."""
    return {"type": "lookup", "kv_request_id": "a", "keys": [b"12345"], "round_seq": 0, **changes}


def fetch(keys: list[BlockKey], indexes: list[int], **changes: Any) -> dict[str, Any]:
    """A right message, but for the changes."""
    message = {"type": "fetch", "kv_request_id": "a", "keys": keys, "block_indexes": indexes}
    return {**message, "round_seq": 0, **changes}
