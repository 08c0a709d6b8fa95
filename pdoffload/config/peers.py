"""The rules of a p2p tier's table, and the address it binds.

Rules that need the resolver or the file system (what a name stands for, whether the secret can be read)
are for whoever opens the tier.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pdoffload.config.hosts import Reach, host_problem, normal_host, reach_of
from pdoffload.config.options import (
    LATER_P2P_BACKENDS,
    P2P_BACKENDS,
    P2P_DEFAULT_HOST,
    P2P_DEFAULT_PORT,
    P2P_HOST_VARIABLE,
    P2P_PORT_VARIABLE,
    P2pTierConfig,
)
from pdoffload.config.reading import read, shown, suggestion
from pdoffload.errors import ConfigError

_LARGEST_PORT = 65535
_PORT_TEXT = re.compile(r"[0-9]{1,5}")


def read_p2p_tier(
    given: Mapping[str, Any], where: str, problems: list[str]
) -> P2pTierConfig | None:
    """A p2p tier's table; None where it has left its problems behind. `where` stands before each key."""
    found: list[str] = []
    values = read(P2pTierConfig, given, where, found)
    host = values.get("host")
    if host is not None:
        guarded = (
            given.get("cluster_secret_file") is not None
            or given.get("allow_unauthenticated", False) is not False
        )
        wrong = host_problem(host) or _exposure_problem(host, guarded=guarded)
        if wrong:
            found.append(f"{where}host: {wrong}")
        else:
            values["host"] = normal_host(host)
    found += (f"{where}backends: {line}" for line in _backend_problems(values.get("backends")))
    if (
        not found
        and values.get("ucx_tls") is not None
        and "UCX" not in values.get("backends", ["UCX"])
    ):
        found.append(
            f"{where}ucx_tls: got {shown(values['ucx_tls'])}, and backends names no UCX that it could "
            "mean; leave it out"
        )
    allowed = given.get("allow_unauthenticated", False) is not False
    if host is not None and not allowed and opens_memory(values.get("backends", ()), host):
        found.append(f"{where}backends: {memory_exposed(host)}")
    problems += found
    return None if found else P2pTierConfig(**values)


def _backend_problems(names: tuple[str, ...] | None) -> list[str]:
    if names is None:
        return []
    available = f"available: {', '.join(P2P_BACKENDS)}"
    if not names:
        return [f"got []; one at least is needed; {available}"]
    problems = [
        f"{shown(name)} is not available in this version; {available}"
        if name in LATER_P2P_BACKENDS
        else f"got {shown(name)}; {suggestion(name, (*P2P_BACKENDS, *LATER_P2P_BACKENDS))}"
        for name in dict.fromkeys(names)
        if name not in P2P_BACKENDS
    ]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    return [*problems, *(f"{shown(name)} is named twice; name it once" for name in twice)]


def exposed(host: str) -> str:
    """What is said of a bare control channel at a `host` that others can reach."""
    return (
        f"got {shown(host)}, which other hosts can reach, without cluster_secret_file; set it, or bind "
        "localhost, or set allow_unauthenticated to true where the network itself is guarded"
    )


def opens_memory(backends: Sequence[str], host: str) -> bool:
    """Whether one of `backends` lets other hosts at the memory, as far as the text of `host` tells.

    MOONCAKE listens without authentication (docs/decisions/0014-mooncake.md).
    """
    return "MOONCAKE" in backends and reach_of(host) is Reach.NETWORK


def memory_exposed(host: str) -> str:
    """What is said of MOONCAKE at a `host` that others can reach."""
    return (
        f'got "MOONCAKE", by which whoever reaches {shown(host)} can read and write host memory, with or '
        "without cluster_secret_file; bind localhost, or name another backend, or set "
        "allow_unauthenticated to true where the network itself is guarded"
    )


def _exposure_problem(host: str, *, guarded: bool) -> str:
    """Empty where nothing is exposed, as far as the text of `host` tells."""
    return "" if guarded or reach_of(host) is not Reach.NETWORK else exposed(host)


def resolve_p2p_address(
    tier: P2pTierConfig, environ: Mapping[str, str], data_parallel_index: int
) -> tuple[str, int]:
    """Host and port to bind: from the table, else from `environ`, else the defaults.

    Port 0 stays 0, any free port; another one is the base, to which `data_parallel_index` is added. A
    variable that is set to nothing counts as not set. The host's spelling is the normal one, so that it
    is a peer's name as well; a name is not resolved. Raises `ConfigError` with every problem, each
    naming the key or the variable that the value came from.
    """
    problems: list[str] = []
    host = _host(tier, environ, problems)
    key, base = _base_port(tier, environ, problems)
    port = base + data_parallel_index if base else 0
    if port > _LARGEST_PORT:
        problems.append(
            f"{key}: got {base}, and with data-parallel index {data_parallel_index} port {port} would "
            f"be bound; allowed: at most {_LARGEST_PORT - data_parallel_index}"
        )
    if problems:
        raise ConfigError(problems)
    return host, port


def _host(tier: P2pTierConfig, environ: Mapping[str, str], problems: list[str]) -> str:
    if tier.host is not None:
        return tier.host
    given = environ.get(P2P_HOST_VARIABLE) or P2P_DEFAULT_HOST
    guarded = tier.cluster_secret_file is not None or tier.allow_unauthenticated
    wrong = host_problem(given) or _exposure_problem(given, guarded=guarded)
    if wrong:
        problems.append(f"{P2P_HOST_VARIABLE}: {wrong}")
    elif not tier.allow_unauthenticated and opens_memory(tier.backends, given):
        problems.append(f"backends: {memory_exposed(given)}")
    return normal_host(given)


def _base_port(
    tier: P2pTierConfig, environ: Mapping[str, str], problems: list[str]
) -> tuple[str, int]:
    """The base port, and the name of what it came from."""
    if tier.port is not None:
        return "port", tier.port
    given = environ.get(P2P_PORT_VARIABLE)
    if not given:
        return "port", P2P_DEFAULT_PORT
    if _PORT_TEXT.fullmatch(given) and int(given) <= _LARGEST_PORT:
        return P2P_PORT_VARIABLE, int(given)
    problems.append(
        f"{P2P_PORT_VARIABLE}: got {shown(given)}; allowed: a whole number, 0 to {_LARGEST_PORT}"
    )
    return P2P_PORT_VARIABLE, 0


def p2p_warnings(tier: P2pTierConfig) -> list[str]:
    """What works, but perhaps not as meant: one line each, naming the key."""
    found = []
    secret = tier.cluster_secret_file
    if secret is not None and secret.startswith(("~", "$")):
        found.append(
            f"cluster_secret_file: {shown(secret)} is taken literally, nothing is expanded"
        )
    if tier.allow_unauthenticated:
        found.append(
            "allow_unauthenticated: true, so whoever reaches the port can read the KV cache"
            if secret is None
            else "allow_unauthenticated: true, so whoever reaches the host can read and write its memory"
            if "MOONCAKE" in tier.backends
            else "allow_unauthenticated: not used, cluster_secret_file is set"
        )
    elif secret is None and tier.host is not None and reach_of(tier.host) is Reach.UNRESOLVED:
        found.append(
            f"host: {shown(tier.host)} without cluster_secret_file, so the tier starts only where "
            "that name means loopback"
        )
    return found
