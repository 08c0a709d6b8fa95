"""Every key an operator can set: a frozen struct per table, with types, bounds, meanings.

These declarations are the reference: docs/configuration.md is written from them, and so is what an
error allows. `pdoffload.config.parse` fills them; built by hand, their values are not checked.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdoffload.config.hosts import HOST_ALLOWED
from pdoffload.config.reading import Unit, about

CPU_SPEC = "NixlCPUOffloadingSpec"
TIERING_SPEC = "NixlTieringOffloadingSpec"
DIRECT_SPEC = "NixlDirectOffloadingSpec"
SPECS = (CPU_SPEC, TIERING_SPEC, DIRECT_SPEC)
ADAPTER_MODULE = "pdoffload.vllm"

TIER_TYPES = ("fs", "p2p")
LATER_TIER_TYPES = ("obj",)
P2P_BACKENDS = ("UCX",)
LATER_P2P_BACKENDS = ("LIBFABRIC", "MOONCAKE", "GPUNETIO", "UCCL")
BUILT_IN_POLICIES = ("lru", "arc")


class Locality(enum.Enum):
    """Whether a tier's medium is of this host. Stated by the operator, never inferred."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class Verify(enum.Enum):
    """When a chunk's checksum is demanded."""

    ALWAYS = "always"
    IF_PRESENT = "if_present"
    OFF = "off"


# Bounds stop a slip of the hand, a figure in the wrong unit say; no machine should meet them.
HostBytes = Annotated[int, Meta(ge=1, le=1 << 50)]
StoreBytes = Annotated[int, Meta(ge=1, le=1 << 60)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
TimeoutSeconds = Annotated[float, Meta(ge=0.1, le=3600)]
ModulePath = Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")]
_DOTTED = "a dotted import path such as package.module, or null"


class FsTierConfig(msgspec.Struct, frozen=True, kw_only=True, tag_field="table", tag="fs"):
    """A tier in a directory."""

    type: Annotated[Literal["fs"], about("Names this kind of tier.")] = "fs"
    root_dir: Annotated[
        str,
        Meta(pattern=r"^[^\x00]+\Z"),
        about("Base directory. `~` and `$VAR` are not expanded.", allowed="a path"),
    ]
    n_read_threads: Annotated[
        int,
        Meta(ge=1, le=256),
        about("I/O threads that read first and help with writes when idle."),
    ] = 16
    n_write_threads: Annotated[
        int,
        Meta(ge=1, le=256),
        about("I/O threads that write first and help with reads when idle."),
    ] = 16
    enable_kv_events: Annotated[
        bool, about("Publish `BlockStored` with medium `STORAGE` for what this tier holds.")
    ] = False
    locality: Annotated[
        Locality | None,
        about("Where the medium is. Part of the events only when stated; never inferred."),
    ] = None
    backend: Annotated[
        Literal["auto", "POSIX", "GDS_MT", "GDS"],
        about(
            "NIXL plugin that moves the bytes. `auto`: GDS_MT where a page gets through it at the start, "
            "else POSIX, and the log says which and why. GDS needs `verify` to be always "
            "(docs/backends.md).",
            own=True,
        ),
    ] = "auto"
    io: Annotated[
        Literal["auto", "uring", "aio", "posix_aio"],
        about(
            "Queue of the POSIX plugin. `auto`: uring where it works, else aio, else posix_aio.",
            own=True,
        ),
    ] = "auto"
    direct: Annotated[
        Literal["auto", "on", "off"],
        about("O_DIRECT. `auto`: used where the file system takes it.", own=True),
    ] = "auto"
    max_bytes: Annotated[
        StoreBytes | None,
        about(
            "Quota of the tier; the least recently used files go first, also across processes. "
            "Without it the tier grows until `min_free_bytes` stops it.",
            unit=Unit.BYTES,
            own=True,
        ),
    ] = None
    min_free_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 60),
        about("Free space below which nothing more is stored.", unit=Unit.BYTES, own=True),
    ] = 1 << 30
    fsync: Annotated[
        bool, about("Publish a file only when it is durable. Slower stores.", own=True)
    ] = False
    file_mode: Annotated[
        int,
        about(
            'Permission bits of chunk files, as a string in octal (`"0640"`) or as a number '
            "(JSON has no octal: 0640 is 416). Directories get the matching search bits.",
            unit=Unit.MODE,
            allowed='"0600", and with it any of group read, group write, others read',
            own=True,
        ),
    ] = 0o600


