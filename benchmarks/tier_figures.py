"""Figures of many contenders in one run, each against its yardsticks."""

from __future__ import annotations

from collections.abc import Mapping

from common import GB, Cost, Spread, ratios


def figures_of(
    costs: Mapping[str, list[Cost]], size_bytes: int, yardsticks: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, Spread]]:
    """Of each contender: GB/s, CPU seconds per GB, and how many times as fast as its yardsticks.

    `yardsticks[who]` are other contenders by a short name, which the figure carries: `ratio_to_NAME`.
    """
    size_gb = size_bytes / GB
    wall_s = {who: [cost.wall_s for cost in each] for who, each in costs.items()}
    found = {}
    for who, each in costs.items():
        figures = {
            "GBps": Spread.of([size_gb / s for s in wall_s[who]]),
            "cpu_s_per_GB": Spread.of([cost.cpu_s / size_gb for cost in each]),
        }
        for name, other in yardsticks.get(who, {}).items():
            # Against itself too: rows of the same figures stand in one table.
            figures[f"ratio_to_{name}"] = Spread.of(ratios(wall_s[other], wall_s[who]))
        found[who] = figures
    return found
