"""A peer's identity has one spelling, and a name is loopback only where all its addresses are."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdoffload.errors import ConfigError, WireError
from pdoffload.p2p.address import Address, endpoint, is_loopback, resolve

GOOD = [
    (Address("localhost", 5710), b"localhost:5710"),
    (Address("10.0.0.7", 1), b"10.0.0.7:1"),
    (Address("prefill_0.prefill.ns.svc.cluster.local", 65535), None),
    (Address("Node-A", 5710), b"Node-A:5710"),
    (Address("::1", 5710), b"[::1]:5710"),
    (Address("fd00::7", 5710), b"[fd00::7]:5710"),
]


@pytest.mark.parametrize(("address", "identity"), GOOD, ids=lambda value: str(value))
def test_an_identity_is_host_and_port_and_comes_back_as_the_same_address(
    address: Address, identity: bytes | None
) -> None:
    assert identity is None or address.identity == identity
    assert Address.from_identity(address.identity) == address
    assert str(address).encode() == address.identity


@pytest.mark.parametrize(
    "identity",
    [
        b"",
        b"\x00\x01\x02\x03\x04",
        b"localhost",
        b"localhost:",
        b":5710",
        b"localhost:0",
        b"localhost:05710",
        b"localhost:65536",
        b"localhost:+5710",
        b"localhost:5710 ",
        b"localhost:5710\n",
        b" localhost:5710",
        b"tcp://localhost:5710",
        b"0.0.0.0:5710",
        b"*:5710",
        b"127.1:5710",
        b"::1:5710",
        b"[::]:5710",
        b"[::1:5710",
        b"[0:0::1]:5710",
        b"[localhost]:5710",
        b"[127.0.0.1]:5710",
        b"[fe80::1%eth0]:5710",
        b"h\xc3\xb6st:5710",
        b"a" * 254 + b":5710",
        "\u0661:5710".encode(),
        "localhost:\u0665".encode(),
    ],
)
def test_every_other_spelling_is_refused(identity: bytes) -> None:
    with pytest.raises(WireError, match=r"^identity: "):
        Address.from_identity(identity)


@given(st.binary(max_size=40))
def test_an_identity_is_refused_or_spells_its_address(identity: bytes) -> None:
    try:
        address = Address.from_identity(identity)
    except WireError:
        return
    assert address.identity == identity


def test_an_endpoint_puts_ipv6_in_brackets() -> None:
    assert endpoint("127.0.0.1", 5710) == "tcp://127.0.0.1:5710"
    assert endpoint("::1", 5710) == "tcp://[::1]:5710"


def answering(*numeric: str):
    """A resolver that knows every name by the same addresses."""
    families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in numeric]
    entries = [
        (family, socket.SOCK_STREAM, 6, "", (each, 0))
        for family, each in zip(families, numeric, strict=True)
    ]
    return lambda *args, **kwargs: entries


def test_a_name_is_dialled_by_ipv4_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answering("::1", "127.0.0.1", "::1"))
    assert resolve("node-a") == ["127.0.0.1", "::1"]
    monkeypatch.setattr(socket, "getaddrinfo", answering("fd00::7"))
    assert resolve("node-a") == ["fd00::7"]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (("127.0.0.1",), True),
        (("127.8.9.1", "::1"), True),
        (("::ffff:127.0.0.1",), True),
        (("127.0.0.1", "10.0.0.7"), False),
        (("::1", "fd00::7"), False),
        (("::ffff:10.0.0.7",), False),
    ],
)
def test_a_name_is_loopback_only_if_all_its_addresses_are(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], expected: bool
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answering(*addresses))
    assert is_loopback("host", "node-a") is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("fd00::7", False)],
)
def test_a_literal_is_judged_without_asking_anyone(
    monkeypatch: pytest.MonkeyPatch, host: str, expected: bool
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert is_loopback("host", host) is expected


def test_localhost_is_loopback_here() -> None:
    assert is_loopback("host", "localhost")


def test_a_name_nobody_knows_is_an_error_that_names_key_and_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError) as caught:
        is_loopback("secondary_tiers[0].host", "node-a.invalid")
    (problem,) = caught.value.problems
    assert problem.startswith("secondary_tiers[0].host: got 'node-a.invalid'")
    assert "not known" in problem
