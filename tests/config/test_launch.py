"""Checking the value of vLLM's --kv-transfer-config."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdoffload.config.launch import check, check_text
from pdoffload.errors import ConfigError

EXTRA = {"cpu_bytes_to_use": 1 << 30}
OWN = {
    "kv_connector": "PdOffloadConnector",
    "kv_connector_module_path": "pdoffload.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": EXTRA,
}
STOCK = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        **EXTRA,
        "spec_name": "NixlCPUOffloadingSpec",
        "spec_module_path": "pdoffload.vllm",
    },
}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PEERS: dict[str, Any] = {
    **OWN,
    "kv_connector_extra_config": {
        **EXTRA,
        "spec_name": "NixlTieringOffloadingSpec",
        "secondary_tiers": [{"type": "p2p"}],
    },
}
STOCK_PEERS = {
    **STOCK,
    "kv_connector_extra_config": {
        **PEERS["kv_connector_extra_config"],
        "spec_module_path": "pdoffload.vllm",
    },
}


def multi(*members: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(members)},
    }


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def problems_of(given: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check(given)
    return caught.value.problems


@pytest.mark.parametrize(
    "given",
    [
        *(EXTRA, OWN, STOCK, multi(NIXL, OWN), multi(STOCK, NIXL)),
        *(PEERS, STOCK_PEERS, multi(NIXL, PEERS), multi(STOCK_PEERS, NIXL)),
    ],
)
def test_the_documented_forms_are_right(given: dict[str, Any]) -> None:
    checked = check(given)
    ((_, config),) = checked.connectors
    assert config.cpu_bytes_to_use == 1 << 30
    assert checked.warnings == ()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (without(OWN, "kv_role"), "kv_role: required and missing"),
        ({**OWN, "kv_role": "both"}, 'kv_role: got "both"'),
        (without(OWN, "kv_connector"), "kv_connector: required and missing"),
        (without(OWN, "kv_connector_module_path"), "kv_connector_module_path: got null"),
        ({**OWN, "kv_connector_module_path": "pdoffload"}, "kv_connector_module_path: got"),
        ({**OWN, "kv_connector": "PdOfloadConnector"}, "nearest: PdOffloadConnector"),
        ({**OWN, "kv_load_failure_polcy": "fail"}, "nearest: kv_load_failure_policy"),
        ({**OWN, "kv_connector_extra_config": 3}, "kv_connector_extra_config: got 3"),
        ({**OWN, "kv_connector_extra_config": {"cpu_bytes_to_use": 0}}, "cpu_bytes_to_use: got 0"),
        (without(OWN, "kv_connector_extra_config"), "cpu_bytes_to_use: required"),
        ({**STOCK, "kv_connector_extra_config": EXTRA}, "spec_name: required and missing"),
        (NIXL, 'kv_connector: got "NixlConnector"'),
        (multi(NIXL), "connectors: none of them"),
        (multi(NIXL, 3), "connectors[1]: got 3"),
        (multi(NIXL, without(OWN, "kv_role")), "connectors[1].kv_role: required"),
        (
            multi(NIXL, {**OWN, "kv_connector_extra_config": {}}),
            "connectors[1].cpu_bytes_to_use: required",
        ),
        ({**multi(), "kv_connector_extra_config": {}}, "connectors: got null"),
        ([OWN], "allowed: an object"),
        ({}, "cpu_bytes_to_use: required"),
    ],
)
def test_a_wrong_form_names_its_place(given: Any, problem: str) -> None:
    assert any(problem in line for line in problems_of(given))


def test_a_wrong_table_of_a_tier_names_its_member() -> None:
    extra = {
        **PEERS["kv_connector_extra_config"],
        "secondary_tiers": [{"type": "p2p", "port": "5710", "host": "0.0.0.0"}],
    }
    assert [
        line.split(": got ")[0]
        for line in problems_of(multi(NIXL, {**PEERS, "kv_connector_extra_config": extra}))
    ] == [
        "connectors[1].secondary_tiers[0].port",
        "connectors[1].secondary_tiers[0].host",
    ]


def test_the_stock_connector_needs_the_path_of_our_spec() -> None:
    extra = {**EXTRA, "spec_name": "NixlCPUOffloadingSpec"}
    (problem,) = problems_of({**STOCK, "kv_connector_extra_config": extra})
    assert problem == 'spec_module_path: required and missing; allowed: "pdoffload.vllm"'


def test_problems_of_both_layers_come_together() -> None:
    wrong = {**without(OWN, "kv_role"), "kv_connector_extra_config": {"verify": "of"}}
    assert [line.split(":")[0] for line in problems_of(wrong)] == [
        "kv_role",
        "verify",
        "cpu_bytes_to_use",
    ]


@pytest.mark.parametrize("given", [OWN, multi(OWN)])
def test_a_policy_that_ends_requests_is_warned_of(given: dict[str, Any]) -> None:
    for weak in (
        {**given, "kv_load_failure_policy": "fail"},
        without(given, "kv_load_failure_policy"),
    ):
        (line,) = check(weak).warnings
        assert line.startswith("kv_load_failure_policy: fail, ")


def test_a_warning_names_its_member() -> None:
    weak = {**OWN, "kv_connector_extra_config": {**EXTRA, "verify": "off"}}
    (line,) = check(multi(NIXL, weak)).warnings
    assert line.startswith("connectors[1].verify: off")


def test_text_is_read_as_json() -> None:
    assert check_text(json.dumps(OWN)) == check(OWN)


@pytest.mark.parametrize(
    "written", ["", "{", "{'a': 1}", "[" * 100_000, '{"cpu_bytes_to_use": 1%s}' % ("0" * 5000)]
)
def test_what_is_not_json_says_where(written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_text(written)
    assert caught.value.problems[0].startswith("not JSON: ")


def test_a_key_given_twice_is_a_problem() -> None:
    """JSON keeps the last of two silently: the operator believes in the first."""
    written = '{"cpu_bytes_to_use": 1, "cpu_bytes_to_use": 2, "verfy": 3}'
    with pytest.raises(ConfigError) as caught:
        check_text(written)
    assert caught.value.problems == (
        "cpu_bytes_to_use: given twice in one object",
        "verfy: unknown key; nearest: verify",
    )
