"""What `pdoffload gc` asks of a tier and what a tier answers, whatever it stores on.

A collector looks at everything one tier keeps in its own namespaces, says what would go under a policy, and
removes it if it is told to. It works beside engines that are running, and touches nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdoffload.clock import Clock
from pdoffload.config import FsTierConfig, ObjTierConfig
from pdoffload.errors import ConfigError

SCHEMA_VERSION = 1
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtpe]?)(i?)b?", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MOST_BYTES = 1 << 60
COLLECTED = (FsTierConfig, ObjTierConfig)
"""Kinds of tier that have a collector."""


class GcPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What has to go, besides what no engine can use any more."""

    max_bytes: int | None = None
    """Of all chosen namespaces together; the least recently used go first."""
    older_than_s: float | None = None
    """Not used for so long."""
    namespace: str | None = None
    """Only this one, by its full name."""


class Amount(msgspec.Struct, kw_only=True):
    """So many files or objects."""

    files: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int, files: int = 1) -> None:
        self.files += files
        self.size_bytes += size_bytes


class NamespaceReport(msgspec.Struct, kw_only=True):
    """One namespace, `<model>_<digest>_r<rank>`, as it was found. Times are seconds since the epoch."""

    name: str
    chunks: Amount
    oldest_use_s: float | None = None
    newest_use_s: float | None = None
    unverified: Amount
    """Of `chunks`: of the size of a chunk without a trailer, as vLLM's own tier writes them."""
    wrong_size: Amount
    """Of `chunks`: of a size that no engine of this namespace loads."""
    unfinished: Amount
    """Left by writers that are dead."""
    being_written: Amount
    """By writers that live."""
    to_go: dict[str, Amount]
    """By reason: `unfinished`, `wrong_size`, `older_than`, `max_bytes`."""
    removed: Amount
    kept_in_use: int = 0
    """Were to go, but are being read, or have been used meanwhile."""
    empty_folders: int = 0
    """Removed ones."""

    def due(self) -> Amount:
        """All that is to go."""
        return Amount(
            files=sum(each.files for each in self.to_go.values()),
            size_bytes=sum(each.size_bytes for each in self.to_go.values()),
        )


class GcReport(msgspec.Struct, kw_only=True):
    """One run over one tier."""

    schema_version: int = SCHEMA_VERSION
    store: str
    """`fs`, ..."""
    root: str
    deleted: bool
    """False: a dry run."""
    namespaces: list[NamespaceReport]
    skipped: list[str]
    """What looks like a namespace and is not ours to touch, and why."""
    problems: list[str]
    """What could not be read or removed, a sentence each."""


class Collector(Protocol):
    """Looks, and removes if `delete`. Raises `ConfigError` where there is nothing to look at."""

    def __call__(self, policy: GcPolicy, *, delete: bool, clock: Clock) -> GcReport: ...


def collectors(root_dir: str | None, config_text: str | None) -> list[Collector]:
    """Of a directory, or of every tier of a configuration that has one.

    `config_text` is JSON as for `check_text`. Raises `ConfigError` with every problem.
    """
    if (root_dir is None) == (config_text is None):
        raise ConfigError(["root_dir, --config: give one of the two"])
    if config_text is None:
        assert root_dir is not None
        return [_of(FsTierConfig(root_dir=root_dir))]
    from pdoffload.config.launch import check_text

    tiers = [
        tier for _, config in check_text(config_text).connectors for tier in config.secondary_tiers
    ]
    found = [_of(tier) for tier in tiers if isinstance(tier, COLLECTED)]
    if not found:
        raise ConfigError(["secondary_tiers: none of them keeps anything that could be collected"])
    return found


def _of(tier: FsTierConfig | ObjTierConfig) -> Collector:
    # Imported here: a room is loaded for its own kind of tier alone.
    if isinstance(tier, ObjTierConfig):
        from pdoffload.tiers.obj.gc import ObjCollector

        return ObjCollector(tier)
    from pdoffload.tiers.fs.gc import FsCollector

    return FsCollector(tier.root_dir)


def rows(report: GcReport, now_s: float) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The report as a table: its columns and its cells, one line per namespace and a total."""
    goes = "removed" if report.deleted else "to go"
    columns: tuple[str, ...] = (
        "namespace",
        "files",
        "size",
        "last used",
        "unfinished",
        "wrong size",
        goes,
        "why",
    )
    lines: list[tuple[str, ...]] = []
    total, gone = Amount(), Amount()
    for each in report.namespaces:
        leaves = each.removed if report.deleted else each.due()
        total.add(each.chunks.size_bytes, each.chunks.files)
        gone.add(leaves.size_bytes, leaves.files)
        uses = [each.newest_use_s, each.oldest_use_s]
        lines.append(
            (
                each.name,
                str(each.chunks.files),
                short_size(each.chunks.size_bytes),
                " to ".join(_age(now_s - use) for use in uses if use is not None) or "-",
                _amount(each.unfinished),
                _amount(each.wrong_size),
                _amount(leaves),
                _why(each),
            )
        )
    lines.append(
        ("all", str(total.files), short_size(total.size_bytes), "", "", "", _amount(gone), "")
    )
    return columns, lines


def _why(report: NamespaceReport) -> str:
    reasons = [f"{name} {amount.files}" for name, amount in report.to_go.items()]
    if report.kept_in_use:
        reasons.append(f"kept, in use {report.kept_in_use}")
    return ", ".join(reasons)


def _amount(amount: Amount) -> str:
    return f"{amount.files} ({short_size(amount.size_bytes)})" if amount.files else "0"


def _age(age_s: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if age_s >= 2 * _SECONDS[unit]:
            return f"{age_s / _SECONDS[unit]:.0f}{unit} ago"
    return f"{max(0.0, age_s):.0f}s ago"


def short_size(size_bytes: int) -> str:
    """Three digits and a unit."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if unit != "B" else f"{size_bytes} B"


def to_json(reports: Sequence[GcReport]) -> str:
    """All reports as one JSON list."""
    return msgspec.json.format(msgspec.json.encode(list(reports)), indent=2).decode()


def parse_size(written: str) -> int:
    """Bytes of `200GB`, `1.5 TiB` or `1048576`. Raises `ConfigError`."""
    match = _SIZE.fullmatch(written.strip())
    if match is not None:
        power = " kmgtpe".index(match[2].lower() or " ")
        size_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
        if size_bytes <= _MOST_BYTES and (match[2] or not match[3]):
            return size_bytes
    raise ConfigError(
        [
            f"--max-bytes: got {written!r}; allowed: a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        ]
    )


def parse_age(written: str) -> float:
    """Seconds of `7d`, `12h`, `30m`, `90s` or `2w`. Raises `ConfigError`."""
    match = _AGE.fullmatch(written.strip())
    if match is None:
        raise ConfigError(
            [f"--older-than: got {written!r}; allowed: a number with s, m, h, d or w, such as 7d"]
        )
    return float(match[1]) * _SECONDS[match[2].lower()]
