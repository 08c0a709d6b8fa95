"""What a quota costs: the fs tier under `max_bytes`, with few and with many files, against one without.

A root is filled with files of one small chunk each (sparse: what is measured is names, not bytes), and a
tier is opened on it whose quota has room for a while. It takes turns with a tier without a quota on an empty
root. `before` are the rounds that fit, `during` those in which every store has to be made room for. Chunks
are as small as they get, so that nothing hides behind the bytes: what the quota adds is per chunk, of
whatever size.

`start` is the time until the first store of a tier that finds the files without a ledger and counts them,
and until that of one that finds them in its ledger; and what the process grew by. `shared lock` is what a
load pays to say that it reads a file.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from common import MIB, Cost, Row, Spread, alternate, measure, parser, ratios, started

from pdoffload.layout import BlockKey, make_key
from pdoffload.testing.fs_rig import FsRig, open_fs
from pdoffload.testing.tier_rig import filled_region
from pdoffload.tiers.fs.paths import Namespace
from pdoffload.tiers.fs.quota import AHEAD_SHARE

CHUNK_BYTES = 4096
FILE_BYTES = CHUNK_BYTES + 4096
_BATCH = 32
_ROUNDS = 8
_LOCKS = 2000
_PATIENCE_S = 600.0
"""A first count of a million files takes its time."""


def keys(serial: Iterator[int], count: int) -> tuple[BlockKey, ...]:
    """Keys that nobody has seen."""
    return tuple(make_key(hashlib.sha256(b"%d" % next(serial)).digest(), 0) for _ in range(count))


def fill(space: Namespace, files: int) -> None:
    """Files of other names than any that are stored, each used a little after the one before."""
    serial = itertools.count(1 << 40)
    for key in keys(serial, files):
        path = space.path(key)
        space.make_parents(path)
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, FILE_BYTES)
        os.close(fd)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def space_of(root: Path) -> Namespace:
    """The namespace that a tier on `root` makes."""
    with open_fs(root, region=filled_region(_BATCH, CHUNK_BYTES)) as rig:
        base = rig.tier.path(keys(itertools.count(), 1)[0]).rsplit("/", 3)[0]
    return Namespace.found(base, 0o600)


def store(rig: FsRig, serial: Iterator[int], chunks: int) -> None:
    """Store fresh chunks, a batch at a time, and believe it only where all went through."""
    rig.patience_s = _PATIENCE_S
    for _ in range(chunks // _BATCH):
        done = rig.store(keys(serial, _BATCH), range(_BATCH))
        if done.failed:
            raise RuntimeError(f"a store failed: {done.failed[0][1]}")


def measure_start(
    root: Path, quota_bytes: int, serial: Iterator[int], rounds: int
) -> dict[str, Spread]:
    """From opening a tier to the end of its first store, without a ledger and with one."""
    counted, known, grown = [], [], []
    region = filled_region(_BATCH, CHUNK_BYTES)

    def start() -> None:
        with open_fs(
            root,
            region=region,
            max_bytes=quota_bytes,
            context={"transfer_timeout_s": _PATIENCE_S},
        ) as rig:
            store(rig, serial, _BATCH)

    for _ in range(rounds):
        for ledger in root.glob("*/.ledger*"):
            ledger.unlink()
        before_bytes = resident_bytes()
        counted.append(measure(start).wall_s)
        grown.append(max(0, resident_bytes() - before_bytes) / MIB)
        known.append(measure(start).wall_s)
    return {
        "counted_s": Spread.of(counted),
        "known_s": Spread.of(known),
        "grown_mib": Spread.of(grown),
    }


def measure_files(directory: Path, files: int, rounds: int, chunks: int) -> list[Row]:
    """All figures for so many files under the quota."""
    full, empty = directory / "quota", directory / "none"
    serial = itertools.count()
    fill(space_of(full), files)
    rows = [
        Row(
            case={"what": "start", "files": files},
            figures=measure_start(full, 1 << 60, serial, 1 if files > 200_000 else 2),
        )
    ]
    standing = sum(1 for _ in full.glob("*/*/*/*.bin"))
    ahead = int(standing * AHEAD_SHARE)
    room = (rounds + 1) * chunks
    region = filled_region(_BATCH, CHUNK_BYTES)
    long = {"transfer_timeout_s": _PATIENCE_S}
    with ExitStack() as stack:
        kept = stack.enter_context(
            open_fs(full, region=region, max_bytes=(standing + room) * FILE_BYTES, context=long)
        )
        free = stack.enter_context(open_fs(empty, region=region, context=long))

        def work(rig: FsRig) -> Cost:
            return measure(lambda: store(rig, serial, chunks))

        for phase in ("before", "during"):
            if phase == "during":
                store(kept, serial, _BATCH * (1 + ahead // _BATCH))  # what is made ahead is used up
            costs = alternate({"quota": lambda: work(kept), "none": lambda: work(free)}, rounds)
            wall = {
                name: [cost.wall_s / chunks * 1e6 for cost in each] for name, each in costs.items()
            }
            cpu = [cost.cpu_s / chunks * 1e6 for cost in costs["quota"]]
            rows.append(
                Row(
                    case={"what": phase, "files": files},
                    figures={
                        "quota_us": Spread.of(wall["quota"]),
                        "none_us": Spread.of(wall["none"]),
                        "ratio": Spread.of(ratios(wall["quota"], wall["none"])),
                        "quota_cpu_us": Spread.of(cpu),
                    },
                )
            )
    evicted = standing + (2 * rounds + 2) * chunks - sum(1 for _ in full.glob("*/*/*/*.bin"))
    if evicted <= 0:
        raise RuntimeError("nothing was evicted")
    return rows


def measure_lock(directory: Path, rounds: int) -> Row:
    """A shared lock per file, next to opening and closing it."""
    paths = [directory / f"lock{number}" for number in range(_LOCKS)]
    for path in paths:
        path.touch()
    opened: list[int] = []

    def opening() -> None:
        opened.extend(os.open(path, os.O_RDONLY) for path in paths)

    def locking() -> None:
        for fd in opened:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    took: dict[str, list[float]] = {"open_us": [], "lock_us": []}
    for _ in range(rounds):
        took["open_us"].append(measure(opening).wall_s / _LOCKS * 1e6)
        took["lock_us"].append(measure(locking).wall_s / _LOCKS * 1e6)
        while opened:
            os.close(opened.pop())
    return Row(
        case={"what": "shared lock", "files": _LOCKS},
        figures={name: Spread.of(values) for name, values in took.items()},
    )


def main(argv: list[str]) -> None:
    options_parser: argparse.ArgumentParser = parser(__doc__)
    options_parser.add_argument("--files", type=int, default=1_000_000, help="under the quota")
    options_parser.add_argument("--dir", type=Path, help="where the files go; a temporary one")
    options = options_parser.parse_args(argv)
    files = 2_000 if options.smoke else options.files
    rounds = options.rounds or (2 if options.smoke else _ROUNDS)
    directory = Path(tempfile.mkdtemp(prefix="eviction-", dir=options.dir))
    run = started("eviction", options, argv)
    try:
        for count in sorted({max(1000, files // 10), files}):
            part = directory / str(count)
            part.mkdir()
            chunks = _BATCH * (2 if options.smoke else 32)
            for row in measure_files(part, count, rounds, chunks):
                run.add(row)
        run.add(measure_lock(directory, rounds))
        run.finish(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
