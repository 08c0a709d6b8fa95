from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdoffload.errors import StorageFull
from pdoffload.layout import BlockKey
from pdoffload.testing.tier_contract import LoadingTierContract, TierContract
from pdoffload.testing.tier_rig import TierDriver, context_of, filled_region, keys_of
from pdoffload.tiers.base import Job, Lookup, Tier, TierContext
from pdoffload.tiers.memory import MemoryTier


class MediumInMemory(LoadingTierContract):
    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, MemoryTier)
        chunk = tier.chunks[key]
        chunk[len(chunk) // 2] ^= 1

    def remove(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, MemoryTier)
        del tier.chunks[key]


class TestMemoryTier(MediumInMemory, TierContract):
    def open(self, context: TierContext, folder: Path) -> Tier:
        return MemoryTier(context)


class FakeLoadingTier(MemoryTier):
    """Its chunks come from elsewhere, as those of peers do."""

    takes_stores = False

    def store(self, job: Job) -> None:
        Tier.store(self, job)


class TestATierWithoutStores(MediumInMemory):
    def open(self, context: TierContext, folder: Path) -> Tier:
        return FakeLoadingTier(context)

    def put(self, driver: TierDriver, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        assert isinstance(driver.tier, MemoryTier)
        MemoryTier.store(driver.tier, Job(-1, tuple(keys), tuple(slots)))
        driver.tier.poll()


def driver_of(max_chunks: float) -> TierDriver:
    region = filled_region()
    max_bytes = int(max_chunks * region.geometry.chunk_bytes)
    return TierDriver(MemoryTier(context_of(region), max_bytes=max_bytes), region)


def test_the_least_recently_used_chunk_makes_room() -> None:
    driver = driver_of(3)
    a, b, c, d, e = keys_of(*"abcde")
    driver.store((a, b, c), (0, 1, 2))
    driver.tier.touch((a,))
    driver.load((b,), (10,))
    driver.store((d,), (3,))
    assert driver.lookup(a, b, c, d) == [Lookup.HIT, Lookup.HIT, Lookup.MISS, Lookup.HIT]
    driver.store((e,), (4,))
    assert driver.lookup(a, b, d, e) == [Lookup.MISS, Lookup.HIT, Lookup.HIT, Lookup.HIT]


def test_a_quota_below_one_chunk_fails_every_store_and_keeps_nothing() -> None:
    driver = driver_of(0.5)
    (key,) = keys_of(1)
    stored = driver.store((key,), (0,))
    assert isinstance(stored.failed[0][1], StorageFull)
    assert driver.tier.stats().failed_stores == 1
    assert driver.lookup(key) == [Lookup.MISS]
