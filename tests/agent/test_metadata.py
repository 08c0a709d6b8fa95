"""Metadata is walked before NIXL sees it: what would crash it, and whose it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.agent.metadata import agent_name_in, backends_in, read_metadata
from pdoffload.errors import NixlError


def field(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content + b"|"


def number(tag: bytes, value: int, size: int = 8) -> bytes:
    return field(tag, value.to_bytes(size, "little"))


def metadata(
    name: bytes = b"agent",
    *,
    backend: bytes = b"UCX",
    address: bytes = b"\x20address",
    connections: int = 1,
    section: bytes = b"MemSection",
    kind: bytes = bytes(4),
    rows: int = 1,
    row: bytes = bytes(24 + 11),
) -> bytes:
    """As NIXL writes it for an agent with one backend and one piece of memory."""
    return b"".join(
        (
            b"nixlSerDes|",
            field(b"Agent", name),
            number(b"Conns", connections),
            field(b"t", backend),
            field(b"c", address),
            field(b"", section),
            number(b"nixlSecElms", 1),
            field(b"bknd", backend),
            field(b"nixlDList", b"nixlSDList"),
            field(b"t", kind),
            number(b"n", rows),
            field(b"", row),
        )
    )


def test_the_name_is_read() -> None:
    assert agent_name_in(metadata(b"peers-receive-0123")) == "peers-receive-0123"
    assert agent_name_in(metadata("Wörter".encode())) == "Wörter"


def test_a_row_and_an_address_of_another_backend_are_its_own_affair() -> None:
    assert agent_name_in(metadata(backend=b"MOONCAKE", address=b"\xff", row=bytes(25))) == "agent"


def test_the_backends_are_read_with_their_addresses() -> None:
    whole = metadata(backend=b"MOONCAKE", address=b"a host")
    assert backends_in(whole) == ("MOONCAKE",)
    assert read_metadata(whole).addresses == {"MOONCAKE": b"a host"}
    assert backends_in(whole[:-1]) == ()


def rails(count: bytes, *numbers: int) -> bytes:
    """As NIXL's LIBFABRIC writes its address: an endpoint for each rail."""
    endpoints = [field(f"dest_data_ep_{number}".encode(), bytes(56)) for number in numbers]
    return b"nixlSerDes|" + field(b"num_rails", count) + b"".join(endpoints)


def test_rails_are_counted() -> None:
    for address in (rails(b"1", 0), rails(b"2", 0, 1)):
        assert agent_name_in(metadata(backend=b"LIBFABRIC", address=address)) == "agent"


@pytest.mark.parametrize(
    "address",
    [
        b"\xff",
        rails(b"0"),
        rails(b"2", 0),
        rails(b"1", 1),
        rails(b"1", 0, 1),
        rails(b"99999999"),
        rails(b"-1", 0),
        rails(b"", 0),
        rails(b"1", 0)[:-1],
    ],
)
def test_rails_that_are_not_as_told_are_refused(address: bytes) -> None:
    with pytest.raises(NixlError, match="garbled"):
        agent_name_in(metadata(backend=b"LIBFABRIC", address=address))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"name": b""}, "name of 0"),
        ({"name": b"\xff"}, "UTF-8"),
        ({"name": b"a\nb"}, "printable"),
        ({"name": b"x" * 513}, "name of 513"),
        ({"address": b""}, "without an address"),
        ({"address": b"\x22address"}, "UCX address of version 3"),
        ({"connections": 2}, "'t' is not at"),
        ({"connections": 2**63}, "'t' is not at"),
        ({"section": b"MemSectiom"}, "no memory section"),
        ({"kind": bytes(3)}, "kind of memory"),
        ({"kind": b"\x05\0\0\0"}, "kind of memory"),
        ({"rows": 2**64 - 1}, "'' is not at"),
        ({"rows": 0}, "bytes follow"),
        ({"row": bytes(24 + 8)}, "without its key"),
        ({"row": b""}, "without its key"),
        ({"backend": b"GDS", "row": bytes(24)}, "without its key"),
    ],
)
def test_what_would_crash_or_mislead_nixl_is_refused(wrong, reason: str) -> None:
    with pytest.raises(NixlError, match=f"garbled.*{reason}"):
        agent_name_in(metadata(**wrong))


def test_every_cut_and_every_surplus_is_refused() -> None:
    whole = metadata()
    for bad in (*(whole[:cut] for cut in range(len(whole))), whole + b"|", b"x" + whole):
        with pytest.raises(NixlError, match="garbled"):
            agent_name_in(bad)


def test_a_length_beyond_the_end_is_refused() -> None:
    whole = metadata()
    at = len(b"nixlSerDes|Agent")
    for length in (2**64 - 1, 2**63, 2**32, len(whole)):
        with pytest.raises(NixlError, match="cut off"):
            agent_name_in(whole[:at] + length.to_bytes(8, "little") + whole[at + 8 :])


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 300))
def test_random_bytes_are_refused_and_raise_nothing_else(noise: bytes, at: int) -> None:
    whole = metadata()
    mixed = whole[:at] + noise + whole[at + len(noise) :]
    for each in (noise, b"nixlSerDes|" + noise, mixed):
        try:
            name = agent_name_in(each)
        except NixlError:
            continue
        assert name.isprintable()
