"""The value of vLLM's `--kv-transfer-config`, checked before an engine is started with it.

vLLM reads the outer object itself; what matters to us in it is which connector it names. Inside
MultiConnector the members that are not ours are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from pdoffload.config import parse, warnings
from pdoffload.config.options import (
    ADAPTER_MODULE,
    DIRECT_SPEC,
    SPECS,
    ModulePath,
    Name,
    OffloadConfig,
)
from pdoffload.config.reading import about, name_text, read, shown, suggestion
from pdoffload.errors import ConfigError

OWN_CONNECTOR = "PdOffloadConnector"
STOCK_CONNECTOR = "OffloadingConnector"
MULTI_CONNECTOR = "MultiConnector"

_ANY = about("Read by vLLM.", allowed="see vLLM")


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's KVTransferConfig, with the keys that concern us typed."""

    kv_connector: Annotated[Name, about("Which connector.")]
    kv_connector_module_path: Annotated[
        ModulePath | None, about("Where it is imported from.", allowed="a dotted import path")
    ] = None
    kv_role: Annotated[
        Literal["kv_both", "kv_producer", "kv_consumer"], about("Stores, loads, or both.")
    ]
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"], about("What a failed load does to its request.")
    ] = "fail"
    kv_connector_extra_config: Annotated[
        dict[str, Any], about("Our settings.", allowed="an object")
    ] = {}
    engine_id: Annotated[Any, _ANY] = None
    kv_buffer_device: Annotated[Any, _ANY] = None
    kv_port: Annotated[Any, _ANY] = None
    enable_permute_local_kv: Annotated[Any, _ANY] = None


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was found to be right: each of our connectors by its place, and what to think over."""

    connectors: tuple[tuple[str, OffloadConfig], ...]
    warnings: tuple[str, ...]


def check_text(written: str) -> Checked:
    """As `check`, for JSON text. A key that stands twice in one object is a problem too."""
    repeated: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        repeated.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    try:
        given = json.loads(written, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"not JSON: {error}"]) from error
    problems = [f"{name_text(name)}: given twice in one object" for name in repeated]
    try:
        checked = check(given)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    return checked


def check(given: Any) -> Checked:
    """Check a whole `--kv-transfer-config` object, or a `kv_connector_extra_config` alone.

    Raises `ConfigError` with every problem found, in whichever member of a MultiConnector.
    """
    if not isinstance(given, Mapping):
        raise ConfigError([f"got {shown(given)}; allowed: an object"])
    if not any(str(name).startswith("kv_") for name in given):
        config = parse(given)
        return Checked(connectors=(("", config),), warnings=tuple(warnings(config)))
    problems: list[str] = []
    found: list[tuple[str, OffloadConfig]] = []
    _check_connector(given, "", problems, found)
    if not found and not problems:
        problems.append(f"connectors: none of them is {OWN_CONNECTOR} or has one of our specs")
    if problems:
        raise ConfigError(problems)
    notes = [f"{where}{line}" for where, config in found for line in warnings(config)]
    if given.get("kv_load_failure_policy", "fail") == "fail":
        notes.append(
            "kv_load_failure_policy: fail, so a failed load ends its request; recompute saves it"
        )
    return Checked(connectors=tuple(found), warnings=tuple(notes))


def _check_connector(
    given: Mapping[str, Any],
    where: str,
    problems: list[str],
    found: list[tuple[str, OffloadConfig]],
) -> None:
    member = bool(where)
    if member and not _is_ours(given):
        return
    values = read(TransferConfig, given, where, problems)
    connector = values.get("kv_connector")
    extra = values.get("kv_connector_extra_config", {})
    if connector == MULTI_CONNECTOR and not member:
        _check_members(extra, problems, found)
    elif connector in (OWN_CONNECTOR, STOCK_CONNECTOR):
        problems += (f"{where}{line}" for line in _path_problems(values, extra))
        try:
            found.append((where, parse(extra)))
        except ConfigError as error:
            problems += (f"{where}{line}" for line in error.problems)
    elif connector is not None:
        known = (OWN_CONNECTOR, STOCK_CONNECTOR, MULTI_CONNECTOR)
        problems.append(
            f"{where}kv_connector: got {shown(connector)}; {suggestion(connector, known)}"
        )


def _check_members(
    extra: Mapping[str, Any], problems: list[str], found: list[tuple[str, OffloadConfig]]
) -> None:
    members = extra.get("connectors")
    if not isinstance(members, list):
        problems.append(f"connectors: got {shown(members)}; allowed: a list of connectors")
        return
    for i, member in enumerate(members):
        if isinstance(member, Mapping):
            _check_connector(member, f"connectors[{i}].", problems, found)
        else:
            problems.append(f"connectors[{i}]: got {shown(member)}; allowed: an object")


def _is_ours(member: Mapping[str, Any]) -> bool:
    """Whether a member of MultiConnector means to be ours: one of our names stands in it."""
    extra = member.get("kv_connector_extra_config")
    paths = [member.get("kv_connector_module_path")]
    if isinstance(extra, Mapping):
        paths += (extra.get("spec_module_path"), extra.get("spec_name"))
    return member.get("kv_connector") == OWN_CONNECTOR or any(
        path == ADAPTER_MODULE or path in SPECS for path in paths
    )


def _path_problems(values: Mapping[str, Any], extra: Mapping[str, Any]) -> list[str]:
    """vLLM finds our classes by module path alone."""
    if values["kv_connector"] == OWN_CONNECTOR:
        given = values.get("kv_connector_module_path")
        if given == ADAPTER_MODULE:
            return []
        return [f'kv_connector_module_path: got {shown(given)}; allowed: "{ADAPTER_MODULE}"']
    if "spec_name" not in extra:
        return [
            f"spec_name: required and missing; under {STOCK_CONNECTOR} vLLM's own spec would run; "
            f"allowed: {', '.join(SPECS)}"
        ]
    if extra["spec_name"] == DIRECT_SPEC:
        return [
            f"kv_connector: {DIRECT_SPEC} needs {OWN_CONNECTOR}; under {STOCK_CONNECTOR} a chunk file "
            "that cannot be read would stop the engine"
        ]
    if extra.get("spec_module_path") is None:
        return [f'spec_module_path: required and missing; allowed: "{ADAPTER_MODULE}"']
    return []
