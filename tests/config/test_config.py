"""What an operator may write, and what is said when it cannot work."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload import config
from pdoffload.config import (
    CustomTierConfig,
    FsTierConfig,
    Locality,
    OffloadConfig,
    P2pTierConfig,
    Verify,
    geometry,
    parse,
)
from pdoffload.errors import ConfigError, MisuseError

HOST = {"cpu_bytes_to_use": 1 << 30}
TIERING = {**HOST, "spec_name": "NixlTieringOffloadingSpec"}


def with_tier(**keys: Any) -> dict[str, Any]:
    return {**TIERING, "secondary_tiers": [{"type": "fs", "root_dir": "/kv", **keys}]}


def problems_of(extra_config: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(extra_config)
    return caught.value.problems


def the_problem(extra_config: Any) -> str:
    (problem,) = problems_of(extra_config)
    return problem


def tier_of(extra_config: dict[str, Any]) -> FsTierConfig:
    (tier,) = parse(extra_config).secondary_tiers
    assert isinstance(tier, FsTierConfig)
    return tier


def test_the_least_configuration_has_the_documented_defaults() -> None:
    assert msgspec.structs.asdict(parse(HOST)) == {
        "spec_name": "NixlCPUOffloadingSpec",
        "spec_module_path": None,
        "cpu_bytes_to_use": 1 << 30,
        "block_size": None,
        "blocks_per_chunk": 1,
        "eviction_policy": "lru",
        "cache_policy_module_path": None,
        "store_threshold": 0,
        "max_tracker_size": 64000,
        "secondary_tiers": (),
        "offload_prompt_only": True,
        "self_describing_kv_events": False,
        "verify": Verify.ALWAYS,
        "transfer_timeout_s": 30.0,
        "n_transfer_threads": 1,
        "model_identity": None,
    }
    assert tier_of(with_tier()) == FsTierConfig(
        root_dir="/kv",
        n_read_threads=16,
        n_write_threads=16,
        enable_kv_events=False,
        locality=None,
        backend="auto",
        io="auto",
        direct="auto",
        max_bytes=None,
        min_free_bytes=1 << 30,
        fsync=False,
        file_mode=0o600,
    )


def test_every_key_can_be_set() -> None:
    tier = {
        "type": "fs",
        "root_dir": "/kv",
        "n_read_threads": 2,
        "n_write_threads": 3,
        "enable_kv_events": True,
        "locality": "REMOTE",
        "backend": "POSIX",
        "io": "aio",
        "direct": "off",
        "max_bytes": 1 << 40,
        "min_free_bytes": 0,
        "fsync": True,
        "file_mode": "0640",
    }
    host = {
        "spec_name": "NixlTieringOffloadingSpec",
        "spec_module_path": "pdoffload.vllm",
        "cpu_bytes_to_use": 5,
        "block_size": 64,
        "eviction_policy": "MyPolicy",
        "cache_policy_module_path": "my.policies",
        "store_threshold": 1,
        "max_tracker_size": 9,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "verify": "if_present",
        "transfer_timeout_s": 2,
        "n_transfer_threads": 4,
        "model_identity": "rope-x2",
    }
    parsed = parse({**host, "secondary_tiers": [tier]})
    assert parsed == OffloadConfig(
        **{
            **host,
            "verify": Verify.IF_PRESENT,
            "secondary_tiers": (
                FsTierConfig(**{**tier, "locality": Locality.REMOTE, "file_mode": 0o640}),
            ),
        }
    )


def test_the_mapping_of_the_engine_is_left_as_it_is() -> None:
    extra_config = with_tier(file_mode="0640")
    before = json.dumps(extra_config)
    parse(extra_config)
    assert json.dumps(extra_config) == before


def test_all_problems_are_reported_together() -> None:
    problems = problems_of(
        {
            "cpu_bytes_to_use": "10GB",
            "verfy": "off",
            "offload_prompt_only": "no",
            "secondary_tiers": [{"type": "fs", "n_read_thread": 4}, {"type": "obj"}, 7],
        }
    )
    text = "\n".join(problems)
    for part in (
        'cpu_bytes_to_use: got "10GB"',
        "verfy: unknown key; nearest: verify",
        'offload_prompt_only: got "no"; allowed: true or false',
        "secondary_tiers[0].n_read_thread: unknown key; nearest: n_read_threads",
        "secondary_tiers[0].root_dir: required and missing",
        "secondary_tiers[1].type: 'obj' is not available in this version",
        "secondary_tiers[2]: got 7",
        "secondary_tiers: NixlCPUOffloadingSpec has host memory alone; set spec_name to "
        "NixlTieringOffloadingSpec",
    ):
        assert part in text
    assert len(problems) == 8


def test_the_host_budget_is_required() -> None:
    assert the_problem({}).startswith("cpu_bytes_to_use: required and missing; allowed: a whole")


@pytest.mark.parametrize("extra_config", [None, [], "x", 3])
def test_what_is_no_object_is_refused(extra_config: Any) -> None:
    assert "allowed: an object" in the_problem(extra_config)


# --- C11 -----------------------------------------------------------------------------------------

HOST_BOOLEANS = ("offload_prompt_only", "self_describing_kv_events")
TIER_BOOLEANS = ("enable_kv_events", "fsync")
NOT_BOOLEANS = ("", "0", "false", "False ", "no", "off", "1", "true", "yes", "banana", 0, 1, None)


@pytest.mark.parametrize("value", NOT_BOOLEANS)
@pytest.mark.parametrize("key", HOST_BOOLEANS + TIER_BOOLEANS)
def test_c11_only_json_true_and_false_are_booleans(key: str, value: Any) -> None:
    extra_config = {**HOST, key: value} if key in HOST_BOOLEANS else with_tier(**{key: value})
    where = "" if key in HOST_BOOLEANS else "secondary_tiers[0]."
    expected = f"{where}{key}: got {json.dumps(value)}; allowed: true or false"
    assert the_problem(extra_config) == expected


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("key", HOST_BOOLEANS + TIER_BOOLEANS)
def test_c11_a_boolean_means_what_it_says(key: str, value: bool) -> None:
    if key in HOST_BOOLEANS:
        assert getattr(parse({**HOST, key: value}), key) is value
    else:
        assert getattr(tier_of(with_tier(**{key: value})), key) is value


# --- C12 -----------------------------------------------------------------------------------------

# key -> least, most, whether null is allowed
HOST_NUMBERS = {
    "cpu_bytes_to_use": (1, 2**50, False),
    "block_size": (1, 2**20, True),
    "blocks_per_chunk": (1, 2**16, False),
    "store_threshold": (0, 2**20, False),
    "max_tracker_size": (1, 10**8, False),
    "transfer_timeout_s": (0.1, 3600, False),
    "n_transfer_threads": (1, 16, False),
}
TIER_NUMBERS = {
    "n_read_threads": (1, 256, False),
    "n_write_threads": (1, 256, False),
    "max_bytes": (1, 2**60, True),
    "min_free_bytes": (0, 2**60, False),
}
NUMBERS = {**HOST_NUMBERS, **TIER_NUMBERS}
TRIED = (0, -1, "16", 1.5, "abc", None, True, 10**12, 10**30, math.nan, math.inf, "10GB", 16, 16.0)


def configuration_with(key: str, value: Any) -> dict[str, Any]:
    return {**HOST, key: value} if key in HOST_NUMBERS else with_tier(**{key: value})


def value_of(key: str, parsed: OffloadConfig) -> Any:
    return getattr(parsed if key in HOST_NUMBERS else parsed.secondary_tiers[0], key)


@pytest.mark.parametrize("value", TRIED)
@pytest.mark.parametrize("key", NUMBERS)
def test_c12_a_number_is_in_range_or_an_error(key: str, value: Any) -> None:
    low, high, may_be_null = NUMBERS[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    right = is_number and low <= value <= high
    if key != "transfer_timeout_s":
        right = right and value == int(value)
    if right or (value is None and may_be_null):
        assert value_of(key, parse(configuration_with(key, value))) == value
    else:
        problem = the_problem(configuration_with(key, value))
        prefix = "" if key in HOST_NUMBERS else "secondary_tiers[0]."
        assert problem.startswith(f"{prefix}{key}: got {json.dumps(value)}; allowed: a ")
        assert f"{low:g}" in problem or str(low) in problem
        assert f" to {high}" in problem


@pytest.mark.parametrize("key", NUMBERS)
def test_c12_the_bounds_themselves_are_allowed(key: str) -> None:
    low, high, _ = NUMBERS[key]
    for bound in (low, high):
        assert value_of(key, parse(configuration_with(key, bound))) == bound


def test_c12_a_whole_number_written_as_a_float_is_taken() -> None:
    """vLLM's --kv-offloading-size hands over 2.5 * 2**30 as a float."""
    budget = parse({"cpu_bytes_to_use": 2.5 * (1 << 30)}).cpu_bytes_to_use
    assert budget == 2684354560
    assert type(budget) is int


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("n_read_thread", "n_read_threads"),
        ("N_READ_THREADS", "n_read_threads"),
        ("root", "root_dir"),
        ("fsnyc", "fsync"),
    ],
)
def test_c12_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    expected = f"secondary_tiers[0].{key}: unknown key; nearest: {nearest}"
    assert the_problem(with_tier(**{key: 1})) == expected


