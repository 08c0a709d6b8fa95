"""Part `direct` of `backends.py`: device memory straight to files, against the way over host memory.

Two real servers of one model are up at once and take turns with the same prompts: one with
`NixlDirectOffloadingSpec`, one with `NixlTieringOffloadingSpec` and a host pool that holds three prompts. A
prompt is computed (cold, while its chunks go out), pushed out of the device and of the pool, and asked again:
an answer counts only if vLLM's own metrics say that its tokens came from disk. CPU seconds are those of all
processes of a server, from the question until no file has been added for half a second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from common import Cost, Row, Run, Spread, alternate, group_cpu_seconds, ratios
from ttft import (
    FULL,
    POOL_PROMPTS,
    SMOKE,
    Sizes,
    checked_hit_s,
    first_token_s,
    offloading,
    prompts,
)

import pdoffload.config
from pdoffload.testing.serving import ServeOptions, VllmServer

_SPEC = "NixlDirectOffloadingSpec"
_STORE_DEADLINE_S = 60.0
_QUIET_S = 0.5
_LOOK_S = 0.05
_Ask = Callable[[VllmServer, Sequence[int]], float]


def missing() -> str:
    """Why it cannot be measured; nothing if it can."""
    return "" if _SPEC in pdoffload.config.SPECS else f"this version has no {_SPEC}"


def measure(run: Run, model: Path, scratch: Path, *, rounds: int, smoke: bool) -> None:
    """Cold prompts and what becomes of their chunks, then hits from disk, of as many prompts."""
    sizes = SMOKE if smoke else FULL
    roots = {name: scratch / f"{name}-chunks" for name in ("staged", "direct")}
    for root in roots.values():
        root.mkdir()
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                VllmServer(
                    ServeOptions(model_dir=model, kv_transfer_config=config), scratch, name=name
                )
            )
            for name, config in _configs(sizes, roots).items()
        }
        # The pool holds three prompts: by the time one is asked again, later ones are in it.
        count = max(rounds, POOL_PROMPTS + 1)
        asked = list(itertools.islice(prompts(21, sizes.prompt_tokens), count))
        for server in servers.values():
            first_token_s(server, next(prompts(22, sizes.prompt_tokens)))
        cold = _in_turns(servers, asked, first_token_s, roots)
        run.add(_row("cold, stored", sizes, cold))
        hit = _in_turns(servers, asked, partial(_hit_s, tokens=sizes.restorable_tokens), roots)
        run.add(_row("disk hit", sizes, hit))


def _configs(sizes: Sizes, roots: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """kv-transfer-configs as an operator writes them: the same fs tier, with and without a pool."""
    staged = offloading(sizes.pool_bytes, roots["staged"])
    direct = offloading(sizes.pool_bytes, roots["direct"])
    settings = direct["kv_connector_extra_config"]
    settings["spec_name"] = _SPEC
    del settings["cpu_bytes_to_use"]
    return {"staged": staged, "direct": direct}


def _hit_s(server: VllmServer, prompt: Sequence[int], *, tokens: int) -> float:
    return checked_hit_s(server, prompt, "disk", tokens)


def _in_turns(
    servers: dict[str, VllmServer],
    asked: Sequence[Sequence[int]],
    ask: _Ask,
    roots: dict[str, Path],
) -> dict[str, list[Cost]]:
    """Every prompt on every server. Wall seconds to the first token; CPU until its chunks are out."""
    queues = {name: iter(asked) for name in servers}

    def one(name: str) -> Cost:
        server = servers[name]
        cpu_s = group_cpu_seconds(server.pid or 0)
        ttft_s = ask(server, next(queues[name]))
        _wait_until_stored(roots[name])
        return Cost(ttft_s, group_cpu_seconds(server.pid or 0) - cpu_s)

    return alternate({name: partial(one, name) for name in servers}, len(asked), warm_up=0)


def _wait_until_stored(root: Path) -> None:
    """Until no file has been added for a while: chunks go out after the answer."""
    deadline_s = time.monotonic() + _STORE_DEADLINE_S
    count, since_s = -1, time.monotonic()
    while time.monotonic() < since_s + _QUIET_S:
        found = sum(1 for _ in root.rglob("*.bin"))
        if found != count:
            count, since_s = found, time.monotonic()
        assert time.monotonic() < deadline_s, "chunks are still written after a minute"
        time.sleep(_LOOK_S)


def _row(what: str, sizes: Sizes, costs: dict[str, list[Cost]]) -> Row:
    wall_s = {name: [cost.wall_s for cost in each] for name, each in costs.items()}
    cpu_s = {name: [cost.cpu_s for cost in each] for name, each in costs.items()}
    figures = {f"{name}_ttft_s": Spread.of(each) for name, each in wall_s.items()}
    figures |= {f"{name}_cpu_s": Spread.of(each) for name, each in cpu_s.items()}
    figures["ttft_ratio"] = Spread.of(ratios(wall_s["direct"], wall_s["staged"]))
    figures["cpu_ratio"] = Spread.of(ratios(cpu_s["direct"], cpu_s["staged"]))
    return Row(
        case={"part": "direct", "what": what, "prompt_tokens": sizes.prompt_tokens},
        figures=figures,
    )
