"""Device caches as a tier's memory: the files are the host pool's, byte by byte, and come back whole."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from device_rig import RUN_CONFIG, Device, finish, open_tier
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.agent.agent import Op
from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.descriptors import MemoryKind
from pdoffload.agent.driver import RUNNING, Verdict
from pdoffload.agent.transfer import TransferState
from pdoffload.config import FsTierConfig
from pdoffload.errors import ConfigError, CorruptChunk, MisuseError, NixlError, TransferError
from pdoffload.testing.agents import FakeAgent, FakeDriver
from pdoffload.testing.tier_rig import ShiftedClock, context_of, keys_of
from pdoffload.tiers.base import Job, Verify
from pdoffload.tiers.fs.tier import FsTier
from pdoffload.vllm.copies import chunks_of
from pdoffload.vllm.direct.chunks import DeviceMemory

HYBRID = {"groups": (((0, 64), (1, 96)), ((1, 48),))}


def nothing() -> None:
    return None


def store(tier, device, runs, names, job_id=1):
    keys = keys_of(*names)
    tier.store(Job(job_id, keys, device.memory.add(runs, len(keys), nothing)))
    result = finish(tier, job_id)
    assert result.succeeded == keys, result
    return [Path(tier.path(key)) for key in keys]


def load(tier, device, runs, names, job_id=2):
    keys = keys_of(*names)
    tier.load(Job(job_id, keys, device.memory.add(runs, len(keys), nothing)))
    return finish(tier, job_id)


def staged_files(root: Path, device: Device, runs, names) -> list[bytes]:
    """What the tiering spec's fs tier writes for the same blocks."""
    keys = keys_of(*names)
    region = device.pool_after(runs, len(keys))
    with open_tier(root, context_of(region, run_config=RUN_CONFIG)) as tier:
        tier.store(Job(1, keys, tuple(range(len(keys)))))
        assert finish(tier, 1).succeeded == keys
        return [Path(tier.path(key)).read_bytes() for key in keys]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), blocks_per_chunk=st.integers(1, 3), kind=st.sampled_from([{}, HYBRID]))
def test_files_are_those_of_the_host_pool(tmp_path_factory, data, blocks_per_chunk, kind):
    """Any blocks in any order, chunks that begin or end in part, groups that use part of the tensors."""
    device = Device(blocks_per_chunk, **kind)
    chosen = [
        data.draw(st.permutations(range(12)))[: data.draw(st.integers(0, 5))]
        for _ in device.caches.groups
    ]
    runs = device.runs(*chosen, first=data.draw(st.integers(0, 5)))
    names = list(range(sum(chunks_of(run, blocks_per_chunk) for run in runs)))
    if not names:
        return
    root = tmp_path_factory.mktemp("kv")
    with open_tier(root / "direct", device.context()) as tier:
        files = [path.read_bytes() for path in store(tier, device, runs, names)]
    assert files == staged_files(root / "staged", device, runs, names)


@pytest.mark.parametrize(
    ("kind", "used"),
    [
        ({}, {0: {4: 64, 0: 64, 7: 64, 2: 64}, 1: {4: 96, 0: 96, 7: 96, 2: 96}}),
        (HYBRID, {0: {4: 64, 0: 64}, 1: {4: 96, 0: 96, 7: 48, 2: 48}}),
    ],
)
def test_chunks_come_back_into_other_blocks(tmp_path, kind, used):
    device = Device(2, **kind)
    out, back = [4, 0, 7, 2], [1, 3, 5, 6]
    cut = 4 // len(device.caches.groups)
    before = [tensor.copy() for tensor in device.tensors]
    with open_tier(tmp_path, device.context()) as tier:
        store(tier, device, device.runs(*(out[i : i + cut] for i in range(0, 4, cut))), "ab")
        device.blank()
        again = device.runs(*(back[i : i + cut] for i in range(0, 4, cut)))
        assert load(tier, device, again, "ab").verified == 2
    for tensor, (was, now) in enumerate(zip(before, device.tensors, strict=True)):
        for source, target in zip(out, back, strict=True):
            length = used[tensor].get(source, 0)
            assert (now[target][:length] == was[source][:length]).all()
            assert not now[target][length:].any(), "bytes beside the page were written"
    untouched = [block for block in range(12) if block not in back]
    assert not any(tensor[untouched].any() for tensor in device.tensors)


