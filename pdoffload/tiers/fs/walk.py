"""The chunk files of a namespace, folder by folder. Nothing but files in their right place is found.

<base>/<hhh>/<hh>_g<group>/<hash>.bin
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from pdoffload.layout import BlockKey, make_key

_FIRST_DIR = re.compile(r"[0-9a-f]{3}")
_SECOND_DIR = re.compile(r"([0-9a-f]{2})_g(0|[1-9]\d{0,9})")
_CHUNK_NAME = re.compile(r"((?:[0-9a-f]{2})+)\.bin")
_MAX_GROUP = 2**32 - 1


class Found(NamedTuple):
    """A chunk file. `used_s` is its modification time, which the quota sets at each use; `read_s` its access
    time, which the kernel sets, once a day at least unless the disk is mounted with `noatime`."""

    key: BlockKey
    path: str
    size_bytes: int
    used_s: float
    read_s: float


def prefixes(base: str) -> list[str]:
    """Those `<hhh>` that have a folder. `OSError` if `base` cannot be read."""
    with os.scandir(base) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(name for name in names if _FIRST_DIR.fullmatch(name))


def files_in(base: str, prefix: str) -> Iterator[Found]:
    """The chunk files under `<base>/<prefix>`. What vanishes meanwhile was removed by another process.

    `OSError` where a folder cannot be read. Links are never followed.
    """
    for second in _entries(f"{base}/{prefix}"):
        place = _SECOND_DIR.fullmatch(second.name)
        if place is None or not second.is_dir(follow_symlinks=False):
            continue
        begin, group = prefix + place[1], int(place[2])
        if group > _MAX_GROUP:
            continue
        for entry in _entries(second.path):
            name = _CHUNK_NAME.fullmatch(entry.name)
            if name is None or not name[1].startswith(begin):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    key = make_key(bytes.fromhex(name[1]), group)
                    yield Found(key, entry.path, status.st_size, status.st_mtime, status.st_atime)


def empty_folders(base: str, prefix: str, *, before_s: float) -> Iterator[str]:
    """Folders for chunk files that hold nothing, and have held nothing new since `before_s`."""
    for second in _entries(f"{base}/{prefix}"):
        if not _SECOND_DIR.fullmatch(second.name) or not second.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):
            if second.stat(follow_symlinks=False).st_mtime < before_s and not _entries(second.path):
                yield second.path


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
