"""How a peer's host is written: rules on the text alone, no name is resolved here.

A host is bound and dialled exactly as it is written, and `host:port` is what peers know a process by.
So a spelling that stands for another address, or for all of them, is refused and never guessed at.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from typing import Any

from pdoffload.config.reading import shown

HOST_ALLOWED = "a host name, an IPv4 address, or an IPv6 address with or without brackets"
_REMEDY = "it is bound and dialled verbatim, so give the node's routable address"
_LONGEST_NAME = 253
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
# The resolver reads such a name as an IPv4 address in an old notation: 0 is 0.0.0.0, 127.1 is 127.0.0.1.
_NUMERIC = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_ENDS_IN_PORT = re.compile(r"(?:[^:]*|\[.*\]):[0-9]+")


class Reach(enum.Enum):
    """Who can reach a socket that is bound to a host."""

    LOOPBACK = "loopback"
    """Processes of this host alone."""
    NETWORK = "network"
    UNRESOLVED = "unresolved"
    """A name: the resolver knows, the text does not."""


def host_problem(given: Any) -> str:
    """Why `given` is no host that peers can dial: what was got, what is allowed, the remedy.

    Empty where nothing is wrong. The name of the key is the caller's to put in front.
    """
    if not isinstance(given, str) or not given:
        return f"got {shown(given)}; allowed: {HOST_ALLOWED}"
    reason = _reason(given)
    return f"got {shown(given)}, {reason}" if reason else ""


def _reason(host: str) -> str:
    address = _address(host)
    if host == "*" or (address is not None and _plain(address).is_unspecified):
        return f"which stands for every address; {_REMEDY}"
    if address is not None:
        if getattr(address, "scope_id", None):
            return f"whose zone means nothing on another host; {_REMEDY}"
        if address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
            return f"which is the address of many; {_REMEDY}"
        return ""
    if "://" in host or "/" in host:
        return f"which is no plain host; leave the scheme and slashes out; allowed: {HOST_ALLOWED}"
    labels = host.removesuffix(".").split(".")
    if _NUMERIC.fullmatch(labels[-1]):
        return f"which is no IPv4 address of four decimal numbers; allowed: {HOST_ALLOWED}"
    if len(host) > _LONGEST_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        port = "the port has a key of its own; " if _ENDS_IN_PORT.fullmatch(host) else ""
        return f"which is no host; {port}allowed: {HOST_ALLOWED}"
    return ""


def normal_host(host: str) -> str:
    """The one spelling of a right `host`: IPv6 short, in lower case and without brackets.

    Names and IPv4 addresses stay letter for letter as they are: stock vLLM compares them so.
    """
    address = _address(host)
    return str(address) if isinstance(address, ipaddress.IPv6Address) else host


def reach_of(host: str) -> Reach:
    """Who can reach a socket bound to a right `host`, as far as its text tells."""
    address = _address(host)
    if host.lower() == "localhost" or (address is not None and _plain(address).is_loopback):
        return Reach.LOOPBACK
    return Reach.UNRESOLVED if address is None else Reach.NETWORK


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` spells, None for anything else. Brackets are of IPv6 alone."""
    try:
        if host.startswith("[") and host.endswith("]"):
            return ipaddress.IPv6Address(host[1:-1])
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _plain(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """`address`, or the IPv4 address inside an IPv6 one that only wraps it (::ffff:127.0.0.1)."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
