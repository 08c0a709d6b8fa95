"""The two managers that `scheduler.py` compares, each with the tiers behind it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)
from vllm_sides import bare_spec, offloading_config

from pdoffload.config import FsTierConfig
from pdoffload.layout import PAGE_BYTES, BlockKey, Geometry, RunConfig
from pdoffload.memory.host import HostRegion, SlotStatus
from pdoffload.policy import make_policy
from pdoffload.tiering.manager import Tiering
from pdoffload.tiers.base import Job, JobResult, Lookup, Settled, Tier, TierContext, TierStats
from pdoffload.tiers.fs.tier import FsTier
from pdoffload.vllm.manager import NixlOffloadingManager

_FLUSH_BOUND_S = 60.0


class KeysTier(Tier):
    """The counterpart of vLLM's example tier: a dict of keys, every job done at once."""

    name = "keys"

    def __init__(self) -> None:
        self._keys: dict[BlockKey, bool] = {}
        self._ended: list[JobResult | Settled] = []

    def lookup(self, keys: Sequence[BlockKey], request_id: str = "") -> list[Lookup]:
        return [Lookup.HIT if key in self._keys else Lookup.MISS for key in keys]

    def store(self, job: Job) -> None:
        for key in job.keys:
            self._keys[key] = True
        self._ended.append(JobResult(job_id=job.job_id, succeeded=job.keys))

    def load(self, job: Job) -> None:
        self._ended.append(JobResult(job_id=job.job_id, succeeded=job.keys))

    def poll(self) -> list[JobResult | Settled]:
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> TierStats:
        return TierStats()

    def close(self, *, timeout_s: float) -> list[JobResult | Settled]:
        return self.poll()


class Side(ABC):
    """One manager and what a worker would do for it."""

    manager: OffloadingManager

    @abstractmethod
    def arrived(self, spec: CPULoadStoreSpec) -> None:
        """The workers have copied these chunks into the pool."""

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no tier has a job of ours."""

    def close(self) -> None:
        self.manager.shutdown()


class Ours(Side):
    def __init__(self, num_chunks: int, tier: str, directory: Path) -> None:
        geometry = Geometry(num_slots=num_chunks, worker_bytes=PAGE_BYTES, num_copies=1)
        self._region = HostRegion.private(geometry)
        context = TierContext(
            region=self._region, run_config=RunConfig(fields={"model_name": "bench"})
        )
        tiers: dict[str, list[Tier]] = {"none": []}
        if tier == "keys":
            tiers["keys"] = [KeysTier()]
        if tier == "fs":
            settings = FsTierConfig(root_dir=str(directory), min_free_bytes=0)
            tiers["fs"] = [FsTier(settings, context)]
        self._tiering = Tiering(self._region, make_policy("lru", num_chunks, None), tiers[tier])
        self.manager = NixlOffloadingManager(self._tiering, flush_bound_s=_FLUSH_BOUND_S)

    def arrived(self, spec: CPULoadStoreSpec) -> None:
        self._region.status[spec.chunk_ids, 0] = SlotStatus.STORED

    def is_idle(self) -> bool:
        return self._tiering.plan.num_jobs == 0


class Vllm(Side):
    def __init__(self, num_chunks: int, tier: str, directory: Path) -> None:
        region = SharedOffloadRegion(
            engine_id=f"bench-{secrets.token_hex(4)}",
            num_chunks=num_chunks,
            rank=None,
            kv_bytes_per_chunk=PAGE_BYTES,
            cpu_page_size=PAGE_BYTES,
        )
        primary = CPUPrimaryTierOffloadingManager(num_chunks, region)
        spec, view = bare_spec(offloading_config(PAGE_BYTES)), primary.get_kv_memoryview()
        tiers: list[SecondaryTierManager] = []
        if tier == "keys":
            tiers = [ExampleSecondaryTierManager(spec, view, "keys")]
        if tier == "fs":
            tiers = [FileSystemTierManager(spec, view, "fs", str(directory))]
        self.manager = self._tiering = TieringOffloadingManager(primary, tiers)

    def arrived(self, spec: CPULoadStoreSpec) -> None:
        """Nothing: vLLM's workers leave no mark that its manager reads."""

    def is_idle(self) -> bool:
        return not self._tiering._jobs


SIDES = {"ours": Ours, "vllm": Vllm}