def test_a_load_of_a_chunk_in_part_verifies_all_of_it_and_writes_only_its_blocks(tmp_path):
    device = Device(3)
    was = device.tensors[0].copy()
    with open_tier(tmp_path, device.context()) as tier:
        (path,) = store(tier, device, device.runs([0, 1, 2]), ["a"])
        device.blank()
        # The device has the chunk's first block already: the second and third come back.
        result = load(tier, device, device.runs([8, 9], first=1), ["a"])
        assert (result.verified, result.failed) == (1, ())
        assert (device.tensors[0][8] == was[1]).all()
        assert (device.tensors[0][9] == was[2]).all()
        assert not device.tensors[0][:8].any()
        body = bytearray(path.read_bytes())
        body[5] ^= 1  # in the block that is not loaded
        path.write_bytes(body)
        result = load(tier, device, device.runs([8, 9], first=1), ["a"], job_id=3)
    ((_, error),) = result.failed
    assert isinstance(error, CorruptChunk)
    assert not path.exists()


def test_what_a_load_left_in_the_scratch_does_not_reach_a_file(tmp_path):
    """One thread loads and then stores: padding is zeros again, or files would tell of other chunks."""
    device = Device(3)
    one = {"n_read_threads": 1, "n_write_threads": 1}
    with open_tier(tmp_path / "a", device.context(), **one) as tier:
        store(tier, device, device.runs([0, 1, 2]), ["a"])
        (lane_memory,) = [device.memory.open(FakeAgent(), 4)]
        slots = device.memory.add(device.runs([3], first=2), 1, nothing)
        lane_memory._scratch[:] = b"\xff" * len(lane_memory._scratch)
        lane_memory.begin(Op.WRITE, slots)
        (side,) = lane_memory.sides()
        chunk = bytearray(device.memory.chunk_bytes)
        for (address, length, _), (offset, _, _) in zip(
            side.memory.tolist(), side.file.tolist(), strict=True
        ):
            chunk[offset : offset + length] = ctypes.string_at(address, length)
    expected = device.pool_after(device.runs([3], first=2), 1)
    assert bytes(chunk) == bytes(expected.slot_view(0))


@pytest.mark.parametrize("verify", list(Verify))
def test_the_trailer_has_a_checksum_unless_verify_is_off(tmp_path, verify):
    device = Device()
    with open_tier(tmp_path, device.context(verify=verify)) as tier:
        (path,) = store(tier, device, device.runs([0, 1]), ["a"])
        assert path.read_bytes()[-4096 + 12] == (0 if verify is Verify.OFF else 1)
        assert load(tier, device, device.runs([2, 3]), ["a"]).verified == (verify is not Verify.OFF)
    assert (device.tensors[0][2:4] == device.tensors[0][0:2]).all()


def test_the_device_is_waited_for_before_its_blocks_are_read(tmp_path):
    device = Device()

    def written() -> None:
        device.tensors[0][0] = 77

    keys = keys_of("a")
    with open_tier(tmp_path, device.context()) as tier:
        tier.store(Job(1, keys, device.memory.add(device.runs([0, 1]), 1, written)))
        assert finish(tier, 1).succeeded == keys
        assert Path(tier.path(keys[0])).read_bytes()[:64] == bytes([77]) * 64


def test_a_failed_read_is_told_and_the_file_stays(tmp_path):
    device = Device()
    driver = FakeDriver()
    lost = Verdict(TransferState.FAILED, NixlError("check_xfer_state", "lost"))
    with open_tier(
        tmp_path, device.context(), make_agent=lambda name: FakeAgent(name, driver=driver)
    ) as tier:
        (path,) = store(tier, device, device.runs([0, 1]), ["a"])
        driver.script("check", lost)
        result = load(tier, device, device.runs([2, 3]), ["a"])
        assert [key for key, _ in result.failed] == list(keys_of("a"))
        assert path.exists()


class SlowDriver(FakeDriver):
    """Takes in the end of 64 pieces a check, as NIXL POSIX does."""

    def check(self, handle):
        handle.checks = getattr(handle, "checks", 0) + 1
        if handle.checks * 64 < len(handle.local):
            return RUNNING
        return super().check(handle)


def test_a_request_of_many_pieces_is_not_slept_through_64_at_a_time(tmp_path):
    tensors = 120
    device = Device(
        1,
        pages=[64] * tensors,
        strides=[128] * tensors,
        groups=([(number, 64) for number in range(tensors)],),
    )
    driver, slept = SlowDriver(), []
    clock = ShiftedClock()
    clock.sleep = lambda duration_s: slept.append(duration_s)
    with open_tier(
        tmp_path,
        device.context(clock=clock),
        make_agent=lambda name: FakeAgent(name, driver=driver),
    ) as tier:
        store(tier, device, device.runs(range(4)), "abcd")
    assert not slept


# --- a GPU, played by memory that is called so ---


