"""What direct offloading takes of the settings: one fs table, and no host pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdoffload.config.options import DIRECT_SPEC, FsTierConfig, OffloadConfig, TierConfig
from pdoffload.config.reading import keys_of, shown

_ONE_TABLE = f"{DIRECT_SPEC} wants exactly one table, of type fs"


def missing_host_bytes(given: Mapping[str, Any]) -> str:
    """The problem of a spec with a host pool and no size for it."""
    (key,) = (key for key in keys_of(OffloadConfig) if key.name == "cpu_bytes_to_use")
    allowed = key.allowed.removesuffix(", or null")
    what = "got null" if "cpu_bytes_to_use" in given else "required and missing"
    return f"cpu_bytes_to_use: {what}; allowed: {allowed}"


def direct_problems(
    values: Mapping[str, Any], given_tiers: Any, tiers: Sequence[TierConfig | None]
) -> list[str]:
    """What cannot work together with the direct spec. `tiers` has None for a table with problems."""
    problems = []
    threshold = values.get("store_threshold", 0)
    if threshold >= 2:
        problems.append(
            f"store_threshold: got {threshold}; with {DIRECT_SPEC} every block is stored; "
            "allowed: 0 or 1"
        )
    if not isinstance(given_tiers, list | tuple):
        return problems
    if len(tiers) != 1:
        got = f"got {len(tiers)} tables" if tiers else "none"
        return [*problems, f"secondary_tiers: {got}; {_ONE_TABLE}"]
    (tier,) = tiers
    if isinstance(tier, FsTierConfig):
        if tier.max_bytes is not None:
            problems.append(
                f"secondary_tiers[0].max_bytes: got {tier.max_bytes}; {DIRECT_SPEC} keeps no quota in "
                "this version; leave it out: min_free_bytes is kept"
            )
        if tier.io == "posix_aio":
            problems.append(
                'secondary_tiers[0].io: got "posix_aio"; after one failed read that queue never tells '
                "when device memory is left alone; allowed: auto, uring, aio"
            )
    elif tier is not None:
        problems.append(f"secondary_tiers[0].type: got {shown(tier.type)}; {_ONE_TABLE}")
    return problems


def direct_warnings(config: OffloadConfig) -> list[str]:
    """Settings of the host pool, which the direct spec does not have."""
    defaults = {key.name: key.default for key in keys_of(OffloadConfig)}
    unused = (
        "cpu_bytes_to_use",
        "eviction_policy",
        "cache_policy_module_path",
        "max_tracker_size",
        "n_transfer_threads",
    )
    return [
        f"{name}: not used, {DIRECT_SPEC} has no host pool"
        for name in unused
        if getattr(config, name) != defaults[name]
    ]
