"""NIXL's backends (plugins) as typed data.

NIXL takes a name and a map of strings, and its POSIX plugin accepts a parameter it does not know
without a word. Here a misspelt name, an unknown parameter and a value out of range are errors.
"""

from __future__ import annotations

import difflib
import re
from typing import Literal

import msgspec

from pdoffload.errors import ConfigError

KNOWN_BACKENDS = (
    "UCX",
    "POSIX",
    "GDS_MT",
    "GDS",
    "OBJ",
    "AZURE_BLOB",
    "LIBFABRIC",
    "MOONCAKE",
    "GPUNETIO",
    "GUSLI",
    "HF3FS",
    "INFINIA",
    "UCCL",
)
"""Every plugin name NIXL 1.4 and 1.5 document. Known is not usable: ask `pdoffload.agent.nixl.probe`."""

_ONE_TRANSPORT = re.compile(r"\^?[a-z0-9_]+")
Params = dict[str, str]


class UcxBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """UCX: memory to memory.

    `reach` says how far. `process`: copies inside this process, at the speed of memcpy; by default UCX
    would ask the kernel to copy (cma), which is a quarter slower (docs/decisions/0002-descriptors.md).
    `network`: other processes and hosts as well, with the errors of dead peers reported; the operator's
    UCX_TLS, UCX_NET_DEVICES and the like decide among UCX's transports. One that can report a dead
    peer must be among them: with `UCX_TLS=sm` no agent is made, with `sm,tcp` it is.

    `tls` is UCX's own setting for this agent alone: the name of a transport, or `^` and the name of one to
    leave out; empty: UCX chooses. More than one name cannot be given this way (NIXL splits its settings
    at commas), and a UCX_TLS in the environment, which counts for all agents of a process, wins over it.

    `num_threads` > 0 gives the plugin a pool of threads of its own, which spin: leave it at 0 unless
    bytes go to many peers at once.
    """

    reach: Literal["process", "network"] = "process"
    tls: str = ""
    num_threads: int = 0

    name = "UCX"

    def __post_init__(self) -> None:
        if self.reach not in ("process", "network"):
            raise ConfigError([f"UcxBackend.reach: {self.reach!r} is neither process nor network"])
        if self.tls and (self.reach == "process" or not _ONE_TRANSPORT.fullmatch(self.tls)):
            raise ConfigError(
                [
                    f"UcxBackend.tls: {self.tls!r} is not one transport, for reach network: tcp, or ^cma"
                ]
            )
        _require_ints(self, num_threads=(0, 64))

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        params = {"num_threads": str(self.num_threads)} if self.num_threads else {}
        if self.reach == "process":
            # UCX's plain in-process copy cannot report a dead peer, so it is used only if nobody asks
            # for that; there is no peer here that could die.
            params |= {"ucx_error_handling_mode": "none", "engine_config": "TLS=^cma"}
        elif self.tls:
            params["engine_config"] = f"TLS={self.tls}"
        return (params,)


class PosixBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POSIX: memory to files. `auto` takes io_uring where the kernel allows it, else Linux AIO.

    `posix_aio` is there for systems that have neither: after one failed I/O that queue answers nothing
    any more and its agent has to be replaced.

    `max_ios` bounds the pieces in flight in one agent; beyond it the plugin refuses a transfer.
    `kernel_queue` is the depth of the kernel's queue.
    """

    queue: Literal["auto", "uring", "aio", "posix_aio"] = "auto"
    max_ios: int = 65536
    kernel_queue: int = 256

    name = "POSIX"

    def __post_init__(self) -> None:
        if self.queue not in ("auto", *_QUEUE_PARAMS):
            allowed = ", ".join(("auto", *_QUEUE_PARAMS))
            raise ConfigError([f"PosixBackend.queue: {self.queue!r} is none of {allowed}"])
        _require_ints(self, max_ios=(64, 65536), kernel_queue=(16, 1024))

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        sizes = {"ios_pool_size": str(self.max_ios), "kernel_queue_size": str(self.kernel_queue)}
        queues = ("uring", "aio") if self.queue == "auto" else (self.queue,)
        return tuple({_QUEUE_PARAMS[queue]: "true", **sizes} for queue in queues)


_QUEUE_PARAMS = {"uring": "use_uring", "aio": "use_aio", "posix_aio": "use_posix_aio"}


class PluginBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Any other plugin of `KNOWN_BACKENDS`, with the plugin's own defaults."""

    name: str

    def __post_init__(self) -> None:
        refuse_unknown(self.name)

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        return ({},)


Backend = UcxBackend | PosixBackend | PluginBackend


def backend_named(name: str) -> Backend:
    """The backend `name` with default parameters; `ConfigError` with the nearest name if unknown."""
    refuse_unknown(name)
    if name == UcxBackend.name:
        return UcxBackend()
    if name == PosixBackend.name:
        return PosixBackend()
    return PluginBackend(name)


def refuse_unknown(name: object) -> None:
    """Raise `ConfigError` unless `name` is one of `KNOWN_BACKENDS`, letter for letter."""
    if name in KNOWN_BACKENDS:
        return
    near = difflib.get_close_matches(str(name).upper(), KNOWN_BACKENDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = ", ".join(KNOWN_BACKENDS)
    raise ConfigError([f"NIXL backend {name!r} is not known{hint} (known: {known})"])


def _require_ints(owner: msgspec.Struct, **ranges: tuple[int, int]) -> None:
    problems = []
    for field, (low, high) in ranges.items():
        value = getattr(owner, field)
        if type(value) is not int or not low <= value <= high:
            problems.append(
                f"{type(owner).__name__}.{field}: {value!r} is not an integer from {low} to {high}"
            )
    if problems:
        raise ConfigError(problems)
