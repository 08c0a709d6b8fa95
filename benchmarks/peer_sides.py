"""The two sides that `peers.py` compares, each built by its spec as vLLM builds it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from peer_process import HOST, PeerOptions, Who
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm_sides import offloading_config

from pdoffload.layout import Geometry
from pdoffload.memory.host import SlotStatus
from pdoffload.vllm.manager import NixlOffloadingManager
from pdoffload.vllm.spec import NixlTieringOffloadingSpec


class Side(ABC):
    """One manager, its pool, and what a worker would do for it."""

    spec: ClassVar[type[OffloadingSpec]]
    manager: OffloadingManager

    @abstractmethod
    def pool(self) -> npt.NDArray[np.uint8]:
        """uint8, (num_slots, chunk_bytes), shared. Keep it no longer than a call."""

    @abstractmethod
    def arrived(self, slots: Sequence[int]) -> None:
        """The workers have copied chunks into these slots."""

    @abstractmethod
    def check(self) -> None:
        """`AssertionError` where the manager's own books disagree."""

    def close(self) -> None:
        self.manager.shutdown()


class Ours(Side):
    spec = NixlTieringOffloadingSpec

    def __init__(self, config: OffloadingConfig, geometry: Geometry) -> None:
        manager = self.spec(config).get_manager()
        assert isinstance(manager, NixlOffloadingManager)
        self.manager: NixlOffloadingManager = manager
        self._region = manager.tiering.region
        assert self._region.geometry == geometry

    def pool(self) -> npt.NDArray[np.uint8]:
        return self._region.array.reshape(-1, self._region.geometry.chunk_bytes)

    def arrived(self, slots: Sequence[int]) -> None:
        self._region.status[slots, 0] = SlotStatus.STORED

    def check(self) -> None:
        self.manager.tiering.check()


class Stock(Side):
    spec = TieringOffloadingSpec

    def __init__(self, config: OffloadingConfig, geometry: Geometry) -> None:
        spec = self.spec(config)
        self.manager = spec.get_manager()
        region = spec._scheduler_mmap
        # No worker will map it: without a name it goes when this process does, however that ends.
        os.unlink(region.mmap_path)
        region._creator = False
        self._view = self.manager.primary_tier.get_kv_memoryview()
        assert self._view.shape == (geometry.num_slots, geometry.chunk_bytes)

    def pool(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._view, np.uint8).reshape(self._view.shape)

    def arrived(self, slots: Sequence[int]) -> None:
        """Nothing: vLLM's workers leave no mark that its manager reads."""

    def check(self) -> None:
        """Nothing: vLLM's manager has no such proof."""


SIDES = {Who.OURS: Ours, Who.STOCK: Stock}


def open_side(options: PeerOptions) -> Side:
    """The manager of `options.who`, with a host pool and a p2p tier as a user would configure them."""
    geometry = Geometry(num_slots=options.num_slots, worker_bytes=options.chunk_bytes, num_copies=1)
    side = SIDES[options.who]
    table = {"type": "p2p", "host": HOST, "port": options.port, **options.tier}
    config = offloading_config(
        options.chunk_bytes,
        engine_id=f"peer-{os.getpid()}",
        extra_config={
            "spec_name": side.spec.__name__,
            "cpu_bytes_to_use": geometry.pool_bytes,
            "secondary_tiers": [table] if options.with_tier else [],
            **options.extra_config,
        },
    )
    return side(config, geometry)
