"""Comparing what peers have written with what they say it is. Any thread that may read the slots."""

from __future__ import annotations

import msgspec
import xxhash

from pdoffload.config import Verify
from pdoffload.errors import CorruptChunk, PdOffloadError, TransferError
from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.pulling import Check


class Checked(msgspec.Struct, frozen=True):
    """How a check went: what arrived wrong, and how many chunks were compared."""

    check: Check
    owner: object
    bad: dict[BlockKey, PdOffloadError]
    verified: int


def compare(check: Check, owner: object, region: HostRegion, verify: Verify) -> Checked:
    """Hash the slots, without the interpreter lock. Checksums that match are kept for the slots."""
    bad: dict[BlockKey, PdOffloadError] = {}
    if not check.checksums and verify is Verify.ALWAYS:
        error = TransferError("the peer sends no checksums, and verify is always")
        return Checked(check, owner, dict.fromkeys(check.keys, error), 0)
    if not check.checksums or verify is Verify.OFF:
        return Checked(check, owner, bad, 0)
    for key, slot, told in zip(check.keys, check.slots, check.checksums, strict=True):
        found: bytes = xxhash.xxh3_128_digest(region.slot_view(slot))
        if found == told:
            region.set_checksum(slot, found)
        else:
            bad[key] = CorruptChunk(key.hex(), "does not match the checksum its peer sent")
    return Checked(check, owner, bad, len(check.keys) - len(bad))
