"""What offloading costs the engine's scheduler thread: `NixlOffloadingManager` against vLLM's own
`TieringOffloadingManager`, driven by the same calls.

A step is what a busy engine does between two forward passes: 8 requests of 125 lookups each (124 hits in the
pool, then the miss that ends the prefix, which every tier is asked about), touch of the hits, prepare_store
and complete_store of 32 new chunks each (256 in all, which evict as many, because the pool is full), end of
step, statistics. `loads` are prepare_load and complete_load of the 992 hits, timed apart. Timed is the
scheduler's thread alone; what workers and tiers do in between is not.

Tier `keys` keeps keys in a dict and is done at once: the managers' own work. Tier `fs` is each side's real
one, on tmpfs, with its threads at work on the same interpreter.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common import Budget, Cost, Row, Spread, alternate, parser, ratios, started
from pool_start import measure_pool_start
from scheduler_sides import SIDES, Side
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from pdoffload.layout import make_key

NUM_REQUESTS = 8
LOOKUPS = 125
STORES = 32
P99_BUDGET_MS = 5.0
BYTES_PER_CHUNK_BUDGET = 400
_FILL_CHUNKS = 256
_IDLE_POLL_S = 0.001
_IDLE_DEADLINE_S = 60.0


def fresh_keys() -> Iterator[OffloadKey]:
    """Keys that nobody has seen, as long as vLLM's own."""
    for number in itertools.count():
        yield OffloadKey(make_key(hashlib.sha256(b"%d" % number).digest(), 0))


class Engine:
    """Drives one manager as vLLM's scheduler does, with a pool that is full from the start."""

    def __init__(self, side: Side, *, takes_notes: bool = True) -> None:
        self._side = side
        self._takes_notes = takes_notes
        self._manager = side.manager
        self._new_keys = fresh_keys()
        self._request_ids = itertools.count()
        self.loads_s: list[float] = []
        self._random = random.Random(3)
        # Resident keys: a list to draw from, and where in it each key stands.
        self._resident: list[OffloadKey] = []
        self._place: dict[OffloadKey, int] = {}

    def fill(self, num_chunks: int) -> None:
        """Store `num_chunks` chunks and let the tiers take them."""
        left = num_chunks
        while left:
            request = ReqContext(str(next(self._request_ids)))
            self._manager.on_new_request(request)
            count = min(_FILL_CHUNKS, left)
            left -= count
            self._store(request, [next(self._new_keys) for _ in range(count)])
            self._end_step([request])
            self.settle()

    def step(self) -> Cost:
        """One step; wall and CPU seconds of the scheduler's thread. Appends to `loads_s`."""
        watch, loads = _Watch(), _Watch()
        requests = [ReqContext(str(next(self._request_ids))) for _ in range(NUM_REQUESTS)]
        hits = self._random.sample(self._resident, NUM_REQUESTS * (LOOKUPS - 1))
        prefixes = [hits[at::NUM_REQUESTS] for at in range(NUM_REQUESTS)]
        misses = [next(self._new_keys) for _ in requests]
        stores = [[next(self._new_keys) for _ in range(STORES)] for _ in requests]
        for request, prefix, miss in zip(requests, prefixes, misses, strict=True):
            with watch:
                self._look_up(request, prefix, miss)
            with loads:
                self._manager.prepare_load(prefix, request)
                self._manager.complete_load(prefix, request)
        self.loads_s.append(loads.cost().wall_s)
        for request, keys in zip(requests, stores, strict=True):
            self._store(request, keys, watch)
        with watch:
            self._end_step(requests)
        self.settle()
        return watch.cost()

    def _look_up(self, request: ReqContext, prefix: list[OffloadKey], miss: OffloadKey) -> None:
        manager = self._manager
        manager.on_new_request(request)
        for key in prefix:
            if manager.lookup(key, request) is not LookupResult.HIT:
                raise AssertionError("a resident chunk was not found")
        if manager.lookup(miss, request) not in (LookupResult.MISS, LookupResult.RETRY):
            raise AssertionError("a chunk was found that nobody stored")
        manager.touch(prefix, request)

    def _store(
        self, request: ReqContext, keys: list[OffloadKey], watch: _Watch | None = None
    ) -> None:
        watch = watch or _Watch()
        with watch:
            prepared = self._manager.prepare_store(keys, request)
        assert prepared is not None
        assert len(prepared.keys_to_store) == len(keys)
        assert isinstance(prepared.store_spec, CPULoadStoreSpec)
        self._side.arrived(prepared.store_spec)
        with watch:
            self._manager.complete_store(keys, request)
        if self._takes_notes:
            self._note(keys, prepared.evicted_keys)

    def _note(self, stored: list[OffloadKey], evicted: list[OffloadKey]) -> None:
        for key in evicted:
            last, place = self._resident.pop(), self._place.pop(key)
            if last != key:
                self._resident[place], self._place[last] = last, place
        for key in stored:
            self._place[key] = len(self._resident)
            self._resident.append(key)

    def _end_step(self, requests: list[ReqContext]) -> None:
        manager = self._manager
        manager.on_schedule_end(ScheduleEndContext([each.req_id for each in requests], ()))
        for request in requests:
            manager.on_request_finished(request)
        list(manager.take_events())
        manager.get_stats()

    def settle(self) -> None:
        """Wait, untimed, until the tiers have taken what they were given."""
        deadline_s = time.monotonic() + _IDLE_DEADLINE_S
        self._manager.on_schedule_end(ScheduleEndContext((), ()))
        while not self._side.is_idle():
            assert time.monotonic() < deadline_s
            time.sleep(_IDLE_POLL_S)
            self._manager.on_schedule_end(ScheduleEndContext((), ()))


