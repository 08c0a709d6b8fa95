"""A process that drives an fs tier on command, for tests with several processes or with limits.

    python -m pdoffload.testing.fs_child ROOT [--nixl] [KEY=JSON ...]

reads one command a line and answers with one JSON object a line:

    store NAME COUNT     stores COUNT chunks called NAME 0, NAME 1, ... out of the slots 0, 1, ...
    load NAME COUNT      loads them into the slots COUNT, COUNT + 1, ... and compares the bytes
    lookup NAME COUNT    how many are HIT
    spawn NAME           starts a process that stores 8 chunks at a time, without end: two answers
    reap PID             waits for the end of such a process
    endless NAME         stores 8 chunks at a time, without end; no answer but the first result
    touch NAME COUNT     marks them as used
    stats, fds           the tier's counters; open file descriptors of the process
    exhaust, relent      open files until no more can be opened; close them again
    fork                 a child tries every verb: how many were refused

KEY=JSON are settings of the tier. Every process has the same bytes in the same slot.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from pdoffload.errors import MisuseError, PdOffloadError, StorageError
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.child import LineChild
from pdoffload.testing.fs_rig import FsRig, open_fs
from pdoffload.testing.tier_rig import filled_region, keys_of
from pdoffload.tiers.base import JobResult, Lookup

CHUNK_BYTES = 8192
SLOTS = 128


class FsChild(LineChild):
    """The parent's end."""

    def __init__(
        self, root: Path, *, nixl: bool = False, set_up: str = "", **settings: object
    ) -> None:
        """`set_up` is Python that runs in the child first, to set a limit say."""
        code = f"{set_up}\nfrom pdoffload.testing.fs_child import main\nmain()"
        given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        super().__init__(
            [sys.executable, "-c", code, os.fspath(root), *(["--nixl"] if nixl else []), *given]
        )


def main() -> None:
    """The process itself."""
    root, nixl = Path(sys.argv[1]), "--nixl" in sys.argv
    region = filled_region(SLOTS, CHUNK_BYTES)
    settings = {
        key: json.loads(value)
        for key, _, value in (each.partition("=") for each in sys.argv[2:])
        if value
    }
    make_agent = None if nixl else FakeAgent
    with open_fs(root, make_agent=make_agent, region=region, **settings) as rig:
        _answer({"ready": True})
        for line in sys.stdin:
            _answer(_obey(rig, *line.split()))


def _obey(rig: FsRig, verb: str, name: str = "", count: str = "0") -> dict[str, Any]:
    number = int(count)
    keys = keys_of(*((name, each) for each in range(number)))
    if verb == "store":
        return _told(rig.store(keys, range(number)))
    if verb == "load":
        result = rig.load(keys, range(number, 2 * number))
        good = [place for place, key in enumerate(keys) if key in result.succeeded]
        same = all(rig.bytes_of(place) == rig.bytes_of(number + place) for place in good)
        return {**_told(result), "same": same}
    if verb == "lookup":
        return {"hits": rig.lookup(*keys).count(Lookup.HIT)}
    if verb == "spawn":
        return {"pid": _spawn(rig.root, name)}
    if verb == "endless":
        for serial in itertools.count():
            told = _told(rig.store(keys_of(*((name, serial, each) for each in range(8))), range(8)))
            if serial == 0:
                _answer(told)
    if verb == "touch":
        rig.tier.touch(keys)
        return {}
    if verb == "reap":
        return {"ended": os.waitpid(int(name), 0)[0]}
    if verb == "stats":
        answer: dict[str, Any] = msgspec.to_builtins(rig.tier.stats())
        return answer
    if verb == "exhaust":
        return {"fds": _exhaust()}
    if verb == "relent":
        while _hoard:
            os.close(_hoard.pop())
        return {}
    if verb == "fds":
        return {"fds": len(os.listdir("/proc/self/fd"))}
    return {"refused": _fork(rig)}


def _told(result: JobResult) -> dict[str, Any]:
    return {
        "succeeded": len(result.succeeded),
        "failed": len(result.failed),
        "present": result.already_present,
        "errnos": [_errno(error) for _, error in result.failed],
        "error": str(result.failed[0][1]) if result.failed else "",
        "moved_bytes": result.moved_bytes,
    }


def _errno(error: PdOffloadError) -> int | None:
    return error.errno if isinstance(error, StorageError) else None


def _spawn(root: Path, name: str) -> int:
    """Fork a writer with a tier of its own. Only before this process has stored: it has no threads then."""
    child = os.fork()
    if child:
        return child
    with open_fs(root, make_agent=FakeAgent, region=filled_region(SLOTS, CHUNK_BYTES)) as rig:
        for number in itertools.count():
            rig.store(keys_of(*((name, number, each) for each in range(8))), range(8))
            if number == 0:
                _answer({"begun": True})
    os._exit(1)


_hoard: list[int] = []


def _exhaust() -> int:
    try:
        while True:
            _hoard.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return max(_hoard) + 1


def _fork(rig: FsRig) -> int:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    refused = 0
    (key,) = keys_of("forked")
    for verb in (
        lambda: rig.tier.lookup((key,)),
        lambda: rig.submit_store((key,), (0,)),
        lambda: rig.submit_load((key,), (0,)),
        lambda: rig.tier.touch((key,)),
        lambda: rig.tier.poll(),
        lambda: rig.tier.close(timeout_s=1),
    ):
        try:
            verb()
        except MisuseError:
            refused += 1
    os._exit(refused)


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
