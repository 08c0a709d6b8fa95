"""Our fs tier against vLLM's own fs tier: the same chunks, the same pool, the same disk, O_DIRECT on both.

Both work through the verbs that a scheduler calls: jobs of 16 chunks are queued at once and polled until
all have ended. Ours computes a checksum of every chunk it stores and compares it when it loads; vLLM's has
none. Each store round writes new files, each load round reads the files of that contender's last store, and
a sample of what comes back is compared byte by byte, outside the measurement. All files are removed at the
end, not between rounds: deleting changes how fast ext4 makes the next ones. Where fio is installed it does
the same with io_uring, without temporary names, checksums or Python: what the disk can give.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
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
    measure,
    parser,
    ratios,
    started,
)
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs import io as vllm_fs_io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm_sides import bare_spec, offloading_config

from pdoffload.config import FsTierConfig
from pdoffload.layout import BlockKey, Geometry, RunConfig, make_key
from pdoffload.memory.host import HostRegion
from pdoffload.tiers.base import Job, JobResult, TierContext
from pdoffload.tiers.fs.tier import FsTier

# From few files to many: ext4 is slow at making files where many were deleted minutes ago.
CHUNKS_BYTES = (8 * MIB, 2 * MIB, 256 * KIB)
CHUNKS_PER_JOB = 16
CONTENDERS = 3
CHECKSUM_CPU_S_PER_GB = 0.04
_POLL_S = 0.001
_DEADLINE_S = 120.0
_FIO_BUFFER_DEPTH = 16


class Pool:
    """A host region full of random bytes; both tiers move to and from it."""

    def __init__(self, chunk_bytes: int, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        # Twice the slots, of which the upper half is never touched: our tier refuses to queue stores of
        # more than half of a pool, and here all are queued at once.
        geometry = Geometry(num_slots=2 * num_chunks, worker_bytes=chunk_bytes, num_copies=1)
        self.region = HostRegion.private(geometry)
        self.total_bytes = num_chunks * chunk_bytes
        self.rows = self.region.array[: self.total_bytes].reshape(num_chunks, chunk_bytes)
        random = np.random.default_rng(5)
        for row in self.rows:
            row[:] = np.frombuffer(random.bytes(chunk_bytes), np.uint8)
        self.expected = self.rows[:: max(num_chunks // 16, 1)].copy()

    def clear(self) -> None:
        self.rows[:] = 0
        for slot in range(self.num_chunks):
            self.region.forget_checksum(slot)

    def check(self, who: str) -> None:
        """A sample of chunks has the bytes that were stored."""
        found = self.rows[:: max(self.num_chunks // 16, 1)]
        assert np.array_equal(found, self.expected), f"{who} brought other bytes back"

    def jobs(
        self, keys: list[BlockKey]
    ) -> Iterable[tuple[int, tuple[BlockKey, ...], tuple[int, ...]]]:
        for number, first in enumerate(range(0, len(keys), CHUNKS_PER_JOB)):
            last = min(first + CHUNKS_PER_JOB, len(keys))
            yield number, tuple(keys[first:last]), tuple(range(first, last))


class OursTier:
    """pdoffload's `FsTier`, as the tiering room drives it."""

    def __init__(self, pool: Pool, directory: Path) -> None:
        self._pool = pool
        self._next_job_id = 0
        context = TierContext(
            region=pool.region,
            run_config=RunConfig(fields={"model_name": "bench"}),
            transfer_timeout_s=_DEADLINE_S,
        )
        settings = FsTierConfig(root_dir=str(directory), direct="on", min_free_bytes=0)
        self._tier = FsTier(settings, context)

    def store(self, keys: list[BlockKey]) -> Cost:
        # New bytes in the slots: their checksums are not known yet.
        for slot in range(self._pool.num_chunks):
            self._pool.region.forget_checksum(slot)
        return measure(lambda: self._run(keys, self._tier.store))

    def load(self, keys: list[BlockKey]) -> Cost:
        return measure(lambda: self._run(keys, self._tier.load))

    def _run(self, keys: list[BlockKey], verb: Callable[[Job], None]) -> None:
        left = set()
        for number, job_keys, slots in self._pool.jobs(keys):
            left.add(self._next_job_id + number)
            verb(Job(self._next_job_id + number, job_keys, slots))
        self._next_job_id += len(left)
        deadline_s = time.monotonic() + _DEADLINE_S
        while left:
            for news in self._tier.poll():
                assert isinstance(news, JobResult)
                assert not news.failed, news.failed[0]
                left.discard(news.job_id)
            assert time.monotonic() < deadline_s
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._tier.close(timeout_s=_DEADLINE_S)


