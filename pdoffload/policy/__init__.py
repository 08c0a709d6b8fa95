"""The room of eviction policies: who leaves the host pool. `policy.base.Policy` is the contract."""

from __future__ import annotations

import importlib
import inspect

from pdoffload.config.reading import shown, suggestion
from pdoffload.errors import ConfigError
from pdoffload.policy.arc import Arc
from pdoffload.policy.base import Policy
from pdoffload.policy.lru import Lru

__all__ = ["Arc", "Lru", "Policy", "make_policy"]

_BUILT_IN: dict[str, type[Policy]] = {"lru": Lru, "arc": Arc}


def make_policy(name: str, capacity: int, module_path: str | None = None) -> Policy:
    """The policy called `name`, for `capacity` residents.

    A built-in name wins; any other is a class derived from `Policy`, imported from `module_path`.
    Importing it runs that module's code. Raises `ConfigError` for a name, module or class that does not
    serve, and `MisuseError` for a capacity below 1.
    """
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        return built_in(capacity)
    if module_path is None:
        raise ConfigError(
            [
                f"eviction_policy: got {shown(name)}; {suggestion(name, _BUILT_IN)}; allowed: "
                f"{', '.join(_BUILT_IN)}, or the name of a class and cache_policy_module_path"
            ]
        )
    found = _import_class(name, module_path)
    try:
        return found(capacity)
    except Exception as error:  # foreign code: whatever it raises, its settings cannot work
        raise ConfigError(
            [f"eviction_policy: {name} of {module_path} cannot be made: {error!r}"]
        ) from error


def _import_class(name: str, module_path: str) -> type[Policy]:
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # foreign code: importing it may raise anything
        raise ConfigError(
            [
                f"cache_policy_module_path: cannot import {shown(module_path)}: {error!r}; "
                "give the dotted path of a module on PYTHONPATH"
            ]
        ) from error
    found = getattr(module, name, None)
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        policies = [
            one
            for one, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Policy) and value is not Policy
        ]
        wrong = "no such name there" if found is None else "not a class derived from Policy"
        known = suggestion(name, policies) if policies else "it holds no policy"
        raise ConfigError([f"eviction_policy: got {shown(name)}, {wrong} ({module_path}); {known}"])
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError([f"eviction_policy: {name} of {module_path} lacks {missing}"])
    return found
