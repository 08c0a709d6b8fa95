"""Collecting what need not be kept under a root directory, beside engines that run.

Only what has our own layout is looked at: namespaces whose `config.json` stands beside them, in them chunk
files in their right place, and the folders of writers that are dead. Links are not followed. Files go as an
engine's quota lets them go: under the evictor's lock, entered in the ledger if there is one, and never while
somebody reads them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pdoffload.clock import Clock
from pdoffload.config.reading import suggestion
from pdoffload.errors import ConfigError, PdOffloadError
from pdoffload.layout import BlockKey
from pdoffload.tiers.chunkfile import TRAILER_BYTES, stated_chunk_bytes
from pdoffload.tiers.fs.gc_removal import Remover
from pdoffload.tiers.fs.paths import CONFIG_NAME, Namespace
from pdoffload.tiers.fs.walk import Found, empty_folders, files_in, prefixes
from pdoffload.tiers.fs.writer import sweep, unfinished
from pdoffload.tiers.gc import Amount, GcPolicy, GcReport, NamespaceReport

_log = logging.getLogger(__name__)

_NAMESPACE = re.compile(r"(.+_[0-9a-f]{12})_r\d+")
_SAMPLES = 3
"""Files of one size whose trailer is read to learn the length of a chunk."""
_MOST_SIZES = 64
EMPTY_QUIET_S = 3600.0
"""A folder that has been empty for so long goes: nobody is just about to rename a file into it."""


class _File(NamedTuple):
    """Sorts by the time of last use."""

    used_s: float
    size_bytes: int
    key: BlockKey


class _Looked(NamedTuple):
    space: Namespace
    report: NamespaceReport
    files: list[_File]
    """Those that are of use."""
    spoilt: list[_File]
    """Those of a wrong size."""


class FsCollector:
    """The collector of one root directory."""

    def __init__(self, root_dir: str) -> None:
        self._root_dir = os.path.abspath(root_dir)

    def __repr__(self) -> str:
        return f"<FsCollector {self._root_dir}>"

    def __call__(self, policy: GcPolicy, *, delete: bool, clock: Clock) -> GcReport:
        """See `Collector`. Takes about 200 bytes of memory for each file."""
        problems: list[str] = []
        names, skipped = self._names(policy)
        now_s = clock.wall_s()
        looked = [each for name in names if (each := self._look(name, clock, problems))]
        chosen = _choose(looked, policy, now_s)
        if delete:
            for each, files in zip(looked, chosen, strict=True):
                self._remove(each, files, clock, now_s, problems)
        return GcReport(
            store="fs",
            root=self._root_dir,
            deleted=delete,
            namespaces=[each.report for each in looked],
            skipped=skipped,
            problems=problems,
        )

    def _names(self, policy: GcPolicy) -> tuple[list[str], list[str]]:
        """The namespaces to look at, sorted; and what is left alone, and why."""
        try:
            with os.scandir(self._root_dir) as entries:
                folders = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise ConfigError(
                [f"root_dir: {self._root_dir!r} cannot be read: {error.strerror}"]
            ) from error
        known, skipped = [], []
        for name in sorted(folders):
            match = _NAMESPACE.fullmatch(name)
            if match is None:
                continue
            config = f"{self._root_dir}/{match[1]}/{CONFIG_NAME}"
            if os.path.isfile(config) and not os.path.islink(config):
                known.append(name)
            else:
                skipped.append(f"{name}: left alone: there is no {config}")
        if policy.namespace is None:
            return known, skipped
        if policy.namespace not in known:
            raise ConfigError(
                [
                    f"--namespace: {policy.namespace!r} is not under {self._root_dir!r}; "
                    f"{suggestion(policy.namespace, known)}"
                ]
            )
        return [policy.namespace], []

    def _look(self, name: str, clock: Clock, problems: list[str]) -> _Looked | None:
        base = f"{self._root_dir}/{name}"
        report = NamespaceReport(
            name=name,
            chunks=Amount(),
            unverified=Amount(),
            wrong_size=Amount(),
            unfinished=Amount(),
            being_written=Amount(),
            to_go={},
            removed=Amount(),
        )
        try:
            config = os.stat(f"{base.rpartition('_r')[0]}/{CONFIG_NAME}")
            space = Namespace.found(base, stat.S_IMODE(config.st_mode))
            found = [
                _File(max(each.used_s, each.read_s), each.size_bytes, each.key)
                for each in _walk(base)
            ]
            (dead, dead_bytes), (live, live_bytes) = unfinished(space, clock)
        except OSError as error:
            problems.append(f"{name}: cannot be read: {error.filename}: {error.strerror}")
            return None
        found.sort()
        report.unfinished.add(dead_bytes, dead)
        report.being_written.add(live_bytes, live)
        if dead:
            report.to_go["unfinished"] = Amount(files=dead, size_bytes=dead_bytes)
        lengths = _chunk_lengths(space, found)
        sound = lengths | {length + TRAILER_BYTES for length in lengths}
        looked = _Looked(space, report, [], [])
        for each in found:
            report.chunks.add(each.size_bytes)
            if not sound or each.size_bytes in sound:
                looked.files.append(each)
                if each.size_bytes in lengths:
                    report.unverified.add(each.size_bytes)
            else:
                looked.spoilt.append(each)
                report.wrong_size.add(each.size_bytes)
        if found:
            report.oldest_use_s, report.newest_use_s = found[0].used_s, found[-1].used_s
        return looked

    def _remove(
        self,
        looked: _Looked,
        files: Sequence[_File],
        clock: Clock,
        now_s: float,
        problems: list[str],
    ) -> None:
        space, report = looked.space, looked.report
        if "unfinished" in report.to_go:
            try:
                count, size_bytes = sweep(space, clock)
                report.removed.add(size_bytes, count)
            except OSError as error:
                problems.append(f"{report.name}: {error}")
        if files:
            used_s = {each.key: each.used_s for each in files}
            try:
                with contextlib.closing(Remover(space, clock)) as remover:
                    remover.remove(used_s)
                report.removed.add(remover.tally.removed_bytes, remover.tally.removed)
                report.kept_in_use = remover.kept_in_use
                problems += (f"{report.name}: {line}" for line in remover.problems)
            except (PdOffloadError, OSError) as error:
                problems.append(f"{report.name}: {error}")
        report.empty_folders = _remove_empty(space, now_s - EMPTY_QUIET_S)


def _walk(base: str) -> Iterator[Found]:
    for prefix in prefixes(base):
        yield from files_in(base, prefix)


def _chunk_lengths(space: Namespace, files: Sequence[_File]) -> set[int]:
    """What sound trailers of the namespace state; one such file of a size speaks for all of that size."""
    by_size: dict[int, list[_File]] = defaultdict(list)
    for each in files:
        by_size[each.size_bytes].append(each)
    lengths = set()
    for size_bytes in sorted(by_size, key=lambda size: len(by_size[size]))[-_MOST_SIZES:]:
        for each in by_size[size_bytes][-_SAMPLES:]:
            stated = stated_chunk_bytes(_last_page(space.path(each.key), size_bytes))
            if stated is not None and stated + TRAILER_BYTES == size_bytes:
                lengths.add(stated)
                break
    return lengths


def _last_page(path: str, size_bytes: int) -> bytes:
    """Empty if it cannot be read. That we look is no use of the file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags | os.O_NOATIME)
        except PermissionError:
            fd = os.open(path, flags)
        try:
            return os.pread(fd, TRAILER_BYTES, max(0, size_bytes - TRAILER_BYTES))
        finally:
            os.close(fd)
    except OSError:
        return b""


