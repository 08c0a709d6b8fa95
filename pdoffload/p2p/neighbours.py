"""Peers of the same host that can write into our memory behind our agent's back.

Between processes of one PID namespace UCX copies by cma: the kernel lets the writer copy straight into
us, and closing our agent does not stop it (seen: 53 of 64 MiB landed afterwards, from a writer that had been
stopped in between). What such a writer had begun is over when it says so, or when its process has ended.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

UNKNOWN = ""
"""Of a process that does not say who it is: stock vLLM."""
_ENDED = frozenset("ZXx")


def own_mark() -> str:
    """This process, as a neighbour tells it from all others: boot, PID namespace, number, start."""
    return _mark_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _mark_of(pid: int) -> str:
    return f"{_home()}:{pid}:{_state_and_start(pid)[1]}"


def is_neighbour(mark: str) -> bool:
    """Whether `mark` is a process of this host and PID namespace, whatever has become of it."""
    return mark.rpartition(":")[0].rpartition(":")[0] == _home() and mark != UNKNOWN


def may_still_write(mark: str) -> bool:
    """Whether `mark` is a neighbour that has not ended: running, waiting or stopped."""
    if not is_neighbour(mark):
        return False
    _, pid, start = mark.rsplit(":", 2)
    try:
        state, started = _state_and_start(int(pid))
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    return started == start and state not in _ENDED


@functools.cache
def _home() -> str:
    """Where process numbers mean what they mean here: the boot of a kernel, and a PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """A process's state letter and the clock tick it started at (proc_pid_stat(5), fields 3 and 22)."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], fields[19]
