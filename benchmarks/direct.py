"""Device memory straight to files against the way through the host pool: the same blocks, the same files.

The "device" is host memory, as on vLLM's CPU build: one tensor per layer, a page per block. Both ways are
whole workers and tiers, from the submitted job until every file stands there, or every block is back.
`direct` has its caches on pages, so that O_DIRECT works, as for the pool; `buffered` is the same with
O_DIRECT off, which is what the CPU build's own caches come down to. Every load is compared with what was
stored, outside the measurement. What a GPU would add to the staged way, its bus twice, is not in here.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import (
    GB,
    KIB,
    MIB,
    Cost,
    Row,
    Run,
    Spread,
    alternate,
    measure,
    parser,
    ratios,
    started,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.nixl import NixlAgent
from pdoffload.config import FsTierConfig
from pdoffload.layout import BlockKey, Geometry, RunConfig, make_key
from pdoffload.memory.device import CacheTensor, DeviceCaches, LayerRef
from pdoffload.memory.host import HostRegion
from pdoffload.tiers.base import Job, JobResult, TierContext
from pdoffload.tiers.fs.memory import FsContext
from pdoffload.tiers.fs.tier import FsTier
from pdoffload.vllm.direct.chunks import DeviceMemory
from pdoffload.vllm.direct.jobs import KeysSpec
from pdoffload.vllm.direct.worker import NixlDirectWorker
from pdoffload.vllm.worker import NixlOffloadingWorker

NUM_LAYERS = 32
PAGES_BYTES = (256 * KIB, 64 * KIB, 8 * KIB)
CHUNKS_PER_JOB = 16
RUN_CONFIG = RunConfig(fields={"model_name": "bench"})
_POLL_S = 0.001
_DEADLINE_S = 120.0


class Device:
    """Tensors full of random bytes, a block of each to a chunk."""

    def __init__(self, page_bytes: int, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.chunk_bytes = page_bytes * NUM_LAYERS
        tensor_bytes = page_bytes * num_chunks
        self._memory = mmap.mmap(-1, NUM_LAYERS * tensor_bytes)
        self.bytes = np.frombuffer(self._memory, np.uint8)
        base = int(self.bytes.ctypes.data)
        random = np.random.default_rng(5)
        for layer in range(NUM_LAYERS):
            part = self.bytes[layer * tensor_bytes : (layer + 1) * tensor_bytes]
            part[:] = np.frombuffer(random.bytes(tensor_bytes), np.uint8)
        self.expected = self.bytes[:: 64 * KIB + 1].copy()
        self.caches = DeviceCaches(
            tensors=tuple(
                CacheTensor(
                    address=base + layer * tensor_bytes,
                    num_blocks=num_chunks,
                    page_bytes=page_bytes,
                    stride_bytes=page_bytes,
                )
                for layer in range(NUM_LAYERS)
            ),
            groups=(tuple(LayerRef(layer, page_bytes) for layer in range(NUM_LAYERS)),),
            storages=((base, self.bytes.size),),
        )
        # As in an engine that has run for a while: blocks of a request lie anywhere.
        self.blocks = np.random.default_rng(6).permutation(num_chunks)

    def check(self, who: str) -> None:
        found = self.bytes[:: 64 * KIB + 1]
        assert np.array_equal(found, self.expected), f"{who} brought other bytes back"

    def jobs(self, keys: list[BlockKey]) -> list[tuple[tuple[BlockKey, ...], range]]:
        firsts = range(0, len(keys), CHUNKS_PER_JOB)
        cuts = [range(first, min(first + CHUNKS_PER_JOB, len(keys))) for first in firsts]
        return [(tuple(keys[i] for i in cut), cut) for cut in cuts]

    def spec(self, cut: range) -> GPULoadStoreSpec:
        blocks = self.blocks[cut.start : cut.stop]
        return GPULoadStoreSpec(blocks, [len(blocks)], [0])


class Direct:
    """What the worker of `NixlDirectOffloadingSpec` does."""

    def __init__(self, device: Device, directory: Path, direct: str) -> None:
        self._device = device
        self._next_job_id = 0
        memory = DeviceMemory(device.caches, chunk_bytes=device.chunk_bytes, blocks_per_chunk=1)
        memory.num_slots = 2 * device.num_chunks + 2  # all stores are queued at once
        context = FsContext(memory=memory, run_config=RUN_CONFIG, transfer_timeout_s=_DEADLINE_S)
        tier = FsTier(
            FsTierConfig(root_dir=str(directory), direct=direct, min_free_bytes=0), context
        )
        self._worker = NixlDirectWorker(
            tier, memory, fingerprint=RUN_CONFIG.fingerprint, timeout_s=_DEADLINE_S
        )

    def store(self, keys: list[BlockKey]) -> None:
        self._run(keys, lambda job, gpu, files: self._worker.submit_store(job, gpu, files))

    def load(self, keys: list[BlockKey]) -> None:
        self._run(keys, lambda job, gpu, files: self._worker.submit_load(job, files, gpu))

    def _run(
        self, keys: list[BlockKey], submit: Callable[[int, GPULoadStoreSpec, KeysSpec], object]
    ) -> None:
        left = set()
        for job_keys, cut in self._device.jobs(keys):
            submit(
                self._next_job_id,
                self._device.spec(cut),
                KeysSpec(job_keys, RUN_CONFIG.fingerprint),
            )
            left.add(self._next_job_id)
            self._next_job_id += 1
        deadline_s = time.monotonic() + _DEADLINE_S
        while left:
            for result in self._worker.get_finished():
                assert result.success
                left.discard(result.job_id)
            assert time.monotonic() < deadline_s
            time.sleep(_POLL_S)
        self._worker.take_news()
        assert not self._worker.take_failed_loads()

    def close(self) -> None:
        self._worker.shutdown()


class Staged:
    """What `NixlTieringOffloadingSpec` does: a copy thread of the worker, the pool, the tier."""

    def __init__(self, device: Device, directory: Path) -> None:
        self._device = device
        self._next_job_id = 0
        # Twice the slots: the tier refuses to queue stores of more than half of a pool.
        geometry = Geometry(
            num_slots=2 * device.num_chunks, worker_bytes=device.chunk_bytes, num_copies=1
        )
        self._region = HostRegion.private(geometry)
        self._region.populate()
        self._tier = FsTier(
            FsTierConfig(root_dir=str(directory), direct="on", min_free_bytes=0),
            TierContext(region=self._region, run_config=RUN_CONFIG, transfer_timeout_s=_DEADLINE_S),
        )
        self._worker = NixlOffloadingWorker(
            self._region,
            device.caches,
            rank=0,
            blocks_per_chunk=1,
            agent_factory=lambda name: NixlAgent(name, [UcxBackend()]),
        )

    def store(self, keys: list[BlockKey]) -> None:
        jobs = dict(enumerate(self._device.jobs(keys), self._next_job_id))
        for job_id, (_, cut) in jobs.items():
            for slot in cut:
                self._region.forget_checksum(slot)
            self._worker.submit_store(job_id, self._device.spec(cut), CPULoadStoreSpec(list(cut)))
        self._run(jobs, copied=lambda job_id, keys, cut: self._tier.store(Job(job_id, keys, cut)))

    def load(self, keys: list[BlockKey]) -> None:
        jobs = dict(enumerate(self._device.jobs(keys), self._next_job_id))
        for job_id, (job_keys, cut) in jobs.items():
            self._tier.load(Job(job_id, job_keys, tuple(cut)))
        self._run(
            jobs,
            arrived=lambda job_id, keys, cut: self._worker.submit_load(
                job_id, CPULoadStoreSpec(list(cut)), self._device.spec(range(cut[0], cut[-1] + 1))
            ),
        )

    def _run(
        self,
        jobs: dict[int, tuple[tuple[BlockKey, ...], range]],
        copied: Callable[[int, tuple[BlockKey, ...], tuple[int, ...]], object] | None = None,
        arrived: Callable[[int, tuple[BlockKey, ...], tuple[int, ...]], object] | None = None,
    ) -> None:
        """Hand every job from its first half to its second, until all have ended there."""
        self._next_job_id += len(jobs)
        left = set(jobs)
        deadline_s = time.monotonic() + _DEADLINE_S
        while left:
            for copy in self._worker.get_finished():
                assert copy.success
                if copied is not None:
                    keys, cut = jobs[copy.job_id]
                    copied(copy.job_id, keys, tuple(cut))
                else:
                    left.discard(copy.job_id)
            for news in self._tier.poll():
                assert isinstance(news, JobResult)
                assert not news.failed, news.failed[0]
                if arrived is not None:
                    keys, cut = jobs[news.job_id]
                    arrived(news.job_id, keys, tuple(cut))
                else:
                    left.discard(news.job_id)
            assert time.monotonic() < deadline_s
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._tier.close(timeout_s=_DEADLINE_S)
        self._worker.shutdown()


def measure_size(run: Run, directory: Path, page_bytes: int, total_bytes: int, rounds: int) -> None:
    """All ways at one page size: stores first, then loads, taking turns."""
    directory.mkdir()
    device = Device(page_bytes, total_bytes // (page_bytes * NUM_LAYERS))
    ways: dict[str, Direct | Staged] = {
        "direct": Direct(device, directory / "direct", "on"),
        "buffered": Direct(device, directory / "buffered", "off"),
        "staged": Staged(device, directory / "staged"),
    }
    numbers = dict.fromkeys(ways, 0)

    def keys(who: str) -> list[BlockKey]:
        names = (f"{who} {numbers[who]} {chunk}" for chunk in range(device.num_chunks))
        return [make_key(hashlib.sha256(name.encode()).digest(), 0) for name in names]

    def fresh_store(who: str) -> Cost:
        numbers[who] += 1
        named = keys(who)
        return measure(lambda: ways[who].store(named))

    def checked_load(who: str) -> Cost:
        named = keys(who)
        device.bytes[:] = 0
        cost = measure(lambda: ways[who].load(named))
        device.check(who)
        return cost

    try:
        stores = {who: functools.partial(fresh_store, who) for who in ways}
        run.add(_row("store", device, page_bytes, alternate(stores, rounds)))
        loads = {who: functools.partial(checked_load, who) for who in ways}
        run.add(_row("load", device, page_bytes, alternate(loads, rounds)))
    finally:
        for way in ways.values():
            way.close()
        shutil.rmtree(directory)


def _row(direction: str, device: Device, page_bytes: int, costs: dict[str, list[Cost]]) -> Row:
    size_gb = device.num_chunks * device.chunk_bytes / GB
    wall = {who: [cost.wall_s for cost in each] for who, each in costs.items()}
    figures = {f"{who}_GBps": Spread.of([size_gb / wall_s for wall_s in wall[who]]) for who in wall}
    figures |= {
        f"{who}_cpu_s_per_GB": Spread.of([cost.cpu_s / size_gb for cost in each])
        for who, each in costs.items()
    }
    figures["direct_over_staged"] = Spread.of(ratios(wall["staged"], wall["direct"]))
    figures["buffered_over_staged"] = Spread.of(ratios(wall["staged"], wall["buffered"]))
    return Row(
        case={
            "direction": direction,
            "page_KiB": page_bytes // KIB,
            "chunk_KiB": device.chunk_bytes // KIB,
        },
        figures=figures,
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk to test")
    options = made.parse_args()
    run = started("direct", options, sys.argv[1:])
    sizes: tuple[int, ...] = PAGES_BYTES
    total_bytes, rounds = 256 * MIB, options.rounds or 5
    if options.smoke:
        sizes, total_bytes, rounds = (8 * KIB,), 8 * MIB, options.rounds or 2
    for page_bytes in sizes:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="direct-") as scratch:
            measure_size(run, Path(scratch) / "roots", page_bytes, total_bytes, rounds)
    run.finish(options.dir)


if __name__ == "__main__":
    main()
