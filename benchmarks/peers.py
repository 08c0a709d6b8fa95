"""Chunks from a peer: our p2p tier against vLLM's own, and against what NIXL can do by itself.

Both sides run in processes of their own, built from the same settings and stepped by the same code, as
vLLM's scheduler steps them (`peer_engine.py`); between steps the engine does nothing, sleeps 100 ms as
if it waited for a device, or runs Python for 100 ms. New chunks are stored at the producer, looked up and
pulled by the consumer, and compared byte by byte outside the measurement. A pull counts from the first
lookup to the lookup that finds the last chunk. While one side is measured, the other's processes are stopped:
vLLM's tier uses a core or more per process by being there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
from bare_write import BareWrite
from common import GB, MIB, Budget, Cost, Row, Run, Spread, alternate, parser, ratios, started
from peer_pair import Mode, Pair, PullCost
from peer_process import Forward, Peer, Request, Who, from_source, keys_of

CHUNK_BYTES = 2 * MIB
STEP_S = 0.1
LOOKUP_CHUNKS = 16
IDLE_BUDGET_CORES = 0.01
BARE_BUDGET = 0.9
BUSY_PRODUCER_BUDGET, BUSY_BOTH_BUDGET, IDLE_BUDGET = 0.2, 0.6, 1.0
SIDES = {"ours": Who.OURS, "stock": Who.STOCK}
_SMALL_CHUNK_BYTES = 4096

MODES = (
    (Mode("producer sleeps", Forward.SLEEP, Forward.IDLE), BUSY_PRODUCER_BUDGET),
    (Mode("producer computes", Forward.SPIN, Forward.IDLE), BUSY_PRODUCER_BUDGET),
    (Mode("both sleep", Forward.SLEEP, Forward.SLEEP), BUSY_BOTH_BUDGET),
    (Mode("both compute", Forward.SPIN, Forward.SPIN), BUSY_BOTH_BUDGET),
    (Mode("both idle", Forward.IDLE, Forward.IDLE), IDLE_BUDGET),
)


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything."""

    rounds: int
    warm_up: int = 2
    pull_bytes: int = 64 * MIB
    step_s: float = STEP_S
    idle_watch_s: float = 3.0
    num_peers: int = 8
    pulls_per_peer: int = 8
    chunks_per_pull: int = 4
    pools: tuple[int, ...] = (1_000, 100_000, 1_000_000)


def measure_pull(run: Run, sizes: Sizes, environment: dict[str, str]) -> None:
    """Both sides as a decoder pulls from its prefiller, and bare NIXL, over one transport."""
    num_chunks = sizes.pull_bytes // CHUNK_BYTES
    pulls: dict[str, list[PullCost]] = {name: [] for name in SIDES}
    with ExitStack() as stack:
        pairs = {
            name: stack.enter_context(
                Pair(
                    who,
                    chunk_bytes=CHUNK_BYTES,
                    num_slots=4 * num_chunks,
                    environment=environment,
                )
            )
            for name, who in SIDES.items()
        }
        bare = stack.enter_context(
            BareWrite(chunk_bytes=CHUNK_BYTES, num_chunks=num_chunks, environment=environment)
        )

        def pull(name: str) -> Cost:
            pulls[name].append(pairs[name].pull(num_chunks, asks=False))
            return pulls[name][-1].cost

        contenders: dict[str, Callable[[], Cost]] = {
            name: lambda name=name: pull(name) for name in SIDES
        }
        costs = alternate({**contenders, "bare": bare.write}, sizes.rounds, warm_up=sizes.warm_up)
        _remark_warnings(run, pairs)
    size_gb = num_chunks * CHUNK_BYTES / GB
    wall_s = {name: [cost.wall_s for cost in each] for name, each in costs.items()}
    figures = {f"{name}_GBps": Spread.of([size_gb / s for s in wall_s[name]]) for name in wall_s}
    figures["ratio_to_bare"] = Spread.of(ratios(wall_s["bare"], wall_s["ours"]))
    figures["stock_ratio_to_bare"] = Spread.of(ratios(wall_s["bare"], wall_s["stock"]))
    for name, each in pulls.items():
        counted = each[-sizes.rounds :]
        figures[f"{name}_producer_cpu_s_per_GB"] = Spread.of(
            [pull.producer_cpu_s / size_gb for pull in counted]
        )
        figures[f"{name}_consumer_cpu_s_per_GB"] = Spread.of(
            [pull.consumer_cpu_s / size_gb for pull in counted]
        )
    figures["bare_cpu_s_per_GB"] = Spread.of([cost.cpu_s / size_gb for cost in costs["bare"]])
    transport = environment.get("UCX_TLS") or os.environ.get("UCX_TLS", "UCX's choice")
    run.add(
        Row(
            case={"what": f"pull of {sizes.pull_bytes // MIB} MiB", "transport": transport},
            figures=figures,
            budgets=[Budget("ratio_to_bare", BARE_BUDGET, True)],
        )
    )