def test_c12_an_unknown_key_near_to_none_lists_them_all() -> None:
    problem = the_problem({**HOST, "zzz": 1})
    assert problem.startswith("zzz: unknown key; known: spec_name, ")
    assert "model_identity" in problem


def test_c12_a_budget_below_one_chunk_names_what_would_do() -> None:
    small = parse({"cpu_bytes_to_use": 3 * 4096 - 1})
    with pytest.raises(ConfigError) as caught:
        geometry(small, worker_bytes_per_block=2000, num_copies=2, blocks_per_chunk=3)
    (problem,) = caught.value.problems
    assert problem.startswith("cpu_bytes_to_use: got 12287 ")
    assert "one chunk takes 12288 " in problem
    enough = parse({"cpu_bytes_to_use": 3 * 4096})
    found = geometry(enough, worker_bytes_per_block=2000, num_copies=2, blocks_per_chunk=3)
    assert (found.num_slots, found.chunk_bytes, found.worker_bytes) == (1, 12288, 6000)


@pytest.mark.parametrize("wrong", ["worker_bytes_per_block", "num_copies", "blocks_per_chunk"])
def test_geometry_of_nothing_is_misuse(wrong: str) -> None:
    sizes = {"worker_bytes_per_block": 1, "num_copies": 1, "blocks_per_chunk": 1, wrong: 0}
    with pytest.raises(MisuseError, match=f"{wrong}=0"):
        geometry(parse(HOST), **sizes)


