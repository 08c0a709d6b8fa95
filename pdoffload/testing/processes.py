"""A child process with a process group of its own, so that its children end with it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_LAUNCH = (
    # Ask for SIGTERM when the thread that started us ends: a test run that is shot dead then leaves
    # no server behind, which would keep a core busy and hold gigabytes.
    "import ctypes, os, sys;ctypes.CDLL(None).prctl(1, 15);os.execvp(sys.argv[1], sys.argv[1:])"
)

# A mapped file that still has its name; "(deleted)" follows those that have lost it.
_SHARED_MEMORY = re.compile(r"(/dev/shm/(?:psm_|sem\.mp-|vllm_)\S+)$", re.M)


def start_group(
    command: Sequence[str], *, env: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a new group; both its output streams go to `output`.

    The group's number is the leader's pid. The leader gets SIGTERM when the calling thread ends.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


def signal_group(group: int, signal_number: int) -> None:
    """Send a signal to every process of `group`; nothing happens if there is none."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal_number)


def members(group: int) -> list[int]:
    """Live processes of `group`. Zombies do not count: a pid 1 that reaps nobody keeps them."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name, may hold anything) state ppid pgrp ...
            state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        if int(pgrp) == group and state != "Z":
            found.append(int(entry.name))
    return found


def shared_memory(group: int) -> set[Path]:
    """Named shared memory of vLLM and of `multiprocessing` that `group` has mapped.

    Theirs only: what another package leaves behind is for its own tests to see.
    """
    found = set()
    for pid in members(group):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(name) for name in _SHARED_MEMORY.findall(maps)}
    return found


def physical_read_bytes(group: int) -> int:
    """Bytes that the kernel has fetched from block devices for the live processes of `group`."""
    total = 0
    for pid in members(group):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            line = re.search(r"^read_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.M)
            total += int(line[1]) if line else 0
    return total
