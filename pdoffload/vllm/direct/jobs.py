"""What scheduler and worker tell each other about direct transfers: plain values, pickled by vLLM.

scheduler --- KeysSpec, in vLLM's job ---> worker
scheduler <-- DirectNews, beside vLLM's list of completed jobs --- worker
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec

from pdoffload.layout import BlockKey
from pdoffload.tiers.base import TierStats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


class KeysSpec(LoadStoreSpec):
    """The chunks of a job by their keys, in the order of the job's blocks.

    `fingerprint` is that of the scheduler's run configuration: files of another one are not touched.
    """

    def __init__(self, keys: tuple[BlockKey, ...], fingerprint: bytes) -> None:
        self.keys = keys
        self.fingerprint = fingerprint

    def __repr__(self) -> str:
        return f"<KeysSpec {len(self.keys)} chunks>"


class DirectNews(msgspec.Struct, frozen=True, kw_only=True):
    """How chunks of ended jobs fared."""

    stored: tuple[BlockKey, ...] = ()
    """Their files stand there."""
    gone: tuple[BlockKey, ...] = ()
    """Could not be loaded, because no file is there."""
    unusable: tuple[BlockKey, ...] = ()
    """Could not be loaded for another reason."""
    stats: TierStats | None = None
    """The counters as they stand now."""


@dataclass
class DirectWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's report of completed jobs, with news of chunks."""

    news: list[DirectNews] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadingWorkerMetadata:
        merged = super().aggregate(other)
        return DirectWorkerMetadata(
            completed_jobs=merged.completed_jobs,
            transfer_stats=merged.transfer_stats,
            news=[*self.news, *getattr(other, "news", ())],
        )
