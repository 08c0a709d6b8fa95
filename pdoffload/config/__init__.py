"""From vLLM's `kv_connector_extra_config` to an `OffloadConfig`: parsed once, all problems at once.

The keys are declared in `pdoffload.config.options`. Only JSON values are read: no environment variable, no
number out of a string, no boolean out of anything but true and false. The one exception is the address of
a p2p tier, for vLLM's own two variables: `resolve_p2p_address`.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Any

import msgspec

from pdoffload.config.direct import direct_problems, direct_warnings, missing_host_bytes
from pdoffload.config.options import (
    ADAPTER_MODULE,
    BUILT_IN_POLICIES,
    CPU_SPEC,
    DIRECT_SPEC,
    LATER_TIER_TYPES,
    SPECS,
    TIER_TYPES,
    TIERING_SPEC,
    CustomTierConfig,
    FsTierConfig,
    Locality,
    OffloadConfig,
    P2pTierConfig,
    TierConfig,
    Verify,
)
from pdoffload.config.peers import p2p_warnings, read_p2p_tier, resolve_p2p_address
from pdoffload.config.reading import keys_of, name_text, read, shown, size_text, suggestion, text
from pdoffload.errors import ConfigError, MisuseError
from pdoffload.layout import Geometry

__all__ = [
    "ADAPTER_MODULE",
    "CPU_SPEC",
    "DIRECT_SPEC",
    "SPECS",
    "TIERING_SPEC",
    "CustomTierConfig",
    "FsTierConfig",
    "Locality",
    "OffloadConfig",
    "P2pTierConfig",
    "TierConfig",
    "Verify",
    "describe",
    "geometry",
    "parse",
    "resolve_p2p_address",
    "resolved",
    "warnings",
]


def parse(extra_config: Mapping[str, Any]) -> OffloadConfig:
    """The configuration in vLLM's `kv_connector_extra_config`, which is left as it is.

    Raises `ConfigError` with every problem found. Looks at nothing but its argument: whether a
    directory or a module exists is found out by whoever uses it.
    """
    if not isinstance(extra_config, Mapping):
        raise ConfigError(
            [f"kv_connector_extra_config: got {shown(extra_config)}; allowed: an object"]
        )
    problems: list[str] = []
    given = dict(extra_config)
    given_tiers = given.pop("secondary_tiers", [])
    values = read(OffloadConfig, given, "", problems)
    tiers = _read_tiers(given_tiers, problems)
    problems += _spec_problems(values, bool(tiers))
    if values.get("spec_name") == DIRECT_SPEC:
        problems += direct_problems(values, given_tiers, tiers)
    elif "cpu_bytes_to_use" not in given or given["cpu_bytes_to_use"] is None:
        problems.append(missing_host_bytes(given))
    problems += _chunk_problems(extra_config)
    problems += _policy_problems(values)
    problems += _shared_root_problems(tiers)
    problems += _second_p2p_problems(given_tiers)
    if problems:
        raise ConfigError(problems)
    return OffloadConfig(**values, secondary_tiers=tuple(tier for tier in tiers if tier))


def _read_tiers(given: Any, problems: list[str]) -> list[TierConfig | None]:
    """One entry per table; None where it cannot be read and has left its problems behind."""
    if not isinstance(given, list | tuple):
        problems.append(f"secondary_tiers: got {shown(given)}; allowed: a list of tier tables")
        return []
    return [_read_tier(one, f"secondary_tiers[{i}]", problems) for i, one in enumerate(given)]


def _read_tier(given: Any, where: str, problems: list[str]) -> TierConfig | None:
    if not isinstance(given, Mapping):
        problems.append(f"{where}: got {shown(given)}; allowed: a tier table, an object with type")
        return None
    kind = given.get("type")
    found_before = len(problems)
    if kind == "fs":
        values = read(FsTierConfig, given, f"{where}.", problems)
        problems += _mode_problems(values, given, where)
        return None if len(problems) > found_before else FsTierConfig(**values)
    if kind == "p2p":
        return read_p2p_tier(given, f"{where}.", problems)
    if "module_path" in given and kind not in LATER_TIER_TYPES:
        own = {name: given[name] for name in ("type", "module_path") if name in given}
        values = read(CustomTierConfig, own, f"{where}.", problems)
        options = {name: value for name, value in given.items() if name not in own}
        if len(problems) > found_before:
            return None
        return CustomTierConfig(**values, options=options)
    problems.append(f"{where}.type: {_type_problem(given)}")
    return None


def _type_problem(given: Mapping[str, Any]) -> str:
    available = f"{', '.join(TIER_TYPES)}, or the name of a class together with module_path"
    if "type" not in given:
        return f"required and missing; allowed: {available}"
    kind = given["type"]
    if kind in LATER_TIER_TYPES:
        return f"{kind!r} is not available in this version; available: {available}"
    near = f" ({suggestion(kind, TIER_TYPES)})" if isinstance(kind, str) else ""
    return f"got {shown(kind)}{near}; allowed: {available}"


def _mode_problems(values: Mapping[str, Any], given: Mapping[str, Any], where: str) -> list[str]:
    mode = values.get("file_mode", 0o600)
    if mode & 0o600 == 0o600 and mode & ~0o664 == 0:
        return []
    (key,) = (key for key in keys_of(FsTierConfig) if key.name == "file_mode")
    octal = f", which is {mode:#o}" if isinstance(given["file_mode"], int) else ""
    return [f"{where}.file_mode: got {shown(given['file_mode'])}{octal}; allowed: {key.allowed}"]


def _spec_problems(values: Mapping[str, Any], has_tiers: bool) -> list[str]:
    spec, module = values.get("spec_name", CPU_SPEC), values.get("spec_module_path")
    problems = []
    if spec not in SPECS and module in (None, ADAPTER_MODULE):
        problems.append(
            f"spec_name: got {shown(spec)}; {suggestion(spec, SPECS)}; "
            "a spec from elsewhere needs spec_module_path"
        )
    if spec == CPU_SPEC and has_tiers:
        problems.append(
            f"secondary_tiers: {CPU_SPEC} has host memory alone; set spec_name to {TIERING_SPEC}"
        )
    threshold = values.get("store_threshold", 0)
    if threshold >= 2 and spec != DIRECT_SPEC and (spec == TIERING_SPEC or has_tiers):
        problems.append(
            f"store_threshold: got {threshold}; with {TIERING_SPEC} or secondary_tiers every "
            "block is stored; allowed: 0 or 1"
        )
    return problems


def _chunk_problems(given: Mapping[str, Any]) -> list[str]:
    if "block_size" not in given or "blocks_per_chunk" not in given:
        return []
    return [
        f"block_size, blocks_per_chunk: got {shown(given['block_size'])} and "
        f"{shown(given['blocks_per_chunk'])}; both set the size of a chunk, give one of them"
    ]


def _policy_problems(values: Mapping[str, Any]) -> list[str]:
    policy = values.get("eviction_policy", "lru")
    if policy in BUILT_IN_POLICIES or values.get("cache_policy_module_path") is not None:
        return []
    return [
        f"eviction_policy: got {shown(policy)}; {suggestion(policy, BUILT_IN_POLICIES)}; "
        "a policy of one's own needs cache_policy_module_path"
    ]


def _shared_root_problems(tiers: list[TierConfig | None]) -> list[str]:
    """Two tiers on one root would each count, evict and sweep the other's files."""
    first: dict[str, int] = {}
    problems = []
    for i, tier in enumerate(tiers):
        if isinstance(tier, FsTierConfig):
            root = os.path.abspath(tier.root_dir)
            if first.setdefault(root, i) != i:
                problems.append(
                    f"secondary_tiers[{i}].root_dir: {shown(tier.root_dir)} is the root of "
                    f"secondary_tiers[{first[root]}] too; each tier needs its own"
                )
    return problems