class VllmTier:
    """vLLM's `FileSystemTierManager` with its defaults, as its TieringOffloadingManager drives it."""

    def __init__(self, pool: Pool, directory: Path, config: OffloadingConfig) -> None:
        self._pool = pool
        self._next_job_id = 0
        self._request = ReqContext("bench")
        self._tier = FileSystemTierManager(bare_spec(config), pool.rows.data, "fs", str(directory))
        assert self._tier._use_o_direct, "no O_DIRECT here: compare on another disk"

    def store(self, keys: list[BlockKey]) -> Cost:
        return measure(lambda: self._run(keys, self._tier.submit_store, is_promotion=False))

    def load(self, keys: list[BlockKey]) -> Cost:
        return measure(lambda: self._run(keys, self._tier.submit_load, is_promotion=True))

    def _run(
        self, keys: list[BlockKey], verb: Callable[[TransferJob], None], *, is_promotion: bool
    ) -> None:
        left = set()
        for number, job_keys, slots in self._pool.jobs(keys):
            left.add(self._next_job_id + number)
            verb(
                TransferJob(
                    job_id=self._next_job_id + number,
                    keys=[OffloadKey(key) for key in job_keys],
                    chunk_ids=np.array(slots, np.int32),
                    is_promotion=is_promotion,
                    req_context=self._request,
                )
            )
        self._next_job_id += len(left)
        deadline_s = time.monotonic() + _DEADLINE_S
        while left:
            for result in self._tier.get_finished_jobs():
                assert result.success
                left.discard(result.job_id)
            assert time.monotonic() < deadline_s
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._tier.shutdown()


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


class Round(msgspec.Struct):
    """Names of one contender's chunks; new ones for every store round."""

    who: str
    number: int = 0

    def keys(self, count: int) -> list[BlockKey]:
        names = (f"{self.who} {self.number} {chunk}" for chunk in range(count))
        return [make_key(hashlib.sha256(name.encode()).digest(), 0) for name in names]


def measure_size(
    run: Run, directory: Path, chunk_bytes: int, total_bytes: int, rounds: int
) -> None:
    """Both tiers, and fio, at one chunk size: stores first, then loads, all taking turns."""
    pool = Pool(chunk_bytes, total_bytes // chunk_bytes)
    config = offloading_config(chunk_bytes)
    fio_directory = directory / "fio"
    fio_directory.mkdir(parents=True)
    ours, theirs = OursTier(pool, directory / "ours"), VllmTier(pool, directory / "vllm", config)
    names = {"ours": Round("ours"), "vllm": Round("vllm")}
    fio_program = shutil.which("fio")
    fio = Fio(fio_program, chunk_bytes, pool.num_chunks, fio_directory) if fio_program else None

    def fresh_store(who: str, store: Callable[[list[BlockKey]], Cost]) -> Cost:
        names[who].number += 1
        return store(names[who].keys(pool.num_chunks))

    def checked_load(who: str, load: Callable[[list[BlockKey]], Cost]) -> Cost:
        pool.clear()
        cost = load(names[who].keys(pool.num_chunks))
        pool.check(who)
        return cost

    try:
        stores = {
            "ours": lambda: fresh_store("ours", ours.store),
            "vllm": lambda: fresh_store("vllm", theirs.store),
        }
        loads = {
            "ours": lambda: checked_load("ours", ours.load),
            "vllm": lambda: checked_load("vllm", theirs.load),
        }
        if fio is not None:
            stores["fio"], loads["fio"] = fio.store, fio.load
        run.add(_row("store", pool, chunk_bytes, alternate(stores, rounds)))
        run.add(_row("load", pool, chunk_bytes, alternate(loads, rounds)))
    finally:
        ours.close()
        theirs.close()
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
