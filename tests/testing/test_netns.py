"""Two namespaces: what is in them, who reaches whom, and that nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdoffload.testing import netns

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, peer = server.accept()
    with connection:
        print(peer[0], len(connection.recv(1000, socket.MSG_WAITALL)))
"""

CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
    connection.sendall(bytes(1000))
"""

MAKE_AND_HANG = """
import sys
from pdoffload.testing.netns import joined_pair
with joined_pair() as (left, right):
    print(left.name, right.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    if reason := netns.why_unavailable():
        pytest.skip(f"no network namespaces here: {reason}")


def _existing() -> set[str]:
    folder = Path("/run/netns")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _python(inside: netns.NetworkNamespace, program: str, *words: str) -> list[str]:
    return [*inside.enter(), sys.executable, "-c", program, *words]


def test_one_end_reaches_the_other_over_the_cable_which_counts_the_bytes() -> None:
    with netns.joined_pair() as (left, right):
        listener = subprocess.Popen(
            _python(left, LISTEN, left.address), stdout=subprocess.PIPE, text=True
        )
        with listener:
            assert listener.stdout is not None
            port = listener.stdout.readline().strip()
            subprocess.run(_python(right, CONNECT, left.address, port), check=True, timeout=60)
            assert listener.stdout.read().split() == [right.address, "1000"]
        assert 1000 < left.received_bytes() < 100_000


def test_nothing_but_the_cable_and_the_loopback_is_inside() -> None:
    with netns.joined_pair() as pair:
        for end in pair:
            devices = subprocess.run(
                [*end.enter(), "ls", "/sys/class/net"], capture_output=True, text=True, check=True
            )
            assert devices.stdout.split() == ["lo", "wire0"]


def test_two_pairs_do_not_disturb_each_other_and_both_go() -> None:
    before = _existing()
    with netns.joined_pair() as first, netns.joined_pair() as second:
        assert len(_existing() - before) == 4
        assert first[0].address == second[0].address
    assert _existing() == before


def test_a_test_that_fails_leaves_no_namespace() -> None:
    before = _existing()
    with pytest.raises(ValueError, match="mine"), netns.joined_pair():
        raise ValueError("mine")
    assert _existing() == before


def test_the_namespaces_of_a_killed_process_are_swept_those_of_a_live_one_stay() -> None:
    with netns.joined_pair() as alive:
        maker = subprocess.Popen(
            [sys.executable, "-c", MAKE_AND_HANG],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with maker:
            assert maker.stdout is not None
            names = maker.stdout.readline().split()
            assert netns.sweep() == []
            maker.kill()
        assert set(names) <= _existing()
        assert netns.sweep() == names
        assert {end.name for end in alive} <= _existing()


def test_what_ip_refuses_is_told_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "_ADDRESSES", ("10.99.0.1", "not-an-address"))
    before = _existing()
    with pytest.raises(netns.NetnsRefused, match="not-an-address"), netns.joined_pair():
        pass
    assert _existing() == before


def test_a_machine_without_ip_has_a_reason_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "apt-get install iproute2" in str(netns.why_unavailable())
