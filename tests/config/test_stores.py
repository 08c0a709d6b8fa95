"""The table of an obj tier: every problem told, no credential shown, no prefix that can be left."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdoffload.config import ObjTierConfig, StoreConfig, describe, parse, warnings
from pdoffload.config.stores import LONGEST_PREFIX, connection_parts, endpoint_of, prefix_problem
from pdoffload.errors import ConfigError

SECRETS = ("obviously-fake-id", "obviously-fake-secret", "obviously-fake-token")
STORE = {"bucket": "chunks", "endpoint_override": "localhost:9000"}
KEYS = dict(zip(("access_key", "secret_key", "session_token"), SECRETS, strict=True))


def with_tier(store: Any = STORE, **tier: Any) -> dict[str, Any]:
    return {
        "spec_name": "NixlTieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [{"type": "obj", "store_config": store, **tier}],
    }


def tier_of(store: Any = STORE, **tier: Any) -> ObjTierConfig:
    (parsed,) = parse(with_tier(store, **tier)).secondary_tiers
    assert isinstance(parsed, ObjTierConfig)
    return parsed


def problems_of(store: Any = STORE, **tier: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(with_tier(store, **tier))
    return caught.value.problems


def test_defaults_are_those_of_vllm() -> None:
    tier = tier_of()
    assert (tier.prefix, tier.io_threads, tier.backend) == ("", 4, "OBJ")
    assert tier.store_config == StoreConfig(bucket="chunks", endpoint_override="localhost:9000")
    assert tier.store_config.scheme == "http"
    assert warnings(parse(with_tier())) == []


def test_all_problems_of_a_table_are_told_together() -> None:
    problems = problems_of(
        {"bucket": "X", "endpoint": "here", "scheme": "ftp", "secret_key": SECRETS[1]},
        prefix="/kv",
        io_threads=0,
        io_thread=3,
        backend="S3",
    )
    told = "\n".join(problems)
    for part in (
        "secondary_tiers[0].io_thread: unknown key; nearest: io_threads",
        "secondary_tiers[0].io_threads: got 0; allowed: a whole number, 1 to 64",
        'secondary_tiers[0].backend: got "S3"; allowed: AZURE_BLOB, OBJ',
        'secondary_tiers[0].prefix: got "/kv", which has a slash at the start',
        'secondary_tiers[0].store_config.bucket: got "X"; allowed: 3 to 63',
        "secondary_tiers[0].store_config.endpoint: unknown key; nearest: endpoint_override",
        'secondary_tiers[0].store_config.scheme: got "ftp"; allowed: http, https',
        "secondary_tiers[0].store_config.access_key, secret_key: one is given without the other",
    ):
        assert part in told
    assert len(problems) == 8


@pytest.mark.parametrize("value", [0, -1, "16", 1.5, "abc", None, True, 10**12, float("nan")])
def test_c12_impossible_numbers_are_problems(value: Any) -> None:
    (problem,) = problems_of(io_threads=value)
    assert problem.startswith("secondary_tiers[0].io_threads: got ")


def test_a_quota_is_refused_with_what_to_use_instead() -> None:
    (problem,) = problems_of(max_bytes=10)
    assert problem.startswith("secondary_tiers[0].max_bytes: ")
    assert "lifecycle rule" in problem
    assert "pdoffload gc" in problem


@pytest.mark.parametrize("store", [None, 7, "chunks", []])
def test_a_store_that_is_no_object_is_told_once_and_not_shown(store: Any) -> None:
    (problem,) = problems_of(store)
    assert problem.startswith("secondary_tiers[0].store_config: ")
    assert "chunks" not in problem


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        ("/kv", "a slash at the start"),
        ("kv/", "a slash at the start, at the end"),
        ("kv//a", "two in a row"),
        ("../x", "a dot segment"),
        ("kv/../../x", "a dot segment"),
        ("kv/./x", "a dot segment"),
        ("my chunks", "a character"),
        ("кэш", "a character"),
        ("kv\\x", "a character"),
        ("kv\n", "a character"),
        ("%2e%2e/x", "a character"),
        ("a" * (LONGEST_PREFIX + 1), "513 characters"),
    ],
)
def test_a_prefix_that_could_be_left_or_spelt_otherwise_is_refused(
    prefix: str, reason: str
) -> None:
    (problem,) = problems_of(prefix=prefix)
    assert problem.startswith("secondary_tiers[0].prefix: got ")
    assert reason in problem


@pytest.mark.parametrize("prefix", ["", "kv", "a/b/c", "v1.2_x-y=z", "..kv", "a" * 300])
def test_a_plain_prefix_is_taken_as_it_is(prefix: str) -> None:
    assert prefix_problem(prefix) == ""
    assert tier_of(prefix=prefix).prefix == prefix


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({"endpoint_override": "host:9000"}, "http://host:9000"),
        ({"endpoint_override": "http://host:9000/"}, "http://host:9000"),
        ({"endpoint_override": "https://host"}, "https://host:443"),
        ({"endpoint_override": "host", "scheme": "https"}, "https://host:443"),
        ({"endpoint_override": "[::1]:9000"}, "http://[::1]:9000"),
        ({"endpoint_override": "http://host/base"}, "http://host:80/base"),
        ({"region": "eu-west-1", "scheme": "https"}, "https://s3.eu-west-1.amazonaws.com:443"),
    ],
)
def test_an_endpoint_is_taken_with_and_without_its_scheme(given: dict[str, str], url: str) -> None:
    assert endpoint_of(tier_of({"bucket": "chunks", **given})).url == url


@pytest.mark.parametrize(
    "endpoint", ["ftp://host", "host:70000", "host:0", "http://", "a b", "http://me:pass@host"]
)
def test_what_is_no_endpoint_is_refused_without_being_shown(endpoint: str) -> None:
    (problem,) = problems_of({**STORE, "endpoint_override": endpoint})
    assert problem.startswith("secondary_tiers[0].store_config.endpoint_override: not an address")
    assert "pass" not in problem


def test_a_scheme_that_contradicts_the_endpoint_is_refused() -> None:
    store = {"bucket": "chunks", "endpoint_override": "https://host", "scheme": "http"}
    (problem,) = problems_of(store)
    assert "endpoint_override says https" in problem


def test_http_to_another_host_is_a_warning() -> None:
    (line,) = warnings(parse(with_tier({**STORE, "endpoint_override": "store.example:9000"})))
    assert line.startswith("secondary_tiers[0].store_config.scheme: http")
    assert "unencrypted" in line


def test_credentials_in_the_configuration_are_a_warning_that_names_the_keys() -> None:
    (line,) = warnings(parse(with_tier({**STORE, **KEYS})))
    assert line.startswith(
        "secondary_tiers[0].store_config.access_key, secret_key, session_token: vLLM prints"
    )


def test_azure_takes_a_connection_string_and_says_what_is_not_for_it() -> None:
    text = "AccountName=fake;AccountKey=ZmFrZQ==;BlobEndpoint=http://127.0.0.1:1000/fake;"
    tier = tier_of({"bucket": "chunks", "connection_string": text}, backend="AZURE_BLOB")
    assert endpoint_of(tier).url == "http://127.0.0.1:1000/fake"
    assert connection_parts(text)["AccountKey"] == "ZmFrZQ=="
    short = {"bucket": "chunks", "connection_string": "AccountName=fake;AccountKey=ZmFrZQ=="}
    host = endpoint_of(tier_of(short, backend="AZURE_BLOB"))
    assert host.url == "https://fake.blob.core.windows.net:443"
    told = "\n".join(problems_of({"bucket": "a.b", **KEYS}, backend="AZURE_BLOB"))
    for part in ("bucket:", "access_key: is for S3", "neither is given"):
        assert part in told
    (problem,) = problems_of({**STORE, "connection_string": text})
    assert "is for AZURE_BLOB" in problem
    for nonsense in ("nonsense", "BlobEndpoint=nonsense url"):
        (problem,) = problems_of(
            {"bucket": "chunks", "connection_string": nonsense}, backend="AZURE_BLOB"
        )
        assert problem.startswith("secondary_tiers[0].store_config.connection_string: ")
        assert "nonsense" not in problem


def test_no_way_of_printing_a_configuration_shows_a_credential() -> None:
    config = parse(with_tier({**STORE, **KEYS}))
    (tier,) = config.secondary_tiers
    assert isinstance(tier, ObjTierConfig)
    said = [describe(config), repr(config), repr(tier), str(tier), repr(tier.store_config)]
    said += [f"{config}", *warnings(config), repr(msgspec.structs.astuple(config))]
    for secret in SECRETS:
        assert not [line for line in said if secret in line]
    assert "store_config.secret_key" in describe(config)
    assert "(given)" in describe(config)


@pytest.mark.parametrize("key", [*KEYS, "connection_string"])
def test_no_problem_shows_a_credential(key: str) -> None:
    for wrong in ([SECRETS[1]], {"value": SECRETS[1]}):
        told = "\n".join(problems_of({**STORE, **KEYS, key: wrong}, nonsense=1))
        assert f"store_config.{key}: got a value of type" in told
        assert not [secret for secret in SECRETS if secret in told]