def measure_lookups(run: Run, sizes: Sizes) -> None:
    """Lookup and fetch of 16 chunks in every mode, and what both sides use when nobody asks."""
    with ExitStack() as stack:
        pairs = {
            name: stack.enter_context(
                Pair(
                    who,
                    chunk_bytes=CHUNK_BYTES,
                    num_slots=4 * LOOKUP_CHUNKS,
                    environment=None,
                )
            )
            for name, who in SIDES.items()
        }
        for mode, limit in MODES:
            for pair in pairs.values():
                pair.set_mode(mode, sizes.step_s)
            costs = alternate(
                {
                    name: lambda pair=pair: pair.pull(LOOKUP_CHUNKS, asks=True).cost
                    for name, pair in pairs.items()
                },
                sizes.rounds,
                warm_up=sizes.warm_up,
            )
            run.add(_lookup_row(mode, limit, costs))
        # The last mode was idle.
        cores = alternate(
            {
                name: lambda pair=pair: Cost(0.0, pair.idle_cores(sizes.idle_watch_s))
                for name, pair in pairs.items()
            },
            min(sizes.rounds, 3),
            warm_up=0,
        )
        _remark_warnings(run, pairs)
    run.add(
        Row(
            case={"what": "idle, connected"},
            figures={
                f"{name}_cores": Spread.of([cost.cpu_s for cost in each])
                for name, each in cores.items()
            },
            budgets=[Budget("ours_cores", IDLE_BUDGET_CORES, False)],
        )
    )


def _lookup_row(mode: Mode, limit: float, costs: dict[str, list[Cost]]) -> Row:
    wall_ms = {name: [1e3 * cost.wall_s for cost in each] for name, each in costs.items()}
    figures = {f"{name}_ms": Spread.of(each) for name, each in wall_ms.items()}
    figures |= {f"{name}_p99_ms": Spread.of([_p99(each)]) for name, each in wall_ms.items()}
    figures["ratio"] = Spread.of(ratios(wall_ms["ours"], wall_ms["stock"]))
    figures["p99_ratio"] = Spread.of([_p99(wall_ms["ours"]) / _p99(wall_ms["stock"])])
    return Row(
        case={"what": f"lookup + fetch of {LOOKUP_CHUNKS} x 2 MiB", "engines": mode.name},
        figures=figures,
        budgets=[Budget("ratio", limit, False), Budget("p99_ratio", limit, False)],
    )


