"""The table of a p2p tier: what may be written, and which address it means."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from pdoffload import config
from pdoffload.config import P2pTierConfig, parse, resolve_p2p_address
from pdoffload.config.options import LATER_P2P_BACKENDS
from pdoffload.errors import ConfigError

TIERING = {"cpu_bytes_to_use": 1 << 30, "spec_name": "NixlTieringOffloadingSpec"}
HOST_VARIABLE, PORT_VARIABLE = "VLLM_P2P_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_PORT"
P2P = {"type": "p2p"}
FS = {"type": "fs", "root_dir": "/kv"}


def with_peers(**keys: Any) -> dict[str, Any]:
    return {**TIERING, "secondary_tiers": [{**P2P, **keys}]}


def tier_of(**keys: Any) -> P2pTierConfig:
    (tier,) = parse(with_peers(**keys)).secondary_tiers
    assert isinstance(tier, P2pTierConfig)
    return tier


def problems_of(extra_config: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(extra_config)
    return caught.value.problems


def the_problem(**keys: Any) -> str:
    (problem,) = problems_of(with_peers(**keys))
    assert problem.startswith("secondary_tiers[0].")
    return problem.removeprefix("secondary_tiers[0].")


def address_problems(
    tier: P2pTierConfig, environ: dict[str, str], index: int = 0
) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve_p2p_address(tier, environ, index)
    return caught.value.problems


def test_the_least_table_has_the_documented_defaults() -> None:
    assert msgspec.structs.asdict(tier_of()) == {
        "type": "p2p",
        "host": None,
        "port": None,
        "backends": ("UCX",),
        "ucx_tls": None,
        "num_threads": 4,
        "unbound_store_timeout_s": 60.0,
        "load_timeout_s": 30.0,
        "lookup_timeout_s": 30.0,
        "store_timeout_s": 30.0,
        "abort_timeout_s": 10.0,
        "cluster_secret_file": None,
        "allow_unauthenticated": False,
        "max_peers": 128,
    }


def test_every_key_can_be_set() -> None:
    table = {
        "host": "10.0.0.11",
        "port": 6000,
        "backends": ["UCX"],
        "ucx_tls": "^cma",
        "num_threads": 8,
        "unbound_store_timeout_s": 1,
        "load_timeout_s": 2.5,
        "lookup_timeout_s": 3,
        "store_timeout_s": 4,
        "abort_timeout_s": 5,
        "cluster_secret_file": "/run/secrets/kv",
        "allow_unauthenticated": False,
        "max_peers": 9,
    }
    assert tier_of(**table) == P2pTierConfig(**{**table, "backends": ("UCX",)})


# key -> least, most, whether null is allowed, whether fractions are
NUMBERS = {
    "port": (0, 65535, True, False),
    "num_threads": (1, 64, False, False),
    "max_peers": (1, 4096, False, False),
    "unbound_store_timeout_s": (0.1, 3600, False, True),
    "load_timeout_s": (0.1, 3600, False, True),
    "lookup_timeout_s": (0.1, 3600, False, True),
    "store_timeout_s": (0.1, 3600, False, True),
    "abort_timeout_s": (0.1, 3600, False, True),
}
TRIED = (0, -1, "16", "5710", 1.5, "abc", None, True, 70000, 10**12, math.nan, math.inf, 16, 16.0)


@pytest.mark.parametrize("value", TRIED)
@pytest.mark.parametrize("key", NUMBERS)
def test_c12_a_number_is_in_range_or_an_error(key: str, value: Any) -> None:
    low, high, may_be_null, may_be_broken = NUMBERS[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    right = is_number and low <= value <= high and (may_be_broken or value == int(value))
    if right or (value is None and may_be_null):
        assert getattr(tier_of(**{key: value}), key) == value
    else:
        problem = the_problem(**{key: value})
        assert problem.startswith(f"{key}: got {json.dumps(value)}; allowed: a ")
        assert f"{low} to {high}" in problem


@pytest.mark.parametrize("key", NUMBERS)
def test_c12_the_bounds_themselves_are_allowed(key: str) -> None:
    for bound in NUMBERS[key][:2]:
        assert getattr(tier_of(**{key: bound}), key) == bound


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host", 5710),
        ("host", True),
        ("host", ""),
        ("backends", "UCX"),
        ("backends", [1]),
        ("backends", None),
        ("ucx_tls", ""),
        ("ucx_tls", "tcp,sm"),
        ("ucx_tls", "UCX_TLS=tcp"),
        ("ucx_tls", 1),
        ("cluster_secret_file", ""),
        ("cluster_secret_file", "/run/a\0b"),
        ("cluster_secret_file", 7),
        ("allow_unauthenticated", "true"),
        ("allow_unauthenticated", 1),
        ("allow_unauthenticated", None),
    ],
)
def test_a_wrong_type_names_key_value_and_what_is_allowed(key: str, value: Any) -> None:
    assert the_problem(**{key: value}).startswith(f"{key}: got {json.dumps(value)}; allowed: ")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("hosts", "host"), ("num_thread", "num_threads"), ("load_timeout", "load_timeout_s")],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    assert the_problem(**{key: 1}) == f"{key}: unknown key; nearest: {nearest}"


@pytest.mark.parametrize("key", ["enable_kv_events", "locality", "module_path"])
def test_keys_of_tiers_that_store_are_unknown_here(key: str) -> None:
    assert the_problem(**{key: False}).startswith(f"{key}: unknown key; ")


# --- which plugins -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LATER_P2P_BACKENDS)
def test_a_plugin_of_a_later_version_is_told_apart_from_a_wrong_one(name: str) -> None:
    assert the_problem(backends=[name]) == (
        f'backends: "{name}" is not available in this version; available: UCX, LIBFABRIC, MOONCAKE'
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["ucx"], 'backends: got "ucx"; nearest: UCX'),
        (["LIBFABRC"], 'backends: got "LIBFABRC"; nearest: LIBFABRIC'),
        (["NOPE"], 'backends: got "NOPE"; known: UCX, LIBFABRIC, '),
        (["POSIX"], 'backends: got "POSIX"; '),
        ([], "backends: got []; one at least is needed; available: UCX, LIBFABRIC, MOONCAKE"),
        (["UCX", "UCX"], 'backends: "UCX" is named twice'),
    ],
)
def test_a_wrong_plugin_names_the_known(names: list[str], said: str) -> None:
    assert the_problem(backends=names).startswith(said)


def test_every_wrong_plugin_is_named() -> None:
    problems = problems_of(with_peers(backends=["UCCL", "UCX", "ucxx"]))
    assert len(problems) == 2


@pytest.mark.parametrize("names", [["UCX"], ["LIBFABRIC"], ["MOONCAKE"], ["LIBFABRIC", "UCX"]])
def test_the_plugins_are_taken_in_their_order(names: list[str]) -> None:
    assert tier_of(backends=names).backends == tuple(names)


def test_a_setting_of_ucx_without_ucx_is_refused() -> None:
    problem = the_problem(backends=["LIBFABRIC"], ucx_tls="tcp")
    assert problem == (
        'ucx_tls: got "tcp", and backends names no UCX that it could mean; leave it out'
    )
    assert tier_of(backends=["LIBFABRIC", "UCX"], ucx_tls="tcp").ucx_tls == "tcp"


# --- who may connect -----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*"])
def test_a_wildcard_is_refused_even_with_a_secret(host: str) -> None:
    problem = the_problem(host=host, cluster_secret_file="/run/secrets/kv")
    assert problem.startswith(f'host: got "{host}", which stands for every address; ')


@pytest.mark.parametrize("host", ["10.0.0.11", "fd00::1", "[fd00::1]", "192.168.1.2"])
def test_without_a_secret_no_address_of_the_network_is_bound(host: str) -> None:
    problem = the_problem(host=host)
    assert problem.startswith(f'host: got "{host}", which other hosts can reach, without ')
    assert "cluster_secret_file" in problem
    assert "allow_unauthenticated" in problem
    assert tier_of(host=host, cluster_secret_file="/s").host == host.strip("[]")
    assert tier_of(host=host, allow_unauthenticated=True).host == host.strip("[]")


@pytest.mark.parametrize("secret", [{}, {"cluster_secret_file": "/s"}])
def test_mooncake_asks_for_a_guarded_network_with_a_secret_too(secret: dict[str, str]) -> None:
    keys: dict[str, Any] = {"host": "10.0.0.11", "backends": ["MOONCAKE"], **secret}
    problem = problems_of(with_peers(**keys))[-1]
    assert problem.startswith(
        'secondary_tiers[0].backends: got "MOONCAKE", by which whoever reaches "10.'
    )
    assert tier_of(**keys, allow_unauthenticated=True).backends == ("MOONCAKE",)
    keys["host"] = "localhost"
    assert tier_of(**keys).backends == ("MOONCAKE",)


def test_mooncake_asks_for_a_guarded_network_where_the_environment_names_it() -> None:
    tier = tier_of(backends=["MOONCAKE"], cluster_secret_file="/s")
    with pytest.raises(ConfigError, match='backends: got "MOONCAKE", by which whoever reaches "10'):
        resolve_p2p_address(tier, {"VLLM_P2P_SIDE_CHANNEL_HOST": "10.0.0.1"}, 0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "[::1]", "prefill-0", None])
def test_loopback_needs_no_secret_and_a_name_is_left_to_the_resolver(host: str | None) -> None:
    assert tier_of(host=host).host == (host and host.strip("[]"))


def test_all_problems_of_a_table_come_together() -> None:
    problems = problems_of(
        {
            **TIERING,
            "secondary_tiers": [
                {"type": "p2p", "host": "10.0.0.1", "port": "5710", "backends": ["ucx"]},
                FS,
                {"type": "p2p", "num_threads": 0, "secret": "x"},
            ],
        }
    )
    assert [line.split(":")[0] for line in problems] == [
        "secondary_tiers[0].port",
        "secondary_tiers[0].host",
        "secondary_tiers[0].backends",
        "secondary_tiers[2].num_threads",
        "secondary_tiers[2].secret",
        "secondary_tiers[2].type",
    ]


def test_a_second_p2p_tier_names_the_first() -> None:
    (problem,) = problems_of({**TIERING, "secondary_tiers": [FS, P2P, {**P2P, "port": 6000}]})
    assert problem.startswith("secondary_tiers[2].type: secondary_tiers[1] is a p2p tier already; ")


def test_peers_stand_in_their_place_among_the_tiers() -> None:
    parsed = parse({**TIERING, "secondary_tiers": [P2P, FS]})
    assert [tier.type for tier in parsed.secondary_tiers] == ["p2p", "fs"]


def test_peers_need_the_tiering_spec() -> None:
    (problem,) = problems_of({"cpu_bytes_to_use": 1, "secondary_tiers": [P2P]})
    assert "set spec_name to NixlTieringOffloadingSpec" in problem


# --- what is said about a right one --------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"host": "prefill-0"}, 'host: "prefill-0" without cluster_secret_file, '),
        (
            {"host": "10.0.0.1", "allow_unauthenticated": True},
            "allow_unauthenticated: true, so whoever reaches the port can read",
        ),
        ({"allow_unauthenticated": True}, "allow_unauthenticated: true, so "),
        (
            {"cluster_secret_file": "/s", "allow_unauthenticated": True},
            "allow_unauthenticated: not used, ",
        ),
        (
            {
                "cluster_secret_file": "/s",
                "allow_unauthenticated": True,
                "backends": ["MOONCAKE"],
            },
            "allow_unauthenticated: true, so whoever reaches the host can read and write",
        ),
        ({"cluster_secret_file": "~/s"}, 'cluster_secret_file: "~/s" is taken literally'),
    ],
)
def test_what_is_perhaps_not_meant_is_warned_of(keys: dict[str, Any], said: str) -> None:
    (line,) = config.warnings(parse(with_peers(**keys)))
    assert line.startswith(f"secondary_tiers[0].{said}")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"host": "127.0.0.1"},
        {"host": "prefill-0", "cluster_secret_file": "/s"},
        {"host": "10.0.0.1", "cluster_secret_file": "/s"},
    ],
)
def test_an_ordinary_table_warns_of_nothing(keys: dict[str, Any]) -> None:
    assert config.warnings(parse(with_peers(**keys))) == []


def test_the_description_shows_every_setting() -> None:
    said = config.describe(parse(with_peers(host="::1", port=0)))
    shown = dict(line.replace(" ", "").split("=") for line in said.splitlines())
    assert shown["secondary_tiers[0].host"] == "::1"
    assert shown["secondary_tiers[0].port"] == "0"
    assert shown["secondary_tiers[0].backends"] == '["UCX"]'
    assert shown["secondary_tiers[0].cluster_secret_file"] == "none"
    for key in P2pTierConfig.__struct_fields__:
        assert f"secondary_tiers[0].{key}" in shown


# --- which address is bound ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "environ", "index", "address"),
    [
        ({}, {}, 0, ("localhost", 5710)),
        ({}, {}, 3, ("localhost", 5713)),
        ({"port": 6000}, {PORT_VARIABLE: "7000"}, 1, ("localhost", 6001)),
        ({"host": "127.0.0.2"}, {HOST_VARIABLE: "::1"}, 0, ("127.0.0.2", 5710)),
        ({}, {HOST_VARIABLE: "[::1]", PORT_VARIABLE: "7000"}, 2, ("::1", 7002)),
        ({}, {HOST_VARIABLE: "", PORT_VARIABLE: ""}, 0, ("localhost", 5710)),
        ({}, {HOST_VARIABLE: "decode-1"}, 0, ("decode-1", 5710)),
        ({"port": 0}, {PORT_VARIABLE: "7000"}, 7, ("localhost", 0)),
        ({}, {PORT_VARIABLE: "0"}, 7, ("localhost", 0)),
        ({"port": 65535}, {}, 0, ("localhost", 65535)),
        ({"cluster_secret_file": "/s"}, {HOST_VARIABLE: "10.0.0.1"}, 0, ("10.0.0.1", 5710)),
    ],
)
def test_the_address_is_the_table_s_then_the_environment_s(
    keys: dict[str, Any], environ: dict[str, str], index: int, address: tuple[str, int]
) -> None:
    assert resolve_p2p_address(tier_of(**keys), environ, index) == address


@pytest.mark.parametrize(
    "written", ["abc", "5710.0", "-1", "65536", "99999999999", " 5710", "5_710", "+1", "\u0665"]
)
def test_a_wrong_port_of_the_environment_names_the_variable(written: str) -> None:
    (problem,) = address_problems(tier_of(), {PORT_VARIABLE: written})
    assert problem.startswith(f"{PORT_VARIABLE}: got ")
    assert "allowed: a whole number, 0 to 65535" in problem


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("0.0.0.0", "which stands for every address"),
        ("tcp://a", "which is no plain host; leave the scheme"),
        ("10.0.0.1", "which other hosts can reach, without cluster_secret_file"),
    ],
)
def test_a_wrong_host_of_the_environment_names_the_variable(written: str, said: str) -> None:
    (problem,) = address_problems(tier_of(), {HOST_VARIABLE: written})
    assert problem.startswith(f'{HOST_VARIABLE}: got "{written}", {said}')


@pytest.mark.parametrize(
    ("keys", "environ", "key"),
    [({"port": 65530}, {}, "port"), ({}, {PORT_VARIABLE: "65530"}, PORT_VARIABLE)],
)
def test_c14_a_port_beyond_the_last_names_base_and_index(
    keys: dict[str, Any], environ: dict[str, str], key: str
) -> None:
    (problem,) = address_problems(tier_of(**keys), environ, 6)
    assert problem == (
        f"{key}: got 65530, and with data-parallel index 6 port 65536 would be bound; "
        "allowed: at most 65529"
    )


def test_both_variables_are_reported_together() -> None:
    problems = address_problems(tier_of(), {HOST_VARIABLE: "*", PORT_VARIABLE: "x"})
    assert [line.split(":")[0] for line in problems] == [HOST_VARIABLE, PORT_VARIABLE]


@pytest.mark.parametrize("other", [{}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "x", "PORT": "y"}])
def test_no_other_variable_counts(other: dict[str, str]) -> None:
    assert resolve_p2p_address(tier_of(), other, 0) == ("localhost", 5710)
