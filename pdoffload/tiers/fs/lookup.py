"""Which chunks stand on the disk: the lookup of the fs tier, by `stat`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from pdoffload.clock import Clock
from pdoffload.layout import BlockKey
from pdoffload.tiers.fs.paths import Namespace, is_chunk_file
from pdoffload.tiers.lookup import ChunkLookup

_log = logging.getLogger(__name__)

Stat = Callable[[str], os.stat_result]


def file_lookup(
    space: Namespace,
    sizes_bytes: tuple[int, ...],
    *,
    timeout_s: float,
    clock: Clock,
    stat: Stat = os.stat,
) -> ChunkLookup:
    """Chunks are there as regular files of one of `sizes_bytes`."""

    def is_there(key: BlockKey) -> bool:
        path = space.path(key)
        try:
            return is_chunk_file(stat(path), sizes_bytes)
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.debug("lookup of %s: %s", path, error)
            return False

    def are_there(keys: Sequence[BlockKey]) -> list[bool]:
        return [is_there(key) for key in keys]

    return ChunkLookup(
        lambda: nullcontext(are_there),
        medium="the file system",
        thread_name="pdoffload-fs-lookup",
        timeout_s=timeout_s,
        clock=clock,
    )
