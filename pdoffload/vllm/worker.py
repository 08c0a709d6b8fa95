"""The worker's side: vLLM's OffloadingWorker over copy threads.

A failed copy to the host leaves its mark in the shared status words, where the scheduler's side reads it
before it believes the store. A failed copy to the device is reported twice: to vLLM, by our connector,
so that the request recomputes the blocks; and in the status words, so that the request does not try again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import MemoryKind
from pdoffload.errors import MisuseError, PdOffloadError
from pdoffload.memory.device import DeviceCaches, enter_thread, written_so_far
from pdoffload.memory.host import HostRegion, SlotStatus
from pdoffload.vllm.copies import HostPart, block_runs, describe_copy
from pdoffload.vllm.transfers import AgentFactory, Copy, CopyThreads, Memory

logger = logging.getLogger(__name__)


class FailedLoad(msgspec.Struct, frozen=True):
    """A load of which this worker did not get its part: the blocks hold undefined bytes."""

    job_id: int
    block_ids: frozenset[int]


class _Job(msgspec.Struct, frozen=True):
    op: Op
    slots: np.ndarray
    block_ids: np.ndarray


class NixlOffloadingWorker(OffloadingWorker):
    """One worker's copies. Takes ownership of `region`; called by the engine's worker thread only.

    `rank` is the index of this worker's part in every chunk. While `reports_load_errors` is False (the
    stock connector), a failed load is tried once more and then reported as a failed job, on which vLLM
    stops: it has no other way to hear that blocks hold wrong bytes.
    """

    def __init__(
        self,
        region: HostRegion,
        caches: DeviceCaches,
        *,
        rank: int,
        blocks_per_chunk: int,
        agent_factory: AgentFactory,
        num_threads: int = 1,
        timeout_s: float = 30.0,
        release_pin: Callable[[], None] | None = None,
    ) -> None:
        needed = caches.block_bytes * blocks_per_chunk
        if needed > region.geometry.worker_bytes:
            raise MisuseError(
                f"a chunk of this worker takes {needed} bytes, its part of a slot has "
                f"{region.geometry.worker_bytes}"
            )
        self._region = region
        self._caches = caches
        self._rank = rank
        self._release_pin = release_pin
        self._timeout_s = timeout_s
        self._host = HostPart(
            address=region.address,
            chunk_bytes=region.geometry.chunk_bytes,
            offset_bytes=rank * region.geometry.worker_bytes,
            blocks_per_chunk=blocks_per_chunk,
            num_slots=region.geometry.num_slots,
        )
        kind = MemoryKind.VRAM if caches.on_gpu else MemoryKind.DRAM
        memory = [Memory(region.address, region.size_bytes)]
        memory += [Memory(at, size, kind, caches.device_id) for at, size in caches.storages]
        self._copies = CopyThreads(
            agent_factory,
            memory,
            num_threads=num_threads,
            timeout_s=timeout_s,
            retries=1,
            enter_thread=lambda: enter_thread(caches),
        )
        self._jobs: dict[int, _Job] = {}
        self._failed_loads: list[FailedLoad] = []
        self._reports_load_errors = False

    @property
    def reports_load_errors(self) -> bool:
        return self._reports_load_errors

    @reports_load_errors.setter
    def reports_load_errors(self, value: bool) -> None:
        self._reports_load_errors = value
        self._copies.retries = 0 if value else 1

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._submit(job_id, Op.WRITE, src_spec, dst_spec)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        self._submit(job_id, Op.READ, dst_spec, src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        for ended in self._copies.finished():
            job = self._jobs.pop(ended.copy_id)
            success = True
            if ended.error is None:
                if job.op is Op.WRITE:
                    self._region.status[job.slots, self._rank] = SlotStatus.STORED
            else:
                success = self._note_failure(ended.copy_id, job, ended.error)
            results.append(
                TransferResult(
                    job_id=ended.copy_id,
                    success=success,
                    transfer_size=ended.size_bytes,
                    transfer_time=ended.elapsed_s,
                )
            )
        return results

    def take_failed_loads(self) -> list[FailedLoad]:
        """Loads that failed since the last call."""
        failed, self._failed_loads = self._failed_loads, []
        return failed

    def wait(self, job_ids: set[int]) -> None:
        self._copies.wait(job_ids)

    def shutdown(self) -> None:
        self._copies.close(timeout_s=self._timeout_s)
        if self._release_pin is not None:
            self._release_pin()
            self._release_pin = None
        self._region.close()

    def _submit(self, job_id: int, op: Op, device: GPULoadStoreSpec, host: LoadStoreSpec) -> None:
        if not isinstance(host, BlockIDsLoadStoreSpec):
            raise MisuseError(
                f"job {job_id}: {type(host).__name__} does not name slots of the pool"
            )
        runs = block_runs(device.group_sizes, device.block_indices, device.block_ids)
        slots = host.block_ids
        self._jobs[job_id] = _Job(op, slots, device.block_ids)
        direction = "store" if op is Op.WRITE else "load"
        self._copies.submit(
            Copy(
                copy_id=job_id,
                op=op,
                describe=lambda: describe_copy(self._caches, self._host, runs, slots),
                ready=written_so_far(self._caches),
                what=f"{direction} of {len(slots)} chunks (job {job_id})",
            )
        )

    def _note_failure(self, job_id: int, job: _Job, error: PdOffloadError) -> bool:
        """Mark the slots; True when everybody who must know has been told by other means."""
        self._region.status[job.slots, self._rank] = SlotStatus.FAILED
        if job.op is Op.WRITE:
            logger.error("store of %d chunks to host memory failed: %s", len(job.slots), error)
            return True
        blocks = frozenset(job.block_ids.tolist())
        logger.error("load of %d blocks from host memory failed: %s", len(blocks), error)
        self._failed_loads.append(FailedLoad(job_id, blocks))
        return self._reports_load_errors
