"""The `config.json` beside stored chunks: what they were made with, compared at every start.

A namespace's name carries a digest of `RunConfig.fields`, so processes that differ there never meet.
`RunConfig.guards` are compared inside the file: a difference would mean a hit rate of zero (keys made in
another way) or worse, and the name cannot tell. Pure.
"""

from __future__ import annotations

import json
from typing import Any

from pdoffload.errors import ConfigError
from pdoffload.layout import RunConfig

_OWN_OBJECT = "pdoffload"
_ABSENT = object()


def config_text(run_config: RunConfig) -> str:
    """The file of `run_config`."""
    own = {_OWN_OBJECT: {"guards": _as_json(run_config.guards)}}
    return json.dumps({**_as_json(run_config.fields), **own}, indent=2, sort_keys=True)


def compare_config(key: str, path: str, stored: bytes, run_config: RunConfig) -> bool:
    """Whether the file `stored` under `path` carries guards; one that stock vLLM wrote does not.

    Raises `ConfigError`, which begins with the setting `key`, unless it is the file of `run_config`.
    """
    theirs = _read(key, path, stored)
    own = theirs.pop(_OWN_OBJECT, None)
    _compare_fields(key, path, theirs, _as_json(run_config.fields))
    if own is None:
        return False
    guards = own.get("guards", {}) if isinstance(own, dict) else {}
    _compare_guards(
        key, path, guards if isinstance(guards, dict) else {}, _as_json(run_config.guards)
    )
    return True


def _as_json(value: Any) -> dict[str, Any]:
    """`value` as it will be read back, so that tuples and lists compare equal."""
    result: dict[str, Any] = json.loads(json.dumps(value))
    return result


def _read(key: str, path: str, stored: bytes) -> dict[str, Any]:
    try:
        theirs = json.loads(stored)
    except ValueError as error:
        raise ConfigError(
            [f"{key}: {path} is not JSON ({error}); restore it, or remove its folder"]
        ) from error
    if not isinstance(theirs, dict):
        raise ConfigError([f"{key}: {path} holds no object; restore it, or remove its folder"])
    return theirs


def _compare_fields(key: str, path: str, stored: dict[str, Any], ours: dict[str, Any]) -> None:
    different = [
        f"{name} is {stored.get(name, 'absent')!r} there and {ours.get(name, 'absent')!r} here"
        for name in sorted({*stored, *ours})
        if stored.get(name, _ABSENT) != ours.get(name, _ABSENT)
    ]
    if different:
        raise ConfigError(
            [
                f"{key}: {path} does not match its folder: {'; '.join(different)}; "
                "it was edited or cut: restore it, or remove the folder"
            ]
        )


def _compare_guards(key: str, path: str, stored: dict[str, Any], ours: dict[str, Any]) -> None:
    problems = [
        f"{name}: the chunks under {path} were made with {stored[name]!r}, this process has "
        f"{ours[name]!r}, so that none of them would ever be found; set it equal, or use another {key}"
        for name in sorted({*stored} & {*ours})
        if stored[name] != ours[name]
    ]
    if problems:
        raise ConfigError(problems)
