"""A GPU's memory straight to files, by cuFile. Needs a GPU, and a NIXL whose GDS_MT plugin works there."""

from __future__ import annotations

import numpy as np
import pytest
from device_rig import RUN_CONFIG, finish, open_tier

from pdoffload.agent.backends import GdsMtBackend, UcxBackend
from pdoffload.agent.nixl import NixlAgent, probe
from pdoffload.memory.device import enter_thread, view_caches, written_so_far
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.base import Job
from pdoffload.tiers.fs.memory import FsContext
from pdoffload.vllm.copies import BlockRun
from pdoffload.vllm.direct.chunks import DeviceMemory

pytestmark = [pytest.mark.gpu, pytest.mark.nixl]

PAGE_BYTES, NUM_BLOCKS = 64 << 10, 16


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch", reason="no torch here")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if reason := probe(GdsMtBackend()):
        pytest.skip(f"GDS_MT cannot be used here: {reason}")
    return torch


def test_blocks_of_a_gpu_go_to_files_and_come_back_verified(torch, tmp_path):
    tensors = [
        torch.randint(-128, 127, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8, device="cuda")
        for _ in range(3)
    ]
    before = [tensor.cpu() for tensor in tensors]
    groups = [[(number, PAGE_BYTES) for number in range(3)]]
    caches = view_caches([(tensor, PAGE_BYTES) for tensor in tensors], groups)
    memory = DeviceMemory(
        caches,
        chunk_bytes=3 * 2 * PAGE_BYTES,
        blocks_per_chunk=2,
        enter_thread=lambda: enter_thread(caches),
    )
    out, back = np.array([5, 0, 9, 2]), np.array([1, 12, 7, 3])
    keys = keys_of("a", "b")
    with open_tier(
        tmp_path,
        FsContext(memory=memory, run_config=RUN_CONFIG),
        make_agent=lambda name: NixlAgent(name, [GdsMtBackend(), UcxBackend()]),
    ) as tier:
        tier.store(Job(1, keys, memory.add([BlockRun(out, 0)], 2, written_so_far(caches))))
        assert finish(tier, 1).succeeded == keys
        for tensor in tensors:
            tensor.zero_()
        tier.load(Job(2, keys, memory.add([BlockRun(back, 0)], 2, written_so_far(caches))))
        assert finish(tier, 2).verified == 2
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor.cpu()[back], was[out])
