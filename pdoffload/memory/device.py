"""The engine's KV caches, seen as addresses: what a copy to or from the host pool needs of them.

The only room beside `pdoffload.vllm` that imports torch. On a CPU build the "device" is host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import torch

from pdoffload.errors import MisuseError

logger = logging.getLogger(__name__)


class CacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One cache tensor: `num_blocks` pages of `page_bytes`, page b at `address + b * stride_bytes`."""

    address: int
    num_blocks: int
    page_bytes: int
    stride_bytes: int


class LayerRef(msgspec.Struct, frozen=True):
    """A KV-cache group's use of tensor number `tensor`: the first `page_bytes` of each of its pages."""

    tensor: int
    page_bytes: int


class DeviceCaches(msgspec.Struct, frozen=True, kw_only=True):
    """All cache tensors of one worker. The engine owns the memory; it must outlive every copy."""

    tensors: tuple[CacheTensor, ...]
    groups: tuple[tuple[LayerRef, ...], ...]
    """Per KV-cache group, the tensors (and bytes of their pages) that hold its layers."""
    storages: tuple[tuple[int, int], ...]
    """(address, bytes) of the distinct allocations behind the tensors: what is registered."""
    device_id: int = 0
    on_gpu: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one device block over all tensors, padding included."""
        return sum(tensor.page_bytes for tensor in self.tensors)


def view_caches(
    tensors: Sequence[tuple[torch.Tensor, int]], groups: Sequence[Sequence[tuple[int, int]]]
) -> DeviceCaches:
    """Addresses of `tensors`, each given with its page size in bytes; dimension 0 counts blocks.

    `groups` holds (tensor index, bytes used of its page) per layer of each KV-cache group. Raises
    `MisuseError` for an empty list, tensors of different devices, or a page that exceeds its stride.
    """
    if not tensors:
        raise MisuseError("an engine without KV cache tensors has nothing to offload")
    devices = {tensor.device for tensor, _ in tensors}
    if len(devices) != 1:
        raise MisuseError(f"KV cache tensors lie on several devices: {sorted(map(str, devices))}")
    device = devices.pop()
    views = []
    for tensor, page_bytes in tensors:
        stride_bytes = tensor.stride(0) * tensor.element_size()
        if not 0 < page_bytes <= stride_bytes:
            raise MisuseError(f"a page of {page_bytes} bytes in a stride of {stride_bytes} bytes")
        views.append(
            CacheTensor(
                address=tensor.data_ptr(),
                num_blocks=tensor.shape[0],
                page_bytes=page_bytes,
                stride_bytes=stride_bytes,
            )
        )
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor, _ in tensors)
    }
    return DeviceCaches(
        tensors=tuple(views),
        groups=tuple(tuple(LayerRef(*ref) for ref in refs) for refs in groups),
        storages=tuple(sorted(storages.items())),
        device_id=device.index or 0,
        on_gpu=device.type != "cpu",
    )


def enter_thread(caches: DeviceCaches) -> None:
    """Make the caches' GPU the calling thread's own, before an agent is opened there."""
    if caches.on_gpu:
        torch.cuda.set_device(caches.device_id)


def written_so_far(caches: DeviceCaches) -> Callable[[], None]:
    """A wait for everything queued on the device until now, to be called on another thread.

    A copy may read a block only after the kernels that fill it, and may overwrite one only after the
    kernels that clear it. On a CPU the engine has finished when it calls us: nothing to wait for.
    """
    if not caches.on_gpu:
        return _nothing
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(caches.device_id))
    wait: Callable[[], None] = event.synchronize
    return wait


def pin_host_memory(address: int, size_bytes: int) -> Callable[[], None] | None:
    """Page-lock host memory for a GPU's copy engines; returns the undo, or None where it is refused.

    Pinning only makes copies faster: without it everything works.
    """
    if not torch.cuda.is_available():
        return None
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, size_bytes, 0))
    if status:
        logger.warning(
            "cudaHostRegister of %d bytes failed with CUDA error %d: copies go through pageable "
            "memory and are slower (is RLIMIT_MEMLOCK too low?)",
            size_bytes,
            status,
        )
        return None

    def unpin() -> None:
        runtime.cudaHostUnregister(address)

    return unpin


def _nothing() -> None:
    return None
