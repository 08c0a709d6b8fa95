"""Names become backends, and backends an agent; MOONCAKE where NIXL has a plugin for it, and where not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdoffload.agent import mooncake, mooncake_engine, nixl, opening
from pdoffload.agent.backends import (
    LibfabricBackend,
    MooncakeBackend,
    PosixBackend,
    UcxBackend,
)
from pdoffload.agent.opening import open_agent, peer_backends
from pdoffload.agent.plugins import Usability
from pdoffload.errors import BackendUnusable, ConfigError


def test_the_backends_of_peers_reach_the_network_in_the_order_of_their_names() -> None:
    assert peer_backends(["LIBFABRIC", "UCX"], ucx_tls="tcp") == [
        LibfabricBackend(),
        UcxBackend(reach="network", tls="tcp"),
    ]


@pytest.mark.nixl
def test_an_agent_has_its_backends_and_a_name_of_its_own() -> None:
    agents = [open_agent("name", [PosixBackend()]) for _ in range(2)]
    assert agents[0].name != agents[1].name
    for agent in agents:
        assert agent.name.startswith("name-")
        assert not agent.lost
        assert agent.close() == []


# --- MOONCAKE ---


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """What would have been opened; NIXL looks for plugins in `tmp_path`."""
    opened: list[Any] = []
    monkeypatch.setattr(nixl, "NixlAgent", lambda *args, **_: opened.append(("NIXL", *args)))
    monkeypatch.setattr(mooncake, "MooncakeAgent", lambda *args, **_: opened.append(("own", *args)))
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    opening._has_mooncake_plugin.cache_clear()
    yield opened
    opening._has_mooncake_plugin.cache_clear()


def test_without_a_plugin_the_engine_s_own_package_serves_it(opened: list[Any]) -> None:
    open_agent("agent", peer_backends(["MOONCAKE"], host="10.0.0.7"))
    assert opened == [("own", "agent", "10.0.0.7")]


def test_a_plugin_that_does_not_load_is_none(opened: list[Any], tmp_path: Path) -> None:
    (tmp_path / "libplugin_MOONCAKE.so").write_bytes(b"no library")
    open_agent("agent", peer_backends(["MOONCAKE"]))
    assert opened == [("own", "agent", "localhost")]


def test_a_plugin_that_loads_goes_first(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "usability", Usability)
    open_agent("agent", peer_backends(["MOONCAKE", "UCX"]))
    assert opened == [("NIXL", "agent", [MooncakeBackend(), UcxBackend(reach="network")])]


def test_the_package_goes_with_no_other_backend(opened: list[Any]) -> None:
    with pytest.raises(BackendUnusable, match=r"MOONCAKE, UCX: .* goes with no other"):
        open_agent("agent", peer_backends(["MOONCAKE", "UCX"]))
    assert opened == []


def test_others_are_nixl_s(opened: list[Any]) -> None:
    open_agent("agent", peer_backends(["UCX"], ucx_tls="tcp"))
    assert opened == [("NIXL", "agent", [UcxBackend(reach="network", tls="tcp")])]


def test_a_name_of_no_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean MOONCAKE"):
        peer_backends(["MOONCAK"])


def test_c13_with_neither_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "mooncake", None)
    opening._has_mooncake_plugin.cache_clear()
    mooncake_engine._load.cache_clear()
    with pytest.raises(BackendUnusable, match=r"pip install pdoffload\[mooncake\]"):
        open_agent("agent", peer_backends(["MOONCAKE"]))
    opening._has_mooncake_plugin.cache_clear()
    mooncake_engine._load.cache_clear()
