"""The direct way by GDS_MT over the cuFile for tests, host memory playing the device: run by test_gds.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from device_rig import Device, finish, open_tier

from pdoffload.testing.cufile import MARK
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.base import Job

NAME = os.environ.get("PDOFFLOAD_TEST_BACKEND", "GDS_MT")
pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(MARK not in os.environ, reason="run by test_gds.py"),
]


def nothing() -> None:
    return None


def device_of(page_bytes: int) -> Device:
    return Device(
        3,
        pages=(page_bytes, 8192),
        strides=(8192, 8192),
        groups=(((0, page_bytes), (1, 8192)),),
    )


@pytest.mark.parametrize("page_bytes", [4096, 4000])
def test_scattered_blocks_go_out_and_come_back(tmp_path: Path, page_bytes: int) -> None:
    device = device_of(page_bytes)
    out, back = [4, 0, 7, 2, 9, 11], [1, 3, 5, 6, 8, 10]
    keys = keys_of("a", "b")
    was = [tensor.copy() for tensor in device.tensors]
    with open_tier(tmp_path, device.context(), make_agent=None, backend=NAME) as tier:
        tier.store(Job(1, keys, device.memory.add(device.runs(out), 2, nothing)))
        assert finish(tier, 1).succeeded == keys
        files = [Path(tier.path(key)).read_bytes() for key in keys]
        device.blank()
        tier.load(Job(2, keys, device.memory.add(device.runs(back), 2, nothing)))
        assert finish(tier, 2).verified == 2
    for tensor, before, used in zip(device.tensors, was, (page_bytes, 8192), strict=True):
        assert (tensor[back, :used] == before[out, :used]).all()
    again = device_of(page_bytes)
    expected = again.pool_after(again.runs(out), 2)
    for slot, file in enumerate(files):
        assert file[:-4096] == bytes(expected.slot_view(slot))
