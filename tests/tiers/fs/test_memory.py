"""The host pool as one kind of memory; a device's caches are tested where they live."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from pdoffload.memory.host import HostRegion
from pdoffload.testing.tier_rig import context_of, filled_region
from pdoffload.tiers.base import Verify
from pdoffload.tiers.fs.memory import PoolMemory, fs_context


def test_c06_a_pool_that_does_not_begin_on_a_page_says_so() -> None:
    region = filled_region(1)
    assert PoolMemory(region).misaligned() == ""
    shifted = SimpleNamespace(address=64 * 4096 + 64, geometry=region.geometry)
    assert PoolMemory(cast(HostRegion, shifted)).misaligned().endswith("is not on a page")


def test_the_terms_of_a_tier_are_kept_for_whichever_memory() -> None:
    region = filled_region(3)
    context = context_of(region, verify=Verify.OFF, transfer_timeout_s=7.0)
    ours = fs_context(context)
    assert (ours.verify, ours.transfer_timeout_s) == (Verify.OFF, 7.0)
    assert (ours.run_config, ours.clock) == (context.run_config, context.clock)
    assert (ours.memory.num_slots, ours.memory.chunk_bytes) == (3, region.geometry.chunk_bytes)
    assert fs_context(ours) is ours