def _second_p2p_problems(given_tiers: Any) -> list[str]:
    """One socket and one set of agents serve every peer; a right table or not, a second one is wrong."""
    if not isinstance(given_tiers, list | tuple):
        return []
    places = [
        i
        for i, one in enumerate(given_tiers)
        if isinstance(one, Mapping) and one.get("type") == "p2p"
    ]
    return [
        f"secondary_tiers[{i}].type: secondary_tiers[{places[0]}] is a p2p tier already; one is "
        "allowed, and it speaks to any number of peers"
        for i in places[1:]
    ]


def geometry(
    config: OffloadConfig, *, worker_bytes_per_block: int, num_copies: int, blocks_per_chunk: int
) -> Geometry:
    """The host pool that `cpu_bytes_to_use` pays for.

    `worker_bytes_per_block` is what one worker keeps of one device block, `num_copies` the workers
    whose parts make up a chunk (1 where all hold equal bytes). `blocks_per_chunk` comes resolved,
    because `block_size` needs the engine's own block size. Raises `ConfigError` where not one chunk
    fits, `MisuseError` for a number below 1.
    """
    if min(worker_bytes_per_block, num_copies, blocks_per_chunk) < 1:
        raise MisuseError(
            f"geometry needs numbers above 0, got worker_bytes_per_block={worker_bytes_per_block}, "
            f"num_copies={num_copies}, blocks_per_chunk={blocks_per_chunk}"
        )
    if config.cpu_bytes_to_use is None:
        raise MisuseError(f"{config.spec_name} has no host pool")
    one = Geometry(
        num_slots=1, worker_bytes=worker_bytes_per_block * blocks_per_chunk, num_copies=num_copies
    )
    num_slots = config.cpu_bytes_to_use // one.chunk_bytes
    if num_slots < 1:
        raise ConfigError(
            [
                f"cpu_bytes_to_use: got {size_text(config.cpu_bytes_to_use)}, but one chunk takes "
                f"{size_text(one.chunk_bytes)}; give at least that, or make chunks smaller "
                "(block_size, blocks_per_chunk)"
            ]
        )
    return msgspec.structs.replace(one, num_slots=num_slots)


