"""Time to first token with a real `vllm serve`: what a hit saves, and what offloading costs without one.

Hits: a prompt of 2,401 tokens is computed (cold); the device's cache is reset and it is asked again (host
hit); when other prompts have pushed it out of the small host pool it is asked once more (disk hit, O_DIRECT).
Each answer counts only if vLLM's own metrics say that 2,400 of its tokens came from there.

Cost: three servers are up at once and take turns with prompts that nobody has seen: without offloading,
with a host pool, and with a host pool and an fs tier. A server that waits for its turn is idle.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from common import (
    MIB,
    Budget,
    Cost,
    Row,
    Run,
    Spread,
    alternate,
    group_cpu_seconds,
    measure,
    parser,
    ratios,
    started,
)

from pdoffload.testing.openai_api import ApiClient
from pdoffload.testing.serving import ServeOptions, VllmServer

DEFAULT_MODEL = Path(".cache/models/smollm2-135m-instruct")
BLOCK_TOKENS = 32
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, head size, bfloat16
POOL_PROMPTS = 3
_COST_BUDGET = 1.03
_VOCABULARY = (1000, 40_000)


class Sizes(msgspec.Struct, frozen=True):
    """What is asked. `prompt_tokens` is a multiple of a block plus the one that is always computed."""

    prompt_tokens: int
    hit_rounds: int
    cost_rounds: int
    batch: int
    batch_prompt_tokens: int
    batch_answer_tokens: int

    @property
    def restorable_tokens(self) -> int:
        return self.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def pool_bytes(self) -> int:
        return int(POOL_PROMPTS * self.prompt_tokens * KV_BYTES_PER_TOKEN)


FULL = Sizes(2_401, 9, 9, 8, 640, 32)
SMOKE = Sizes(321, POOL_PROMPTS + 1, 1, 2, 64, 4)


def offloading(pool_bytes: int, root_dir: Path | None) -> dict[str, Any]:
    """A kv-transfer-config as an operator writes it; with `root_dir`, an fs tier behind the pool."""
    settings: dict[str, Any] = {"cpu_bytes_to_use": pool_bytes}
    if root_dir is not None:
        settings["spec_name"] = "NixlTieringOffloadingSpec"
        settings["secondary_tiers"] = [{"type": "fs", "root_dir": str(root_dir)}]
    return {
        "kv_connector": "PdOffloadConnector",
        "kv_connector_module_path": "pdoffload.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def prompts(seed: int, tokens: int) -> Iterator[list[int]]:
    """Prompts that share no block."""
    source = random.Random(seed)
    while True:
        yield [source.randrange(*_VOCABULARY) for _ in range(tokens)]


def first_token_s(server: VllmServer, prompt: Sequence[int]) -> float:
    return server.complete(prompt, max_tokens=2, ignore_eos=True).ttft_s


def checked_hit_s(server: VllmServer, prompt: Sequence[int], source: str, tokens: int) -> float:
    """TTFT of a prompt that must come back from `source`; nothing else counts as a hit."""
    server.reset_prefix_cache()
    before = server.metrics()
    ttft_s = first_token_s(server, prompt)
    found = server.metrics().since(before).cached_tokens_by_source()
    if found != {source: tokens}:
        raise AssertionError(f"wanted {tokens} tokens from {source}, vLLM counted {found}")
    return ttft_s


def measure_hits(server: VllmServer, sizes: Sizes) -> list[Row]:
    """Cold, host and disk TTFT of the same prompts."""
    source = prompts(11, sizes.prompt_tokens)
    tokens = sizes.restorable_tokens
    warm = next(source)
    first_token_s(server, warm)
    checked_hit_s(server, warm, "host", tokens)
    asked = [next(source) for _ in range(sizes.hit_rounds)]
    cold_s, host_s = [], []
    for prompt in asked:
        cold_s.append(first_token_s(server, prompt))
        host_s.append(checked_hit_s(server, prompt, "host", tokens))
    read_bytes = server.physical_read_bytes()
    # In the order they were stored: when a prompt's turn comes, the pool holds later ones.
    disk_s = [checked_hit_s(server, prompt, "disk", tokens) for prompt in asked]
    read_bytes = server.physical_read_bytes() - read_bytes
    rows = []
    for name, hit_s, share in (("host", host_s, 10), ("disk", disk_s, 8)):
        figures = {
            "cold_s": Spread.of(cold_s),
            "hit_s": Spread.of(hit_s),
            "hit_over_cold": Spread.of(ratios(hit_s, cold_s)),
        }
        if name == "disk":
            figures["read_MiB_per_hit"] = Spread.of([read_bytes / MIB / len(asked)])
        budget = Budget("hit_over_cold", 1 / share, False)
        case: dict[str, str | int] = {"what": f"{name} hit", "prompt_tokens": sizes.prompt_tokens}
        rows.append(Row(case=case, figures=figures, budgets=[budget]))
    return rows


def measure_cold(servers: dict[str, VllmServer], sizes: Sizes) -> Row:
    """TTFT of prompts that nobody has seen, one at a time, the same on every server."""
    queues = {name: prompts(12, sizes.prompt_tokens) for name in servers}
    for server in servers.values():
        first_token_s(server, next(prompts(13, sizes.prompt_tokens)))

    def ask(name: str) -> Cost:
        return Cost(first_token_s(servers[name], next(queues[name])), 0.0)

    costs = alternate({name: partial(ask, name) for name in servers}, sizes.cost_rounds)
    return _cost_row("cold TTFT", {name: [c.wall_s for c in each] for name, each in costs.items()})


def measure_throughput(servers: dict[str, VllmServer], sizes: Sizes) -> Row:
    """Batches of distinct prompts asked at once: seconds until the last answer of the batch."""
    queues = {name: prompts(14, sizes.batch_prompt_tokens) for name in servers}

    def batch(name: str) -> Cost:
        server, asked = servers[name], [next(queues[name]) for _ in range(sizes.batch)]
        cpu_s = group_cpu_seconds(server.pid or 0)

        def one(prompt: list[int]) -> None:
            # A client is for one thread; the server does not mind how many it has.
            client = ApiClient(f"http://127.0.0.1:{server.port}")
            try:
                client.complete(prompt, max_tokens=sizes.batch_answer_tokens, ignore_eos=True)
            finally:
                client.close()

        with ThreadPoolExecutor(sizes.batch) as clients:
            cost = measure(lambda: list(clients.map(one, asked)))
        return Cost(cost.wall_s, group_cpu_seconds(server.pid or 0) - cpu_s)

    costs = alternate({name: partial(batch, name) for name in servers}, sizes.cost_rounds)
    row = _cost_row("batch", {name: [c.wall_s for c in each] for name, each in costs.items()})
    cpu = {f"{name}_cpu_s": Spread.of([c.cpu_s for c in each]) for name, each in costs.items()}
    return msgspec.structs.replace(row, figures={**row.figures, **cpu})


def _cost_row(what: str, wall_s: dict[str, list[float]]) -> Row:
    figures = {f"{name}_s": Spread.of(each) for name, each in wall_s.items()}
    names = [name for name in wall_s if name != "off"]
    for name in names:
        figures[f"{name}_over_off"] = Spread.of(ratios(wall_s[name], wall_s["off"]))
    return Row(
        case={"what": what},
        figures=figures,
        budgets=[Budget(f"{name}_over_off", _COST_BUDGET, False) for name in names],
    )


def measure_idle(servers: dict[str, VllmServer], run: Run, seconds: float) -> None:
    """Say what servers that wait for their turn burn: it is taken from the one that works."""
    time.sleep(seconds)  # vLLM's own worker spins for a moment after its last request
    before = {name: group_cpu_seconds(server.pid or 0) for name, server in servers.items()}
    slept = measure(lambda: time.sleep(seconds))
    for name, server in servers.items():
        share = (group_cpu_seconds(server.pid or 0) - before[name]) / slept.wall_s
        run.remarks.append(f"Idle server {name}: {share:.3f} of a core.")


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="from scripts/make_model.py"
    )
    made.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk to test")
    options = made.parse_args()
    run = started("ttft", options, sys.argv[1:])
    sizes = SMOKE if options.smoke else FULL
    if options.rounds:
        sizes = msgspec.structs.replace(
            sizes,
            hit_rounds=max(options.rounds, POOL_PROMPTS + 1),
            cost_rounds=options.rounds,
        )
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))

        def serve(name: str, config: dict[str, Any] | None) -> VllmServer:
            wanted = ServeOptions(model_dir=options.model, kv_transfer_config=config)
            return stack.enter_context(VllmServer(wanted, scratch, name=name))

        servers = {
            "off": serve("off", None),
            "host": serve("host", offloading(sizes.pool_bytes, None)),
            "tiers": serve("tiers", offloading(sizes.pool_bytes, scratch / "chunks")),
        }
        for row in measure_hits(servers["tiers"], sizes):
            run.add(row)
        run.add(measure_cold(servers, sizes))
        run.add(measure_throughput(servers, sizes))
        measure_idle(servers, run, 0.5 if options.smoke else 10.0)
        run.finish(scratch)


if __name__ == "__main__":
    main()
