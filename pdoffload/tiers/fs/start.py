"""The start of the fs tier: settings tried out on this machine, until only I/O threads are missing."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
from typing import Literal

import msgspec

from pdoffload.agent.agent import Agent
from pdoffload.agent.backends import Backend, PosixBackend
from pdoffload.agent.descriptors import MemoryKind
from pdoffload.agent.nixl import NixlAgent, probe
from pdoffload.config import FsTierConfig
from pdoffload.errors import ConfigError
from pdoffload.layout import PAGE_BYTES
from pdoffload.tiers.base import TierContext, Verify
from pdoffload.tiers.chunkfile import TRAILER_BYTES, ChunkFormat
from pdoffload.tiers.fs.gds import Use, choose
from pdoffload.tiers.fs.lane import MakeAgent, Terms
from pdoffload.tiers.fs.memory import FsContext, fs_context
from pdoffload.tiers.fs.paths import Namespace, open_namespace
from pdoffload.tiers.fs.quota import Quota
from pdoffload.tiers.fs.writer import WriterDir, sweep

_log = logging.getLogger(__name__)

Queue = Literal["uring", "aio", "posix_aio"]
_QUEUES: tuple[Queue, ...] = ("uring", "aio", "posix_aio")
"""The first two are equally fast and take the same processor time; the last is for systems with neither."""
_MAX_REQUEST_CHUNKS = 32
_MAX_REQUEST_BYTES = 32 << 20
_MAX_IOS = 2 * _MAX_REQUEST_CHUNKS
"""A chunk and its trailer each; as many as the plugin submits at once."""
_MAX_KERNEL_QUEUE = 1024
"""As deep as the plugin makes it; a request has no more pieces than that, if more than one chunk."""


class Start(msgspec.Struct, frozen=True):
    """What `prepare` arrived at."""

    terms: Terms
    num_readers: int
    num_writers: int


def prepare(
    config: FsTierConfig,
    context: TierContext | FsContext,
    *,
    rank: int,
    make_agent: MakeAgent | None,
) -> Start:
    """Try everything out, make folders, and sweep. Raises `ConfigError` before a thread is started."""
    context = fs_context(context)
    space = open_namespace(config.root_dir, context.run_config, rank, config.file_mode)
    sweep(space, context.clock)
    writer = WriterDir(space)
    try:
        return _start(config, context, space, writer, make_agent)
    except BaseException:
        writer.close()
        raise


def _start(
    config: FsTierConfig,
    context: FsContext,
    space: Namespace,
    writer: WriterDir,
    make_agent: MakeAgent | None,
) -> Start:
    memory = context.memory
    abilities = probe_files(config, space, writer, memory.misaligned())
    form = ChunkFormat(memory.chunk_bytes, context.run_config.fingerprint)
    most_chunks, most_threads = request_limits(
        form.chunk_bytes, max(config.n_read_threads, config.n_write_threads), memory.most_pieces
    )
    most_ios = max(_MAX_IOS, most_chunks * (memory.most_pieces + 1))
    if make_agent is None:
        use = Use(
            chunk_bytes=form.chunk_bytes,
            most_chunks=most_chunks,
            most_pieces=memory.most_pieces,
            verify=context.verify,
            shows_holes=abilities.shows_holes,
            open_flags=abilities.open_flags,
            file_mode=space.file_mode,
        )
        make_agent = _agent_maker(config, context, use, writer.temp_path(), most_ios=most_ios)
    quota = (
        None if config.max_bytes is None else Quota(space, writer, config.max_bytes, context.clock)
    )
    terms = Terms(
        memory=memory,
        space=space,
        writer=writer,
        quota=quota,
        make_agent=make_agent,
        verify=context.verify,
        format=form,
        sound_sizes=sound_sizes(form.chunk_bytes, context.verify),
        most_chunks=most_chunks,
        shows_holes=abilities.shows_holes,
        open_flags=abilities.open_flags,
        fsync=config.fsync,
        min_free_bytes=config.min_free_bytes,
        timeout_s=context.transfer_timeout_s,
        clock=context.clock,
    )
    return Start(
        terms,
        num_readers=min(config.n_read_threads, most_threads),
        num_writers=min(config.n_write_threads, most_threads),
    )


class Abilities(msgspec.Struct, frozen=True):
    """What was found. `open_flags` is `O_DIRECT` or 0."""

    open_flags: int
    shows_holes: bool


def probe_files(
    config: FsTierConfig, space: Namespace, writer: WriterDir, misaligned: str
) -> Abilities:
    """Write one small file as chunks are written. Raises `ConfigError` if no file can be written at all.

    `misaligned` says why the memory is not fit for direct I/O, which needs every piece on a page.
    """
    try:
        shows_holes = _try_write(writer.temp_path(), space.file_mode, 0)
    except OSError as error:
        raise ConfigError(
            [f"root_dir: no file can be written to {space.root_dir!r}: {error.strerror}"]
        ) from error
    if config.direct == "off":
        return Abilities(0, shows_holes)
    refusal = misaligned
    if not refusal:
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


def posix_backend(
    config: FsTierConfig, *, direct: bool, most_ios: int = _MAX_IOS, because: str = ""
) -> PosixBackend:
    """The plugin's parameters for `config`, tried out. Raises `ConfigError` with every reason.

    `because` goes into the line that says what was taken.
    """
    queues: tuple[Queue, ...] = _QUEUES if config.io == "auto" else (config.io,)
    reasons: list[str] = []
    for queue in queues:
        depth = min(most_ios, _MAX_KERNEL_QUEUE)
        backend = PosixBackend(queue=queue, max_ios=most_ios, kernel_queue=depth)
        reason = probe(backend)
        if reason is None:
            mode = "direct" if direct else "buffered"
            told = [*([because] if because else []), *reasons]
            refused = f" ({'; '.join(told)})" if told else ""
            _log.info("the fs tier moves bytes by NIXL POSIX, %s, %s%s", queue, mode, refused)
            return backend
        reasons.append(f"{queue}: {reason}")
    raise ConfigError([f"io: {config.io!r} is not usable here: {'; '.join(reasons)}"])


def request_limits(chunk_bytes: int, num_threads: int, most_pieces: int = 1) -> tuple[int, int]:
    """How many chunks one request carries, and how many I/O threads each side may have.

    A chunk is moved in up to `most_pieces`, and its trailer in one.

    All threads together use at most half of the file descriptors the process may open.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    fitting = min(_MAX_REQUEST_BYTES // chunk_bytes, _MAX_KERNEL_QUEUE // (most_pieces + 1))
    chunks = max(1, min(_MAX_REQUEST_CHUNKS, fitting, soft // 64))
    return chunks, max(1, min(num_threads, soft // 4 // chunks))


def sound_sizes(chunk_bytes: int, verify: Verify) -> tuple[int, ...]:
    """Sizes of a file whose chunk may be loaded; a bare one carries no checksum."""
    file_bytes = chunk_bytes + TRAILER_BYTES
    return (file_bytes,) if verify is Verify.ALWAYS else (file_bytes, chunk_bytes)


def _agent_maker(
    config: FsTierConfig, context: FsContext, use: Use, trial_path: str, *, most_ios: int
) -> MakeAgent:
    chosen: Backend | str = ""
    if config.backend != "POSIX":
        chosen = choose(config.backend, use, trial_path, context.clock)
    if isinstance(chosen, str):
        _require_host_memory(context.memory.kind, chosen)
        direct = use.open_flags != 0
        chosen = posix_backend(config, direct=direct, most_ios=most_ios, because=chosen)
    backends = [chosen, *context.memory.more_backends()]

    def make(name: str) -> Agent:
        return NixlAgent(name, backends, clock=context.clock)

    return make


def _require_host_memory(kind: MemoryKind, because: str) -> None:
    """Raise `ConfigError` where POSIX is all there is and memory it does not reach is to be moved."""
    if kind is not MemoryKind.DRAM:
        reason = f": {because}" if because else ""
        raise ConfigError(
            [f"backend: POSIX does not reach {kind.value}; GDS_MT or GDS is needed{reason}"]
        )
