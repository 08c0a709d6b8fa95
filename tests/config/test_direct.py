"""Settings of direct offloading: one fs table, no host pool."""

from __future__ import annotations

from typing import Any

import pytest

from pdoffload.config import DIRECT_SPEC, describe, geometry, parse, warnings
from pdoffload.config.launch import check
from pdoffload.errors import ConfigError, MisuseError

FS = {"type": "fs", "root_dir": "/kv"}
DIRECT = {"spec_name": DIRECT_SPEC, "secondary_tiers": [FS]}


def problems(given: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(given)
    return list(caught.value.problems)


def test_no_host_bytes_are_needed() -> None:
    config = parse(DIRECT)
    assert config.cpu_bytes_to_use is None
    assert warnings(config) == []
    assert "cpu_bytes_to_use" in describe(config)
    with pytest.raises(MisuseError, match="has no host pool"):
        geometry(config, worker_bytes_per_block=1, num_copies=1, blocks_per_chunk=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "required and missing; allowed: a whole number"),
        ({"cpu_bytes_to_use": None}, "got null; allowed: a whole number"),
    ],
)
@pytest.mark.parametrize("spec", ["NixlCPUOffloadingSpec", "NixlTieringOffloadingSpec"])
def test_with_a_host_pool_they_still_are(given: dict[str, Any], said: str, spec: str) -> None:
    (problem,) = problems({"spec_name": spec, **given})
    assert problem.startswith(f"cpu_bytes_to_use: {said}")
    assert not problem.endswith("null")


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ([], "secondary_tiers: none; NixlDirectOffloadingSpec wants exactly one table, of type fs"),
        ([FS, {**FS, "root_dir": "/b"}], "secondary_tiers: got 2 tables; "),
        ([{"type": "p2p"}], 'secondary_tiers[0].type: got "p2p"; '),
        ([{"type": "Mine", "module_path": "my.tiers"}], 'secondary_tiers[0].type: got "Mine"; '),
        ([{**FS, "max_bytes": 1 << 30}], "secondary_tiers[0].max_bytes: got 1073741824; "),
        ([{**FS, "io": "posix_aio"}], 'secondary_tiers[0].io: got "posix_aio"; after one failed'),
        ("/kv", 'secondary_tiers: got "/kv"; allowed: a list of tier tables'),
        ([{"type": "fs"}], "secondary_tiers[0].root_dir: required and missing"),
    ],
)
def test_exactly_one_fs_table_is_wanted(tiers: Any, said: str) -> None:
    (problem,) = problems({"spec_name": DIRECT_SPEC, "secondary_tiers": tiers})
    assert problem.startswith(said)


@pytest.mark.parametrize("threshold", [2, 7])
def test_every_block_is_stored(threshold: int) -> None:
    (problem,) = problems({**DIRECT, "store_threshold": threshold})
    assert problem.startswith(f"store_threshold: got {threshold}; with {DIRECT_SPEC} every block")
    assert parse({**DIRECT, "store_threshold": 1}).store_threshold == 1


def test_problems_are_told_together() -> None:
    found = problems({**DIRECT, "secondary_tiers": [], "store_threshold": 2, "verfy": "off"})
    assert [each.split(":")[0] for each in found] == ["verfy", "store_threshold", "secondary_tiers"]


def test_settings_of_the_host_pool_are_warnings() -> None:
    """vLLM's own --kv-offloading-size sets one of them, whatever the spec."""
    config = parse(
        {**DIRECT, "cpu_bytes_to_use": 1 << 30, "eviction_policy": "arc", "n_transfer_threads": 2}
    )
    assert warnings(config) == [
        f"{name}: not used, {DIRECT_SPEC} has no host pool"
        for name in ("cpu_bytes_to_use", "eviction_policy", "n_transfer_threads")
    ]


def launch(connector: str, **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": DIRECT,
        **more,
    }


def test_it_runs_under_our_connector_alone() -> None:
    checked = check(launch("PdOffloadConnector", kv_connector_module_path="pdoffload.vllm"))
    assert checked.warnings == ()
    with pytest.raises(ConfigError) as caught:
        check(launch("OffloadingConnector"))
    (problem,) = caught.value.problems
    assert problem.startswith(f"kv_connector: {DIRECT_SPEC} needs PdOffloadConnector; under ")
