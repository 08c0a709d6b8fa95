"""Device <-> host copies through NIXL against memcpy of the same pieces in the same order.

The "device" is host memory, as on vLLM's CPU build: one tensor per layer, a page per block. Our side is a
whole `NixlOffloadingWorker`, from `submit_store` or `submit_load` until `get_finished` reports the job; the
other side is a loop of memcpy in C, split over as many threads in the same way. `random` picks blocks and
slots at random, `contiguous` takes neighbours; in both a piece is one page, because a chunk lays its layers
side by side.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from common import (
    GB,
    KIB,
    MIB,
    Budget,
    Cost,
    Row,
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
from pdoffload.agent.descriptors import Descriptors
from pdoffload.agent.nixl import NixlAgent
from pdoffload.layout import Geometry
from pdoffload.memory.device import CacheTensor, DeviceCaches, LayerRef
from pdoffload.memory.host import HostRegion
from pdoffload.vllm.copies import BlockRun, HostPart, describe_copy
from pdoffload.vllm.worker import NixlOffloadingWorker

NUM_LAYERS = 4
PAGES_BYTES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB)
BUDGET_FROM_BYTES = 64 * KIB
_MADV_POPULATE_WRITE = 23

_MEMCPY_LOOP = """
#include <stdint.h>
#include <string.h>
/* Rows of (address, length, device), as NIXL is given them. */
void copy_pieces(const uint64_t *to, const uint64_t *from, long count)
{
    for (long i = 0; i < count; i++)
        memcpy((void *)to[3 * i], (const void *)from[3 * i], to[3 * i + 1]);
}
"""

CopyLoop = Callable[[int, int, int], None]


class Sizes(msgspec.Struct, frozen=True):
    """How much memory each side has, and how much of it one job moves."""

    side_bytes: int
    job_bytes: int
    rounds: int


class Bench:
    """Device caches, a host region, and workers of 1 and 2 threads over both, for one page size."""

    def __init__(self, page_bytes: int, sizes: Sizes, loop: CopyLoop) -> None:
        self.page_bytes = page_bytes
        chunk_bytes = page_bytes * NUM_LAYERS
        self.num_blocks = sizes.side_bytes // chunk_bytes
        self.job_blocks = max(sizes.job_bytes // chunk_bytes, 1)
        self.job_bytes = self.job_blocks * chunk_bytes
        self._loop = loop
        geometry = Geometry(num_slots=self.num_blocks, worker_bytes=chunk_bytes, num_copies=1)
        self.region = HostRegion.private(geometry)
        self.region.populate()
        self._pool = self.region.array  # keeps the mapping until both workers have closed
        # The device's memory must outlive every agent that knows it.
        self._device = mmap.mmap(-1, self.num_blocks * chunk_bytes)
        self._device.madvise(_MADV_POPULATE_WRITE)
        self.device = np.frombuffer(self._device, np.uint8)
        self.device[:] = np.random.default_rng(1).integers(0, 256, self.device.size, np.uint8)
        self.caches = self._view_device()
        self.workers = {count: self._worker(count) for count in (1, 2)}
        self._memcpy_threads = ThreadPoolExecutor(2)
        self._next_job_id = 0

    def _view_device(self) -> DeviceCaches:
        tensor_bytes = self.num_blocks * self.page_bytes
        base = int(self.device.ctypes.data)
        return DeviceCaches(
            tensors=tuple(
                CacheTensor(
                    address=base + layer * tensor_bytes,
                    num_blocks=self.num_blocks,
                    page_bytes=self.page_bytes,
                    stride_bytes=self.page_bytes,
                )
                for layer in range(NUM_LAYERS)
            ),
            groups=(tuple(LayerRef(layer, self.page_bytes) for layer in range(NUM_LAYERS)),),
            storages=((base, self.device.size),),
        )

    def _worker(self, num_threads: int) -> NixlOffloadingWorker:
        return NixlOffloadingWorker(
            self.region,
            self.caches,
            rank=0,
            blocks_per_chunk=1,
            agent_factory=lambda name: NixlAgent(name, [UcxBackend()]),
            num_threads=num_threads,
        )

    def close(self) -> None:
        """Stop the workers, each of which closes the region that they share."""
        self._memcpy_threads.shutdown()
        for worker in self.workers.values():
            worker.shutdown()

    def through_nixl(
        self,
        direction: str,
        blocks: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        threads: int,
    ) -> None:
        """One job, submitted and waited for as vLLM does it."""
        worker = self.workers[threads]
        job_id = self._next_job_id
        self._next_job_id += 1
        device, host = GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(slots)
        if direction == "store":
            worker.submit_store(job_id, device, host)
        else:
            worker.submit_load(job_id, host, device)
        worker.wait({job_id})
        (result,) = worker.get_finished()
        assert result.success
        assert result.transfer_size == self.job_bytes

    def by_memcpy(self, to: Descriptors, source: Descriptors, threads: int) -> None:
        """The same pieces, in the same order, cut in the same places."""
        count = len(to)
        bounds = [count * part // threads for part in range(threads + 1)]
        parts = [
            self._memcpy_threads.submit(
                self._loop,
                to.rows[low:].ctypes.data,
                source.rows[low:].ctypes.data,
                high - low,
            )
            for low, high in itertools.pairwise(bounds)
        ]
        for part in parts:
            part.result()

    def pieces(
        self, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> tuple[Descriptors, Descriptors]:
        host = HostPart(
            address=self.region.address,
            chunk_bytes=self.region.geometry.chunk_bytes,
            offset_bytes=0,
            blocks_per_chunk=1,
            num_slots=self.num_blocks,
        )
        return describe_copy(self.caches, host, [BlockRun(blocks, 0)], slots)

    def check_round_trip(self, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Bytes that went out come back, through both worker sizes: fast and wrong is worth nothing."""
        pages = self.device.reshape(NUM_LAYERS, self.num_blocks, self.page_bytes)
        before = pages[:, blocks].copy()
        for threads in self.workers:
            self.through_nixl("store", blocks, slots, threads)
            pages[:, blocks] = 0
            self.through_nixl("load", blocks, slots, threads)
            assert np.array_equal(pages[:, blocks], before), (
                f"{threads} threads: other bytes came back"
            )


