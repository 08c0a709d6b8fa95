"""The specs: how vLLM asks for the scheduler's and the workers' side of offloading.

Each process of an engine builds one spec and asks it for one side: the scheduler for the manager, every
worker for the worker. Both sides meet in the shared host region, which the first of them creates.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from pdoffload import config as settings
from pdoffload.agent.agent import Agent
from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.nixl import NixlAgent
from pdoffload.config import FsTierConfig, ObjTierConfig, P2pTierConfig, TierConfig
from pdoffload.config.peers import resolve_p2p_address
from pdoffload.errors import ConfigError
from pdoffload.layout import Geometry
from pdoffload.memory.device import pin_host_memory
from pdoffload.memory.host import HostRegion, region_bytes
from pdoffload.memory.rendezvous import size_problems
from pdoffload.p2p.address import Address
from pdoffload.policy import make_policy
from pdoffload.tiering.manager import Tiering
from pdoffload.tiers.base import Tier, TierContext
from pdoffload.tiers.fs.paths import root_problems
from pdoffload.tiers.fs.tier import FsTier
from pdoffload.tiers.obj.tier import ObjTier
from pdoffload.tiers.peer import open_peer_tier
from pdoffload.vllm import compat, metrics
from pdoffload.vllm.manager import NixlOffloadingManager
from pdoffload.vllm.worker import NixlOffloadingWorker

logger = logging.getLogger(__name__)


class NixlCPUOffloadingSpec(OffloadingSpec):
    """One tier: finished device blocks are copied into host memory, by NIXL.

    Raises `ConfigError`, with every problem in one message, before any memory or thread is taken.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        compat.log_where_vllm_logs()
        self.settings = settings.parse(config.extra_config)
        self.replicated_layout = config.replicated_layout
        self._manager: NixlOffloadingManager | None = None
        self._worker: NixlOffloadingWorker | None = None
        self.geometry = self._checked_geometry()

    def _checked_geometry(self) -> Geometry:
        """The pool's sizes. Every problem that looking can find is told at once, before any work."""
        problems = self._tier_problems()
        try:
            geometry = settings.geometry(
                self.settings,
                worker_bytes_per_block=self.config.worker_kv_bytes_per_block,
                num_copies=1 if self.replicated_layout else self.config.parallel.world_size,
                blocks_per_chunk=self.blocks_per_chunk,
            )
        except ConfigError as error:
            raise ConfigError([*error.problems, *problems]) from error
        problems = size_problems(region_bytes(geometry)) + problems
        if problems:
            raise ConfigError(problems)
        return geometry

    def _tier_problems(self) -> list[str]:
        return []

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions(with_tiers=bool(extra_config.get("secondary_tiers")))

    def make_agent(self, name: str) -> Agent:
        """The agent of one copy thread."""
        return NixlAgent(name, [UcxBackend()])

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            compat.warn_of_unknown_version()
            logger.info("pdoffload:\n%s", settings.describe(self.settings))
            for warning in settings.warnings(self.settings):
                logger.warning("pdoffload: %s", warning)
            self._manager = self._build_manager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self._build_worker(kv_caches)
        return self._worker

    def _build_manager(self) -> NixlOffloadingManager:
        timeout_s = self.settings.transfer_timeout_s
        region = self._open_region(self.config.parallel.world_size)
        tiers: list[Tier] = []
        try:
            policy = make_policy(
                self.settings.eviction_policy,
                self.geometry.num_slots,
                self.settings.cache_policy_module_path,
            )
            tiers += self._open_tiers(region)
        except BaseException:
            region.close()
            raise
        tiering = Tiering(
            region,
            policy,
            tiers,
            store_threshold=self.settings.store_threshold,
            max_tracker_size=self.settings.max_tracker_size,
            record_moves=self.kv_events_config.enable_kv_cache_events,
        )
        logger.info(
            "pdoffload: host pool of %d chunks of %d bytes (%.2f GiB), tiers: %s",
            self.geometry.num_slots,
            self.geometry.chunk_bytes,
            self.geometry.pool_bytes / 2**30,
            ", ".join(tier.name for tier in tiers) or "none",
        )
        # A copy is tried twice at most, and waits behind one other at its deadline.
        return NixlOffloadingManager(tiering, flush_bound_s=4 * timeout_s)

    def _open_region(self, member: int) -> HostRegion:
        return HostRegion.open(
            self.config.engine_id,
            self.geometry,
            member=member,
            members=self.config.parallel.world_size + 1,
        )

    def _open_tiers(self, region: HostRegion) -> list[Tier]:
        return []

    def _build_worker(self, kv_caches: CanonicalKVCaches) -> NixlOffloadingWorker:
        rank = self.config.parallel.rank
        caches = compat.device_caches(kv_caches)
        region = self._open_region(rank)
        release_pin: Callable[[], None] | None = None
        try:
            region.populate()
            release_pin = pin_host_memory(region.address, region.size_bytes)
            return NixlOffloadingWorker(
                region,
                caches,
                rank=0 if self.replicated_layout else rank,
                blocks_per_chunk=self.blocks_per_chunk,
                agent_factory=self.make_agent,
                num_threads=self.settings.n_transfer_threads,
                timeout_s=self.settings.transfer_timeout_s,
                release_pin=release_pin,
            )
        except BaseException:
            if release_pin is not None:
                release_pin()
            region.close()
            raise


