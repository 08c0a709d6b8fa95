"""A device of numpy arrays, and the tier that moves its blocks to files: nothing of vLLM, nothing of NIXL."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pdoffload.agent.agent import Op
from pdoffload.config import FsTierConfig
from pdoffload.layout import Geometry, RunConfig
from pdoffload.memory.device import CacheTensor, DeviceCaches, LayerRef
from pdoffload.memory.host import HostRegion
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.tier_rig import ShiftedClock
from pdoffload.tiers.base import JobResult, TierContext
from pdoffload.tiers.fs.memory import FsContext
from pdoffload.tiers.fs.tier import FsTier
from pdoffload.vllm.copies import BlockRun, HostPart, describe_copy
from pdoffload.vllm.direct.chunks import DeviceMemory

NUM_BLOCKS = 12
RUN_CONFIG = RunConfig(fields={"model_name": "org/model", "dtype": "float32"})


class Device:
    """Cache tensors of `pages` bytes a block in `strides`, filled with different bytes.

    `groups` are lists of (tensor, bytes used of its page).
    """

    def __init__(
        self,
        blocks_per_chunk: int = 2,
        *,
        pages: Sequence[int] = (64, 96),
        strides: Sequence[int] = (64, 128),
        groups: Sequence[Sequence[tuple[int, int]]] = (((0, 64), (1, 96)),),
        on_gpu: bool = False,
        seed: int = 3,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.tensors = [
            rng.integers(0, 256, (NUM_BLOCKS, stride), dtype=np.uint8) for stride in strides
        ]
        self.blocks_per_chunk = blocks_per_chunk
        self.caches = DeviceCaches(
            tensors=tuple(
                CacheTensor(
                    address=tensor.ctypes.data,
                    num_blocks=NUM_BLOCKS,
                    page_bytes=page,
                    stride_bytes=tensor.strides[0],
                )
                for tensor, page in zip(self.tensors, pages, strict=True)
            ),
            groups=tuple(tuple(LayerRef(*ref) for ref in refs) for refs in groups),
            storages=tuple((tensor.ctypes.data, tensor.nbytes) for tensor in self.tensors),
            on_gpu=on_gpu,
        )
        self.worker_bytes = sum(pages) * blocks_per_chunk
        self.geometry = Geometry(num_slots=16, worker_bytes=self.worker_bytes, num_copies=1)
        self.memory = DeviceMemory(
            self.caches,
            chunk_bytes=self.geometry.chunk_bytes,
            blocks_per_chunk=blocks_per_chunk,
        )

    def context(self, **terms) -> FsContext:
        return FsContext(
            memory=self.memory, run_config=RUN_CONFIG, **{"clock": ShiftedClock(), **terms}
        )

    def runs(self, *blocks: Sequence[int], first: int = 0) -> list[BlockRun]:
        """A run of blocks per group."""
        return [BlockRun(np.array(each, dtype=np.int32), first) for each in blocks]

    def pool_after(self, runs: Sequence[BlockRun], count: int) -> HostRegion:
        """A host pool of zeros into which the staged spec's copy has gone, chunk i in slot i."""
        region = HostRegion.private(self.geometry)
        part = HostPart(
            address=region.address,
            chunk_bytes=self.geometry.chunk_bytes,
            offset_bytes=0,
            blocks_per_chunk=self.blocks_per_chunk,
            num_slots=self.geometry.num_slots,
        )
        device, host = describe_copy(self.caches, part, runs, np.arange(count))
        agent = FakeAgent()
        for address, size_bytes in self.caches.storages:
            agent.register_memory(address, size_bytes, kind=device.kind)
        agent.register_memory(region.address, region.size_bytes)
        agent.wait(agent.submit(Op.WRITE, device, host, timeout_s=5, what="copy"))
        agent.close()
        return region

    def blank(self) -> None:
        """Forget everything: zeros in all tensors."""
        for tensor in self.tensors:
            tensor[:] = 0


@contextmanager
def open_tier(
    root: Path, context: FsContext | TierContext, *, make_agent=FakeAgent, **settings
) -> Iterator[FsTier]:
    """An fs tier over any memory, closed at the end; by default over fake agents."""
    config = FsTierConfig(root_dir=str(root), **{"min_free_bytes": 0, **settings})
    tier = FsTier(config, context, make_agent=make_agent)
    try:
        yield tier
        tier.check()
    finally:
        tier.close(timeout_s=10)


def finish(tier: FsTier, job_id: int) -> JobResult:
    """Poll until the job has its result."""
    deadline_s = time.monotonic() + 30
    while True:
        for news in tier.poll():
            if isinstance(news, JobResult) and news.job_id == job_id:
                return news
        assert time.monotonic() < deadline_s, f"job {job_id} did not end"
        time.sleep(0.0005)