P2P_HOST_VARIABLE = "VLLM_P2P_SIDE_CHANNEL_HOST"
P2P_PORT_VARIABLE = "VLLM_P2P_SIDE_CHANNEL_PORT"
P2P_DEFAULT_HOST = "localhost"
P2P_DEFAULT_PORT = 5710


class P2pTierConfig(msgspec.Struct, frozen=True, kw_only=True, tag_field="table", tag="p2p"):
    """What peers hold in host memory, and what is lent to them. Nothing is stored in this tier.

    `host` and `port` as given: `pdoffload.config.peers.resolve_p2p_address` says what to bind.
    """

    type: Annotated[Literal["p2p"], about("Names this kind of tier.")] = "p2p"
    host: Annotated[
        str | None,
        about(
            "Bound and dialled verbatim, nothing is detected: across hosts give the node's routable "
            f"address. null: `{P2P_HOST_VARIABLE}`, else `{P2P_DEFAULT_HOST}`.",
            allowed=f"{HOST_ALLOWED}, or null",
        ),
    ] = None
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        about(
            "Base port: the bound one is this plus the data-parallel index. 0: any free port, told to "
            f"peers as it is. null: `{P2P_PORT_VARIABLE}`, else {P2P_DEFAULT_PORT}."
        ),
    ] = None
    backends: Annotated[
        tuple[str, ...],
        about(
            "NIXL plugins of this tier's own agents, whatever the main connector uses. UCX alone in "
            "this version.",
            allowed='a list of NIXL network plugins, such as ["UCX"]',
        ),
    ] = P2P_BACKENDS
    ucx_tls: Annotated[
        Annotated[str, Meta(pattern=r"^\^?[a-z0-9_]+\Z")] | None,
        about(
            "UCX transport of this tier's own agents: the only one, or with `^` the one that is left out. "
            "null: UCX chooses. `UCX_TLS` in the environment means every agent of the process and wins.",
            allowed="the name of one UCX transport, such as tcp or ^cma, or null",
            own=True,
        ),
    ] = None
    num_threads: Annotated[
        int,
        Meta(ge=1, le=64),
        about("Threads that write to peers, each with a NIXL agent of its own."),
    ] = 4
    unbound_store_timeout_s: Annotated[
        TimeoutSeconds,
        about(
            "How long blocks are kept for a decoder that has not asked yet. They take up host memory "
            "for so long; a later fetch is refused at once."
        ),
    ] = 60.0
    load_timeout_s: Annotated[
        TimeoutSeconds,
        about("Deadline in seconds of a pull, from the fetch to the last byte.", own=True),
    ] = 30.0
    lookup_timeout_s: Annotated[
        TimeoutSeconds,
        about(
            "Deadline in seconds of a peer's answer to a lookup; then it counts as a miss.",
            own=True,
        ),
    ] = 30.0
    store_timeout_s: Annotated[
        TimeoutSeconds,
        about(
            "Deadline in seconds of a fetch on the producer's side, waiting for blocks included.",
            own=True,
        ),
    ] = 30.0
    abort_timeout_s: Annotated[
        TimeoutSeconds,
        about("How long an answer to an abort is waited for, in seconds.", own=True),
    ] = 10.0
    cluster_secret_file: Annotated[
        Annotated[str, Meta(pattern=r"^[^\x00]+\Z")] | None,
        about(
            "File with the secret that all peers share: it authenticates and encrypts the control "
            "channel. Without it only loopback may be bound.",
            allowed="a path, or null",
            own=True,
        ),
    ] = None
    allow_unauthenticated: Annotated[
        bool,
        about(
            "Bind beyond loopback without a secret: whoever reaches the port can read host memory.",
            own=True,
        ),
    ] = False
    max_peers: Annotated[
        int, Meta(ge=1, le=4096), about("Peers spoken to at a time; more are refused.", own=True)
    ] = 128


