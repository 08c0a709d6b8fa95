"""What each NIXL plugin moves, and what it needs on a machine: data for `usability` and docs/backends.md.

Read in the plugins' sources and in the libraries that NIXL 1.5.1's wheel links them to. DRAM is host
memory, VRAM a GPU's.
"""

from __future__ import annotations

import msgspec

_HOST = ("DRAM",)
_ANY = ("DRAM", "VRAM")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device file or kernel module. `pattern` is a glob; `without` says what its absence means."""

    pattern: str
    without: str
    needed: bool = False
    """Without it the plugin cannot be used; otherwise it is slower, or the start tells."""


class StartCheck(msgspec.Struct, frozen=True):
    """A function of a library that is called before anything is moved, and answers 0 if it can be.

    It takes nothing and returns an int, or a struct that begins with one.
    """

    library: str
    function: str
    remedy: str


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin: what it moves between `memory` and the `far` side, and on which conditions."""

    memory: tuple[str, ...]
    far: str
    libraries: tuple[str, ...] = ()
    """Beyond those in NIXL's wheel, with the symbol version where one is asked for."""
    devices: tuple[Device, ...] = ()
    start: StartCheck | None = None
    tells_failures: bool = True
    """A request that failed is not reported as done."""
    comes_with: str = "NIXL's wheel"
    use: str
    """How pdoffload uses it."""
    tested: str


GPU_DEVICES = "/dev/nvidia[0-9]*"
_GPU = Device(pattern=GPU_DEVICES, without="there is no NVIDIA GPU, or no driver for it")
_RDMA = Device(pattern="/dev/infiniband/uverbs*", without="there is no RDMA: bytes go by TCP")
_CUFILE = Needs(
    memory=_ANY,
    far="files",
    libraries=("libcufile.so.0", "libcudart.so.12"),
    devices=(
        _GPU,
        Device(
            pattern="/dev/nvidia-fs*",
            without="nvidia-fs is not loaded: unless the kernel's own P2PDMA serves the disk, cuFile copies "
            "GPU memory through host memory (compat mode)",
        ),
    ),
    start=StartCheck(
        "libcufile.so.0",
        "cuFileDriverOpen",
        "cuFile needs a GPU with NVIDIA's driver, and nvidia-fs or `allow_compat_mode` in the cufile.json "
        "that CUFILE_ENV_PATH_JSON names; without a GPU use backend POSIX",
    ),
    use="",
    tested="",
)

NEEDS: dict[str, Needs] = {
    "UCX": Needs(
        memory=_ANY,
        far="memory of this and other processes and hosts",
        devices=(_RDMA,),
        use="copies between device and host memory; tier `p2p`",
        tested="for real: in one process, between processes over TCP and cma",
    ),
    "POSIX": Needs(
        memory=_HOST,
        far="files",
        use="tier `fs`",
        tested="for real: io_uring, Linux AIO, POSIX AIO",
    ),
    "GDS_MT": msgspec.structs.replace(
        _CUFILE,
        use="tier `fs` with `backend: GDS_MT`, and with `auto` where it works",
        tested="the real plugin on host memory over a cuFile for tests; the real cuFile refuses to start "
        "without a GPU. Never on a GPU",
    ),
    "GDS": msgspec.structs.replace(
        _CUFILE,
        tells_failures=False,
        use="tier `fs` with `backend: GDS`, if `verify` is `always`",
        tested="as GDS_MT",
    ),
    "OBJ": Needs(
        memory=_HOST,
        far="objects of an S3 store",
        use="agents only",
        tested="its parameters",
    ),
    "AZURE_BLOB": Needs(
        memory=_HOST,
        far="blobs of a container",
        use="agents only",
        tested="its parameters",
    ),
    "LIBFABRIC": Needs(
        memory=_ANY,
        far="memory of other processes and hosts",
        libraries=(
            "libfabric.so.1 (FABRIC_1.10; NIXL 1.4: FABRIC_1.7)",
            "libcudart.so.12",
            "libcuda.so.1",
            "libhwloc.so.15",
        ),
        devices=(_RDMA,),
        use="agents only",
        tested="why it does not load",
    ),
    "MOONCAKE": Needs(
        memory=_ANY,
        far="memory of other processes and hosts",
        comes_with="a NIXL that was built with it",
        use="agents only",
        tested="that it is missing",
    ),
    "GPUNETIO": Needs(
        memory=_ANY,
        far="memory of other processes and hosts",
        libraries=(
            "libcuda.so.1",
            "libcudart.so.12",
            "DOCA: libdoca_common.so.2, libdoca_gpunetio.so.2",
        ),
        devices=(
            msgspec.structs.replace(_GPU, needed=True),
            Device(
                pattern="/dev/infiniband/uverbs*", without="there is no RDMA device", needed=True
            ),
        ),
        use="no",
        tested="why it does not load",
    ),
    "GUSLI": Needs(memory=_HOST, far="block devices", use="no", tested="that it loads"),
    "HF3FS": Needs(
        memory=_HOST,
        far="files of 3FS",
        comes_with="a NIXL that was built with it",
        use="no",
        tested="that it is missing",
    ),
    "INFINIA": Needs(
        memory=_ANY,
        far="objects of DDN Infinia",
        libraries=("libred_client.so.2", "libred_async.so"),
        use="no",
        tested="why it does not load",
    ),
    "UCCL": Needs(
        memory=_ANY,
        far="memory of other processes and hosts",
        comes_with="a NIXL that was built with it",
        use="no",
        tested="that it is missing",
    ),
}
"""Every name of `KNOWN_BACKENDS`."""
