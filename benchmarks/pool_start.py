"""How long a host pool takes to start, against faulting the same pages in by one call of the kernel."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from common import GIB, MIB, Budget, Cost, Row, Spread, alternate, measure, ratios

from pdoffload.layout import Geometry
from pdoffload.memory.host import HostRegion

POOL_BYTES = 8 * GIB
_CHUNK_BYTES = 2 * MIB
_BUDGET = 1.5
_MADV_POPULATE_WRITE = 23


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell MemAvailable")


def measure_pool_start(*, smoke: bool) -> Row:
    """`HostRegion.open` and `populate`, as the first worker calls them, in turns with plain mappings.

    `shared` is the same kind of memory as the pool (pages of /dev/shm), which is what the budget is
    about; `private` shows what huge pages give where the kernel hands them out by itself.
    """
    size_bytes = 64 * MIB if smoke else min(POOL_BYTES, available_bytes() // 2 // GIB * GIB)
    geometry = Geometry(
        num_slots=size_bytes // _CHUNK_BYTES, worker_bytes=_CHUNK_BYTES, num_copies=1
    )

    def pool() -> Cost:
        opened = []

        def start() -> None:
            region = HostRegion.open(f"bench-{os.getpid()}", geometry, member=0, members=1)
            opened.append(region)
            region.populate()

        cost = measure(start)
        for region in opened:
            region.close()
        return cost

    def plain(flags: int) -> Cost:
        mapping = mmap.mmap(-1, size_bytes, flags=flags)
        cost = measure(lambda: mapping.madvise(_MADV_POPULATE_WRITE))
        mapping.close()
        return cost

    costs = alternate(
        {
            "pool": pool,
            "shared": lambda: plain(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
            "private": lambda: plain(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        },
        1 if smoke else 3,
        warm_up=0 if smoke else 1,
    )
    wall = {name: [cost.wall_s for cost in each] for name, each in costs.items()}
    figures = {f"{name}_s": Spread.of(each) for name, each in wall.items()}
    figures["start_ratio"] = Spread.of(ratios(wall["pool"], wall["shared"]))
    return Row(
        case={"what": f"start of a {size_bytes / GIB:g} GiB pool"},
        figures=figures,
        budgets=[Budget("start_ratio", _BUDGET, False)],
    )
