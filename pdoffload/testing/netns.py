"""Two network namespaces joined by one cable: two hosts, as far as TCP can tell, on one machine.

    with joined_pair() as (left, right):
        run([*left.enter(), "ping", "-c1", right.address])

Made with `ip` of iproute2, as root. In each namespace there are the loopback and one end of a veth
pair, and nothing else: no route leads to this machine's own interfaces or beyond. Files, Unix sockets
and /proc are shared with everybody, so a process inside is watched and ended as usual, and its HTTP
server is reached over a Unix socket.

A namespace outlives the process that made it if that is shot dead. Its name carries that process's
number, and `joined_pair` first removes those of processes that are gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdoffload.errors import PdOffloadError

_PREFIX = "pdoffload-net"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-\d+[ab]")
_DEVICE = "wire0"
# Of a private range. Nobody outside a pair sees them, so every pair may have the same two.
_ADDRESSES = ("10.99.0.1", "10.99.0.2")
_PREFIX_BITS = 30
_COMMAND_TIMEOUT_S = 20.0
_numbers = itertools.count(1)


class NetnsRefused(PdOffloadError):
    """`ip` did not do what it was asked; the message holds the command and what it said."""


class NetworkNamespace(msgspec.Struct, frozen=True):
    """One end of a pair."""

    name: str
    address: str
    """Of this end of the cable; the other end reaches it there."""

    def enter(self) -> list[str]:
        """The words in front of a command that is to run inside. `ip` becomes that command, so the
        process that was started is the command's own."""
        return ["ip", "netns", "exec", self.name]

    def received_bytes(self) -> int:
        """Bytes that have come in over the cable since it was made, headers included."""
        counters = _ip(
            "netns", "exec", self.name, "cat", f"/sys/class/net/{_DEVICE}/statistics/rx_bytes"
        )
        return int(counters)


def why_unavailable() -> str | None:
    """What keeps this process from making namespaces, found by making a pair; None if it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command: apt-get install iproute2"
    try:
        with joined_pair() as (left, _):
            left.received_bytes()
    except NetnsRefused as refused:
        return str(refused)
    return None


@contextlib.contextmanager
def joined_pair() -> Iterator[tuple[NetworkNamespace, NetworkNamespace]]:
    """Two new namespaces; they and their cable go at the end, whatever runs inside by then.

    Raises `NetnsRefused`, with nothing left behind.
    """
    sweep()
    number = next(_numbers)
    names = [f"{_PREFIX}-{os.getpid()}-{number}{end}" for end in "ab"]
    ends = [NetworkNamespace(*pair) for pair in zip(names, _ADDRESSES, strict=True)]
    with contextlib.ExitStack() as made:
        for end in ends:
            _ip("netns", "add", end.name)
            made.callback(_remove, end.name)
        left, right = ends
        # Both ends are born inside: this machine's own namespace never sees them.
        _ip(
            *("link", "add", _DEVICE, "netns", left.name, "type", "veth"),
            *("peer", "name", _DEVICE, "netns", right.name),
        )
        for end in ends:
            inside = ("-n", end.name)
            _ip(*inside, "addr", "add", f"{end.address}/{_PREFIX_BITS}", "dev", _DEVICE)
            _ip(*inside, "link", "set", _DEVICE, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield left, right


def sweep() -> list[str]:
    """Remove the namespaces whose maker is gone; their names."""
    folder = Path("/run/netns")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    gone = [
        name
        for name in names
        if (match := _NAME.fullmatch(name)) and not Path(f"/proc/{match[1]}").exists()
    ]
    for name in gone:
        _remove(name)
    return gone


def _remove(name: str) -> None:
    # Another process may sweep the same one at the same time.
    with contextlib.suppress(NetnsRefused):
        _ip("netns", "del", name)


def _ip(*words: str) -> str:
    try:
        done = subprocess.run(
            ["ip", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetnsRefused(f"ip {' '.join(words)}: {error}") from error
    if done.returncode:
        raise NetnsRefused(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
