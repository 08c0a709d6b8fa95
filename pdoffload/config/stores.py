"""The rules of an obj tier's table: the store, and names that cannot leave their prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pdoffload.config.options import ObjTierConfig
from pdoffload.config.reading import keys_of, read, shown, text
from pdoffload.config.store_options import StoreConfig

_ENDPOINT = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[A-Za-z0-9._/-]*)?"
)
_PART = re.compile(r"[A-Za-z0-9._=-]+")
LONGEST_PREFIX = 512
_AWS_ONLY = ("access_key", "secret_key", "session_token", "region")
_NO_QUOTA = (
    "max_bytes: an object store is not emptied by this tier, NIXL deletes no object; set a lifecycle rule "
    "on the bucket, or run pdoffload gc"
)


class Endpoint(msgspec.Struct, frozen=True):
    """Where a store listens."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}{self.path}"


def read_obj_tier(
    given: Mapping[str, Any], where: str, problems: list[str]
) -> ObjTierConfig | None:
    """An obj tier's table; None where it has left its problems behind. `where` stands before each key."""
    found: list[str] = []
    plain = {key: value for key, value in given.items() if key != "max_bytes"}
    if "max_bytes" in given:
        found.append(f"{where}{_NO_QUOTA}")
    store = plain.pop("store_config", None)
    inner: list[str] = []
    if isinstance(store, Mapping):
        values = read(StoreConfig, store, f"{where}store_config.", inner)
        inner += (
            f"{where}store_config.{line}"
            for line in _store_problems(values, store, str(plain.get("backend", "OBJ")))
        )
    own = read(ObjTierConfig, plain, where, found)
    missing = f"{where}store_config: required and missing"
    found = [line for line in found if not line.startswith(missing)]
    if store is None:
        found.append(f"{missing}; allowed: an object with bucket, endpoint_override and the like")
    elif not isinstance(store, Mapping):
        found.append(
            f"{where}store_config: got a value of type {type(store).__name__}; allowed: an object"
        )
    wrong = prefix_problem(own.get("prefix", ""))
    if wrong:
        found.append(f"{where}prefix: {wrong}")
    found += inner
    problems += found
    if found:
        return None
    return ObjTierConfig(**own, store_config=StoreConfig(**values))


def prefix_problem(prefix: str) -> str:
    """Why `prefix` is none; empty if it is.

    A dot segment would leave the prefix, and the bucket too, and stores and their proxies fold slashes.
    Other letters are spelt in more than one way (spaces, accents), and then nothing is found again.
    """
    if not prefix:
        return ""
    (key,) = (key for key in keys_of(ObjTierConfig) if key.name == "prefix")
    reason = ""
    parts = prefix.split("/")
    if len(prefix) > LONGEST_PREFIX:
        reason = f"{len(prefix)} characters"
    elif "" in parts:
        reason = "a slash at the start, at the end, or two in a row"
    elif {".", ".."} & set(parts):
        reason = "a dot segment"
    elif not all(_PART.fullmatch(part) for part in parts):
        reason = "a character that stores do not all spell alike"
    return f"got {shown(prefix)}, which has {reason}; allowed: {key.allowed}" if reason else ""


