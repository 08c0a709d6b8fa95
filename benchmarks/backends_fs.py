"""Part `fs` of `backends.py`: our fs tier by every queue and plugin, against vLLM's own fs tier, and fio.

`fs_tier.py` has the comparison of the two tiers at many sizes, with its budgets; this is the same work, of
more contenders at once.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from common import KIB, Row, Run, alternate
from fs_tier import Fio
from tier_figures import figures_of
from tier_sides import Contender, Pool, Window, Work, our_fs, stock_fs
from vllm_sides import offloading_config


def _nothing() -> str:
    return ""


def _no_gds_mt() -> str:
    plugins = importlib.import_module("pdoffload.agent.plugins")
    if not hasattr(plugins, "usability"):
        return "this version does not use it for files"
    found = plugins.usability("GDS_MT")
    return "" if found.usable else str(found.why)


class Mode(msgspec.Struct, frozen=True):
    """A way for our tier's bytes. The table below is all that has to grow."""

    settings: Mapping[str, Any]
    """Of the tier's table."""
    missing: Callable[[], str] = _nothing
    """Why it cannot be measured here; nothing if it can."""


GDS_MT = "GDS_MT (test library)" if os.environ.get("CUFILE_FOR_TESTS") else "GDS_MT"
"""Its own code either way; over the library for tests it moves host memory by pread and pwrite."""
MODES: dict[str, Mode] = {
    "POSIX uring": Mode({"backend": "POSIX", "io": "uring"}),
    "POSIX aio": Mode({"backend": "POSIX", "io": "aio"}),
    GDS_MT: Mode({"backend": "GDS_MT"}, _no_gds_mt),
}


def measure(run: Run, directory: Path, *, chunk_bytes: int, total_bytes: int, rounds: int) -> None:
    """All of them take turns: stores first, then loads. One row for each and direction."""
    directory.mkdir()
    pool = Pool(chunk_bytes, total_bytes // chunk_bytes)
    here = {name: mode for name, mode in MODES.items() if not mode.missing()}
    run.remarks += [f"{name}: {mode.missing()}" for name, mode in MODES.items() if name not in here]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        contenders = {}
        for number, (name, mode) in enumerate(here.items()):
            side = our_fs(pool, directory / f"ours{number}", **mode.settings)
            contenders[name] = Contender(name, side, pool, Window())
            stack.callback(contenders[name].close)
        stock = stock_fs(pool, directory / "vllm", offloading_config(chunk_bytes))
        contenders["vLLM"] = Contender("vLLM", stock, pool, Window())
        stack.callback(contenders["vLLM"].close)
        stores: dict[str, Work] = {name: each.store for name, each in contenders.items()}
        loads: dict[str, Work] = {name: each.load for name, each in contenders.items()}
        program = shutil.which("fio")
        if program is not None:
            (directory / "fio").mkdir()
            fio = Fio(program, chunk_bytes, pool.num_chunks, directory / "fio")
            stores["fio"], loads["fio"] = fio.store, fio.load
        for direction, works in (("store", stores), ("load", loads)):
            costs = alternate(works, rounds)
            against = {"vllm": "vLLM", "fio": "fio"}
            yardsticks = {name: other for name, other in against.items() if other in costs}
            figures = figures_of(costs, pool.total_bytes, dict.fromkeys(costs, yardsticks))
            for who, each in figures.items():
                case: dict[str, str | int] = {
                    "part": "fs",
                    "who": who,
                    "direction": direction,
                    "chunk_KiB": chunk_bytes // KIB,
                    "chunks": pool.num_chunks,
                }
                run.add(Row(case=case, figures=each))
