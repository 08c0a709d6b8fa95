"""Part `obj` of `backends.py`: our obj tier against vLLM's own, on one S3 server, chunks of 2 MiB.

Jobs of one chunk each, a given number of them under way; both tiers have as many I/O threads as that. Ours
stores a trailer with a checksum and compares it; vLLM's has none. The server is moto's, one Python process
that keeps objects in memory: it is what both wait for most of the time, on the same machine, so the figures
compare what the tiers themselves take, and say nothing about a store.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from common import MIB, Row, Run, alternate
from tier_figures import figures_of
from tier_sides import Contender, OurSide, Pool, StockSide, Window, Work
from vllm_sides import bare_spec, offloading_config

CHUNK_BYTES = 2 * MIB
_BUCKET = "benchmarks"


def missing() -> str:
    """Why it cannot be measured; nothing if it can."""
    if importlib.util.find_spec("pdoffload.tiers.obj") is None:
        return "this version has no obj tier"
    if importlib.util.find_spec("moto") is None:
        return "moto is not installed: make setup"
    return ""


def measure(
    run: Run, scratch: Path, *, num_chunks: int, in_flight: tuple[int, ...], rounds: int
) -> None:
    """Stores, then loads, for each number in flight; one row for each, tier and direction."""
    from pdoffload.testing.s3_server import S3Server

    with S3Server(scratch) as server:
        server.create_bucket(_BUCKET)
        for count in in_flight:
            _measure(run, server, in_flight=count, num_chunks=max(num_chunks, count), rounds=rounds)


def _measure(run: Run, server: object, *, in_flight: int, num_chunks: int, rounds: int) -> None:
    pool = Pool(CHUNK_BYTES, num_chunks)
    window = Window(chunks_per_job=1, jobs_in_flight=in_flight)
    with ExitStack() as stack:
        sides = {
            "ours": _our_side(server, pool, in_flight),
            "vLLM": _stock_side(server, pool, in_flight),
        }
        contenders = {name: Contender(name, side, pool, window) for name, side in sides.items()}
        for each in contenders.values():
            stack.callback(each.close)
        stores: dict[str, Work] = {name: each.store for name, each in contenders.items()}
        loads: dict[str, Work] = {name: each.load for name, each in contenders.items()}
        for direction, works in (("store", stores), ("load", loads)):
            costs = alternate(works, rounds)
            yardsticks = {who: {"vllm": "vLLM"} for who in costs}
            for who, figures in figures_of(costs, pool.total_bytes, yardsticks).items():
                case: dict[str, str | int] = {
                    "part": "obj",
                    "who": who,
                    "direction": direction,
                    "in_flight": in_flight,
                    "chunks": num_chunks,
                }
                run.add(Row(case=case, figures=figures))


def _our_side(server: object, pool: Pool, threads: int) -> OurSide:
    from pdoffload.tiers.obj.tier import ObjTier

    settings = server.tier(_BUCKET, prefix=f"ours-{threads}", io_threads=threads)
    return OurSide(ObjTier(settings, pool.context()))


def _stock_side(server: object, pool: Pool, threads: int) -> StockSide:
    from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

    store = server.tier(_BUCKET).store_config
    # It asks NIXL how long each transfer took, and fails where its agent was made without telemetry.
    with patch.dict(os.environ, {"NIXL_TELEMETRY_ENABLE": "1"}):
        tier = ObjectStoreSecondaryTierManager(
            bare_spec(offloading_config(CHUNK_BYTES)),
            pool.rows.data,
            "obj",
            store_config={
                "bucket": _BUCKET,
                "endpoint_override": server.host,
                "access_key": store.access_key,
                "secret_key": store.secret_key,
                "region": "us-east-1",
            },
            prefix=f"vllm-{threads}",
            io_threads=threads,
        )
    return StockSide(tier)