def _store_problems(values: Mapping[str, Any], given: Mapping[str, Any], backend: str) -> list[str]:
    problems = []
    azure = backend == "AZURE_BLOB"
    endpoint = values.get("endpoint_override", "")
    told = _ENDPOINT.fullmatch(endpoint)
    (key,) = (key for key in keys_of(StoreConfig) if key.name == "endpoint_override")
    if endpoint and (told is None or int(told["port"] or 1) not in range(1, 65536)):
        # Whatever it is, it may be a URL with a password in it.
        problems.append(f"endpoint_override: not an address; allowed: {key.allowed}")
    elif told and told["scheme"] and told["scheme"] != values.get("scheme", told["scheme"]):
        problems.append(
            f"scheme: got {shown(values['scheme'])}, and endpoint_override says {told['scheme']}; "
            "leave one of them out"
        )
    if "." in values.get("bucket", "") and azure:
        problems.append(f"bucket: got {shown(values['bucket'])}; a container of Azure has no dots")
    if bool(values.get("access_key")) != bool(values.get("secret_key")):
        problems.append(
            "access_key, secret_key: one is given without the other; give both, or none"
        )
    if values.get("session_token") and not values.get("access_key"):
        problems.append("session_token: given without access_key and secret_key; give all three")
    if azure:
        problems += (
            f"{name}: is for S3 stores; with AZURE_BLOB give connection_string, or nothing"
            for name in _AWS_ONLY
            if given.get(name)
        )
        problems += _connection_problems(values.get("connection_string", ""))
        if not endpoint and not values.get("connection_string"):
            problems.append(
                "connection_string, endpoint_override: neither is given; AZURE_BLOB needs one of them"
            )
    elif values.get("connection_string"):
        problems.append(
            "connection_string: is for AZURE_BLOB; with OBJ give access_key and secret_key"
        )
    return problems


def _connection_problems(connection_string: str) -> list[str]:
    given = _blob_endpoint(connection_string)
    if not connection_string or (given and _ENDPOINT.fullmatch(given.rstrip("/"))):
        return []
    return [
        "connection_string: says nowhere which account or which BlobEndpoint (a URL) is meant; copy it "
        "from the account's access keys"
    ]


def endpoint_of(tier: ObjTierConfig) -> Endpoint:
    """Where the tier's store listens."""
    store = tier.store_config
    given, scheme = store.endpoint_override, str(store.scheme)
    if tier.backend == "AZURE_BLOB" and store.connection_string:
        given = _blob_endpoint(store.connection_string)
        scheme = "https"
    if not given:
        given = f"s3.{store.region or 'us-east-1'}.amazonaws.com"
    told = _ENDPOINT.fullmatch(given.rstrip("/"))
    assert told is not None, "checked where it was read"
    scheme = told["scheme"] or scheme
    port = int(told["port"] or (443 if scheme == "https" else 80))
    return Endpoint(scheme, told["host"], port, told["path"] or "")


def connection_parts(connection_string: str) -> dict[str, str]:
    """What stands in an Azure connection string: `AccountName=...;AccountKey=...`."""
    pairs = (part.partition("=") for part in connection_string.split(";") if part)
    return {name.strip(): value for name, _, value in pairs}


def _blob_endpoint(connection_string: str) -> str:
    parts = connection_parts(connection_string)
    if "BlobEndpoint" in parts:
        return parts["BlobEndpoint"]
    if "AccountName" not in parts:
        return ""
    suffix = parts.get("EndpointSuffix", "core.windows.net")
    scheme = parts.get("DefaultEndpointsProtocol", "https")
    return f"{scheme}://{parts['AccountName']}.blob.{suffix}"


def obj_warnings(tier: ObjTierConfig) -> list[str]:
    """What works, but perhaps not as meant: one line each, naming the key."""
    endpoint, found = endpoint_of(tier), []
    if endpoint.scheme == "http" and endpoint.host not in ("localhost", "127.0.0.1", "[::1]"):
        found.append(
            f"store_config.scheme: http, so chunks travel to {endpoint.host} unencrypted; set https"
        )
    secrets = [
        key.name
        for key in keys_of(StoreConfig)
        if key.secret and getattr(tier.store_config, key.name)
    ]
    if secrets:
        found.append(
            f"store_config.{', '.join(secrets)}: vLLM prints its configuration into its log at start, "
            "with what stands here; leave them out where the log is not as secret as they are, and let "
            "the SDK find credentials in the environment, its files or the machine's role"
        )
    return found


def store_rows(store: StoreConfig) -> list[tuple[str, str]]:
    """Every key of the store with its value in words; of a credential whether it is given."""
    return [
        (
            f"store_config.{key.name}",
            _said_of(getattr(store, key.name))
            if key.secret
            else text(getattr(store, key.name), key.unit),
        )
        for key in keys_of(StoreConfig)
    ]


def _said_of(secret: str) -> str:
    return "(given)" if secret else "none"
