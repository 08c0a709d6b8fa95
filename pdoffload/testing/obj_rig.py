"""An obj tier for tests: over a fake agent that a test can script, or over NIXL and a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdoffload.agent.agent import Agent
from pdoffload.clock import Clock
from pdoffload.config import ObjTierConfig, StoreConfig
from pdoffload.memory.host import HostRegion
from pdoffload.testing.agents import FakeAgent, FakeDriver, FakeStore
from pdoffload.testing.tier_rig import ShiftedClock, TierDriver, context_of, filled_region
from pdoffload.tiers.obj.diagnosis import Why
from pdoffload.tiers.obj.lane import MakeAgent
from pdoffload.tiers.obj.tier import ObjTier


class ObjRig(TierDriver):
    """An open `ObjTier` of 64 slots."""

    tier: ObjTier


class FakeAgents:
    """Makes fake agents over one store, each with a driver of its own."""

    def __init__(self, clock: Clock) -> None:
        self.store = FakeStore()
        self.drivers: dict[str, FakeDriver] = {}
        """By the name that asked for an agent; the newest of that name."""
        self.names: list[str] = []
        self._clock = clock

    def __call__(self, name: str) -> Agent:
        self.names.append(name)
        driver = FakeDriver(clock=self._clock, store=self.store)
        self.prepare(name, driver)
        self.drivers[name] = driver
        return FakeAgent(name, driver=driver, clock=self._clock)

    def prepare(self, name: str, driver: FakeDriver) -> None:
        """For a test to override: what the agent of that name shall do."""


def fake_config(prefix: str = "", **settings: Any) -> ObjTierConfig:
    """A table for a store that is none."""
    return ObjTierConfig(store_config=StoreConfig(bucket="fake"), prefix=prefix, **settings)


@contextmanager
def open_obj(
    config: ObjTierConfig,
    *,
    make_agent: MakeAgent | None = None,
    why: Why | None = None,
    clock: Clock | None = None,
    region: HostRegion | None = None,
    context: dict[str, Any] | None = None,
    rank: int = 0,
    close_s: float = 10.0,
) -> Iterator[ObjRig]:
    """An `ObjRig`, closed at the end. Without `make_agent` it moves bytes by NIXL."""
    own_region = region or filled_region()
    terms = {"clock": clock or ShiftedClock(), **(context or {})}
    tier = ObjTier(
        config, context_of(own_region, **terms), rank=rank, make_agent=make_agent, why=why
    )
    rig = ObjRig(tier, own_region)
    try:
        yield rig
        tier.check()
    finally:
        rig.take(tier.close(timeout_s=close_s))