def warnings(config: OffloadConfig) -> list[str]:
    """What works, but perhaps not as meant: one line each, naming the key."""
    found = []
    if config.spec_name == TIERING_SPEC and not config.secondary_tiers:
        found.append(f"secondary_tiers: none, so {TIERING_SPEC} keeps chunks in host memory alone")
    if config.spec_name == DIRECT_SPEC:
        found += direct_warnings(config)
    if config.verify is Verify.OFF:
        found.append("verify: off, so a chunk damaged on disk reaches the model unnoticed")
    if config.eviction_policy in BUILT_IN_POLICIES and config.cache_policy_module_path:
        found.append(
            f"cache_policy_module_path: not used, {config.eviction_policy} is a built-in policy"
        )
    for i, tier in enumerate(config.secondary_tiers):
        if isinstance(tier, FsTierConfig):
            found += (f"secondary_tiers[{i}].{line}" for line in _fs_warnings(tier))
        elif isinstance(tier, P2pTierConfig):
            found += (f"secondary_tiers[{i}].{line}" for line in p2p_warnings(tier))
    return found


def _fs_warnings(tier: FsTierConfig) -> list[str]:
    found = []
    if tier.root_dir.startswith(("~", "$")):
        found.append(f"root_dir: {shown(tier.root_dir)} is taken literally, nothing is expanded")
    elif not os.path.isabs(tier.root_dir):
        found.append(
            f"root_dir: {shown(tier.root_dir)} is relative to the directory the engine starts in"
        )
    if tier.max_bytes is None and not tier.min_free_bytes:
        found.append("min_free_bytes: 0 without max_bytes, so the tier may fill the disk")
    return found


def resolved(config: OffloadConfig) -> list[tuple[str, str]]:
    """Every key with its value in words, in the order of the reference.

    The values of a foreign tier's own keys are left out: they may be secrets.
    """
    rows = [
        (key.name, text(getattr(config, key.name), key.unit))
        for key in keys_of(OffloadConfig)
        if key.name != "secondary_tiers"
    ]
    if not config.secondary_tiers:
        rows.append(("secondary_tiers", "none"))
    for i, tier in enumerate(config.secondary_tiers):
        rows += ((f"secondary_tiers[{i}].{name}", value) for name, value in _tier_rows(tier))
    return rows


def _tier_rows(tier: TierConfig) -> list[tuple[str, str]]:
    if isinstance(tier, CustomTierConfig):
        return [
            ("type", tier.type),
            ("module_path", tier.module_path),
            *((name_text(name), "(given)") for name in tier.options),
        ]
    return [(key.name, text(getattr(tier, key.name), key.unit)) for key in keys_of(type(tier))]


def describe(config: OffloadConfig) -> str:
    """The configuration as it is printed once at start: one `key = value` per line, no secrets."""
    rows = resolved(config)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}} = {value}" for name, value in rows)