@settings(deadline=None)
@given(st.integers(1, 1 << 40), st.integers(1, 1 << 24), st.integers(1, 64), st.integers(1, 64))
def test_the_pool_never_exceeds_its_budget_and_wastes_less_than_a_chunk(
    budget: int, worker_bytes: int, copies: int, blocks: int
) -> None:
    try:
        pool = geometry(
            parse({"cpu_bytes_to_use": budget}),
            worker_bytes_per_block=worker_bytes,
            num_copies=copies,
            blocks_per_chunk=blocks,
        )
    except ConfigError:
        assert budget < -(-worker_bytes * copies * blocks // 4096) * 4096
    else:
        assert budget - pool.chunk_bytes < pool.pool_bytes <= budget


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("verify", "Always", "always, if_present, off"),
        ("verify", True, "always, if_present, off"),
        ("model_identity", "", "a non-empty string"),
        ("model_identity", "x" * 201, "at most 200 characters"),
        ("model_identity", 7, "a non-empty string"),
        ("model_identity", "half a pair \ud800", "a non-empty string"),
        ("cache_policy_module_path", "a..b", "a dotted import path"),
        ("cache_policy_module_path", "os; x", "a dotted import path"),
        ("spec_module_path", "", "a dotted import path"),
        ("secondary_tiers", {"type": "fs"}, "a list of tier tables"),
        ("secondary_tiers", None, "a list of tier tables"),
    ],
)
def test_a_wrong_word_names_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    problem = the_problem({**HOST, key: value})
    assert problem.startswith(f"{key}: got ")
    assert allowed in problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("root_dir", ""),
        ("root_dir", "/kv\0"),
        ("root_dir", None),
        ("locality", "local"),
        ("backend", "posix"),
        ("io", "io_uring"),
        ("direct", True),
    ],
)
def test_a_wrong_word_in_a_tier_names_the_tier(key: str, value: Any) -> None:
    problem = the_problem(with_tier(**{key: value}))
    assert problem.startswith(f"secondary_tiers[0].{key}: got ")


@pytest.mark.parametrize("backend", ["auto", "POSIX", "GDS_MT", "GDS"])
def test_every_plugin_of_the_fs_tier_can_be_named(backend: str) -> None:
    assert tier_of(with_tier(backend=backend)).backend == backend


@pytest.mark.parametrize("backend", ["NOPE", "gds_mt", ["GDS_MT"], None, ""])
def test_another_one_is_told_those_there_are(backend: Any) -> None:
    problem = the_problem(with_tier(backend=backend))
    assert problem.endswith("; allowed: GDS, GDS_MT, POSIX, auto")


@pytest.mark.parametrize(
    ("written", "mode"),
    [("0600", 0o600), ("640", 0o640), ("0o664", 0o664), (0o660, 0o660), (384, 0o600)],
)
def test_file_mode_is_read_in_octal_or_as_a_number(written: Any, mode: int) -> None:
    assert tier_of(with_tier(file_mode=written)).file_mode == mode


