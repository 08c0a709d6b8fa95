"""Every NIXL backend that tiers use, against others with the same bytes: files, objects, peers, direct.

The contenders of a part take turns in one run. `fs`: our tier by each queue of POSIX against vLLM's own tier.
`obj`: our tier against vLLM's own, on one S3 server, 1 to 32 chunks in flight. `peers`: pulls over each
network backend, against a bare NIXL write and UCX alone. `direct`: device memory straight to files against
the way over host memory, with a real vLLM. What is not installed is left out, with a remark.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import msgspec
from common import GIB, KIB, MIB, Run, file_system_of, parser, started

PARTS = ("fs", "obj", "peers", "direct")
DEFAULT_MODEL = Path(".cache/models/smollm2-135m-instruct")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything."""

    fs_chunks: tuple[int, ...] = (2 * MIB, 256 * KIB)
    fs_bytes: int = GIB
    fs_rounds: int = 7
    obj_chunks: int = 64
    obj_in_flight: tuple[int, ...] = (1, 4, 16, 32)
    obj_rounds: int = 7
    peer_chunks: int = 32
    peer_rounds: int = 40
    direct_rounds: int = 9


SMOKE = Sizes(
    fs_chunks=(256 * KIB,),
    fs_bytes=8 * MIB,
    fs_rounds=2,
    obj_chunks=4,
    obj_in_flight=(1, 2),
    obj_rounds=2,
    peer_chunks=4,
    peer_rounds=2,
    direct_rounds=2,
)


def fs(run: Run, options: argparse.Namespace, sizes: Sizes) -> None:
    import backends_fs

    contenders = len(backends_fs.MODES) + 2
    fitting_bytes = shutil.disk_usage(options.dir).free // 2 // (contenders * (sizes.fs_rounds + 1))
    total_bytes = sizes.fs_bytes
    if fitting_bytes < total_bytes:
        total_bytes = max(fitting_bytes // (64 * MIB) * 64 * MIB, 64 * MIB)
        run.remarks.append(f"Disk is short: {total_bytes // MIB} MiB per measurement.")
    if file_system_of(options.dir) == "tmpfs":
        run.remarks.append("This is tmpfs: memory, not a disk.")
    if shutil.which("fio") is None:
        run.remarks.append("fio: not installed; no figure for what the disk itself can give.")
    for chunk_bytes in sizes.fs_chunks:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="backends-fs-") as scratch:
            backends_fs.measure(
                run,
                Path(scratch) / "roots",
                chunk_bytes=chunk_bytes,
                total_bytes=total_bytes,
                rounds=sizes.fs_rounds,
            )


def restart_over_test_cufile() -> NoReturn:
    """Run this script again, as a process in which GDS_MT finds the cuFile of the tests. Compiles that."""
    from pdoffload.testing.cufile import MARK, build, environment, library_folder

    root = Path(__file__).parents[1]
    folder = root / ".cache" / "cufile-for-tests"
    folder.mkdir(parents=True, exist_ok=True)
    build(root / "tests" / "agent" / "cufile_for_tests.c", folder)
    cudart = library_folder("nvidia-cuda-runtime-cu12", "libcudart.so.12")
    assert cudart is not None, "nvidia-cuda-runtime-cu12 is not installed: make setup"
    found = {**environment(folder, cudart), MARK: "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv], found)


def obj(run: Run, options: argparse.Namespace, sizes: Sizes) -> None:
    import backends_obj

    reason = backends_obj.missing()
    if reason:
        run.remarks.append(f"obj: {reason}")
        return
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="backends-obj-") as scratch:
        backends_obj.measure(
            run,
            Path(scratch),
            num_chunks=sizes.obj_chunks,
            in_flight=sizes.obj_in_flight,
            rounds=sizes.obj_rounds,
        )


def peers(run: Run, _: argparse.Namespace, sizes: Sizes) -> None:
    import backends_peers

    backends_peers.measure(run, num_chunks=sizes.peer_chunks, rounds=sizes.peer_rounds)


def direct(run: Run, options: argparse.Namespace, sizes: Sizes) -> None:
    import backends_direct

    reason = backends_direct.missing()
    if reason:
        run.remarks.append(f"direct: {reason}")
        return
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="backends-direct-") as scratch:
        backends_direct.measure(
            run, options.model, Path(scratch), rounds=sizes.direct_rounds, smoke=options.smoke
        )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", choices=PARTS, action="append", help="these parts; default: all")
    made.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk to test")
    made.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="from scripts/make_model.py, for direct"
    )
    made.add_argument(
        "--test-cufile", action="store_true", help="GDS_MT without a GPU, over the tests' cuFile"
    )
    options = made.parse_args()
    if options.test_cufile and "CUFILE_FOR_TESTS" not in os.environ:
        restart_over_test_cufile()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    run = started("backends", options, sys.argv[1:])
    sizes = SMOKE if options.smoke else Sizes()
    if options.rounds:
        names = ("fs_rounds", "obj_rounds", "peer_rounds", "direct_rounds")
        sizes = msgspec.structs.replace(sizes, **dict.fromkeys(names, options.rounds))
    parts = {"fs": fs, "obj": obj, "peers": peers, "direct": direct}
    for name in options.only or PARTS:
        parts[name](run, options, sizes)
    run.finish(options.dir)


if __name__ == "__main__":
    main()
