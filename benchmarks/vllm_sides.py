"""The least that vLLM's own offloading classes want to be given, so that they run without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

TOKENS_PER_BLOCK = 32


def offloading_config(
    chunk_bytes: int, *, engine_id: str = "bench", extra_config: Mapping[str, Any] | None = None
) -> OffloadingConfig:
    """One worker, one KV-cache group, one block per chunk of `chunk_bytes`.

    `extra_config` is what a user writes under `kv_connector_extra_config`.
    """
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS_PER_BLOCK, ("layer",), 0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config=dict(extra_config or {}),
        engine_id=engine_id,
        model=OffloadingModelConfig("bench", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS_PER_BLOCK, 1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


class _BareSpec(OffloadingSpec):  # type: ignore[misc]
    """Carries the configuration to a secondary tier; an engine never sees it."""

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError("a benchmark builds its managers itself")

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError("a benchmark copies nothing to a device")


def bare_spec(config: OffloadingConfig) -> OffloadingSpec:
    return _BareSpec(config)