@pytest.mark.parametrize(
    "written", [640, 600, "0400", "0666", "0777", "0o", "8", "0649", 0, -1, None, True, 1.5, "rw"]
)
def test_a_file_mode_that_locks_us_out_or_everyone_in_is_refused(written: Any) -> None:
    problem = the_problem(with_tier(file_mode=written))
    assert problem.startswith(f"secondary_tiers[0].file_mode: got {json.dumps(written)}")
    assert 'allowed: "0600"' in problem


def test_a_decimal_file_mode_shows_what_it_really_is() -> None:
    assert "got 640, which is 0o1200" in the_problem(with_tier(file_mode=640))


# --- rules between keys --------------------------------------------------------------------------


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, None])
def test_both_chunk_sizes_are_refused_naming_both(blocks_per_chunk: int | None) -> None:
    problems = problems_of({**HOST, "block_size": 64, "blocks_per_chunk": blocks_per_chunk})
    assert problems[-1].startswith("block_size, blocks_per_chunk: got 64 and ")


@pytest.mark.parametrize("threshold", [2, 3])
def test_a_store_threshold_is_refused_with_several_tiers(threshold: int) -> None:
    assert parse({**HOST, "store_threshold": threshold}).store_threshold == threshold
    problem = the_problem({**TIERING, "store_threshold": threshold})
    assert problem.startswith(f"store_threshold: got {threshold}; ")
    assert parse({**TIERING, "store_threshold": 1}).store_threshold == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CPUOffloadingSpec", "nearest: NixlCPUOffloadingSpec"),
        ("TieringOffloadingSpec", "nearest: NixlTieringOffloadingSpec"),
        ("NixlTieringOfloadingSpec", "nearest: NixlTieringOffloadingSpec"),
        ("NixlDirectOfloadingSpec", "nearest: NixlDirectOffloadingSpec"),
    ],
)
@pytest.mark.parametrize("path", [None, "pdoffload.vllm"])
def test_an_unknown_spec_names_the_nearest(name: str, said: str, path: str | None) -> None:
    problem = the_problem({**HOST, "spec_name": name, "spec_module_path": path})
    assert problem.startswith("spec_name: ")
    assert said in problem


def test_a_spec_from_elsewhere_is_taken_with_its_module() -> None:
    parsed = parse({**HOST, "spec_name": "MySpec", "spec_module_path": "my.specs"})
    assert (parsed.spec_name, parsed.spec_module_path) == ("MySpec", "my.specs")


def test_a_policy_of_ones_own_needs_its_module() -> None:
    problem = the_problem({**HOST, "eviction_policy": "LRUU"})
    assert problem.startswith('eviction_policy: got "LRUU"; nearest: lru; ')
    assert "cache_policy_module_path" in problem
    own = {**HOST, "eviction_policy": "Mine", "cache_policy_module_path": "my.policies"}
    assert parse(own).eviction_policy == "Mine"


@pytest.mark.parametrize("second", ["/kv", "/kv/", "/kv/../kv", "/./kv"])
def test_two_tiers_on_one_root_are_refused(second: str) -> None:
    tiers = [{"type": "fs", "root_dir": "/kv"}, {"type": "fs", "root_dir": second}]
    problem = the_problem({**TIERING, "secondary_tiers": tiers})
    assert problem.startswith("secondary_tiers[1].root_dir: ")
    assert "secondary_tiers[0]" in problem


# --- tiers ---------------------------------------------------------------------------------------


def test_tiers_keep_their_order() -> None:
    tiers = [{"type": "fs", "root_dir": root} for root in ("/b", "/a", "/c")]
    parsed = parse({**TIERING, "secondary_tiers": tiers})
    roots = [tier.root_dir for tier in parsed.secondary_tiers if isinstance(tier, FsTierConfig)]
    assert roots == ["/b", "/a", "/c"]


@pytest.mark.parametrize("kind", ["obj"])
def test_a_tier_of_a_later_version_is_told_apart_from_a_wrong_one(kind: str) -> None:
    for table in ({"type": kind}, {"type": kind, "module_path": "my.tiers"}):
        problem = the_problem({**TIERING, "secondary_tiers": [table]})
        assert problem == (
            f"secondary_tiers[0].type: '{kind}' is not available in this version; "
            "available: fs, p2p, or the name of a class together with module_path"
        )


