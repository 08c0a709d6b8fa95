"""Where a peer is reached, and who it is: one text, `host:port`.

How a host is written is ruled by `pdoffload.config.hosts`; here a name is resolved. The identity on the
wire is vLLM's for names and IPv4 addresses; IPv6 addresses, which vLLM's tier cannot dial, take brackets.
"""

from __future__ import annotations

import ipaddress
import re
import socket

import msgspec

from pdoffload.config.hosts import host_problem, normal_host
from pdoffload.errors import ConfigError, WireError

_IDENTITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+):([1-9][0-9]{0,4})")
_LAST_PORT = 65535


class Address(msgspec.Struct, frozen=True, order=True):
    """A peer's host as `normal_host` writes it, and its port (1 .. 65535; 0 for binding: any free one)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def identity(self) -> bytes:
        """What a process at this address is called on the wire."""
        return str(self).encode("ascii")

    @classmethod
    def from_identity(cls, identity: bytes) -> Address:
        """The address that `identity` spells; `WireError` unless it is the one right spelling of it."""
        match = _IDENTITY.fullmatch(identity.decode("ascii", "replace"))
        if match is None or int(match[2]) > _LAST_PORT:
            raise WireError("identity", f"{identity[:300]!r} is not host:port")
        host = match[1].strip("[]")
        problem = host_problem(host)
        if problem or normal_host(host) != host or (":" in host) != (match[1] != host):
            raise WireError("identity", problem or f"{match[1]!r} is not how this host is written")
        return cls(host, int(match[2]))


def literal(host: str) -> str | None:
    """`host` as a numeric address, None if it is a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def resolve(host: str) -> list[str]:
    """The numeric addresses of a right `host`, IPv4 before IPv6; never empty. `OSError` if it has none.

    IPv4 comes first because stock vLLM binds and dials names by IPv4 alone. A name may block for as long
    as the system's resolver waits, which is seconds; a literal never does.
    """
    numeric = literal(host)
    if numeric is not None:
        return [numeric]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    distinct = dict.fromkeys(ipaddress.ip_address(str(entry[4][0])) for entry in found)
    return [str(each) for each in sorted(distinct, key=lambda each: each.version)]


def endpoint(numeric: str, port: int) -> str:
    """ZeroMQ's name for a TCP port of a numeric address."""
    return f"tcp://{Address(numeric, port)}"


def is_loopback(key: str, host: str) -> bool:
    """Whether a socket bound to a right `host` can be reached from this host alone.

    A name counts as loopback only if every address of it is one. `ConfigError`, naming `key`, if it has no
    address. May block as `resolve` does.
    """
    try:
        numeric = [ipaddress.ip_address(each) for each in resolve(host)]
    except OSError as error:
        raise ConfigError([unresolvable(key, host, error)]) from error
    mapped = [getattr(each, "ipv4_mapped", None) or each for each in numeric]
    return all(each.is_loopback for each in mapped)


def unresolvable(key: str, host: str, error: OSError) -> str:
    """The problem of a `host` without an address, as `ConfigError` takes it."""
    reason = error.strerror or str(error)
    return f"{key}: got {host!r}, which cannot be resolved ({reason}); give an address, or a name known here"