class CustomTierConfig(msgspec.Struct, frozen=True, kw_only=True, tag_field="table", tag="class"):
    """A tier class from elsewhere. `options` are its own keys, as given: the class checks them."""

    type: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*\Z")],
        about("Name of the tier class.", allowed="the name of a class"),
    ]
    module_path: Annotated[
        ModulePath,
        about("Where the class is imported from.", allowed="a dotted import path"),
    ]
    options: Annotated[
        dict[str, Any],
        about("Every other key of the table, handed to the class as it is.", allowed="any keys"),
    ] = {}


TierConfig = FsTierConfig | P2pTierConfig | CustomTierConfig


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of vLLM's `kv_connector_extra_config`."""

    spec_name: Annotated[
        Name,
        about(
            f"`{CPU_SPEC}`: host memory alone. `{TIERING_SPEC}`: host memory first, then the "
            f"`secondary_tiers` in their order. `{DIRECT_SPEC}`: device memory straight to the one `fs` "
            "table in `secondary_tiers`.",
            allowed=f"{', '.join(SPECS)}, or a class in spec_module_path",
        ),
    ] = CPU_SPEC
    spec_module_path: Annotated[
        ModulePath | None,
        about(
            f"Import path of the spec. `{ADAPTER_MODULE}` under the stock OffloadingConnector; "
            "not needed under PdOffloadConnector.",
            allowed=_DOTTED,
        ),
    ] = None
    cpu_bytes_to_use: Annotated[
        HostBytes | None,
        about(
            "Host bytes over all workers together, not per worker. Required, but for "
            f"`{DIRECT_SPEC}`, which has no host pool.",
            unit=Unit.BYTES,
        ),
    ] = None
    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        about(
            "Tokens per offloaded chunk: a multiple of the device block size (the default). "
            "Not together with `blocks_per_chunk`."
        ),
    ] = None
    blocks_per_chunk: Annotated[
        int, Meta(ge=1, le=1 << 16), about("Device blocks per offloaded chunk.")
    ] = 1
    eviction_policy: Annotated[
        Name,
        about(
            "Which chunk leaves host memory first.",
            allowed="lru, arc, or the name of a class in cache_policy_module_path",
        ),
    ] = "lru"
    cache_policy_module_path: Annotated[
        ModulePath | None,
        about("Where a policy of one's own is imported from.", allowed=_DOTTED),
    ] = None
    store_threshold: Annotated[
        int,
        Meta(ge=0, le=1 << 20),
        about("Lookups before a block is worth storing; 0 and 1 store all. Single tier only."),
    ] = 0
    max_tracker_size: Annotated[
        int,
        Meta(ge=1, le=100_000_000),
        about("Blocks whose lookups `store_threshold` counts at a time."),
    ] = 64_000
    secondary_tiers: Annotated[
        tuple[FsTierConfig | P2pTierConfig | CustomTierConfig, ...],
        about("Tier tables, asked in the order listed.", allowed="a list of tier tables"),
    ] = ()
    offload_prompt_only: Annotated[
        bool, about("Blocks written while decoding are not offloaded.")
    ] = True
    self_describing_kv_events: Annotated[
        bool,
        about("Events carry hashes, tokens, parent and group; needs events on in vLLM."),
    ] = False
    verify: Annotated[
        Verify,
        about(
            "`always`: a chunk without a checksum, or with the wrong one, is not loaded. "
            "`if_present`: one without is, as sharing with stock vLLM needs. `off`: nothing is "
            "compared, and flipped bytes reach the model.",
            own=True,
        ),
    ] = Verify.ALWAYS
    transfer_timeout_s: Annotated[
        TimeoutSeconds,
        about("Deadline in seconds of any one transfer; nothing waits without one.", own=True),
    ] = 30.0
    n_transfer_threads: Annotated[
        int,
        Meta(ge=1, le=16),
        about("Device<->host copy threads per worker, a NIXL agent each.", own=True),
    ] = 1
    model_identity: Annotated[
        Name | None,
        about("Keeps models that look alike apart on disk: part of the namespace.", own=True),
    ] = None