@pytest.mark.parametrize("table", [{}, {"type": "FS"}, {"type": "disk"}, {"type": 3}])
def test_an_unknown_tier_type_names_the_known(table: dict[str, Any]) -> None:
    problem = the_problem({**TIERING, "secondary_tiers": [table]})
    assert problem.startswith("secondary_tiers[0].type: ")
    assert "allowed: fs, p2p, or the name of a class together with module_path" in problem


def test_a_tier_from_elsewhere_keeps_its_own_keys() -> None:
    table = {"type": "Mine", "module_path": "my.tiers", "depth": {"a": [1]}, "options": 2}
    parsed = parse({**TIERING, "secondary_tiers": [table]})
    assert parsed.secondary_tiers == (
        CustomTierConfig(
            type="Mine", module_path="my.tiers", options={"depth": {"a": [1]}, "options": 2}
        ),
    )


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"type": "Mine", "module_path": ""}, "module_path"),
        ({"type": "Mine", "module_path": None}, "module_path"),
        ({"type": "my-tier", "module_path": "my.tiers"}, "type"),
        ({"module_path": "my.tiers"}, "type"),
    ],
)
def test_a_tier_from_elsewhere_needs_a_name_and_a_module(table: dict[str, Any], key: str) -> None:
    assert the_problem({**TIERING, "secondary_tiers": [table]}).startswith(
        f"secondary_tiers[0].{key}: "
    )


# --- what is said about a right one --------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_config", "key"),
    [
        (TIERING, "secondary_tiers"),
        ({**HOST, "verify": "off"}, "verify"),
        ({**HOST, "cache_policy_module_path": "my.policies"}, "cache_policy_module_path"),
        (with_tier(root_dir="kv"), "secondary_tiers[0].root_dir"),
        (with_tier(root_dir="~/kv"), "secondary_tiers[0].root_dir"),
        (with_tier(min_free_bytes=0), "secondary_tiers[0].min_free_bytes"),
    ],
)
def test_what_is_perhaps_not_meant_is_warned_of(extra_config: dict[str, Any], key: str) -> None:
    (line,) = config.warnings(parse(extra_config))
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "extra_config", [HOST, with_tier(), with_tier(max_bytes=9, min_free_bytes=0)]
)
def test_an_ordinary_configuration_warns_of_nothing(extra_config: dict[str, Any]) -> None:
    assert config.warnings(parse(extra_config)) == []


def test_the_description_shows_every_setting_and_no_secret() -> None:
    tiers = [
        {"type": "fs", "root_dir": "/kv", "file_mode": "0640", "locality": "LOCAL"},
        {"type": "Mine", "module_path": "my.tiers", "password": "hunter2"},
    ]
    said = config.describe(parse({**TIERING, "secondary_tiers": tiers}))
    shown = dict(line.replace(" ", "").split("=") for line in said.splitlines())
    assert shown["cpu_bytes_to_use"] == "1073741824(1GiB)"
    assert shown["verify"] == "always"
    assert shown["model_identity"] == "none"
    assert shown["secondary_tiers[0].file_mode"] == "0640"
    assert shown["secondary_tiers[0].locality"] == "LOCAL"
    assert shown["secondary_tiers[1].password"] == "(given)"
    assert "hunter2" not in said
    for key in OffloadConfig.__struct_fields__:
        assert key in said


def test_a_path_that_would_break_the_line_is_quoted() -> None:
    said = config.describe(parse(with_tier(root_dir="/kv\n/x\x1b[2J")))
    assert '= "/kv\\n/x\\u001b[2J"' in said
    assert all(line.isprintable() for line in said.splitlines())


# --- anything at all -----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KNOWN_KEYS = st.sampled_from(
    (
        *OffloadConfig.__struct_fields__,
        *FsTierConfig.__struct_fields__,
        *P2pTierConfig.__struct_fields__,
    )
)
TABLE = st.dictionaries(KNOWN_KEYS | st.text(max_size=8), JSON, max_size=6)
TIER_TABLE = st.builds(
    lambda kind, table: {**table, "type": kind}, st.sampled_from(("fs", "p2p")), TABLE
)


@settings(deadline=None)
@given(TABLE, st.lists(TIER_TABLE | TABLE | JSON, max_size=3))
def test_whatever_is_given_is_parsed_or_refused_with_its_reasons(
    host: dict[str, Any], tiers: list[Any]
) -> None:
    said: tuple[str, ...] = ()
    try:
        parsed = parse({**HOST, **host, "secondary_tiers": tiers})
    except ConfigError as error:
        said = error.problems
    else:
        assert len(parsed.secondary_tiers) == len(tiers)
        said = (*config.describe(parsed).splitlines(), *config.warnings(parsed))
    assert said
    assert all(line.isprintable() for line in said)
