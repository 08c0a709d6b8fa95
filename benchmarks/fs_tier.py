"""Our fs tier against vLLM's own fs tier: the same chunks, the same pool, the same disk, O_DIRECT on both.

Both work through the verbs that a scheduler calls: jobs of 16 chunks are queued at once and polled until
all have ended. Ours computes a checksum of every chunk it stores and compares it when it loads; vLLM's has
none. Each store round writes new files, each load round reads the files of that contender's last store, and
a sample of what comes back is compared byte by byte, outside the measurement. All files are removed at the
end, not between rounds: deleting changes how fast ext4 makes the next ones. Where fio is installed it does
the same with io_uring, without temporary names, checksums or Python: what the disk can give.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import (
    GB,
    GIB,
    KIB,
    MIB,
    Budget,
    Cost,
    Row,
    Run,
    Spread,
    alternate,
    file_system_of,
    parser,
    ratios,
    started,
)
from tier_sides import Contender, Pool, Window, Work, our_fs, stock_fs
from vllm.v1.kv_offload.tiering.fs import io as vllm_fs_io
from vllm_sides import offloading_config

# From few files to many: ext4 is slow at making files where many were deleted minutes ago.
CHUNKS_BYTES = (8 * MIB, 2 * MIB, 256 * KIB)
CONTENDERS = 3
CHECKSUM_CPU_S_PER_GB = 0.04
_FIO_BUFFER_DEPTH = 16


class Fio:
    """fio with io_uring, a file per chunk. CPU seconds are those of the child."""

    def __init__(self, program: str, chunk_bytes: int, num_chunks: int, directory: Path) -> None:
        self._total_bytes = chunk_bytes * num_chunks
        self._round = 0
        self._arguments = [
            program,
            "--ioengine=io_uring",
            "--direct=1",
            f"--bs={chunk_bytes}",
            f"--filesize={chunk_bytes}",
            f"--nrfiles={num_chunks}",
            f"--iodepth={_FIO_BUFFER_DEPTH}",
            "--openfiles=64",
            "--file_service_type=sequential",
            "--create_on_open=1",
            "--fallocate=none",
            "--end_fsync=0",
            "--invalidate=0",
            "--output-format=json",
            f"--directory={directory}",
        ]

    def store(self) -> Cost:
        self._round += 1
        return self._run("write")

    def load(self) -> Cost:
        return self._run("read")

    def _run(self, direction: str) -> Cost:
        words = [*self._arguments, f"--name=round{self._round}", f"--rw={direction}"]
        answer = subprocess.run(words, check=True, capture_output=True, text=True)
        job = json.loads(answer.stdout[answer.stdout.index("{") :])["jobs"][0]
        wall_s = job[direction]["runtime"] / 1000
        assert job[direction]["io_bytes"] == self._total_bytes
        return Cost(wall_s, wall_s * (job["usr_cpu"] + job["sys_cpu"]) / 100)


def measure_size(
    run: Run, directory: Path, chunk_bytes: int, total_bytes: int, rounds: int
) -> None:
    """Both tiers, and fio, at one chunk size: stores first, then loads, all taking turns."""
    pool = Pool(chunk_bytes, total_bytes // chunk_bytes)
    fio_directory = directory / "fio"
    fio_directory.mkdir(parents=True)
    sides = {
        "ours": our_fs(pool, directory / "ours"),
        "vllm": stock_fs(pool, directory / "vllm", offloading_config(chunk_bytes)),
    }
    contenders = {name: Contender(name, side, pool, Window()) for name, side in sides.items()}
    fio_program = shutil.which("fio")
    fio = Fio(fio_program, chunk_bytes, pool.num_chunks, fio_directory) if fio_program else None
    try:
        stores: dict[str, Work] = {name: each.store for name, each in contenders.items()}
        loads: dict[str, Work] = {name: each.load for name, each in contenders.items()}
        if fio is not None:
            stores["fio"], loads["fio"] = fio.store, fio.load
        run.add(_row("store", pool, chunk_bytes, alternate(stores, rounds)))
        run.add(_row("load", pool, chunk_bytes, alternate(loads, rounds)))
    finally:
        for each in contenders.values():
            each.close()
        shutil.rmtree(directory)


def _row(direction: str, pool: Pool, chunk_bytes: int, costs: dict[str, list[Cost]]) -> Row:
    size_gb = pool.total_bytes / GB
    wall = {who: [cost.wall_s for cost in each] for who, each in costs.items()}
    cpu = {who: [cost.cpu_s / size_gb for cost in each] for who, each in costs.items()}
    figures = {f"{who}_GBps": Spread.of([size_gb / wall_s for wall_s in wall[who]]) for who in wall}
    figures |= {f"{who}_cpu_s_per_GB": Spread.of(cpu[who]) for who in cpu}
    figures["ratio"] = Spread.of(ratios(wall["vllm"], wall["ours"]))
    if "fio" in wall:
        figures["ratio_to_fio"] = Spread.of(ratios(wall["fio"], wall["ours"]))
    figures["cpu_s_per_GB_beyond_vllm"] = Spread.of(
        [ours - theirs for ours, theirs in zip(cpu["ours"], cpu["vllm"], strict=True)]
    )
    return Row(
        case={"direction": direction, "chunk_KiB": chunk_bytes // KIB, "chunks": pool.num_chunks},
        figures=figures,
        budgets=[
            _speed_budget(chunk_bytes, figures),
            Budget("cpu_s_per_GB_beyond_vllm", CHECKSUM_CPU_S_PER_GB, False),
        ],
    )


def _speed_budget(chunk_bytes: int, figures: dict[str, Spread]) -> Budget:
    """At 256 KiB: 1.3 times vLLM or within 5 % of fio, whichever is lower; above: not below vLLM."""
    if chunk_bytes >= 2 * MIB:
        return Budget("ratio", 1.0, True)
    by_fio = figures.get("ratio_to_fio")
    if by_fio is not None and 0.95 / by_fio.median < 1.3 / figures["ratio"].median:
        return Budget("ratio_to_fio", 0.95, True)
    return Budget("ratio", 1.3, True)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk to test")
    options = made.parse_args()
    run = started("fs_tier", options, sys.argv[1:])
    sizes: tuple[int, ...] = CHUNKS_BYTES
    total_bytes, rounds = GIB, options.rounds or 7
    if options.smoke:
        sizes, total_bytes, rounds = (256 * KIB,), 8 * MIB, options.rounds or 2
    fitting_bytes = shutil.disk_usage(options.dir).free // 2 // (CONTENDERS * (rounds + 1))
    if fitting_bytes < total_bytes:
        total_bytes = max(fitting_bytes // (64 * MIB) * 64 * MIB, 64 * MIB)
        run.remarks.append(f"Disk is short: {total_bytes // MIB} MiB per measurement, not 1 GiB.")
    if file_system_of(options.dir) == "tmpfs":
        run.remarks.append("This is tmpfs: memory, not a disk.")
    if not vllm_fs_io._HAS_FSIO_C:
        run.remarks.append("vLLM's C path is absent: it is measured on its slower Python path.")
    if shutil.which("fio") is None:
        run.remarks.append("fio is not installed: no figure for what the disk itself can give.")
    for chunk_bytes in sizes:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="fs-tier-") as scratch:
            measure_size(run, Path(scratch) / "roots", chunk_bytes, total_bytes, rounds)
    run.finish(options.dir)


if __name__ == "__main__":
    main()