class _Watch:
    """Sums the wall time of the pieces it is held over, on the scheduler's thread."""

    def __init__(self) -> None:
        self._wall_s = self._cpu_s = 0.0
        self._started = (0.0, 0.0)

    def __enter__(self) -> None:
        self._started = (time.perf_counter(), time.thread_time())

    def __exit__(self, *_: object) -> None:
        self._wall_s += time.perf_counter() - self._started[0]
        self._cpu_s += time.thread_time() - self._started[1]

    def cost(self) -> Cost:
        return Cost(self._wall_s, self._cpu_s)


def measure_steps(num_chunks: int, tier: str, rounds: int, directory: Path) -> Row:
    """Steps of both sides in turns, each over its own full pool of `num_chunks`."""
    sides = {who: make(num_chunks, tier, directory / who) for who, make in SIDES.items()}
    engines = {who: Engine(side) for who, side in sides.items()}
    try:
        for engine in engines.values():
            engine.fill(num_chunks)
        gc.collect()
        gc.freeze()  # as vLLM does once an engine has started
        costs = alternate({who: engine.step for who, engine in engines.items()}, rounds, warm_up=5)
    finally:
        gc.unfreeze()
        for side in sides.values():
            side.close()
    wall_ms = {who: [1e3 * cost.wall_s for cost in each] for who, each in costs.items()}
    figures = {f"{who}_ms": Spread.of(each) for who, each in wall_ms.items()}
    figures |= {f"{who}_p99_ms": Spread.of([_p99(each)]) for who, each in wall_ms.items()}
    loads_ms = {who: [1e3 * s for s in each.loads_s[-rounds:]] for who, each in engines.items()}
    figures |= {f"{who}_loads_ms": Spread.of(each) for who, each in loads_ms.items()}
    cpu_ms = {who: [1e3 * cost.cpu_s for cost in each] for who, each in costs.items()}
    figures |= {f"{who}_cpu_ms": Spread.of(each) for who, each in cpu_ms.items()}
    figures |= {f"{who}_cpu_p99_ms": Spread.of([_p99(each)]) for who, each in cpu_ms.items()}
    figures["ratio"] = Spread.of(ratios(wall_ms["ours"], wall_ms["vllm"]))
    figures["cpu_ratio"] = Spread.of(ratios(cpu_ms["ours"], cpu_ms["vllm"]))
    figures["loads_ratio"] = Spread.of(ratios(loads_ms["ours"], loads_ms["vllm"]))
    figures["p99_ratio"] = Spread.of([_p99(wall_ms["ours"]) / _p99(wall_ms["vllm"])])
    return Row(
        case={"what": "step", "tier": tier, "resident": num_chunks, "steps": rounds},
        figures=figures,
        budgets=[
            Budget("ratio", 1.0, False),
            Budget("p99_ratio", 1.0, False),
            Budget("ours_p99_ms", P99_BUDGET_MS, False),
        ],
    )


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def memory_of(who: str, num_chunks: int, tier: str, directory: Path, traced: bool) -> float:
    """Growth in bytes per chunk from before the manager exists until its pool is full. In a child."""
    _warm_up(who, tier, directory / "warm")
    gc.collect()
    if traced:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0] if traced else _private_bytes()
    side = SIDES[who](num_chunks, tier, directory / "full")
    Engine(side, takes_notes=False).fill(num_chunks)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0] if traced else _private_bytes()
    side.close()
    return (after - before) / num_chunks


def _warm_up(who: str, tier: str, directory: Path) -> None:
    """Import, load plugins and fill allocators once, so that none of it counts as memory per chunk."""
    side = SIDES[who](_FILL_CHUNKS, tier, directory)
    Engine(side).fill(_FILL_CHUNKS)
    side.close()


def _private_bytes() -> int:
    """Anonymous resident memory of this process; the pool itself is shared memory and does not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell RssAnon")


def measure_memory(num_chunks: int, tier: str, directory: Path) -> Row:
    """Every figure from a process of its own, so that nothing is counted that another left behind."""
    figures = {}
    for who in SIDES:
        for kind, traced in (("python", True), ("private", False)):
            place = directory / f"{who}-{kind}"
            place.mkdir(parents=True)
            # Forked, so that the imports are paid once; nothing runs in this process yet.
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(1, mp_context=context) as child:
                bytes_per_chunk = child.submit(
                    memory_of, who, num_chunks, tier, place, traced
                ).result()
            shutil.rmtree(place, ignore_errors=True)
            figures[f"{who}_{kind}_bytes"] = Spread.of([bytes_per_chunk])
    return Row(
        case={"what": "memory per chunk", "tier": tier, "resident": num_chunks},
        figures=figures,
        budgets=[
            Budget("ours_python_bytes", BYTES_PER_CHUNK_BUDGET, False),
            Budget("ours_private_bytes", BYTES_PER_CHUNK_BUDGET, False),
        ],
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="tmpfs for the fs tiers")
    options = made.parse_args()
    run = started("scheduler", options, sys.argv[1:])
    residents: tuple[int, ...] = (1_000, 10_000, 100_000)
    rounds = options.rounds or 300
    if options.smoke:
        residents, rounds = (2_000,), options.rounds or 3
    for tier in ("none", "fs"):
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="scheduler-") as scratch:
            run.add(measure_memory(residents[-1], tier, Path(scratch)))
    for tier in ("keys", "fs"):
        for num_chunks in residents:
            with tempfile.TemporaryDirectory(dir=options.dir, prefix="scheduler-") as scratch:
                run.add(measure_steps(num_chunks, tier, rounds, Path(scratch)))
    run.add(measure_pool_start(smoke=options.smoke))
    run.finish(options.dir)


if __name__ == "__main__":
    main()
