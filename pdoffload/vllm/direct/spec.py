"""The spec: how vLLM asks for the scheduler's and the worker's side of direct offloading."""

from __future__ import annotations

import logging
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
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import DIRECT_SPEC, FsTierConfig
from pdoffload.errors import ConfigError
from pdoffload.layout import Geometry
from pdoffload.memory.device import enter_thread
from pdoffload.tiers.fs.lookup import file_lookup
from pdoffload.tiers.fs.memory import FsContext
from pdoffload.tiers.fs.paths import open_namespace, root_problems
from pdoffload.tiers.fs.start import sound_sizes
from pdoffload.tiers.fs.tier import FsTier
from pdoffload.vllm import compat, metrics
from pdoffload.vllm.direct.chunks import DeviceMemory
from pdoffload.vllm.direct.manager import NixlDirectManager
from pdoffload.vllm.direct.worker import NixlDirectWorker

logger = logging.getLogger(__name__)


class NixlDirectOffloadingSpec(OffloadingSpec):
    """Finished device blocks straight into chunk files, and back, in the worker's process.

    Raises `ConfigError`, with every problem in one message, before any folder or thread is made.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        compat.log_where_vllm_logs()
        self.settings = settings.parse(config.extra_config)
        (table,) = self.settings.secondary_tiers
        assert isinstance(table, FsTierConfig), "parse lets nothing else through"
        self.table = table
        if problems := self._problems():
            raise ConfigError(problems)
        self.chunk_bytes = Geometry(
            num_slots=1,
            worker_bytes=config.worker_kv_bytes_per_block * self.blocks_per_chunk,
            num_copies=1,
        ).chunk_bytes
        # Here, because only while our connector builds the spec the whole engine's settings are known.
        self.run_config = compat.run_config(self, self.settings.model_identity)
        self._manager: NixlDirectManager | None = None
        self._worker: NixlDirectWorker | None = None

    def _problems(self) -> list[str]:
        problems = [f"secondary_tiers[0].{each}" for each in root_problems(self.table.root_dir)]
        world_size = self.config.parallel.world_size
        if world_size != 1:
            problems.append(
                f"spec_name: {DIRECT_SPEC} works with one worker in this version, this engine has "
                f"{world_size}; with tensor or pipeline parallelism use NixlTieringOffloadingSpec"
            )
        if not compat.under_our_connector():
            problems.append(
                f"spec_name: {DIRECT_SPEC} needs kv_connector PdOffloadConnector: under vLLM's own a "
                "chunk file that cannot be read would stop the engine"
            )
        return problems

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metrics.direct_definitions()

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

    def _build_manager(self) -> NixlDirectManager:
        table = self.table
        space = open_namespace(table.root_dir, self.run_config, 0, table.file_mode)
        if table.enable_kv_events and not self.kv_events_config.enable_kv_cache_events:
            logger.warning(
                "enable_kv_events is set, but KV events are off in the engine: nothing will be published"
            )
        logger.info("pdoffload: chunks of %d bytes, device <-> %s", self.chunk_bytes, space.base)
        lookup = file_lookup(
            space,
            sound_sizes(self.chunk_bytes, self.settings.verify),
            timeout_s=self.settings.transfer_timeout_s,
            clock=SYSTEM_CLOCK,
        )
        return NixlDirectManager(
            lookup,
            fingerprint=self.run_config.fingerprint,
            locality=table.locality,
            publishes_events=table.enable_kv_events
            and self.kv_events_config.enable_kv_cache_events,
        )

    def _build_worker(self, kv_caches: CanonicalKVCaches) -> NixlDirectWorker:
        caches = compat.device_caches(kv_caches)
        memory = DeviceMemory(
            caches,
            chunk_bytes=self.chunk_bytes,
            blocks_per_chunk=self.blocks_per_chunk,
            enter_thread=lambda: enter_thread(caches),
        )
        context = FsContext(
            memory=memory,
            run_config=self.run_config,
            verify=self.settings.verify,
            transfer_timeout_s=self.settings.transfer_timeout_s,
        )
        try:
            tier = FsTier(self.table, context)
        except ConfigError as error:
            raise ConfigError([f"secondary_tiers[0].{each}" for each in error.problems]) from error
        return NixlDirectWorker(
            tier,
            memory,
            fingerprint=self.run_config.fingerprint,
            timeout_s=self.settings.transfer_timeout_s,
        )