class CopyingDriver(FakeDriver):
    """Counts what it is asked to copy between memories."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[MemoryKind, MemoryKind]] = []
        self.filed: list[MemoryKind] = []

    def make(self, op, local, remote, peer):
        if remote.kind is MemoryKind.FILE:
            self.filed.append(local.kind)
        else:
            self.copied.append((local.kind, remote.kind))
        return super().make(op, local, remote, peer)


def test_a_gpus_chunks_move_from_its_memory_and_are_hashed_from_a_copy(tmp_path):
    device = Device(2, on_gpu=True)
    runs, driver = device.runs([4, 0, 7, 2]), CopyingDriver()
    was = device.tensors[1].copy()
    with open_tier(
        tmp_path / "direct",
        device.context(),
        make_agent=lambda name: FakeAgent(name, driver=driver),
    ) as tier:
        files = [path.read_bytes() for path in store(tier, device, runs, "ab")]
        assert driver.copied == [(MemoryKind.VRAM, MemoryKind.DRAM)] * 2
        assert set(driver.filed) == {MemoryKind.VRAM, MemoryKind.DRAM}
        assert files == staged_files(tmp_path / "staged", device, runs, "ab")
        device.blank()
        result = load(tier, device, device.runs([1, 3, 5, 6]), "ab")
    assert result.verified == 2
    assert (device.tensors[1][[1, 3, 5, 6], :96] == was[[4, 0, 7, 2], :96]).all()


def test_a_gpu_with_verify_off_copies_nothing_to_the_host(tmp_path):
    device = Device(2, on_gpu=True)
    driver = CopyingDriver()
    with open_tier(
        tmp_path,
        device.context(verify=Verify.OFF),
        make_agent=lambda name: FakeAgent(name, driver=driver),
    ) as tier:
        store(tier, device, device.runs([0, 1]), "a")
        load(tier, device, device.runs([2, 3]), "a")
    assert not driver.copied
    assert device.memory.more_backends() == (UcxBackend(),)


def test_posix_does_not_reach_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="POSIX does not reach VRAM; GDS_MT or GDS is needed"):
        FsTier(FsTierConfig(root_dir=str(tmp_path)), Device(on_gpu=True).context())


def test_a_gpus_context_is_made_the_threads_own_before_it_opens_an_agent(tmp_path):
    device, seen = Device(2, on_gpu=True), []
    device.memory = DeviceMemory(
        device.caches,
        chunk_bytes=device.geometry.chunk_bytes,
        blocks_per_chunk=2,
        enter_thread=lambda: seen.append("thread"),
    )

    def open_agent(name):
        seen.append("agent")
        return FakeAgent(name)

    with open_tier(tmp_path, device.context(), make_agent=open_agent) as tier:
        store(tier, device, device.runs([0, 1]), "a")
    assert seen[:2] == ["thread", "agent"]


# --- what does not fit ---


def test_direct_io_needs_every_page_on_a_page():
    aligned = Device(pages=(4096,), strides=(8192,), groups=(((0, 4096),),))
    address = aligned.tensors[0].ctypes.data
    said = aligned.memory.misaligned()
    assert (said == "") == (address % 4096 == 0), said
    said = Device().memory.misaligned()
    assert "cache tensor 0" in said


def test_blocks_that_do_not_make_up_the_chunks_move_nothing(tmp_path):
    device = Device(2)
    with open_tier(tmp_path, device.context()) as tier:
        keys = keys_of("a", "b")
        tier.store(Job(1, keys, device.memory.add(device.runs([0, 1]), 2, nothing)))
        result = finish(tier, 1)
    assert [key for key, _ in result.failed] == list(keys)
    assert "cover 1 chunks, but 2" in str(result.failed[0][1])
    assert not list(tmp_path.rglob("*.bin"))


def test_a_chunk_that_is_larger_than_its_file_is_misuse():
    device = Device(2)
    with pytest.raises(MisuseError, match="takes 320 bytes, a file 256"):
        DeviceMemory(device.caches, chunk_bytes=256, blocks_per_chunk=2)


def test_a_slot_is_known_until_it_is_dropped():
    device = Device(2)
    slots = device.memory.add(device.runs([0, 1, 2, 3]), 2, nothing)
    assert np.diff(slots).tolist() == [1]
    device.memory.drop(slots)
    with pytest.raises(TransferError, match="given up before it began"):
        device.memory.rows_of(slots[0])


def test_what_was_withdrawn_is_never_asked_for_and_the_other_way_round():
    device = Device(2)
    first, second = device.memory.add(device.runs([0, 1, 2, 3]), 2, nothing)
    lane = device.memory.open(FakeAgent(), 2)
    lane.begin(Op.READ, [first])
    assert device.memory.withdraw([first])
    with pytest.raises(TransferError, match="given up before it began"):
        lane.sides()
    lane.begin(Op.READ, [second])
    lane.sides()
    assert not device.memory.withdraw([second])
    assert len(device.memory.rows_of(second))
