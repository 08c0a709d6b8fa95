"""What UCX itself says about a connection: which of its transports the bytes really take.

NIXL does not tell, and the difference is large: two processes of one host move bytes by cma at several
GB/s, by TCP at one or two. UCX knows, in two places of the library that NIXL has loaded:

- its object tree (`ucs_vfs_path_list_dir`), which UCX's own file system daemon shows, holds the address
  of every endpoint: /ucp/context/AGENT/worker/AGENT:0/ep/0x7f7c3fb01040;
- `ucp_ep_print_info`, a public function, writes the lanes of an endpoint and their uses as text:
  `lane[1]:  5:cma/memory.0 md[4]  -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0`.

Lanes marked `rma_bw` carry bulk writes; several share them. Both calls are synchronous, take 0.2 ms, and
write through C's `fputs` into memory: no Python runs below them, so no lock of UCX's ever waits for the
interpreter. Reading the log instead (UCX_LOG_LEVEL=info, UCX_PROTO_INFO) was tried and dropped: it turns
the log of the whole process up, the main connector's included, hides UCX's last words before a crash in
a file, and tells of a configuration once, not which peer has it. Tried with UCX 1.23 of NIXL 1.5.1.
Whatever is not found as described makes the answer "unknown".
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pdoffload.agent.backends import Backend, UcxBackend

UNKNOWN = "unknown"

LONGEST_NAME = 31
"""UCX cuts the names of contexts and workers here (UCP_ENTITY_NAME_MAX with its final zero)."""

_HOLDS_CMA = frozenset({"all", "cma", "sm", "shm"})

_ADDRESS = re.compile(r"[0-9a-f]{8,16}")
_LANE = re.compile(r"lane\[\d+\]:\s+\d+:(\S+?)\.\d+ .*\brma_bw#\d+")


def allows_cma(transports: str) -> bool:
    """Whether UCX may use cma under this value of UCX_TLS (empty: not set); aliases of UCX included."""
    names = set(transports.removeprefix("^").split(","))
    if transports.startswith("^"):
        return not names & _HOLDS_CMA
    return not transports or bool(names & _HOLDS_CMA)


def opens_to_cma(backends: Sequence[Backend]) -> bool:
    """What `Agent.open_to_cma` says of an agent with these backends."""
    return any(
        isinstance(backend, UcxBackend)
        and backend.reach == "network"
        and allows_cma(os.environ.get("UCX_TLS") or backend.tls)
        for backend in backends
    )


def keep_rdma_out_of_a_machine_without_it() -> None:
    """Tell UCX not to load its InfiniBand module where the kernel has no such device.

    That module brings in the system's RDMA libraries, and with them a second libnl beside the one in
    NIXL's wheel; both clean up at exit, and the process dies with SIGSEGV after its work is done. An
    operator's own UCX_MODULES stands.
    """
    try:
        has_rdma = bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        has_rdma = False
    if not has_rdma:
        os.environ.setdefault("UCX_MODULES", "^ib")


class UcxEndpoints:
    """The endpoints of one NIXL agent. Used on the agent's thread, between its calls of NIXL."""

    def __init__(self, agent_name: str) -> None:
        self._name = agent_name
        self._of: dict[str, int] = {}
        self._before: frozenset[int] = frozenset()

    def expect(self) -> None:
        """A peer is about to be added: whatever endpoint appears until `note` is its own."""
        self._before = self._now()

    def note(self, peer: str) -> None:
        """The peer has been added."""
        new = self._now() - self._before
        if len(new) == 1:
            (self._of[peer],) = new

    def forget(self, peer: str) -> None:
        """The peer is removed: its endpoint may be gone at once, and its address used again."""
        self._of.pop(peer, None)

    def transport_of(self, peer: str) -> str:
        """The transports and devices of bulk writes, as "cma/memory" or "tcp/lo+tcp/eth0"."""
        endpoint = self._of.get(peer)
        library = _libraries()
        if endpoint is None or library is None or endpoint not in self._now():
            return UNKNOWN
        return bulk_transports(endpoint)

    def _now(self) -> frozenset[int]:
        library = _libraries()
        if library is None:
            return frozenset()
        # UCX fills a folder of the tree when the one above it is listed. Names come without anything
        # between them: the worker's is one name while there is one worker, endpoints begin with 0x.
        workers = f"/ucp/context/{self._name}/worker"
        for folder in ("/", "/ucp", "/ucp/context", f"/ucp/context/{self._name}"):
            library.listed(folder)
        worker = f"{workers}/{library.listed(workers)}"
        library.listed(worker)
        found = library.listed(f"{worker}/ep").split("0x")[1:]
        if not all(_ADDRESS.fullmatch(each) for each in found):
            return frozenset()
        return frozenset(int(each, 16) for each in found)


def bulk_transports(endpoint: int) -> str:
    """The transports and devices of bulk writes through the live UCX endpoint at this address."""
    library = _libraries()
    if library is None:
        return UNKNOWN
    text = _written(lambda out: library.ucp.ucp_ep_print_info(ctypes.c_void_p(endpoint), out))
    return "+".join(_LANE.findall(text)) or UNKNOWN


class _Libraries:
    """UCX as it is loaded in this process, and C's way to write into memory."""

    def __init__(self, ucs: str, ucp: str) -> None:
        self.ucs = ctypes.CDLL(ucs)
        self.ucp = ctypes.CDLL(ucp)
        self.ucp.ucp_ep_print_info.restype = None
        self._fputs = ctypes.cast(ctypes.CDLL(None).fputs, ctypes.c_void_p)

    def listed(self, path: str) -> str:
        """The names in a folder of UCX's object tree, one after the other; nothing if there is none."""
        name = path.encode()
        return _written(lambda out: self.ucs.ucs_vfs_path_list_dir(name, self._fputs, out))


@functools.cache
def _libraries() -> _Libraries | None:
    """None where this process has no UCX, several of it, or one without what is needed here.

    Asked for when an agent exists, so that UCX is loaded by then if it ever will be.
    """
    found: dict[str, set[str]] = {"libucs": set(), "libucp": set()}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        stem = re.match(r"libuc[sp](?=[-.])", path.rpartition("/")[2])
        if stem:
            found[stem[0]].add("/" + path)
    if any(len(paths) != 1 for paths in found.values()):
        return None
    try:
        return _Libraries(found["libucs"].pop(), found["libucp"].pop())
    except (OSError, AttributeError):
        return None


def _written(fill: Callable[[ctypes.c_void_p], object]) -> str:
    """What `fill` writes to the C stream it is given."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    if not stream:
        return ""
    try:
        fill(stream)
    finally:
        libc.fclose(stream)
    try:
        return ctypes.string_at(text, size.value).decode(errors="replace")
    finally:
        libc.free(text)
