"""What the file system under a namespace and NIXL's POSIX plugin can do, found out at start."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
from typing import Literal

import msgspec

from pdoffload.agent.backends import PosixBackend
from pdoffload.agent.nixl import probe
from pdoffload.config import FsTierConfig
from pdoffload.errors import ConfigError
from pdoffload.layout import PAGE_BYTES
from pdoffload.tiers.batches import Limits
from pdoffload.tiers.paths import Namespace
from pdoffload.tiers.writer import WriterDir

_log = logging.getLogger(__name__)

Queue = Literal["uring", "aio", "posix_aio"]
_QUEUES: tuple[Queue, ...] = ("uring", "aio", "posix_aio")
_MAX_BATCH_CHUNKS = 64
_MAX_BATCH_BYTES = 32 << 20
_MAX_IOS = 2 * _MAX_BATCH_CHUNKS
"""A chunk and its trailer each."""


class Abilities(msgspec.Struct, frozen=True):
    """What was found. `open_flags` is `O_DIRECT` or 0."""

    open_flags: int
    shows_holes: bool


def probe_files(
    config: FsTierConfig, space: Namespace, writer: WriterDir, address: int
) -> Abilities:
    """Write one small file as chunks are written. Raises `ConfigError` if no file can be written at all.

    `address` is the pool's: direct I/O needs it on a page.
    """
    try:
        shows_holes = _try_write(writer.temp_path(), space.file_mode, 0)
    except OSError as error:
        raise ConfigError(
            [f"root_dir: no file can be written to {space.root_dir!r}: {error.strerror}"]
        ) from error
    if config.direct == "off":
        return Abilities(0, shows_holes)
    refusal = ""
    if address % PAGE_BYTES:
        refusal = f"the pool at {address:#x} is not on a page"
    else:
        try:
            _try_write(writer.temp_path(), space.file_mode, os.O_DIRECT)
        except OSError as error:
            refusal = (
                f"{os.strerror(error.errno or 0)} ({errno.errorcode.get(error.errno or 0, '?')})"
            )
    if refusal:
        level = logging.WARNING if config.direct == "on" else logging.INFO
        _log.log(level, "%s: direct I/O is refused: %s; mode: buffered", space.base, refusal)
    return Abilities(0 if refusal else os.O_DIRECT, shows_holes)


def _try_write(path: str, mode: int, flags: int) -> bool:
    """Write the second of two pages, then the first; whether the hole showed meanwhile."""
    page = mmap.mmap(-1, PAGE_BYTES)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, mode)
    try:
        os.ftruncate(fd, 2 * PAGE_BYTES)
        os.pwrite(fd, page, PAGE_BYTES)
        shows_holes = os.lseek(fd, 0, os.SEEK_HOLE) == 0
        os.pwrite(fd, page, 0)
        return shows_holes and os.lseek(fd, 0, os.SEEK_HOLE) == 2 * PAGE_BYTES
    finally:
        os.close(fd)
        os.unlink(path)


def posix_backend(config: FsTierConfig) -> PosixBackend:
    """The plugin's parameters for `config`, tried out. Raises `ConfigError` with every reason."""
    if config.backend not in ("auto", "POSIX"):
        raise ConfigError(
            [f"backend: {config.backend!r} is not usable in this version; use auto or POSIX"]
        )
    queues: tuple[Queue, ...] = _QUEUES if config.io == "auto" else (config.io,)
    reasons: list[str] = []
    for queue in queues:
        backend = PosixBackend(queue=queue, max_ios=_MAX_IOS)
        reason = probe(backend)
        if reason is None:
            refused = f" ({'; '.join(reasons)})" if reasons else ""
            _log.info("fs tier moves bytes through NIXL POSIX, queue %s%s", queue, refused)
            return backend
        reasons.append(f"{queue}: {reason}")
    raise ConfigError([f"io: {config.io!r} is not usable here: {'; '.join(reasons)}"])


def batch_limits(num_threads: int) -> tuple[Limits, int]:
    """How much one batch holds, and how many I/O threads each side may have.

    All threads together use at most half of the file descriptors the process may open.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    chunks = max(4, min(_MAX_BATCH_CHUNKS, soft // 64))
    return Limits(chunks, _MAX_BATCH_BYTES), max(1, min(num_threads, soft // 4 // chunks))