def measure_case(bench: Bench, direction: str, order: str, rounds: int) -> Row:
    """One page size, direction and order: NIXL and memcpy, 1 and 2 threads, taking turns."""
    random = np.random.default_rng(7)

    def choose() -> npt.NDArray[np.int64]:
        if order == "random":
            return random.permutation(bench.num_blocks)[: bench.job_blocks]
        first = int(random.integers(0, bench.num_blocks - bench.job_blocks + 1))
        return np.arange(first, first + bench.job_blocks)

    blocks, slots = choose(), choose()
    bench.check_round_trip(blocks, slots)

    def nixl(threads: int) -> Cost:
        blocks, slots = choose(), choose()
        return measure(lambda: bench.through_nixl(direction, blocks, slots, threads))

    def memcpy(threads: int) -> Cost:
        device, host = bench.pieces(choose(), choose())
        to, source = (host, device) if direction == "store" else (device, host)
        return measure(lambda: bench.by_memcpy(to, source, threads))

    costs = alternate(
        {
            "nixl_1": lambda: nixl(1),
            "memcpy_1": lambda: memcpy(1),
            "nixl_2": lambda: nixl(2),
            "memcpy_2": lambda: memcpy(2),
        },
        rounds,
    )
    return _row(bench, direction, order, costs)


def _row(bench: Bench, direction: str, order: str, costs: dict[str, list[Cost]]) -> Row:
    wall = {name: [cost.wall_s for cost in each] for name, each in costs.items()}
    figures = {
        f"{name}_GBps": Spread.of([bench.job_bytes / GB / wall_s for wall_s in each])
        for name, each in wall.items()
    }
    figures["ratio_1"] = Spread.of(ratios(wall["memcpy_1"], wall["nixl_1"]))
    figures["ratio_2"] = Spread.of(ratios(wall["memcpy_2"], wall["nixl_2"]))
    figures["speed_up"] = Spread.of(ratios(wall["nixl_1"], wall["nixl_2"]))
    # Seconds of the processor rather than of the clock: nearly deaf to what else the machine does.
    cpu = {name: [cost.cpu_s for cost in each] for name, each in costs.items()}
    figures["cpu_ratio_1"] = Spread.of(ratios(cpu["memcpy_1"], cpu["nixl_1"]))
    figures["memcpy_speed_up"] = Spread.of(ratios(wall["memcpy_1"], wall["memcpy_2"]))
    budgets = [
        Budget("ratio_1", 0.85, True),
        Budget("ratio_2", 0.85, True),
        Budget("speed_up", 1.4, True),
    ]
    return Row(
        case={"page_KiB": bench.page_bytes // KIB, "direction": direction, "order": order},
        figures=figures,
        budgets=budgets if bench.page_bytes >= BUDGET_FROM_BYTES else [],
    )


def compile_copy_loop(directory: Path) -> CopyLoop:
    """The memcpy loop as a function of (to rows, from rows, count); it runs without the interpreter lock."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("device_copy needs a C compiler for its memcpy loop: apt-get install gcc")
    source, library = directory / "loop.c", directory / "loop.so"
    source.write_text(_MEMCPY_LOOP)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    loop: Any = ctypes.CDLL(str(library)).copy_pieces
    loop.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    loop.restype = None
    return loop  # type: ignore[no-any-return]


def main() -> None:
    options = parser(__doc__).parse_args()
    run = started("device_copy", options, sys.argv[1:])
    pages_bytes: tuple[int, ...] = PAGES_BYTES
    sizes = Sizes(512 * MIB, 128 * MIB, options.rounds or 11)
    if options.smoke:
        pages_bytes = (64 * KIB,)
        sizes = Sizes(8 * MIB, 2 * MIB, options.rounds or 2)
    with tempfile.TemporaryDirectory() as scratch:
        loop = compile_copy_loop(Path(scratch))
        for page_bytes in pages_bytes:
            bench = Bench(page_bytes, sizes, loop)
            try:
                for direction in ("store", "load"):
                    for order in ("random", "contiguous"):
                        run.add(measure_case(bench, direction, order, sizes.rounds))
            finally:
                bench.close()
        run.finish(Path(scratch))


if __name__ == "__main__":
    main()
