"""What a request's `kv_transfer_params` ask of this peer: to keep blocks, to get them, or both.

The keys are those of vLLM's p2p tier, and whoever routes requests sends them. Roles are per request: any
process may be producer and consumer at once. Other keys of the params belong to other connectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdoffload.config.hosts import HOST_ALLOWED, host_problem, normal_host
from pdoffload.config.reading import about, read, shown
from pdoffload.p2p.address import Address

_PRODUCE, _PULL, _ASK = "remote_decoder", "remote_prefiller", "remote_kv_source"

# As long as one on the wire may be: pdoffload.p2p.messages.
RequestId = Annotated[str, Meta(min_length=1, max_length=1024)]
_ID = about("The name under which both peers know this request's blocks.")


class Source(msgspec.Struct, frozen=True):
    """The peer that a request's blocks come from."""

    kv_request_id: str
    address: Address
    asks: bool
    """Whether a lookup round comes first. Without one every block is taken to be there."""


class Roles(msgspec.Struct, frozen=True):
    """What this peer does for one request. `producer_id`: the id under which its blocks are kept."""

    producer_id: str | None = None
    source: Source | None = None


class _DecoderTable(msgspec.Struct, frozen=True):
    kv_request_id: Annotated[RequestId, _ID]


class _SourceTable(msgspec.Struct, frozen=True):
    kv_request_id: Annotated[RequestId, _ID]
    remote_host: Annotated[str, about("Where that peer is dialled.", allowed=HOST_ALLOWED)]
    remote_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)], about("The port that it bound, index included.")
    ]


_TABLES: dict[str, type[msgspec.Struct]] = {
    _PRODUCE: _DecoderTable,
    _PULL: _SourceTable,
    _ASK: _SourceTable,
}
_NONE = Roles()


def roles_of(params: Any) -> Roles | tuple[str, ...]:
    """The roles in a request's `params`, or every problem with them: key, value, what is allowed, remedy.

    Routers write null for what they do not mean, so a key with null counts as absent. Called once per
    request on the scheduler's thread: without any of the keys it costs three look-ups. Nothing is resolved.
    """
    if params is None:
        return _NONE
    if not isinstance(params, Mapping):
        return (f"kv_transfer_params: got {shown(params)}; allowed: an object, or null",)
    given = {key: params[key] for key in _TABLES if params.get(key) is not None}
    if not given:
        return _NONE
    problems = _pair_problems(given)
    values = {key: _read(key, table, problems) for key, table in given.items()}
    if problems:
        return tuple(problems)
    producer = values.get(_PRODUCE)
    asked = values.get(_PULL) or values.get(_ASK)
    source = None
    if asked is not None:
        address = Address(normal_host(asked["remote_host"]), asked["remote_port"])
        source = Source(asked["kv_request_id"], address, asks=_ASK in values)
    return Roles(producer["kv_request_id"] if producer else None, source)


def _pair_problems(given: Mapping[str, Any]) -> list[str]:
    """Two sources would each claim the same blocks; a prefiller's decoder is one and does not prefill."""
    if len(given) == 1 or given.keys() == {_PRODUCE, _ASK}:
        return []
    return [
        f"{', '.join(given)}: got {len(given)} roles for one request; allowed together: {_PRODUCE} and "
        f"{_ASK}; send one of them, or null for the other{'s' if len(given) > 2 else ''}"
    ]


def _read(key: str, table: Any, problems: list[str]) -> dict[str, Any]:
    """The values of one role's table, complete unless it has left problems."""
    names = ", ".join(_TABLES[key].__struct_fields__)
    if not isinstance(table, Mapping):
        problems.append(f"{key}: got {shown(table)}; allowed: an object with {names}, or null")
        return {}
    values = read(_TABLES[key], table, f"{key}.", problems)
    wrong = host_problem(values["remote_host"]) if "remote_host" in values else ""
    if wrong:
        problems.append(f"{key}.remote_host: {wrong}")
    return values
