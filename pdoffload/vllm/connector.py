"""The connector: vLLM's OffloadingConnector with failures that cost a recompute.

The stock connector has no word for a device copy that failed: it stops the engine. Ours tells vLLM which
blocks of which request hold no valid bytes, so that it computes them, and tells the scheduler's side
when the copies that ran at a cache reset are over.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from pdoffload import config as settings
from pdoffload.errors import ConfigError
from pdoffload.vllm import compat
from pdoffload.vllm.direct.jobs import DirectWorkerMetadata
from pdoffload.vllm.direct.manager import NixlDirectManager
from pdoffload.vllm.direct.worker import NixlDirectWorker
from pdoffload.vllm.manager import NixlOffloadingManager
from pdoffload.vllm.worker import NixlOffloadingWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)


class PdOffloadConnector(OffloadingConnector):
    """vLLM builds one per process and role; every call comes on the engine's own thread there."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer_config = vllm_config.kv_transfer_config
        settings.parse(transfer_config.kv_connector_extra_config)
        compat.adopt_defaults(transfer_config.kv_connector_extra_config)
        with compat.building_for(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
        # Block ids are unique within a KV-cache group only: with several, vLLM takes requests instead.
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._failed_blocks: set[int] = set()
        self._flushing: dict[int, int] = {}
        if (
            role is KVConnectorRole.SCHEDULER
            and transfer_config.kv_load_failure_policy != "recompute"
        ):
            logger.warning(
                "kv_load_failure_policy is %r: a failed load will fail its request; "
                'set "recompute" to have it computed instead',
                transfer_config.kv_load_failure_policy,
            )

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._copies.reports_load_errors = True

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.connector_worker is not None
        requests = dict(self.connector_worker._load_jobs)
        results: KVConnectorTransferResults = super().get_transfer_results(finished_req_ids)
        for failed in self._copies.take_failed_loads():
            request_id = requests.get(failed.job_id)
            if self._one_group or request_id is None:
                self._failed_blocks |= failed.block_ids
            else:
                results.failed_recving.add(request_id)
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        reported = super().build_connector_worker_meta()
        worker = None if self.connector_worker is None else self.connector_worker.worker
        if not isinstance(worker, NixlDirectWorker) or not (news := worker.take_news()):
            return reported
        told = reported or OffloadingWorkerMetadata()
        return DirectWorkerMetadata(told.completed_jobs, told.transfer_stats, news)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @property
    def _copies(self) -> NixlOffloadingWorker | NixlDirectWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        if not isinstance(worker, NixlOffloadingWorker | NixlDirectWorker):
            raise ConfigError(
                [
                    f"spec_name: PdOffloadConnector works with {' or '.join(compat.BUILT_IN_SPECS)}, "
                    f"the one given makes a {type(worker).__name__}"
                ]
            )
        return worker

    # --- scheduler ---

    def reset_cache(self) -> bool | None:
        assert self.connector_scheduler is not None
        self._flushing.update(
            (job_id, job.pending_count) for job_id, job in self.connector_scheduler._jobs.items()
        )
        done: bool | None = super().reset_cache()
        self._release_if_flushed()
        return done

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reported = connector_output.kv_connector_worker_meta
        if self._flushing and isinstance(reported, OffloadingWorkerMetadata):
            for job_id, count in reported.completed_jobs.items():
                if job_id in self._flushing:
                    self._flushing[job_id] -= count
                    if self._flushing[job_id] <= 0:
                        del self._flushing[job_id]
            self._release_if_flushed()
        if isinstance(reported, DirectWorkerMetadata):
            assert self.connector_scheduler is not None
            manager = self.connector_scheduler.manager
            assert isinstance(manager, NixlDirectManager)
            for news in reported.news:
                manager.on_news(news)
        super().update_connector_output(connector_output)

    def _release_if_flushed(self) -> None:
        assert self.connector_scheduler is not None
        manager = self.connector_scheduler.manager
        if not self._flushing and isinstance(manager, NixlOffloadingManager):
            manager.on_reset_flushed()

    # --- front end ---

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        extra_config: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        compat.adopt_defaults(extra_config)
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
