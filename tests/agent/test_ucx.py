"""What UCX says of a connection, and that nothing is guessed where it says nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdoffload.agent import ucx
from pdoffload.agent.ucx import UNKNOWN, UcxEndpoints

HEAD = "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n"
TAIL = "#\n# | 16516..inf | multi-frag copy-in | tcp/lo        |\n"
LANES = {
    "cma/memory": (
        "#   lane[0]:  2:tcp/lo.0 md[1]   -> md[1]/tcp/sysdev[255] seg 4294967295 am keepalive wireup\n"
        "#   lane[1]:  5:cma/memory.0 md[4]   -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0\n"
    ),
    "tcp/lo+tcp/eth0": (
        "#   lane[0]:  2:tcp/lo.0 md[1]   -> md[1]/tcp/sysdev[255] seg 1 rma_bw#0 am keepalive\n"
        "#   lane[1]:  1:tcp/eth0.0 md[1]   -> md[1]/tcp/sysdev[255] seg 1 rma_bw#1 wireup\n"
    ),
    "rc_mlx5/mlx5_0:1": (
        "#   lane[0]:  9:rc_mlx5/mlx5_0:1.0 md[4]   -> md[4]/ib/sysdev[3] seg 8256 rma_bw#0 am\n"
    ),
    UNKNOWN: "#   lane[0]:  2:tcp/lo.0 md[1]   -> md[1]/tcp/sysdev[255] seg 1 am\n",
}


class FakeUcx:
    """UCX's object tree with endpoints, each with its text."""

    def __init__(self) -> None:
        self.endpoints: dict[int, str] = {}
        self.workers = "agent:0"
        self.ucp = self

    def listed(self, path: str) -> str:
        if path == "/ucp/context/agent/worker":
            return self.workers
        if path == "/ucp/context/agent/worker/agent:0/ep":
            return "".join(f"{address:#x}" for address in self.endpoints)
        return ""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeUcx:
    fake = FakeUcx()
    fake.endpoints[0x7F7C3FB01000] = HEAD  # to the agent itself
    written: Callable[..., str] = lambda _: fake.endpoints[0x7F7C3FB01040]  # noqa: E731
    monkeypatch.setattr(ucx, "_libraries", lambda: fake)
    monkeypatch.setattr(ucx, "_written", written)
    return fake


@pytest.mark.parametrize("expected", LANES)
def test_lanes_of_bulk_writes_are_the_transport(fake: FakeUcx, expected: str) -> None:
    seen = UcxEndpoints("agent")
    seen.expect()
    fake.endpoints[0x7F7C3FB01040] = HEAD + LANES[expected] + TAIL
    seen.note("peer")
    assert seen.transport_of("peer") == expected
    seen.forget("peer")
    assert seen.transport_of("peer") == UNKNOWN


def test_two_new_endpoints_are_nobodys(fake: FakeUcx) -> None:
    seen = UcxEndpoints("agent")
    seen.expect()
    fake.endpoints |= {0x7F7C3FB01040: LANES["cma/memory"], 0x7F7C3FB01080: ""}
    seen.note("peer")
    assert seen.transport_of("peer") == UNKNOWN


def test_an_endpoint_that_is_gone_is_not_asked(fake: FakeUcx) -> None:
    seen = UcxEndpoints("agent")
    seen.expect()
    fake.endpoints[0x7F7C3FB01040] = LANES["cma/memory"]
    seen.note("peer")
    del fake.endpoints[0x7F7C3FB01040]
    assert seen.transport_of("peer") == UNKNOWN


@pytest.mark.parametrize("workers", ["", "agent:0agent:1", "agent"])
def test_another_tree_than_expected_is_unknown(fake: FakeUcx, workers: str) -> None:
    fake.workers = workers
    seen = UcxEndpoints("agent")
    seen.expect()
    fake.endpoints[0x7F7C3FB01040] = LANES["cma/memory"]
    seen.note("peer")
    assert seen.transport_of("peer") == UNKNOWN


def test_names_that_are_no_addresses_are_left_alone(fake: FakeUcx) -> None:
    seen = UcxEndpoints("agent")
    fake.listed = lambda _: "agent:0x7f7c3fb010400x7f7c3fb0zz80"  # type: ignore[method-assign]
    seen.expect()
    seen.note("peer")
    assert seen.transport_of("peer") == UNKNOWN


def test_a_process_without_ucx_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "_libraries", lambda: None)
    seen = UcxEndpoints("agent")
    seen.expect()
    seen.note("peer")
    assert seen.transport_of("peer") == UNKNOWN


def test_text_is_written_by_c() -> None:
    assert ucx._written(lambda out: ucx.ctypes.CDLL(None).fputs(b"lane", out)) == "lane"
    assert ucx._written(lambda _: None) == ""
