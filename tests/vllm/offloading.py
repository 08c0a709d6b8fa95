"""Configurations and prompts that the tests with a real server share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pdoffload.testing.openai_api import Completion, Metrics
from pdoffload.testing.serving import VllmServer

MiB = 1 << 20


def offloading(
    root_dir: Path | None = None,
    *,
    connector: str = "PdOffloadConnector",
    spec: str | None = None,
    tier: dict[str, Any] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """A kv-transfer-config: the host pool, and `tier`; an fs tier where `root_dir` is given."""
    settings: dict[str, Any] = {"cpu_bytes_to_use": 256 * MiB, **extra}
    if root_dir is not None:
        tier = {"type": "fs", "root_dir": str(root_dir), "min_free_bytes": MiB, **(tier or {})}
    if tier is not None:
        settings |= {"spec_name": "NixlTieringOffloadingSpec", "secondary_tiers": [tier]}
    if spec is not None:
        settings["spec_name"] = spec
    config = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    if connector == "PdOffloadConnector":
        config["kv_connector_module_path"] = "pdoffload.vllm"
    else:
        settings["spec_module_path"] = "pdoffload.vllm"
    return config


def direct(root_dir: Path, *, tier: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """A kv-transfer-config: the device straight to files under `root_dir`."""
    table = {"type": "fs", "root_dir": str(root_dir), "min_free_bytes": MiB, **(tier or {})}
    config = offloading()
    config["kv_connector_extra_config"] = {
        "spec_name": "NixlDirectOffloadingSpec",
        "secondary_tiers": [table],
        **extra,
    }
    return config


def beside_nixl(ours: dict[str, Any]) -> dict[str, Any]:
    """A kv-transfer-config: vLLM's NixlConnector, which is asked first, and `ours` beside it."""
    # One thread, not four: each of them spins, and there are two cores for everybody.
    main = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"num_threads": 1},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [main, ours]},
    }


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids of the tiny models' byte alphabet."""
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(num_tokens)]


def ask(server: VllmServer, tokens: list[int], **parameters: Any) -> tuple[Completion, Metrics]:
    """A completion of 16 tokens, and what the server counted meanwhile."""
    before = server.metrics()
    answer = server.complete(tokens, max_tokens=16, return_token_ids=True, **parameters)
    assert answer.token_ids, "the server gave no token ids"
    return answer, server.metrics().since(before)
