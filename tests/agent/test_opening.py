"""Names become backends, and backends an agent."""

from __future__ import annotations

import pytest

from pdoffload.agent.backends import LibfabricBackend, PosixBackend, UcxBackend
from pdoffload.agent.opening import open_agent, peer_backends
from pdoffload.errors import BackendUnusable, ConfigError


def test_the_backends_of_peers_reach_the_network_in_the_order_of_their_names() -> None:
    assert peer_backends(["LIBFABRIC", "UCX"], ucx_tls="tcp") == [
        LibfabricBackend(),
        UcxBackend(reach="network", tls="tcp"),
    ]


def test_a_name_of_no_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean UCX"):
        peer_backends(["UCXX"])


@pytest.mark.nixl
def test_an_agent_has_its_backends_and_a_name_of_its_own() -> None:
    agents = [open_agent("name", [PosixBackend()]) for _ in range(2)]
    assert agents[0].name != agents[1].name
    for agent in agents:
        assert agent.name.startswith("name-")
        assert not agent.lost
        assert agent.close() == []


@pytest.mark.nixl
def test_one_unusable_backend_is_enough_to_refuse_an_agent() -> None:
    with pytest.raises(BackendUnusable, match="MOONCAKE cannot be used"):
        open_agent("name", peer_backends(["UCX", "MOONCAKE"]))
