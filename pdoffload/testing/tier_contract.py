"""The contract of `pdoffload.tiers.base.Tier` as tests: inherit `TierContract` and run it by pytest.

A subclass says how to open a tier, and gives two ways to its medium that do not lead through the tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.errors import CorruptChunk, MisuseError, StorageError
from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.testing.tier_rig import TierDriver, context_of, filled_region, keys_of
from pdoffload.tiers.base import Lookup, Tier, TierContext, Verify

SLOTS = 64


class TierContract(ABC):
    """Every tier passes this."""

    @abstractmethod
    def open(self, context: TierContext, folder: Path) -> Tier:
        """A tier; what it keeps outside of memory lies under `folder`."""

    @abstractmethod
    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        """Flip one bit in the middle of a stored chunk, behind the tier's back."""

    @abstractmethod
    def remove(self, tier: Tier, key: BlockKey) -> None:
        """Take a stored chunk away, behind the tier's back."""

    @pytest.fixture
    def region(self) -> Iterator[HostRegion]:
        region = filled_region(SLOTS)
        yield region
        region.close()

    @pytest.fixture
    def driver(self, region: HostRegion, tmp_path: Path) -> Iterator[TierDriver]:
        tier = self.open(context_of(region), tmp_path)
        driver = TierDriver(tier, region)
        yield driver
        driver.take(tier.close(timeout_s=10))

    # --- bytes ---

    def test_stored_bytes_come_back_exactly_into_other_slots(self, driver: TierDriver) -> None:
        keys = keys_of(*range(8))
        stored = driver.store(keys, range(8))
        assert (stored.succeeded, stored.failed, stored.settled) == (keys, (), True)
        before = driver.bytes_of(*range(8))
        loaded = driver.load(keys[::-1], range(32, 40))
        assert (loaded.succeeded, loaded.failed) == (keys[::-1], ())
        assert driver.bytes_of(*range(32, 40)) == before[::-1]
        assert driver.bytes_of(31, 40) == driver.bytes_of(31, 40), "neighbours stay"
        chunk_bytes = driver.region.geometry.chunk_bytes
        assert stored.moved_bytes == loaded.moved_bytes == 8 * chunk_bytes
        assert loaded.verified == 8

    def test_only_the_slots_of_the_job_change(self, driver: TierDriver) -> None:
        keys = keys_of("a", "b")
        driver.store(keys, (0, 1))
        others = [slot for slot in range(SLOTS) if slot not in (10, 20)]
        before = driver.bytes_of(*others)
        driver.load(keys, (10, 20))
        assert driver.bytes_of(*others) == before

    def test_a_slot_may_be_rewritten_once_its_store_has_ended(self, driver: TierDriver) -> None:
        keys = keys_of("a")
        original = driver.bytes_of(3)
        driver.store(keys, (3,))
        driver.clear(3)
        driver.load(keys, (5,))
        assert driver.bytes_of(5) == original

    def test_a_loaded_slot_knows_its_checksum(self, driver: TierDriver) -> None:
        keys = keys_of("a")
        digest = driver.region.checksum(0)
        driver.store(keys, (0,))
        driver.load(keys, (9,))
        assert driver.region.checksum(9) == digest

    def test_a_failed_load_leaves_no_checksum_of_other_bytes(self, driver: TierDriver) -> None:
        stale = driver.region.checksum(0)
        driver.load(keys_of("absent"), (0,))
        driver.region.slot_view(0)[0] ^= 1
        assert driver.region.checksum(0) != stale

    def test_c07_a_job_as_big_as_the_pool_moves_entirely(self, driver: TierDriver) -> None:
        keys = keys_of(*range(SLOTS))
        before = driver.bytes_of(*range(SLOTS))
        total_bytes = driver.region.size_bytes
        assert driver.store(keys, range(SLOTS)).moved_bytes == total_bytes
        driver.clear(*range(SLOTS))
        loaded = driver.load(keys, range(SLOTS))
        assert (loaded.moved_bytes, loaded.succeeded) == (total_bytes, keys)
        assert driver.bytes_of(*range(SLOTS)) == before

    # --- lookups ---

    def test_a_chunk_is_a_miss_before_it_is_stored_and_a_hit_after(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of("a", "b")
        assert driver.lookup(*keys) == [Lookup.MISS, Lookup.MISS]
        driver.store(keys[:1], (0,))
        assert driver.lookup(*keys) == [Lookup.HIT, Lookup.MISS]

    def test_nothing_is_found_for_no_key(self, driver: TierDriver) -> None:
        assert driver.tier.lookup(()) == []

    # --- failures are values ---

    def test_a_load_of_an_absent_chunk_fails_without_an_exception(self, driver: TierDriver) -> None:
        (key,) = keys_of("never stored")
        loaded = driver.load((key,), (0,))
        assert loaded.succeeded == ()
        assert [failed for failed, _ in loaded.failed] == [key]
        assert isinstance(loaded.failed[0][1], StorageError)

    def test_a_load_brings_what_is_there_and_names_what_is_not(self, driver: TierDriver) -> None:
        there, absent = keys_of(1, 2, 3), keys_of("x", "y")
        driver.store(there, (0, 1, 2))
        mixed = (there[0], absent[0], there[1], absent[1], there[2])
        loaded = driver.load(mixed, (20, 21, 22, 23, 24))
        assert loaded.succeeded == there
        assert [key for key, _ in loaded.failed] == list(absent)
        assert driver.bytes_of(20, 22, 24) == driver.bytes_of(0, 1, 2)

    def test_c02_flipped_bit_is_a_miss_and_can_be_stored_again(self, driver: TierDriver) -> None:
        keys = keys_of(1, 2)
        driver.store(keys, (0, 1))
        self.corrupt(driver.tier, keys[0])
        loaded = driver.load(keys, (10, 11))
        assert loaded.succeeded == keys[1:]
        assert isinstance(loaded.failed[0][1], CorruptChunk)
        assert driver.tier.stats().corrupt_chunks == 1
        assert driver.lookup(*keys) == [Lookup.MISS, Lookup.HIT]
        assert driver.store(keys[:1], (0,)).moved_bytes > 0
        assert driver.load(keys[:1], (12,)).succeeded == keys[:1]
        assert driver.bytes_of(12) == driver.bytes_of(0)

    def test_c03_a_chunk_that_vanished_after_the_lookup_is_a_miss_at_once(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of(1, 2)
        driver.store(keys, (0, 1))
        assert driver.lookup(*keys) == [Lookup.HIT, Lookup.HIT]
        self.remove(driver.tier, keys[1])
        loaded = driver.load(keys, (10, 11))
        assert loaded.succeeded == keys[:1]
        assert [key for key, _ in loaded.failed] == list(keys[1:])
        assert driver.tier.stats().vanished_chunks == 1
        assert driver.tier.lookup(keys) == [Lookup.HIT, Lookup.MISS], "asked once, answered at once"

    # --- jobs ---

    def test_c23_a_second_store_moves_nothing(self, driver: TierDriver) -> None:
        keys = keys_of(*range(16))
        driver.store(keys, range(16))
        before = driver.tier.stats()
        again = driver.store(keys, range(16))
        after = driver.tier.stats()
        assert (again.succeeded, again.moved_bytes, again.already_present) == (keys, 0, 16)
        assert after.bytes_written == before.bytes_written
        assert after.stored_chunks == before.stored_chunks == 16
        assert after.already_present == before.already_present + 16

    def test_every_job_ends_exactly_once_and_accounts_for_its_keys(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of(*range(20))
        jobs: dict[int, tuple[BlockKey, ...]] = {}
        for slot, key in enumerate(keys):
            jobs[driver.submit_store((key,), (slot,))] = (key,)
        for first in (0, 4):
            wanted = keys[first : first + 2]
            jobs[driver.submit_load(wanted, (40 + first, 41 + first))] = wanted
        for job_id, wanted in jobs.items():
            result = driver.result(job_id)
            named = (*result.succeeded, *(key for key, _ in result.failed))
            assert sorted(named) == sorted(wanted)
        driver.poll()
        assert set(driver.results) == set(jobs)

    def test_a_job_without_chunks_ends(self, driver: TierDriver) -> None:
        assert driver.store((), ()).succeeded == ()
        assert driver.load((), ()).failed == ()

    def test_c20_jobs_over_the_same_chunks_do_not_disturb_each_other(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of(*range(8))
        driver.store(keys, range(8))
        loads = [driver.submit_load(keys, range(first, first + 8)) for first in (16, 24, 32)]
        store = driver.submit_store(keys, range(8))
        for job_id in (*loads, store):
            assert driver.result(job_id).failed == ()
        for first in (16, 24, 32):
            assert driver.bytes_of(*range(first, first + 8)) == driver.bytes_of(*range(8))

    def test_touching_is_allowed_for_any_key(self, driver: TierDriver) -> None:
        keys = keys_of("there", "absent")
        driver.store(keys[:1], (0,))
        driver.tier.touch(keys)
        assert driver.lookup(*keys) == [Lookup.HIT, Lookup.MISS]

    # --- settings ---

    @pytest.mark.parametrize("verify", Verify)
    def test_verified_counts_what_was_compared(
        self, verify: Verify, region: HostRegion, tmp_path: Path
    ) -> None:
        tier = self.open(context_of(region, verify=verify), tmp_path)
        driver = TierDriver(tier, region)
        keys = keys_of(1, 2)
        driver.store(keys, (0, 1))
        loaded = driver.load(keys, (10, 11))
        driver.take(tier.close(timeout_s=10))
        assert loaded.succeeded == keys
        assert driver.bytes_of(10, 11) == driver.bytes_of(0, 1)
        assert loaded.verified == (0 if verify is Verify.OFF else 2)
        assert tier.stats().verified_chunks == loaded.verified

    # --- the end ---

    def test_closing_ends_every_job_and_is_idempotent(
        self, region: HostRegion, tmp_path: Path
    ) -> None:
        tier = self.open(context_of(region), tmp_path)
        driver = TierDriver(tier, region)
        keys = keys_of(*range(30))
        jobs = [driver.submit_store((key,), (slot,)) for slot, key in enumerate(keys)]
        driver.take(tier.close(timeout_s=10))
        driver.take(tier.close(timeout_s=10))
        assert set(driver.results) == set(jobs)
        assert all(result.settled for result in driver.results.values())

    def test_a_closed_tier_refuses_work(self, region: HostRegion, tmp_path: Path) -> None:
        tier = self.open(context_of(region), tmp_path)
        driver = TierDriver(tier, region)
        tier.close(timeout_s=10)
        (key,) = keys_of(1)
        for verb in (
            lambda: tier.lookup((key,)),
            lambda: tier.touch((key,)),
            lambda: driver.submit_store((key,), (0,)),
            lambda: driver.submit_load((key,), (0,)),
        ):
            with pytest.raises(MisuseError, match="closed"):
                verb()
        assert tier.poll() == []
        assert "closed" in repr(tier)
