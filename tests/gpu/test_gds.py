"""GPU memory to files by NIXL's GDS plugins and NVIDIA's own cuFile, and the fs tier over them.

Written where there is no GPU: none of these has ever run. `scripts/gpu_check.sh` runs them all and prints
what they measure. The figures are for reading; nothing is asserted about speed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.backends import Backend, GdsBackend, GdsMtBackend, UcxBackend
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.agent.nixl import NixlAgent
from pdoffload.agent.plugins import usability
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import FsTierConfig
from pdoffload.layout import BlockKey
from pdoffload.testing.fs_rig import FsRig, open_fs
from pdoffload.testing.tier_contract import TierContract
from pdoffload.testing.tier_rig import filled_region, keys_of
from pdoffload.tiers.base import Tier, TierContext, Verify
from pdoffload.tiers.fs.tier import FsTier

pytestmark = [pytest.mark.gpu, pytest.mark.nixl]
MIB = 1 << 20
CHUNK, CHUNKS = 2 * MIB, 128
SIZE = CHUNK * CHUNKS
BACKENDS: dict[str, Backend] = {
    "GDS_MT": GdsMtBackend(num_threads=8),
    "GDS": GdsBackend(max_batches=2, batch_pieces=128),
}
NAMES = pytest.mark.parametrize("name", list(BACKENDS))


@pytest.fixture(autouse=True)
def checked() -> None:
    """In an ordinary run what is not set up is skipped; the script fails for it."""
    found = usability("GDS_MT")
    if not found.usable and "PDOFFLOAD_GPU_CHECK" not in os.environ:
        pytest.skip(f"{found.why}; scripts/gpu_check.sh says what is needed")


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where files go: PDOFFLOAD_GPU_DIR, on the disk that is to be measured, else a temporary folder."""
    given = os.environ.get("PDOFFLOAD_GPU_DIR")
    return tmp_path if given is None else Path(given)


@pytest.fixture
def file(folder: Path) -> Iterator[int]:
    """A file of `SIZE`, opened for direct I/O where the file system takes it."""
    path = folder / f"pdoffload-gpu-{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)
    path.unlink()


def report(what: str, size_bytes: int, took_s: float) -> None:
    print(f"\n{what}: {size_bytes / took_s / 1e9:.2f} GB/s ({took_s * 1e3:.1f} ms)")


def moved_s(agent: NixlAgent, op: Op, address: int, fd: int) -> float:
    """Seconds for all chunks between GPU memory at `address` and `fd`."""
    starts = [number * CHUNK for number in range(CHUNKS)]
    memory = pieces(MemoryKind.VRAM, [address + start for start in starts], CHUNK)
    began_s = SYSTEM_CLOCK.monotonic_s()
    transfer = agent.wait(
        agent.submit(
            op, memory, pieces(MemoryKind.FILE, starts, CHUNK, fd), timeout_s=60, what=op.name
        )
    )
    assert transfer.state is TransferState.DONE, transfer.error
    return SYSTEM_CLOCK.monotonic_s() - began_s


@NAMES
def test_the_plugin_is_usable(name: str) -> None:
    found = usability(name)
    assert found.usable, found.why
    print("\n", name, *found.remarks)


@NAMES
def test_gpu_memory_goes_to_a_file_and_comes_back(name: str, torch: Any, file: int) -> None:
    there = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(there)
    torch.cuda.synchronize()
    agent = NixlAgent("gpu", [BACKENDS[name]])
    for tensor in (there, back):
        agent.register_memory(tensor.data_ptr(), SIZE, kind=MemoryKind.VRAM)
    region = agent.register_files([file], [SIZE])
    report(f"{name} GPU -> file", SIZE, moved_s(agent, Op.WRITE, there.data_ptr(), file))
    report(f"{name} file -> GPU", SIZE, moved_s(agent, Op.READ, back.data_ptr(), file))
    assert torch.equal(there, back)
    region.release()
    assert agent.close() == []
    with open(f"/proc/self/fd/{file}", "rb", buffering=0) as plain:
        first = plain.read(MIB)
    assert first == bytes(there[:MIB].cpu().numpy())


def test_gpu_memory_goes_to_host_memory_and_back(torch: Any) -> None:
    device = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    host = torch.zeros(SIZE, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    agent = NixlAgent("gpu", [UcxBackend()])
    agent.register_memory(device.data_ptr(), SIZE, kind=MemoryKind.VRAM)
    agent.register_memory(host.data_ptr(), SIZE)
    starts = [number * CHUNK for number in range(CHUNKS)]
    sides = (
        pieces(MemoryKind.VRAM, [device.data_ptr() + start for start in starts], CHUNK),
        pieces(MemoryKind.DRAM, [host.data_ptr() + start for start in starts], CHUNK),
    )
    expected = device.cpu()
    for op, what in ((Op.WRITE, "UCX GPU -> host"), (Op.READ, "UCX host -> GPU")):
        began_s = SYSTEM_CLOCK.monotonic_s()
        moved = agent.wait(agent.submit(op, *sides, timeout_s=60, what=what))
        assert moved.state is TransferState.DONE, moved.error
        report(what, SIZE, SYSTEM_CLOCK.monotonic_s() - began_s)
        assert torch.equal(host, expected)
        if op is Op.WRITE:
            device.zero_()
            torch.cuda.synchronize()
    assert torch.equal(device.cpu(), expected)
    assert agent.close() == []


class GdsContract(TierContract):
    name: str

    def open(self, context: TierContext, folder: Path) -> Tier:
        named = self.name if context.verify is Verify.ALWAYS else "GDS_MT"
        return FsTier(
            FsTierConfig(root_dir=str(folder), min_free_bytes=0, backend=named),  # type: ignore[arg-type]
            context,
        )

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, FsTier)
        FsRig(tier, filled_region(1), Path()).flip(key, 4096)

    def remove(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, FsTier)
        os.unlink(tier.path(key))


class TestFsTierByGdsMt(GdsContract):
    name = "GDS_MT"


class TestFsTierByGds(GdsContract):
    name = "GDS"


@pytest.mark.parametrize("name", ["POSIX", *BACKENDS])
def test_the_tier_from_host_memory(name: str, folder: Path) -> None:
    """The same chunks by each plugin, for comparison; the other plugin reads them."""
    region = filled_region(2 * CHUNKS, CHUNK)
    keys = keys_of(*((name, number) for number in range(CHUNKS)))
    root = folder / f"pdoffload-gpu-{os.getpid()}-{name}"
    with open_fs(root, region=region, backend=name) as rig:
        for what, act, slots in (
            ("store", rig.store, range(CHUNKS)),
            ("load", rig.load, range(CHUNKS, 2 * CHUNKS)),
        ):
            began_s = SYSTEM_CLOCK.monotonic_s()
            assert act(keys, slots).succeeded == keys
            report(f"fs tier, {name}, {what}", SIZE, SYSTEM_CLOCK.monotonic_s() - began_s)
    with open_fs(root, region=region, backend="POSIX" if name != "POSIX" else "GDS_MT") as rig:
        rig.clear(*range(CHUNKS, 2 * CHUNKS))
        assert rig.load(keys, range(CHUNKS, 2 * CHUNKS)).succeeded == keys
        assert rig.bytes_of(CHUNKS) == rig.bytes_of(0)
        for key in keys:
            rig.path(key).unlink()


def test_auto_takes_gds_mt_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), open_fs(tmp_path):
        pass
    assert any("moves bytes by NIXL GDS_MT" in line for line in caplog.messages), caplog.messages
