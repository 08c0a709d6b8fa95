"""NIXL's backends (plugins) as typed data.

NIXL takes a name and a map of strings, and its POSIX plugin accepts a parameter it does not know
without a word. Here a misspelt name, an unknown parameter and a value out of range are errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from pdoffload.errors import ConfigError
from pdoffload.layout import PAGE_BYTES

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
"""Every plugin name NIXL 1.4 and 1.5 document. Known is not usable: ask `agent.plugins.usability`."""

Ranges = Mapping[str, tuple[int, int]]
"""Of a backend's numbers: the least and the greatest."""

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
    ranges: ClassVar[Ranges] = {"num_threads": (0, 64)}

    def __post_init__(self) -> None:
        if self.reach not in ("process", "network"):
            raise ConfigError([f"UcxBackend.reach: {self.reach!r} is neither process nor network"])
        if self.tls and (self.reach == "process" or not _ONE_TRANSPORT.fullmatch(self.tls)):
            raise ConfigError(
                [
                    f"UcxBackend.tls: {self.tls!r} is not one transport, for reach network: tcp, or ^cma"
                ]
            )
        _require_ints(self)

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
    ranges: ClassVar[Ranges] = {"max_ios": (64, 65536), "kernel_queue": (16, 1024)}

    def __post_init__(self) -> None:
        if self.queue not in ("auto", *_QUEUE_PARAMS):
            allowed = ", ".join(("auto", *_QUEUE_PARAMS))
            raise ConfigError([f"PosixBackend.queue: {self.queue!r} is none of {allowed}"])
        _require_ints(self)

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        sizes = {"ios_pool_size": str(self.max_ios), "kernel_queue_size": str(self.kernel_queue)}
        queues = ("uring", "aio") if self.queue == "auto" else (self.queue,)
        return tuple({_QUEUE_PARAMS[queue]: "true", **sizes} for queue in queues)


_QUEUE_PARAMS = {"uring": "use_uring", "aio": "use_aio", "posix_aio": "use_posix_aio"}


class GdsMtBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GDS_MT: device or host memory to files through cuFile, one blocking call per piece on a thread.

    `num_threads` of each agent's own pool; 0: half of the machine's cores.
    """

    num_threads: int = 0

    name = "GDS_MT"
    ranges: ClassVar[Ranges] = {"num_threads": (0, 256)}

    def __post_init__(self) -> None:
        _require_ints(self)

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        return ({"thread_count": str(self.num_threads)} if self.num_threads else {},)


class GdsBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GDS: device or host memory to files through cuFile's batch calls.

    It does not tell of a read or write that failed (see `pdoffload.agent.nixl`): whoever uses it must be
    able to see that bytes are missing.

    `max_batches` are prepared at the start, each for `batch_pieces`; a piece longer than
    `max_piece_bytes`, whole pages, is cut by the plugin. A request takes one batch: one that needs more
    pieces, and one that finds no batch free, is refused by the agent. cuFile itself takes no more pieces
    in a batch than `io_batchsize` of its cufile.json says, 128 by default.
    """

    max_batches: int = 16
    batch_pieces: int = 128
    max_piece_bytes: int = 16 << 20

    name = "GDS"
    ranges: ClassVar[Ranges] = {
        "max_batches": (1, 1024),
        "batch_pieces": (1, 256),
        "max_piece_bytes": (PAGE_BYTES, 1 << 30),
    }

    def __post_init__(self) -> None:
        _require_ints(self)
        if self.max_piece_bytes % PAGE_BYTES:
            raise ConfigError(
                [
                    f"GdsBackend.max_piece_bytes: {self.max_piece_bytes} is not whole pages of {PAGE_BYTES}"
                ]
            )

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        return (
            {
                "batch_pool_size": str(self.max_batches),
                "batch_limit": str(self.batch_pieces),
                "max_request_size": str(self.max_piece_bytes),
            },
        )


class ObjBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OBJ: memory to the objects of one bucket of an S3 store. `repr` shows no credential.

    Without credentials the AWS SDK looks for them (environment, files, the machine's role).
    `endpoint` is a URL, empty: AWS itself. `checksums` "supported" has the SDK add its own to every
    upload, which some stores refuse; "required" only where the S3 interface demands one.
    """

    bucket: str
    endpoint: str = ""
    scheme: Literal["http", "https"] = "https"
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    ca_bundle: str = ""
    checksums: Literal["required", "supported"] = "required"
    num_threads: int = 4

    name = "OBJ"
    ranges: ClassVar[Ranges] = {"num_threads": (1, 256)}

    def __post_init__(self) -> None:
        _require_ints(self)

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        params = {
            "bucket": self.bucket,
            "endpoint_override": self.endpoint,
            "scheme": self.scheme,
            "region": self.region,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "session_token": self.session_token,
            "ca_bundle": self.ca_bundle,
            "req_checksum": self.checksums,
            "resp_checksum": self.checksums,
            "num_threads": str(self.num_threads),
        }
        return ({name: value for name, value in params.items() if value},)

    def __repr__(self) -> str:
        return f"<ObjBackend bucket {self.bucket!r} at {self.endpoint or 'AWS'}>"


class AzureBlobBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AZURE_BLOB: memory to the blobs of one container. `repr` shows no credential.

    `connection_string` carries the account and its key; without it `account_url` does the first, and
    Azure's own chain of credentials the second.
    """

    container: str
    account_url: str = ""
    connection_string: str = ""
    ca_bundle: str = ""
    num_threads: int = 4

    name = "AZURE_BLOB"
    ranges: ClassVar[Ranges] = {"num_threads": (1, 256)}

    def __post_init__(self) -> None:
        _require_ints(self)

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        params = {
            "container_name": self.container,
            "account_url": self.account_url,
            "connection_string": self.connection_string,
            "ca_bundle": self.ca_bundle,
            "num_threads": str(self.num_threads),
        }
        return ({name: value for name, value in params.items() if value},)

    def __repr__(self) -> str:
        return f"<AzureBlobBackend container {self.container!r}>"


class LibfabricBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LIBFABRIC: memory to memory of other processes and hosts (EFA, or libfabric's other providers).

    `num_threads` > 0 posts from a pool of the plugin's own.
    """

    num_threads: int = 0

    name = "LIBFABRIC"
    ranges: ClassVar[Ranges] = {"num_threads": (0, 64)}

    def __post_init__(self) -> None:
        _require_ints(self)

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        return ({"num_threads": str(self.num_threads)} if self.num_threads else {},)


class MooncakeBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MOONCAKE: memory to memory of other processes and hosts, by the Transfer Engine."""

    name = "MOONCAKE"
    ranges: ClassVar[Ranges] = {}

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        return ({},)


class PluginBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Any other plugin of `KNOWN_BACKENDS`, with the plugin's own defaults."""

    name: str
    ranges: ClassVar[Ranges] = {}

    def __post_init__(self) -> None:
        refuse_unknown(self.name)

    def candidates(self) -> tuple[Params, ...]:
        """Parameters to try, in this order, until the plugin accepts one set."""
        return ({},)


Backend = (
    UcxBackend
    | PosixBackend
    | GdsMtBackend
    | GdsBackend
    | ObjBackend
    | AzureBlobBackend
    | LibfabricBackend
    | MooncakeBackend
    | PluginBackend
)
_WITH_DEFAULTS = {
    each.name: each
    for each in (
        UcxBackend,
        PosixBackend,
        GdsMtBackend,
        GdsBackend,
        LibfabricBackend,
        MooncakeBackend,
    )
}


def backend_named(name: str) -> Backend:
    """The backend `name` with default parameters; `ConfigError` with the nearest name if unknown.

    OBJ and AZURE_BLOB have no defaults to work with: they come as plugins that NIXL itself refuses.
    """
    refuse_unknown(name)
    known = _WITH_DEFAULTS.get(name)
    return PluginBackend(name) if known is None else known()


def refuse_unknown(name: object) -> None:
    """Raise `ConfigError` unless `name` is one of `KNOWN_BACKENDS`, letter for letter."""
    if name in KNOWN_BACKENDS:
        return
    near = difflib.get_close_matches(str(name).upper(), KNOWN_BACKENDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = ", ".join(KNOWN_BACKENDS)
    raise ConfigError([f"NIXL backend {name!r} is not known{hint} (known: {known})"])


def _require_ints(owner: Backend) -> None:
    problems = []
    for field, (low, high) in owner.ranges.items():
        value = getattr(owner, field)
        if type(value) is not int or not low <= value <= high:
            problems.append(
                f"{type(owner).__name__}.{field}: {value!r} is not an integer from {low} to {high}"
            )
    if problems:
        raise ConfigError(problems)
