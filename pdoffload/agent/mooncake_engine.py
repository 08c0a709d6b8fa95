"""The Transfer Engine of Mooncake's Python package: how one is made, and its errors in our words.

The only module that imports the package. What is known of its ways stands in `pdoffload.agent.mooncake`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pdoffload.agent.agent import Op
from pdoffload.errors import BackendUnusable, NixlError

_log = logging.getLogger(__name__)

_SETTINGS = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    # One connection a peer. Its one thread is no faster by several (four are its default), and none is
    # closed before the engine is, though the peer be gone.
    "MC_TCP_LANES_PER_PEER": "1",
    # It writes to standard error, several lines an engine at its own default.
    "MC_LOG_LEVEL": "ERROR",
}
"""In the environment only while an engine of ours is made; what an operator has set there stands."""
_environment = threading.Lock()


class MooncakeError(NixlError):
    """The Transfer Engine refused a call."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(call, reason)
        self.args = (f"Mooncake {call} failed: {reason}",)


def make_engine(host: str) -> Any:
    """An engine that peers reach at `host`, by TCP; `BackendUnusable` with the reason if none can be made."""
    if ":" in host:
        reason = f"Mooncake's Transfer Engine takes a name or an IPv4 address, got {host!r}"
        raise BackendUnusable("initialize", reason)
    if os.environ.get("MC_TCP_PROTO") == "1":
        reason = "MC_TCP_PROTO=1 in the environment: then a write is done before it has arrived"
        raise BackendUnusable("initialize", reason)
    module = _load()
    with _settings():
        engine = module.TransferEngine()
        code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if code:
        reason = f"Mooncake's Transfer Engine does not start at {host!r}: code {code}"
        raise BackendUnusable("initialize", reason)
    return engine


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    with _environment:
        ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                del os.environ[name]


@functools.cache
def _load() -> Any:
    """The package's module; `BackendUnusable` with the remedy where it is missing or broken."""
    try:
        with _settings():  # some are read once a process, when it is loaded
            from mooncake import engine
    except (ImportError, OSError) as error:
        remedy = "get it by: pip install pdoffload[mooncake]"
        if "libibverbs" in str(error) or "libnuma" in str(error):
            remedy = "it needs the system's RDMA libraries (Debian: libibverbs1, libnuma1)"
        reason = f"Mooncake's Transfer Engine cannot be imported ({error}); {remedy}"
        raise BackendUnusable("import", reason) from error
    return engine


@functools.cache
def warn_of_open_ports(host: str) -> None:
    """Once a process and host."""
    _log.warning(
        "MOONCAKE: the Transfer Engines of this process listen on all interfaces, without "
        "authentication: whoever reaches %s can read and write the memory that is registered, with or "
        "without the cluster's secret; see docs/peers.md",
        host,
    )


def opcodes() -> dict[Op, Any]:
    """What the engine calls our operations."""
    names = _load().TransferOpcode
    return {Op.WRITE: names.Write, Op.READ: names.Read}


def open_segment(engine: Any, segment: str) -> bool:
    """Have the engine learn how a peer is reached; whether it has. No row: not a byte moves."""
    batch = engine.batch_transfer_async(segment, [], [], [], opcodes()[Op.WRITE])
    if batch:
        engine.get_batch_transfer_status([batch])
    return bool(batch)


def call(name: str, method: Callable[..., Any], *args: Any) -> Any:
    """What `method` of an engine returns; `MooncakeError` for whatever it raises."""
    try:
        return method(*args)
    except Exception as error:  # the seam: pybind raises what it makes of any C++ exception
        # Whoever keeps the error keeps the frames of its traceback: they must not hold the engine.
        error.__traceback__ = None
        del method, args
        raise MooncakeError(name, str(error) or type(error).__name__) from error