def measure_crowd(run: Run, sizes: Sizes) -> None:
    """Many requests at once, from many peers, into one consumer; ours alone."""
    num_pulls = sizes.num_peers * sizes.pulls_per_peer
    chunks_per_peer = sizes.pulls_per_peer * sizes.chunks_per_pull
    size_gb = num_pulls * sizes.chunks_per_pull * CHUNK_BYTES / GB
    took_ms: list[float] = []
    gbps, cpu_s_per_gb = [], []
    with ExitStack() as stack:
        # A pool gives away a part of itself at a time: three times what is on its way is enough.
        consumer, *producers = (
            stack.enter_context(Peer(Who.OURS, chunk_bytes=CHUNK_BYTES, num_slots=3 * chunks))
            for chunks in (sizes.num_peers * chunks_per_peer, *[chunks_per_peer] * sizes.num_peers)
        )
        peers = (consumer, *producers)
        for number in range(-1, sizes.rounds):
            names = {
                f"{number} {producer.options.port} {pull}": producer
                for producer in producers
                for pull in range(sizes.pulls_per_peer)
            }
            stored = {
                name: producer.fill(
                    Request(f"store {name}", keys_of(name, sizes.chunks_per_pull)), seed
                )
                for seed, (name, producer) in enumerate(names.items())
            }
            requests = [
                Request(name, keys_of(name, sizes.chunks_per_pull), from_source(producer, name))
                for name, producer in names.items()
            ]
            cpu_s = sum(peer.cpu_s() for peer in peers)
            pulled = consumer.pull(*requests)
            cpu_s = sum(peer.cpu_s() for peer in peers) - cpu_s
            for request, each in zip(requests, pulled, strict=True):
                assert each.num_loaded == len(request.keys), each
                assert consumer.read(request.keys) == stored[request.request_id]
            if number >= 0:
                took_ms += [1e3 * each.took_s for each in pulled]
                gbps.append(size_gb / max(each.took_s for each in pulled))
                cpu_s_per_gb.append(cpu_s / size_gb)
        run.remarks += [line for peer in peers for line in peer.look().warnings]
    run.add(
        Row(
            case={
                "what": f"{num_pulls} pulls at once from {sizes.num_peers} peers",
                "chunks": sizes.chunks_per_pull,
            },
            figures={
                "ours_GBps": Spread.of(gbps),
                "ours_ms": Spread.of(took_ms),
                "ours_p99_ms": Spread.of([_p99(took_ms)]),
                "ours_cpu_s_per_GB": Spread.of(cpu_s_per_gb),
            },
        )
    )


def measure_start(run: Run, sizes: Sizes) -> None:
    """Pools of many small chunks: what the tier adds to the start, and what first contact stalls."""
    for num_slots in sizes.pools:
        figures: dict[str, Spread] = {}
        for name, who in SIDES.items():
            shape = {"chunk_bytes": _SMALL_CHUNK_BYTES, "num_slots": num_slots}
            with Peer(who, **shape, with_tier=False) as without:
                bare_s = without.start_s
            with Peer(who, **shape) as producer, Peer(who, **shape) as consumer:
                figures[f"{name}_tier_start_s"] = Spread.of([producer.start_s - bare_s])
                keys = keys_of("first", 1)
                stored = producer.fill(Request("store", keys), seed=1)
                consumer.look(), producer.look()
                (pulled,) = consumer.pull(Request("first", keys, from_source(producer, "first")))
                assert pulled.num_loaded == 1, pulled
                assert consumer.read(keys) == stored
                figures[f"{name}_first_pull_ms"] = Spread.of([1e3 * pulled.took_s])
                longest_s = max(consumer.look().longest_step_s, producer.look().longest_step_s)
                figures[f"{name}_longest_step_ms"] = Spread.of([1e3 * longest_s])
        run.add(Row(case={"what": "start and first contact", "slots": num_slots}, figures=figures))


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _remark_warnings(run: Run, pairs: dict[str, Pair]) -> None:
    """What the sides complained of belongs to the reader."""
    for name, pair in pairs.items():
        run.remarks += [f"{name}: {line}" for line in dict.fromkeys(pair.warnings())]


PARTS = ("pull", "lookup", "crowd", "start")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", choices=PARTS, action="append", help="these parts; default: all")
    options = made.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    run = started("peers", options, sys.argv[1:])
    sizes = Sizes(rounds=options.rounds or 40)
    if options.smoke:
        sizes = Sizes(
            rounds=options.rounds or 2,
            warm_up=0,
            pull_bytes=8 * MIB,
            step_s=0.02,
            idle_watch_s=0.2,
            num_peers=2,
            pulls_per_peer=2,
            chunks_per_pull=2,
            pools=(1_000,),
        )
    parts = options.only or PARTS
    if "pull" in parts:
        for environment in ({}, {"UCX_TLS": "tcp"}):
            measure_pull(run, sizes, environment)
    if "lookup" in parts:
        measure_lookups(run, sizes)
    if "crowd" in parts:
        measure_crowd(run, sizes)
    if "start" in parts:
        measure_start(run, sizes)
    run.finish(Path(tempfile.gettempdir()))


if __name__ == "__main__":
    main()