def _choose(looked: Sequence[_Looked], policy: GcPolicy, now_s: float) -> list[list[_File]]:
    """What has to go of each namespace; its report says why."""
    chosen: list[list[_File]] = [list(each.spoilt) for each in looked]
    for each in looked:
        if each.spoilt:
            each.report.to_go["wrong_size"] = each.report.wrong_size
    left: list[tuple[_File, int]] = []
    for number, each in enumerate(looked):
        old = Amount()
        for file in each.files:
            if policy.older_than_s is not None and now_s - file.used_s > policy.older_than_s:
                old.add(file.size_bytes)
                chosen[number].append(file)
            else:
                left.append((file, number))
        if old.files:
            each.report.to_go["older_than"] = old
    if policy.max_bytes is None:
        return chosen
    excess_bytes = sum(file.size_bytes for file, _ in left) - policy.max_bytes
    left.sort()
    for file, number in left:
        if excess_bytes <= 0:
            break
        excess_bytes -= file.size_bytes
        looked[number].report.to_go.setdefault("max_bytes", Amount()).add(file.size_bytes)
        chosen[number].append(file)
    return chosen


def _remove_empty(space: Namespace, before_s: float) -> int:
    removed = 0
    try:
        paths: Iterable[str] = (
            path
            for prefix in prefixes(space.base)
            for path in empty_folders(space.base, prefix, before_s=before_s)
        )
        for path in paths:
            with contextlib.suppress(OSError):  # a file came into it this moment
                os.rmdir(path)
                removed += 1
    except OSError as error:
        _log.debug("%s: %s", space.base, error)
    return removed
