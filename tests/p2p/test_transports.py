"""Which way bytes take to a peer: what UCX is told to use, and what the tier says is in use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdoffload.agent.plugins import plugin_dir
from pdoffload.config import P2pTierConfig
from pdoffload.errors import ConfigError
from pdoffload.p2p.address import Address
from pdoffload.testing.engine_process import ASK, PULL, EngineProcess
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import HOST, Chunks, EngineOptions
from pdoffload.testing.tier_rig import context_of, filled_region
from pdoffload.tiers.peer import open_peer_tier

pytestmark = pytest.mark.nixl

COUNT = 12
CMA, TCP = r"cma/memory", r"tcp/\w+(\+tcp/\w+)*"
# UCX's shared memory (posix, sysv) cannot tell of a peer that died; what needs it to, leaves them out.
TRANSPORTS: dict[str, tuple[str, Mapping[str, str], str]] = {
    "default": ("", {}, CMA),
    "tcp": ("", {"UCX_TLS": "tcp"}, TCP),
    "tcp by one device": ("", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}, "tcp/lo"),
    "cma, tcp": ("", {"UCX_TLS": "cma,tcp"}, CMA),
    "shared memory, tcp": ("", {"UCX_TLS": "sm,tcp"}, CMA),
    "posix, tcp": ("", {"UCX_TLS": "posix,tcp"}, TCP),
    "all but cma": ("", {"UCX_TLS": "^cma"}, TCP),
    "the tier's own tcp": ("tcp", {}, TCP),
    "all but cma for the tier": ("^cma", {}, TCP),
    "the environment before the tier": ("tcp", {"UCX_TLS": "cma,tcp"}, CMA),
}


@pytest.mark.parametrize("case", TRANSPORTS)
def test_chunks_go_both_ways_by_what_ucx_may_use_and_the_tier_says_by_what(
    case: str, nursery: Nursery
) -> None:
    ucx_tls, environment, transport = TRANSPORTS[case]
    options = EngineOptions(chunk_bytes=1 << 20, ucx_tls=ucx_tls, environment=environment)
    with EngineProcess(nursery, options) as one, EngineProcess(nursery, options) as other:
        for producer, consumer in ((one, other), (other, one)):
            chunks = Chunks(f"of {producer.address}", COUNT)
            producer.keep("kept", chunks)
            assert consumer.pull(PULL, producer, "kept", chunks).num_right == COUNT
            consumer.forget()
            assert consumer.pull(ASK, producer, "asked", chunks).num_right == COUNT
            seen = producer.at_rest()
            ((name, peers),) = seen.peers.transports
            assert (bool(re.fullmatch(transport, name)), peers) == (True, 1), name
            (line,) = [line for line in producer.logged if "written to by" in line]
            assert name in line
            assert str(consumer.address) in line


def test_peers_that_reach_each_other_by_different_ways_meet_where_they_can(
    nursery: Nursery,
) -> None:
    by_tcp = EngineOptions(environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"})
    with EngineProcess(nursery, EngineOptions()) as one, EngineProcess(nursery, by_tcp) as other:
        one.works_with(other)
        other.works_with(one)
        for each in (one, other):
            ((name, _),) = each.at_rest().peers.transports
            assert re.fullmatch(TCP, name)


def test_a_transport_that_reaches_nobody_leaves_engines_that_compute(nursery: Nursery) -> None:
    options = EngineOptions(environment={"UCX_TLS": "posix"})
    with EngineProcess(nursery, options) as one, EngineProcess(nursery, EngineOptions()) as other:
        chunks = Chunks("held", COUNT)
        for producer, consumer in ((one, other), (other, one)):
            producer.hold(chunks)
            for role in (ASK, PULL):
                request_id = f"{role} of {producer.address}"
                assert consumer.pull(role, producer, request_id, chunks).num_loaded == 0
            producer.at_rest()
            consumer.at_rest()
            producer.forget()
        assert any("UCX" in line and "cannot be used" in line for line in one.logged)


@pytest.mark.parametrize(
    "backends", [("LIBFABRIC",), ("UCX", "LIBFABRIC")], ids=lambda names: " ".join(names)
)
def test_a_backend_that_does_not_load_is_told_at_the_start_with_the_remedy(
    backends: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    folder = plugin_dir()
    assert folder is not None
    for plugin in folder.glob("*.so"):
        if "LIBFABRIC" not in plugin.name:
            (tmp_path / plugin.name).symlink_to(plugin)
    (tmp_path / "libplugin_LIBFABRIC.so").write_bytes(b"no library")
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    region = filled_region(4)
    with pytest.raises(ConfigError) as refused:
        open_peer_tier(
            P2pTierConfig(backends=backends), Address(HOST, 0), context_of(region), lambda: "0"
        )
    region.close()
    (problem,) = refused.value.problems
    assert problem.startswith(f"backends: got {list(backends)}, with")
    assert "LIBFABRIC cannot be used: it does not load" in problem
    assert ("UCX_TLS" in problem) == ("UCX" in backends)


@pytest.mark.parametrize("transports", ["posix", "nonsense"])
def test_a_transport_that_reaches_nobody_is_told_at_the_start(
    transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    region = filled_region(4)
    with pytest.raises(ConfigError, match=f"backends: .* UCX_TLS={transports}.* cannot be used"):
        open_peer_tier(P2pTierConfig(), Address(HOST, 0), context_of(region), lambda: "0")
    region.close()


def test_the_tier_s_own_transport_is_told_where_it_cannot_be_used_or_does_not_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    region = filled_region(4)
    with pytest.raises(ConfigError, match=r'backends: .* ucx_tls "nonsense".* cannot be used'):
        open_peer_tier(
            P2pTierConfig(ucx_tls="nonsense"), Address(HOST, 0), context_of(region), lambda: "0"
        )
    monkeypatch.setenv("UCX_TLS", "tcp")
    tier = open_peer_tier(
        P2pTierConfig(ucx_tls="^cma"), Address(HOST, 0), context_of(region), lambda: "0"
    )
    tier.close(timeout_s=5)
    region.close()
    assert "ucx_tls ^cma is not in force: UCX_TLS=tcp" in caplog.text
