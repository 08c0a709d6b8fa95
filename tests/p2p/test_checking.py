"""What arrived against what the peer says it sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import xxhash

from pdoffload.config import Verify
from pdoffload.errors import CorruptChunk, TransferError
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.checking import compare
from pdoffload.p2p.pulling import Check
from pdoffload.testing.tier_rig import filled_region, keys_of

KEYS = keys_of("a", "b", "c")
SLOTS = (4, 2, 7)
OWNER = object()


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = filled_region(8)
    yield region
    region.close()


def sums_of(region: HostRegion) -> tuple[bytes, ...]:
    return tuple(xxhash.xxh3_128_digest(region.slot_view(slot)) for slot in SLOTS)


def check_of(sums: tuple[bytes, ...]) -> Check:
    return Check(1, 5, KEYS, SLOTS, sums)


@pytest.mark.parametrize("verify", [Verify.ALWAYS, Verify.IF_PRESENT])
def test_right_bytes_are_verified_and_their_checksums_kept(
    region: HostRegion, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = sums_of(region)
    checked = compare(check_of(sums), OWNER, region, verify)
    assert (checked.bad, checked.verified, checked.owner) == ({}, 3, OWNER)
    assert checked.check.round_seq == 5
    monkeypatch.setattr(xxhash, "xxh3_128_digest", None)
    assert tuple(region.checksum(slot) for slot in SLOTS) == sums, "without hashing them again"


@pytest.mark.parametrize("verify", [Verify.ALWAYS, Verify.IF_PRESENT])
def test_c02_a_wrong_byte_is_found_and_named(region: HostRegion, verify: Verify) -> None:
    sums = sums_of(region)
    region.slot_view(2)[4000] ^= 1
    checked = compare(check_of(sums), OWNER, region, verify)
    assert list(checked.bad) == [KEYS[1]]
    assert isinstance(checked.bad[KEYS[1]], CorruptChunk)
    assert checked.verified == 2
    assert region.checksum(2) not in sums, "the wrong one was not kept"


def test_without_checksums_nothing_is_taken_if_verify_is_always(region: HostRegion) -> None:
    checked = compare(check_of(()), OWNER, region, Verify.ALWAYS)
    assert set(checked.bad) == set(KEYS)
    assert all(type(error) is TransferError for error in checked.bad.values())
    assert checked.verified == 0


@pytest.mark.parametrize("verify", [Verify.IF_PRESENT, Verify.OFF])
def test_without_checksums_all_is_taken_unverified_otherwise(
    region: HostRegion, verify: Verify
) -> None:
    checked = compare(check_of(()), OWNER, region, verify)
    assert (checked.bad, checked.verified) == ({}, 0)


def test_verify_off_compares_nothing(region: HostRegion) -> None:
    checked = compare(check_of((b"w" * 16,) * 3), OWNER, region, Verify.OFF)
    assert (checked.bad, checked.verified) == ({}, 0)
