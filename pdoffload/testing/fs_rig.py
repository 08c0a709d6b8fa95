"""An fs tier for tests: real files, over NIXL or over a fake agent that a test can script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdoffload.agent.agent import Agent
from pdoffload.clock import Clock
from pdoffload.config import FsTierConfig
from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.testing.agents import FakeAgent, FakeDriver
from pdoffload.testing.tier_rig import ShiftedClock, TierDriver, context_of, filled_region
from pdoffload.tiers.fs.lane import MakeAgent
from pdoffload.tiers.fs.tier import FsTier


class FsRig(TierDriver):
    """An open `FsTier` of 64 slots under `root`, and where its files lie."""

    tier: FsTier

    def __init__(self, tier: FsTier, region: HostRegion, root: Path) -> None:
        super().__init__(tier, region)
        self.root = root

    def path(self, key: BlockKey) -> Path:
        """The final name of a chunk."""
        return Path(self.tier.path(key))

    def temps(self) -> list[Path]:
        """Unfinished files of whomever."""
        return list(self.root.glob("*/.tmp/*/*.part"))

    def flip(self, key: BlockKey, at: int) -> None:
        """Flip one bit of byte `at` of a chunk's file."""
        with open(self.path(key), "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))


class Fakes:
    """Makes fake agents over one driver, and says which names asked for one."""

    def __init__(self, clock: Clock) -> None:
        self.driver = FakeDriver(clock=clock)
        self.names: list[str] = []
        self._clock = clock

    def __call__(self, name: str) -> Agent:
        self.names.append(name)
        return FakeAgent(name, driver=self.driver, clock=self._clock)


@contextmanager
def open_fs(
    root: Path,
    *,
    make_agent: MakeAgent | None = None,
    clock: Clock | None = None,
    region: HostRegion | None = None,
    context: dict[str, Any] | None = None,
    rank: int = 0,
    close_s: float = 10.0,
    **settings: Any,
) -> Iterator[FsRig]:
    """An `FsRig`, closed at the end. Without `make_agent` it moves bytes by NIXL."""
    own_region = region or filled_region()
    terms = {"clock": clock or ShiftedClock(), **(context or {})}
    config = FsTierConfig(root_dir=os.fspath(root), **{"min_free_bytes": 0, **settings})
    tier = FsTier(config, context_of(own_region, **terms), rank=rank, make_agent=make_agent)
    rig = FsRig(tier, own_region, root)
    try:
        yield rig
        tier.check()
    finally:
        rig.take(tier.close(timeout_s=close_s))
