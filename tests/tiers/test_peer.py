"""The p2p tier, between two pools of one process: real sockets and threads, a fake or a real agent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pdoffload.agent import mooncake, mooncake_engine
from pdoffload.agent.agent import Agent
from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.nixl import NixlAgent
from pdoffload.config import P2pTierConfig
from pdoffload.errors import ConfigError, PdOffloadError, TransferError
from pdoffload.layout import BlockKey
from pdoffload.p2p.address import Address
from pdoffload.p2p.link import Link
from pdoffload.p2p.terms import Deadlines
from pdoffload.policy.lru import Lru
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.tier_contract import SLOTS, LoadingTierContract
from pdoffload.testing.tier_rig import TierDriver, context_of, filled_region
from pdoffload.tiering.index import Index
from pdoffload.tiers.base import Tier, TierContext, TierRequest
from pdoffload.tiers.peer import PeerTier, open_peer_tier

SHORT = Deadlines(store_timeout_s=1.0)


def fake_agent(purpose: str) -> Agent:
    return FakeAgent(purpose)


def nixl_agent(purpose: str) -> Agent:
    return NixlAgent(purpose, [UcxBackend(reach="network")])


class Host:
    """A pool, its index and its tier, as one engine has them."""

    def __init__(self, context: TierContext, open_agent: Callable[[str], Agent]) -> None:
        self.region = context.region
        num_slots = context.region.geometry.num_slots
        self.index = Index(num_slots, Lru(num_slots))
        link = Link.bind(Address("127.0.0.1", 0))
        self.address = link.address
        self.tier = PeerTier(context, link, open_agent, lambda: "seed", deadlines=SHORT)
        self.tier.borrow_from(self.index)

    def hold(self, key: BlockKey, chunk: bytes) -> None:
        reserved = self.index.reserve([key])
        assert reserved is not None
        self.region.slot_view(reserved.slots[0])[:] = chunk
        self.region.forget_checksum(reserved.slots[0])
        self.index.commit([key])

    def close(self) -> None:
        self.tier.close(timeout_s=10)
        assert self.index.num_lent == 0
        self.index.check()
        self.region.close()


class PeerContract(LoadingTierContract):
    """The contract, for a request whose chunks another engine of this process holds."""

    request_id = "a request"
    loads_partly = False
    absence: type[PdOffloadError] = TransferError
    open_agent: Callable[[str], Agent]

    @pytest.fixture(autouse=True)
    def other(self) -> Iterator[Host]:
        """The engine that holds the chunks."""
        self._other = Host(context_of(filled_region(SLOTS, seed=1)), type(self).open_agent)
        yield self._other
        self._other.close()

    def open(self, context: TierContext, folder: Path) -> Tier:
        mine = Host(context, type(self).open_agent)
        params = {
            "remote_kv_source": {
                "kv_request_id": "id",
                "remote_host": self._other.address.host,
                "remote_port": self._other.address.port,
            }
        }
        mine.tier.request_started(TierRequest(self.request_id, params))
        return mine.tier

    def put(self, driver: TierDriver, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        for key, chunk in zip(keys, driver.bytes_of(*slots), strict=True):
            self._other.hold(key, chunk)
            self._other.region.checksum(self._other.index.slot_of(key))

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        slot = self._other.index.slot_of(key)
        self._other.region.slot_view(slot)[4096] ^= 1

    def remove(self, tier: Tier, key: BlockKey) -> None:
        """The only way a chunk can go that was promised: its engine goes."""
        self._other.tier.close(timeout_s=10)


class TestFakeAgents(PeerContract):
    open_agent = staticmethod(fake_agent)


@pytest.mark.nixl
class TestNixlAgents(PeerContract):
    open_agent = staticmethod(nixl_agent)


# --- MOONCAKE ---


def mooncake_table(**keys: object) -> P2pTierConfig:
    return P2pTierConfig(backends=("MOONCAKE",), **keys)  # type: ignore[arg-type]


def test_mooncake_is_not_opened_to_other_hosts_unasked(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of these tests")
    secret.chmod(0o600)
    region = filled_region(4)
    with pytest.raises(ConfigError, match='backends: got "MOONCAKE", by which whoever reaches'):
        open_peer_tier(
            mooncake_table(cluster_secret_file=str(secret)),
            Address("192.0.2.77", 0),
            context_of(region),
            lambda: "0",
        )
    region.close()


def test_c13_without_mooncake_the_start_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    mooncake_engine._load.cache_clear()
    region = filled_region(4)
    with pytest.raises(
        ConfigError, match=r"backends: got \['MOONCAKE'\].*pip install pdoffload\[mooncake\]"
    ):
        open_peer_tier(mooncake_table(), Address("127.0.0.1", 0), context_of(region), lambda: "0")
    mooncake_engine._load.cache_clear()
    region.close()


@pytest.mark.mooncake
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_mooncake_works_wherever_the_loopback_is_bound(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[str] = []
    monkeypatch.setattr(mooncake, "warn_of_open_ports", hosts.append)
    region = filled_region(4)
    tier = open_peer_tier(mooncake_table(), Address(host, 0), context_of(region), lambda: "0")
    tier.close(timeout_s=5)
    region.close()
    assert hosts == []
