"""What a router may ask of a peer in `kv_transfer_params`, and what is said when it cannot be."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.p2p.address import Address
from pdoffload.p2p.messages import Fetch, decode, encode
from pdoffload.p2p.roles import Roles, Source, roles_of

DECODER = {"kv_request_id": "r-1"}
PEER = {"kv_request_id": "r-2", "remote_host": "10.0.0.11", "remote_port": 5710}
TABLES = {"remote_decoder": DECODER, "remote_prefiller": PEER, "remote_kv_source": PEER}
AT = Address("10.0.0.11", 5710)


def problems_of(params: Any) -> tuple[str, ...]:
    problems = roles_of(params)
    assert isinstance(problems, tuple)
    assert problems
    return problems


def the_problem(params: Any) -> str:
    (problem,) = problems_of(params)
    return problem


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"max_offload_tokens": 100},
        {"remote_decoder": None, "remote_prefiller": None, "remote_kv_source": None},
        {"do_remote_decode": True, "remote_host": None, "remote_block_ids": [1, 2]},
    ],
)
def test_params_without_a_role_ask_for_nothing(params: Any) -> None:
    assert roles_of(params) == Roles(producer_id=None, source=None)


def test_a_prefiller_keeps_its_blocks_under_the_id() -> None:
    assert roles_of({"remote_decoder": DECODER}) == Roles("r-1", None)


def test_a_decoder_pulls_without_asking() -> None:
    assert roles_of({"remote_prefiller": PEER}) == Roles(None, Source("r-2", AT, asks=False))


def test_a_consumer_of_a_prefix_asks_first() -> None:
    assert roles_of({"remote_kv_source": PEER}) == Roles(None, Source("r-2", AT, asks=True))


def test_a_prefiller_may_take_its_prefix_from_a_third_peer() -> None:
    params = {"remote_decoder": DECODER, "remote_kv_source": PEER, "remote_prefiller": None}
    assert roles_of(params) == Roles("r-1", Source("r-2", AT, asks=True))


@pytest.mark.parametrize(
    "keys",
    [
        keys
        for n in (2, 3)
        for keys in itertools.combinations(TABLES, n)
        if keys != ("remote_decoder", "remote_kv_source")
    ],
)
def test_every_other_combination_names_its_keys(keys: tuple[str, ...]) -> None:
    problem = the_problem({key: TABLES[key] for key in keys})
    assert problem.startswith(f"{', '.join(keys)}: got {len(keys)} roles for one request; ")
    assert "allowed together: remote_decoder and remote_kv_source" in problem


@pytest.mark.parametrize("key", TABLES)
@pytest.mark.parametrize("value", ["r-1", 1, True, False, [], [DECODER], 0, ""])
def test_a_role_that_is_no_object_says_what_it_holds(key: str, value: Any) -> None:
    problem = the_problem({key: value})
    assert problem.startswith(f"{key}: got {json.dumps(value)}; allowed: an object with ")
    assert all(name in problem for name in TABLES[key])


@pytest.mark.parametrize("value", ["", None, 7, True, ["r"], "x" * 1025, "half a pair \ud800"])
@pytest.mark.parametrize("key", TABLES)
def test_an_id_is_a_text_of_bounded_length(key: str, value: Any) -> None:
    problem = the_problem({key: {**TABLES[key], "kv_request_id": value}})
    assert problem.startswith(f"{key}.kv_request_id: got ")
    assert problem.endswith("; allowed: a non-empty string of at most 1024 characters")
    assert len(problem) < 250


def test_the_longest_id_fits_the_wire() -> None:
    longest = "x" * 1024
    roles = roles_of({"remote_decoder": {"kv_request_id": longest}})
    assert roles == Roles(longest, None)
    fetch = Fetch(kv_request_id=longest, keys=(), block_indexes=(), round_seq=0)
    assert decode(encode(fetch)) == fetch


@pytest.mark.parametrize("value", ["5710", 0, -1, 65536, True, None, 1.5, [5710]])
@pytest.mark.parametrize("key", ["remote_prefiller", "remote_kv_source"])
def test_a_port_is_a_number_that_can_be_dialled(key: str, value: Any) -> None:
    assert the_problem({key: {**PEER, "remote_port": value}}) == (
        f"{key}.remote_port: got {json.dumps(value)}; allowed: a whole number, 1 to 65535"
    )


@pytest.mark.parametrize("value", ["", None, 5710, True, ["10.0.0.11"]])
def test_a_host_of_a_wrong_type_says_what_is_allowed(value: Any) -> None:
    problem = the_problem({"remote_prefiller": {**PEER, "remote_host": value}})
    assert problem.startswith(f"remote_prefiller.remote_host: got {json.dumps(value)}; allowed: ")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0.0.0.0", "which stands for every address"),
        ("tcp://10.0.0.11", "leave the scheme and slashes out"),
        ("10.0.0.11:5710", "the port has a key of its own"),
    ],
)
def test_a_host_that_cannot_be_dialled_says_why(value: str, said: str) -> None:
    problem = the_problem({"remote_kv_source": {**PEER, "remote_host": value}})
    assert problem.startswith(f'remote_kv_source.remote_host: got "{value}", ')
    assert said in problem


@pytest.mark.parametrize("written", ["::1", "[::1]", "0:0:0:0:0:0:0:1"])
def test_every_spelling_of_an_address_is_one_peer(written: str) -> None:
    roles = roles_of({"remote_prefiller": {**PEER, "remote_host": written}})
    assert isinstance(roles, Roles)
    assert roles.source is not None
    assert roles.source.address == Address("::1", 5710)


@pytest.mark.parametrize(("key", "table"), TABLES.items())
def test_a_missing_key_is_named(key: str, table: dict[str, Any]) -> None:
    for name in table:
        problem = the_problem({key: without(table, name)})
        assert problem.startswith(f"{key}.{name}: required and missing; allowed: ")


@pytest.mark.parametrize(
    ("key", "name", "nearest"),
    [
        ("remote_decoder", "kv_requestid", "nearest: kv_request_id"),
        ("remote_decoder", "remote_host", "known: kv_request_id"),
        ("remote_prefiller", "remote_hosts", "nearest: remote_host"),
        ("remote_kv_source", "remoteport", "nearest: remote_port"),
    ],
)
def test_an_unknown_key_in_a_role_names_the_nearest(key: str, name: str, nearest: str) -> None:
    assert the_problem({key: {**TABLES[key], name: 1}}) == f"{key}.{name}: unknown key; {nearest}"


def test_all_problems_are_reported_together() -> None:
    params = {
        "remote_prefiller": {"kv_request_id": "", "remote_port": "5710", "remote_hots": "a"},
        "remote_kv_source": {**PEER, "remote_host": "*"},
    }
    assert [line.split(":")[0] for line in problems_of(params)] == [
        "remote_prefiller, remote_kv_source",
        "remote_prefiller.kv_request_id",
        "remote_prefiller.remote_port",
        "remote_prefiller.remote_hots",
        "remote_prefiller.remote_host",
        "remote_kv_source.remote_host",
    ]


@pytest.mark.parametrize("params", ["remote_decoder", 3, True, ["remote_decoder"], 0])
def test_params_that_are_no_object_are_refused(params: Any) -> None:
    assert the_problem(params).startswith("kv_transfer_params: got ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TABLE = st.dictionaries(st.sampled_from(tuple(PEER)) | st.text(max_size=8), JSON, max_size=4)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(tuple(TABLES)), TABLE | st.just(PEER) | JSON, max_size=3))
def test_whatever_is_sent_is_understood_or_refused_with_its_reasons(params: dict[str, Any]) -> None:
    roles = roles_of(params)
    if isinstance(roles, tuple):
        assert all(line.isprintable() for line in roles)
    elif roles.source is not None:
        assert roles.source.address.port > 0
        assert Address.from_identity(roles.source.address.identity) == roles.source.address
