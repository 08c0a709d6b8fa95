"""The contract of `pdoffload.tiers.base.Tier` as tests: inherit one class and run it by pytest.

`TierContract` is for a tier that takes stores. One that does not inherits `LoadingTierContract` and says
how chunks come onto its medium. A subclass says how to open a tier, and gives two ways to its medium that
do not lead through the tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdoffload.errors import CorruptChunk, MisuseError, PdOffloadError, StorageError
from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.testing.tier_rig import TierDriver, context_of, filled_region, keys_of
from pdoffload.tiers.base import Lookup, Tier, TierContext, TierRequest, Verify

SLOTS = 64


class LoadingTierContract(ABC):
    """What every tier does: lookups, loads, failures, the end."""

    request_id = ""
    """The request that every lookup and load of these tests is for; `open` may start it."""
    loads_partly = True
    """Whether a load brings what is there although a chunk of the same job is not."""
    absence: type[PdOffloadError] = StorageError
    """The error of a chunk that is not there."""

    @abstractmethod
    def open(self, context: TierContext, folder: Path) -> Tier:
        """A tier; what it keeps outside of memory lies under `folder`."""

    @abstractmethod
    def put(self, driver: TierDriver, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Have the medium hold, for each key, the bytes that lie in the driver's slot now."""

    @abstractmethod
    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        """Flip one bit in the middle of a chunk on the medium, behind the tier's back."""

    @abstractmethod
    def remove(self, tier: Tier, key: BlockKey) -> None:
        """Take a chunk from the medium, behind the tier's back."""

    @pytest.fixture
    def region(self) -> Iterator[HostRegion]:
        region = filled_region(SLOTS)
        yield region
        region.close()

    @pytest.fixture
    def driver(self, region: HostRegion, tmp_path: Path) -> Iterator[TierDriver]:
        driver = self.drive(context_of(region), tmp_path)
        yield driver
        driver.take(driver.tier.close(timeout_s=10))

    def drive(self, context: TierContext, folder: Path) -> TierDriver:
        """An open tier and its driver; whoever asks for it closes the tier."""
        return TierDriver(self.open(context, folder), context.region, self.request_id)

    # --- bytes ---

    def test_loads_bring_the_bytes_of_the_medium_exactly(self, driver: TierDriver) -> None:
        keys = keys_of(*range(8))
        before = driver.bytes_of(*range(8))
        self.put(driver, keys, range(8))
        loaded = driver.load(keys[::-1], range(32, 40))
        assert (loaded.succeeded, loaded.failed, loaded.settled) == (keys[::-1], (), True)
        assert driver.bytes_of(*range(32, 40)) == before[::-1]
        assert loaded.moved_bytes == 8 * driver.region.geometry.chunk_bytes
        assert loaded.verified == 8

    def test_only_the_slots_of_the_job_change(self, driver: TierDriver) -> None:
        keys = keys_of("a", "b")
        self.put(driver, keys, (0, 1))
        others = [slot for slot in range(SLOTS) if slot not in (10, 20)]
        before = driver.bytes_of(*others)
        driver.load(keys, (10, 20))
        assert driver.bytes_of(*others) == before

    def test_a_loaded_slot_knows_its_checksum(self, driver: TierDriver) -> None:
        keys = keys_of("a")
        digest = driver.region.checksum(0)
        self.put(driver, keys, (0,))
        driver.load(keys, (9,))
        assert driver.region.checksum(9) == digest

    def test_a_failed_load_leaves_no_checksum_of_other_bytes(self, driver: TierDriver) -> None:
        stale = driver.region.checksum(0)
        driver.load(keys_of("absent"), (0,))
        driver.region.slot_view(0)[0] ^= 1
        assert driver.region.checksum(0) != stale

    def test_c07_a_load_as_big_as_the_pool_moves_entirely(self, driver: TierDriver) -> None:
        keys = keys_of(*range(SLOTS))
        before = driver.bytes_of(*range(SLOTS))
        self.put(driver, keys, range(SLOTS))
        driver.clear(*range(SLOTS))
        loaded = driver.load(keys, range(SLOTS))
        assert (loaded.moved_bytes, loaded.succeeded) == (driver.region.size_bytes, keys)
        assert driver.bytes_of(*range(SLOTS)) == before

    # --- lookups ---

    def test_what_the_medium_holds_is_a_hit_and_nothing_else(self, driver: TierDriver) -> None:
        keys = keys_of("a", "b", "c")
        self.put(driver, keys[:2], (0, 1))
        assert driver.lookup(*keys) == [Lookup.HIT, Lookup.HIT, Lookup.MISS]

    def test_nothing_is_found_for_no_key(self, driver: TierDriver) -> None:
        assert driver.tier.lookup(()) == []

    # --- failures are values ---

    def test_a_load_of_an_absent_chunk_fails_without_an_exception(self, driver: TierDriver) -> None:
        (key,) = keys_of("never stored")
        loaded = driver.load((key,), (0,))
        assert loaded.succeeded == ()
        assert [failed for failed, _ in loaded.failed] == [key]
        assert isinstance(loaded.failed[0][1], self.absence)

    def test_a_load_names_what_is_not_there(self, driver: TierDriver) -> None:
        there, absent = keys_of(1, 2, 3), keys_of("x", "y")
        self.put(driver, there, (0, 1, 2))
        mixed = (there[0], absent[0], there[1], absent[1], there[2])
        loaded = driver.load(mixed, (20, 21, 22, 23, 24))
        if self.loads_partly:
            assert loaded.succeeded == there
            assert [key for key, _ in loaded.failed] == list(absent)
            assert driver.bytes_of(20, 22, 24) == driver.bytes_of(0, 1, 2)
        else:
            assert loaded.succeeded == ()
            assert [key for key, _ in loaded.failed] == list(mixed)

    def test_c02_flipped_bit_is_a_miss(self, driver: TierDriver) -> None:
        keys = keys_of(1, 2)
        self.put(driver, keys, (0, 1))
        self.corrupt(driver.tier, keys[0])
        loaded = driver.load(keys, (10, 11))
        assert loaded.succeeded == keys[1:]
        assert isinstance(loaded.failed[0][1], CorruptChunk)
        assert driver.tier.stats().corrupt_chunks == 1
        assert driver.lookup(*keys) == [Lookup.MISS, Lookup.HIT]
        assert driver.bytes_of(11) == driver.bytes_of(1)

    def test_c03_a_chunk_that_vanished_after_the_lookup_is_a_miss_at_once(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of(1, 2)
        self.put(driver, keys, (0, 1))
        assert driver.lookup(*keys) == [Lookup.HIT, Lookup.HIT]
        self.remove(driver.tier, keys[1])
        loaded = driver.load(keys, (10, 11))
        left = keys[:1] if self.loads_partly else ()
        assert loaded.succeeded == left
        assert [key for key, _ in loaded.failed] == list(keys[len(left) :])
        assert driver.tier.stats().vanished_chunks == len(loaded.failed)
        answers = [Lookup.HIT if key in left else Lookup.MISS for key in keys]
        assert driver.tier.lookup(keys, self.request_id) == answers, "asked and answered at once"

    # --- jobs ---

    def test_every_load_ends_exactly_once_and_accounts_for_its_keys(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of(*range(20))
        self.put(driver, keys[:18], range(18))
        others = set(driver.results)
        jobs: dict[int, tuple[BlockKey, ...]] = {}
        for first in range(0, 20, 2):
            wanted = keys[first : first + 2]
            jobs[driver.submit_load(wanted, (40 + first, 41 + first))] = wanted
        for job_id, wanted in jobs.items():
            result = driver.result(job_id)
            named = (*result.succeeded, *(key for key, _ in result.failed))
            assert sorted(named) == sorted(wanted)
        driver.poll()
        assert set(driver.results) == others | set(jobs)

    def test_a_load_without_chunks_ends(self, driver: TierDriver) -> None:
        assert driver.load((), ()).failed == ()

    def test_c20_loads_of_the_same_chunks_do_not_disturb_each_other(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of(*range(8))
        self.put(driver, keys, range(8))
        for job_id in [driver.submit_load(keys, range(n, n + 8)) for n in (16, 24, 32)]:
            assert driver.result(job_id).failed == ()
        for first in (16, 24, 32):
            assert driver.bytes_of(*range(first, first + 8)) == driver.bytes_of(*range(8))

    def test_touching_is_allowed_for_any_key(self, driver: TierDriver) -> None:
        keys = keys_of("there", "absent")
        self.put(driver, keys[:1], (0,))
        driver.tier.touch(keys)
        assert driver.lookup(*keys) == [Lookup.HIT, Lookup.MISS]

    # --- requests ---

    def test_requests_come_and_go_in_any_order(self, driver: TierDriver) -> None:
        tier = driver.tier
        for params in (None, {}, {"something": "else"}):
            assert tier.request_started(TierRequest("other", params)) is False
            assert tier.lookup(keys_of("absent"), "other") != [Lookup.HIT]
            tier.request_finished("other")
        tier.request_finished("other")
        tier.request_finished("never started")

    # --- settings ---

    @pytest.mark.parametrize("verify", Verify)
    def test_verified_counts_what_was_compared(
        self, verify: Verify, region: HostRegion, tmp_path: Path
    ) -> None:
        driver = self.drive(context_of(region, verify=verify), tmp_path)
        keys = keys_of(1, 2)
        self.put(driver, keys, (0, 1))
        loaded = driver.load(keys, (10, 11))
        driver.take(driver.tier.close(timeout_s=10))
        assert loaded.succeeded == keys
        assert driver.bytes_of(10, 11) == driver.bytes_of(0, 1)
        assert loaded.verified == (0 if verify is Verify.OFF else 2)
        assert driver.tier.stats().verified_chunks == loaded.verified

    # --- the end ---

    def test_closing_ends_every_load_and_is_idempotent(
        self, region: HostRegion, tmp_path: Path
    ) -> None:
        driver = self.drive(context_of(region), tmp_path)
        keys = keys_of(*range(30))
        self.put(driver, keys, range(30))
        jobs = [driver.submit_load((key,), (30 + at,)) for at, key in enumerate(keys)]
        driver.take(driver.tier.close(timeout_s=10))
        driver.take(driver.tier.close(timeout_s=10))
        assert set(driver.results) >= set(jobs)
        assert all(result.settled for result in driver.results.values())

    def test_a_closed_tier_refuses_work(self, region: HostRegion, tmp_path: Path) -> None:
        driver = self.drive(context_of(region), tmp_path)
        tier = driver.tier
        tier.close(timeout_s=10)
        (key,) = keys_of(1)
        for verb in (
            lambda: tier.lookup((key,)),
            lambda: tier.touch((key,)),
            lambda: driver.submit_load((key,), (0,)),
        ):
            with pytest.raises(MisuseError, match="closed"):
                verb()
        assert tier.poll() == []
        assert "closed" in repr(tier)

    def test_a_tier_refuses_stores_if_it_says_that_it_takes_none(self, driver: TierDriver) -> None:
        if driver.tier.takes_stores:
            return
        with pytest.raises(MisuseError, match=f"{driver.tier.name} takes no stores"):
            driver.submit_store(keys_of(1), (0,))


class TierContract(LoadingTierContract):
    """What a tier that takes stores does besides: chunks get there through the tier itself."""

    def put(self, driver: TierDriver, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        stored = driver.store(keys, slots)
        assert (stored.succeeded, stored.failed, stored.settled) == (tuple(keys), (), True)

    def test_a_slot_may_be_rewritten_once_its_store_has_ended(self, driver: TierDriver) -> None:
        keys = keys_of("a")
        original = driver.bytes_of(3)
        driver.store(keys, (3,))
        driver.clear(3)
        driver.load(keys, (5,))
        assert driver.bytes_of(5) == original

    def test_c07_a_store_as_big_as_the_pool_moves_entirely(self, driver: TierDriver) -> None:
        stored = driver.store(keys_of(*range(SLOTS)), range(SLOTS))
        assert stored.moved_bytes == driver.region.size_bytes

    def test_a_chunk_is_a_miss_before_it_is_stored_and_a_hit_after(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of("a", "b")
        assert driver.lookup(*keys) == [Lookup.MISS, Lookup.MISS]
        driver.store(keys[:1], (0,))
        assert driver.lookup(*keys) == [Lookup.HIT, Lookup.MISS]

    def test_c02_a_corrupt_chunk_can_be_stored_again(self, driver: TierDriver) -> None:
        keys = keys_of(1)
        driver.store(keys, (0,))
        self.corrupt(driver.tier, keys[0])
        assert driver.load(keys, (10,)).succeeded == ()
        assert driver.store(keys, (0,)).moved_bytes > 0
        assert driver.load(keys, (12,)).succeeded == keys
        assert driver.bytes_of(12) == driver.bytes_of(0)

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

    def test_stores_and_loads_at_once_end_exactly_once_each(self, driver: TierDriver) -> None:
        keys = keys_of(*range(20))
        jobs = {driver.submit_store((key,), (slot,)): key for slot, key in enumerate(keys)}
        jobs |= {driver.submit_load((keys[at],), (40 + at,)): keys[at] for at in (0, 4)}
        for job_id, key in jobs.items():
            result = driver.result(job_id)
            assert [*result.succeeded, *(failed for failed, _ in result.failed)] == [key]
        driver.poll()
        assert set(driver.results) == set(jobs)

    def test_a_store_without_chunks_ends(self, driver: TierDriver) -> None:
        assert driver.store((), ()).succeeded == ()

    def test_c20_a_store_does_not_disturb_loads_of_the_same_chunks(
        self, driver: TierDriver
    ) -> None:
        keys = keys_of(*range(8))
        driver.store(keys, range(8))
        loads = [driver.submit_load(keys, range(first, first + 8)) for first in (16, 24)]
        store = driver.submit_store(keys, range(8))
        for job_id in (*loads, store):
            assert driver.result(job_id).failed == ()
        for first in (16, 24):
            assert driver.bytes_of(*range(first, first + 8)) == driver.bytes_of(*range(8))

    def test_closing_ends_every_store(self, region: HostRegion, tmp_path: Path) -> None:
        driver = self.drive(context_of(region), tmp_path)
        keys = keys_of(*range(30))
        jobs = [driver.submit_store((key,), (slot,)) for slot, key in enumerate(keys)]
        driver.take(driver.tier.close(timeout_s=10))
        assert set(driver.results) == set(jobs)
        assert all(result.settled for result in driver.results.values())

    def test_a_closed_tier_refuses_stores(self, region: HostRegion, tmp_path: Path) -> None:
        driver = self.drive(context_of(region), tmp_path)
        driver.tier.close(timeout_s=10)
        with pytest.raises(MisuseError, match="closed"):
            driver.submit_store(keys_of(1), (0,))
