"""Which spellings of a host are taken, and what is said of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.config.hosts import Reach, host_problem, normal_host, reach_of

LOOPBACK, NETWORK, UNRESOLVED = Reach.LOOPBACK, Reach.NETWORK, Reach.UNRESOLVED


@pytest.mark.parametrize(
    ("written", "normal", "reach"),
    [
        ("localhost", "localhost", LOOPBACK),
        ("LocalHost", "LocalHost", LOOPBACK),
        ("127.0.0.1", "127.0.0.1", LOOPBACK),
        ("127.9.9.9", "127.9.9.9", LOOPBACK),
        ("::1", "::1", LOOPBACK),
        ("[::1]", "::1", LOOPBACK),
        ("0:0:0:0:0:0:0:1", "::1", LOOPBACK),
        ("::ffff:127.0.0.1", "::ffff:7f00:1", LOOPBACK),
        ("10.0.0.11", "10.0.0.11", NETWORK),
        ("[FD00::AB]", "fd00::ab", NETWORK),
        ("fe80::1", "fe80::1", NETWORK),
        ("prefill-0", "prefill-0", UNRESOLVED),
        ("pd_offload_prefill_1", "pd_offload_prefill_1", UNRESOLVED),
        ("prefill-0.peers.default.svc.cluster.local.", None, UNRESOLVED),
        ("7.example", "7.example", UNRESOLVED),
        ("localhost.localdomain", None, UNRESOLVED),
    ],
)
def test_a_right_host_has_one_spelling(written: str, normal: str | None, reach: Reach) -> None:
    assert host_problem(written) == ""
    spelt = normal_host(written)
    assert spelt == (normal or written)
    assert host_problem(spelt) == ""
    assert normal_host(spelt) == spelt
    assert reach_of(written) is reach_of(spelt) is reach


@pytest.mark.parametrize("written", ["0.0.0.0", "::", "[::]", "0:0::0", "*", "::ffff:0.0.0.0"])
def test_a_wildcard_is_told_that_peers_must_dial_it(written: str) -> None:
    problem = host_problem(written)
    assert problem.startswith(f'got "{written}", which stands for every address; ')
    assert "bound and dialled verbatim, so give the node's routable address" in problem


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("0", "no IPv4 address"),
        ("127.1", "no IPv4 address"),
        ("127.0.0.01", "no IPv4 address"),
        ("10.0.0.256", "no IPv4 address"),
        ("1.2.3.4.", "no IPv4 address"),
        ("0x7f.0x1", "no IPv4 address"),
        ("2130706433", "no IPv4 address"),
        ("224.0.0.1", "the address of many"),
        ("255.255.255.255", "the address of many"),
        ("ff02::1", "the address of many"),
        ("fe80::1%eth0", "whose zone means nothing on another host"),
        ("tcp://10.0.0.1", "leave the scheme and slashes out"),
        ("tcp://10.0.0.1:5710", "leave the scheme and slashes out"),
        ("10.0.0.0/8", "leave the scheme and slashes out"),
        ("10.0.0.1:5710", "the port has a key of its own"),
        ("prefill:5710", "the port has a key of its own"),
        ("[::1]:5710", "the port has a key of its own"),
        ("[10.0.0.1]", "which is no host"),
        ("[::1", "which is no host"),
        (" 10.0.0.1", "no IPv4 address"),
        ("10.0.0.1\n", "which is no host"),
        ("my host", "which is no host"),
        ("-a", "which is no host"),
        ("a-", "which is no host"),
        ("a..b", "which is no host"),
        (".", "which is no host"),
        ("a" * 64, "which is no host"),
        (".".join(["a" * 60] * 5), "which is no host"),
        ("b\u00fccher", "which is no host"),
        ("\u0661\u0662.\u0661", "which is no host"),
    ],
)
def test_what_is_no_host_is_told_why(written: str, reason: str) -> None:
    problem = host_problem(written)
    assert reason in problem
    assert problem.isprintable()


@pytest.mark.parametrize("given_value", ["", None, 5710, True, ["localhost"], {}])
def test_what_is_no_text_is_told_what_is_allowed(given_value: Any) -> None:
    assert host_problem(given_value) == (
        f"got {json.dumps(given_value)}; allowed: a host name, an IPv4 address, or an IPv6 address "
        "with or without brackets"
    )


@settings(deadline=None)
@given(st.text(max_size=30) | st.ip_addresses().map(str))
def test_whatever_is_taken_keeps_its_meaning_in_its_one_spelling(written: str) -> None:
    problem = host_problem(written)
    if problem:
        assert problem.isprintable()
        return
    spelt = normal_host(written)
    assert host_problem(spelt) == ""
    assert normal_host(spelt) == spelt
    assert reach_of(spelt) is reach_of(written)
    assert "[" not in spelt