class NixlTieringOffloadingSpec(NixlCPUOffloadingSpec):
    """Host memory first, then the `secondary_tiers` in the order listed."""

    def _tier_problems(self) -> list[str]:
        return [
            f"secondary_tiers[{number}].{problem}"
            for number, table in enumerate(self.settings.secondary_tiers)
            if isinstance(table, FsTierConfig)
            for problem in root_problems(table.root_dir)
        ]

    def _open_tiers(self, region: HostRegion) -> list[Tier]:
        if self.settings.secondary_tiers:
            # Tiers move bytes in this process: without it the first use of every slot pays for page faults.
            region.populate()
        context = TierContext(
            region=region,
            run_config=compat.run_config(self, self.settings.model_identity),
            verify=self.settings.verify,
            transfer_timeout_s=self.settings.transfer_timeout_s,
        )
        tiers: list[Tier] = []
        problems: list[str] = []
        try:
            for number, table in enumerate(self.settings.secondary_tiers):
                try:
                    tiers.append(self._open_tier(table, context))
                except ConfigError as error:
                    problems += [f"secondary_tiers[{number}].{text}" for text in error.problems]
            if problems:
                raise ConfigError(problems)
        except BaseException:
            for tier in tiers:
                tier.close(timeout_s=self.settings.transfer_timeout_s)
            raise
        return tiers

    def _open_tier(self, table: TierConfig, context: TierContext) -> Tier:
        if isinstance(table, FsTierConfig):
            if table.enable_kv_events and not self.kv_events_config.enable_kv_cache_events:
                logger.warning(
                    "enable_kv_events is set on tier fs at %s, but KV events are off in the engine: "
                    "nothing will be published",
                    table.root_dir,
                )
            return FsTier(table, context)
        if isinstance(table, ObjTierConfig):
            if table.enable_kv_events and not self.kv_events_config.enable_kv_cache_events:
                logger.warning(
                    "enable_kv_events is set on tier obj in bucket %s, but KV events are off in the "
                    "engine: nothing will be published",
                    table.store_config.bucket,
                )
            return ObjTier(table, context)
        if isinstance(table, P2pTierConfig):
            index = self.config.parallel.data_parallel_index
            host, port = resolve_p2p_address(table, os.environ, index)
            return open_peer_tier(table, Address(host, port), context, compat.hash_seed)
        try:
            tier_class = getattr(importlib.import_module(table.module_path), table.type)
        except (ImportError, AttributeError) as error:
            raise ConfigError([f"type: cannot import {table.type!r}: {error}"]) from error
        if not (isinstance(tier_class, type) and issubclass(tier_class, Tier)):
            raise ConfigError(
                [f"type: {table.type!r} is not a subclass of pdoffload.tiers.base.Tier"]
            )
        # A tier from elsewhere is built like ours: from its table and the context.
        build: Callable[[Mapping[str, Any], TierContext], Tier] = tier_class
        return build(table.options, context)
