"""The fs tier by cuFile: whether NIXL's GDS_MT or GDS works here, tried out by bytes.

A plugin that stands in NIXL's list is not usable for that, and one that starts may still not be able to
move a byte on this file system. That shows here, at the start, and not in stores that fail.
"""

from __future__ import annotations

import glob
import logging
import mmap
import os
from typing import Literal

import msgspec
import numpy as np

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.backends import GdsBackend, GdsMtBackend
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.agent.needs import GPU_DEVICES, NEEDS
from pdoffload.agent.nixl import NixlAgent
from pdoffload.agent.plugins import usability
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import ConfigError, PdOffloadError
from pdoffload.layout import PAGE_BYTES
from pdoffload.tiers.base import Verify

_log = logging.getLogger(__name__)

_THREADS = 4
"""Of the plugin, for each I/O thread of the tier: a cuFile call blocks and moves one piece."""
_BATCH_PIECES = 128
"""As many as cuFile takes in a batch unless its cufile.json says otherwise."""
_CUTS_BYTES = tuple(1 << bits for bits in range(24, 31))
_TRIAL_TIMEOUT_S = 3.0
_left_over: list[object] = []
"""What a trial that never ended may still read or write: never freed."""

CufileBackend = GdsMtBackend | GdsBackend


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What the tier will do with a backend, as far as the choice depends on it."""

    chunk_bytes: int
    most_chunks: int
    """Of one request."""
    most_pieces: int = 1
    """Of one chunk."""
    verify: Verify
    shows_holes: bool
    open_flags: int
    file_mode: int


def choose(
    name: Literal["auto", "GDS_MT", "GDS"], use: Use, path: str, clock: Clock
) -> CufileBackend | str:
    """The backend `name`, or for `auto`: GDS_MT if it works, else the reason why POSIX is to be used.

    A file is written to `path` and removed. Raises `ConfigError` with reason and remedy if `name` does
    not work, in less than five seconds unless there is a GPU to set up.
    """
    backend: CufileBackend = _gds(use) if name == "GDS" else GdsMtBackend(num_threads=_THREADS)
    if not NEEDS[backend.name].tells_failures:
        _require_proof(backend.name, use)
    found = usability(backend.name)
    reason = found.why or _trial(backend, use, path, clock)
    if not reason:
        mode = "direct" if use.open_flags else "buffered"
        _log.info("the fs tier moves bytes by NIXL %s, %s", backend.name, mode)
        for remark in found.remarks:
            _log.warning("NIXL %s: %s", backend.name, remark)
        return backend
    if name != "auto":
        raise ConfigError([f"backend: {name!r} is not usable here: {reason}"])
    if glob.glob(GPU_DEVICES):
        # Where there is a GPU somebody expects it; elsewhere the line that names POSIX says enough.
        _log.warning("the fs tier cannot use NIXL GDS_MT: %s", reason)
    return f"GDS_MT is not usable here: {reason}"


def _require_proof(name: str, use: Use) -> None:
    """Raise `ConfigError` unless the tier sees by itself which bytes did not arrive."""
    if use.verify is not Verify.ALWAYS:
        raise ConfigError(
            [
                f"backend: {name!r} does not tell of a read that failed: it needs `verify` to be always, "
                f"not {use.verify.value}; use GDS_MT"
            ]
        )
    if not use.shows_holes:
        raise ConfigError(
            [
                f"backend: {name!r} does not tell of a write that failed, and the file system of root_dir "
                "does not show what was never written; use GDS_MT or POSIX"
            ]
        )


def _gds(use: Use) -> GdsBackend:
    """For one request at a time of `most_chunks` chunks and trailers."""
    for cut_bytes in _CUTS_BYTES:
        # A long piece is cut, and every chunk has a trailer.
        pieces_of_chunk = use.most_pieces + -(-use.chunk_bytes // cut_bytes)
        if use.most_chunks * pieces_of_chunk <= _BATCH_PIECES:
            return GdsBackend(max_batches=1, batch_pieces=_BATCH_PIECES, max_piece_bytes=cut_bytes)
    raise ConfigError(
        [f"backend: 'GDS' cannot move chunks of {use.chunk_bytes} bytes in one batch; use GDS_MT"]
    )


def _trial(backend: CufileBackend, use: Use, path: str, clock: Clock) -> str:
    """Why a page does not get through a file of our own and back; empty if it does."""
    memory = mmap.mmap(-1, 2 * PAGE_BYTES)
    memory[:PAGE_BYTES] = os.urandom(PAGE_BYTES)
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | use.open_flags
        fd = os.open(path, flags, use.file_mode)
    except OSError as error:
        return f"{path}: {error.strerror}"
    over = True
    try:
        agent = NixlAgent("fs-trial", [backend], clock=clock)
        try:
            reason = _there_and_back(agent, fd, memory)
        finally:
            over = not agent.close(timeout_s=0.0)
    except PdOffloadError as error:
        return str(error)
    finally:
        os.unlink(path)
        if over:
            os.close(fd)
        else:
            _left_over.append((fd, memory))
    if not reason and memory[:PAGE_BYTES] != memory[PAGE_BYTES:]:
        reason = "what was written is not what was read"
    return reason


def _there_and_back(agent: Agent, fd: int, memory: mmap.mmap) -> str:
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    agent.register_memory(address, len(memory))
    agent.register_files([fd], [PAGE_BYTES])
    file = pieces(MemoryKind.FILE, [0], PAGE_BYTES, fd)
    for op, place in ((Op.WRITE, address), (Op.READ, address + PAGE_BYTES)):
        page = pieces(MemoryKind.DRAM, [place], PAGE_BYTES)
        what = f"the trial {op.name.lower()} of a page"
        moved: Transfer = agent.wait(
            agent.submit(op, page, file, timeout_s=_TRIAL_TIMEOUT_S / 2, what=what)
        )
        if moved.state is not TransferState.DONE:
            return str(moved.error or f"{what} ended {moved.state.name}")
    return ""
