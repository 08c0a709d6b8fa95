"""NIXL itself. The only module that imports it, and the only one that sees its errors and states.

What a failed request means was read in NIXL's source and tried on 1.4.1 and 1.5.1:

- Once a request has failed, NIXL never asks the plugin about it again.
- POSIX with io_uring or Linux AIO, from NIXL 1.5: an I/O that fails or ends short fails its own request
  alone, and the failure is told only when every I/O of that request has ended or been cancelled. (Only
  a kernel that refuses the ring itself makes it tell earlier; nothing distinguishes that from here.)
- POSIX with posix_aio, and every POSIX queue before 1.5: the error of one I/O is told to whichever
  request is asked next, possibly to none or to all, while other I/Os go on; a request can be reported
  done whose I/O failed. All file requests of the agent are UNKNOWN then, and it has to be replaced.
- Before 1.5 a short read or write counts as done: the length of the files is compared instead.
- Releasing a POSIX request in flight, and closing an agent over one, does not stop its I/O; the
  completion of it is written through a dangling pointer. We never do either.
- GDS_MT waits for every piece of a request before it tells of an error, counts a short read or write as
  one, and tells of nothing but that: FAILED. Releasing a request in flight, and closing an agent over
  one, waits for its I/O, for ever if need be. We never do either.
- GDS counts the pieces that have ended and does not look at how: one that failed or ended short is DONE.
  So is a request whose state cuFile refuses to tell. Only the length of a file is compared here; holes
  show what was not written, checksums what was not read. A request of several batches gives the first
  ones back to its pool again at each look, so a request is one batch (`FileLimits`). What a refused
  submit has begun nobody knows, and its batch is used again: UNKNOWN, for all file requests.
- GDS_MT and GDS give cuFile the caller's own descriptor, when a file is registered, and share one cuFile
  handle among registrations of a descriptor in one agent; in GDS the first deregistration closes it for
  all. Two live regions never share a file here (`RegionTable`).
- UCX tells the first error of a request while other pieces of it may still move: UNKNOWN until the
  agent, and with it UCX's worker, is gone.

And of peers, between processes over TCP and over cma, on 1.5.1:

- A peer killed in the middle of a write, or that closes its agent: the next state check raises
  nixlRemoteDisconnectError, within milliseconds. A peer that was killed before: so does the post.
- A peer stopped in the middle (SIGSTOP): the request stays in progress. Destroying the agent over it
  takes milliseconds; the peer, continued, works on with others.
- cma copies whole requests in the post itself, into a stopped peer as well, and into one that has
  closed its agent: 53 of 64 MiB landed after that, from a writer that had been stopped in between.
- With a peer's failure to be reported (`ucx_error_handling_mode` peer, the default), UCX uses cma and TCP
  between processes of a host; its shared-memory transports cannot report it and are left out.
- Removing a peer closes its endpoint here, but UCX keeps one that the other side is connected to until
  a worker ends (ucp_ep_disconnected): one descriptor a time by cma, two by TCP, on both sides.
  When the other agent is closed, nothing is left.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import stat
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdoffload.agent.agent import Op
from pdoffload.agent.backends import Backend, UcxBackend
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.driver import DONE, RUNNING, Verdict
from pdoffload.agent.limits import FileLimits
from pdoffload.agent.metadata import agent_name_in
from pdoffload.agent.plugins import usability
from pdoffload.agent.transfer import TransferState
from pdoffload.agent.ucx import LONGEST_NAME, UNKNOWN, UcxEndpoints, allows_cma
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import BackendUnusable, ConfigError, NixlError

# Raised by NIXL's core before a plugin has seen the request.
_NOT_POSTED = (
    "nixlNotFoundError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotSupportedError",
)


class NixlAgent(DrivenAgent):
    """A NIXL agent with exactly the given backends, all of them usable or `BackendUnusable`.

    NIXL's progress thread is off: it would spin a core for ever. The name is made unique among all
    hosts (see `unique_name`). Belongs to the thread that creates it.
    """

    def __init__(
        self,
        name: str,
        backends: Sequence[Backend],
        *,
        clock: Clock = SYSTEM_CLOCK,
        check_overlaps: bool = True,
    ) -> None:
        unique = unique_name(name)
        driver = NixlDriver(unique, backends)
        super().__init__(unique, driver, clock=clock, check_overlaps=check_overlaps)
        self.backends = driver.params
        """Backend name -> the parameters it was created with."""
        self.open_to_cma = any(
            isinstance(backend, UcxBackend)
            and backend.reach == "network"
            and allows_cma(os.environ.get("UCX_TLS") or backend.tls)
            for backend in backends
        )


class NixlDriver:
    """One `nixl_agent`; see `Driver`."""

    def __init__(self, name: str, backends: Sequence[Backend]) -> None:
        if len({backend.name for backend in backends}) != len(backends) or not backends:
            raise ConfigError([f"backends {[b.name for b in backends]}: want each one once"])
        api = _load()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        try:
            self._agent = _call("nixl_agent", api.nixl_agent, name, config)
        except NixlError as error:
            # Without a single plugin (NIXL_PLUGIN_DIR names an empty folder) no agent is made at all.
            raise BackendUnusable("nixl_agent", error.reason) from error
        self._name = name
        self.params = {backend.name: self._create(backend) for backend in backends}
        kinds = {each: self._agent.get_backend_mem_types(each) for each in self.params}
        self._file_backends = [each for each in kinds if "FILE_SEG" in kinds[each]]
        self._memory_backends = [
            each for each in kinds if not {"FILE_SEG", "OBJ_SEG", "BLK_SEG"} & set(kinds[each])
        ]
        before_1_5 = _version() < (1, 5)
        self._posix_loses_track = before_1_5 or "use_posix_aio" in self.params.get("POSIX", {})
        self._short_is_done = before_1_5 or "GDS" in self.params
        self._limits = FileLimits(backends)
        self._endpoints = UcxEndpoints(name) if "UCX" in self.params else None
        self._requests: set[_Request] = set()

    def _create(self, backend: Backend) -> dict[str, str]:
        reason = ""
        for params in backend.candidates():
            try:
                _call("create_backend", self._agent.create_backend, backend.name, params)
            except NixlError as error:
                reason = error.reason
            else:
                return params
        why = usability(backend.name).why or "it loads, and refuses to start"
        raise BackendUnusable("create_backend", f"{backend.name} cannot be used: {why} ({reason})")

    def register(self, kind: MemoryKind, rows: Rows) -> Any:
        return _call("register_memory", self._agent.register_memory, rows, kind.value)

    def deregister(self, handle: Any) -> None:
        _call("deregister_memory", self._agent.deregister_memory, handle)

    def metadata(self) -> bytes:
        return bytes(_call("get_agent_metadata", self._agent.get_agent_metadata))

    def name_in(self, metadata: bytes) -> str:
        return agent_name_in(metadata)

    def add_peer(self, metadata: bytes) -> None:
        if self._endpoints:
            self._endpoints.expect()
        _call("add_remote_agent", self._agent.add_remote_agent, metadata)
        if self._endpoints:
            self._endpoints.note(agent_name_in(metadata))

    def remove_peer(self, name: str) -> None:
        if self._endpoints:
            self._endpoints.forget(name)
        _call("remove_remote_agent", self._agent.remove_remote_agent, name)

    def transport_of(self, name: str) -> str:
        if len(self._memory_backends) != 1:
            return UNKNOWN
        if self._endpoints:
            return self._endpoints.transport_of(name)
        return self._memory_backends[0]

    def progress(self) -> int:
        told = _call("get_new_notifs", self._agent.get_new_notifs)
        return sum(len(messages) for messages in told.values())

    def make(self, op: Op, local: Descriptors, remote: Descriptors, peer: str | None) -> _Request:
        to_file = remote.kind is MemoryKind.FILE
        backends = self._file_backends if to_file else self._memory_backends
        if not backends:
            reason = f"no backend of {list(self.params)} moves {local.kind.value} <-> {remote.kind.value}"
            raise NixlError("initialize_xfer", reason)
        refusal = self._limits.refusal(remote.rows) if to_file else ""
        if refusal:
            raise NixlError("initialize_xfer", refusal)
        if op is Op.READ and not to_file and peer is None:
            # Both sides are this process's memory, and UCX's in-process write is a bare memcpy while
            # its read is not.
            op, local, remote = Op.WRITE, remote, local
        sides = [
            _call("get_xfer_descs", self._agent.get_xfer_descs, side.rows, side.kind.value)
            for side in (local, remote)
        ]
        handle = _call(
            "initialize_xfer",
            self._agent.initialize_xfer,
            op.value,
            *sides,
            peer or self._name,
            b"",
            backends,
        )
        request = _Request(handle, remote.rows if to_file else None)
        if to_file:
            self._limits.take(len(remote))
        self._requests.add(request)
        return request

    def start(self, handle: _Request) -> Verdict:
        return self._judge("transfer", self._agent.transfer, handle)

    def check(self, handle: _Request) -> Verdict:
        return self._judge("check_xfer_state", self._agent.check_xfer_state, handle)

    def _judge(self, name: str, call: Callable[[Any], Any], request: _Request) -> Verdict:
        try:
            state = _call(name, call, request.handle)
        except NixlError as error:
            return self._diagnose(request, error)
        if state == "PROC":
            return RUNNING
        if state == "DONE":
            return self._confirm(request)
        return self._diagnose(request, NixlError(name, f"state {state}"))

    def _diagnose(self, request: _Request, error: NixlError) -> Verdict:
        cause = type(error.__cause__).__name__
        if error.call == "transfer" and cause in _NOT_POSTED:
            return Verdict(TransferState.FAILED, error)
        try:
            backend = _call("query_xfer_backend", self._agent.query_xfer_backend, request.handle)
        except NixlError:
            # Which plugin failed only sharpens the verdict; without it the safe one stands.
            return Verdict(TransferState.UNKNOWN, error)
        if backend == "POSIX" and self._posix_loses_track:
            return Verdict(TransferState.UNKNOWN, error, spreads=True)
        if backend == "GDS":
            return Verdict(TransferState.UNKNOWN, error, spreads=True)
        told_late = backend == "POSIX" or (backend == "GDS_MT" and error.call == "check_xfer_state")
        if told_late and cause == "nixlBackendError":
            return Verdict(TransferState.FAILED, error)
        return Verdict(TransferState.UNKNOWN, error)

    def _confirm(self, request: _Request) -> Verdict:
        if request.files is None or not self._short_is_done:
            return DONE
        ends = request.files[:, 0] + request.files[:, 1]
        for fd in np.unique(request.files[:, 2]):
            need = int(ends[request.files[:, 2] == fd].max())
            status = os.fstat(int(fd))
            have = status.st_size
            if stat.S_ISREG(status.st_mode) and have < need:
                reason = f"file {int(fd)} holds {have} of {need} bytes"
                return Verdict(TransferState.FAILED, NixlError("check_xfer_state", reason))
        return DONE

    def release(self, handle: _Request) -> None:
        _call("release_xfer_handle", self._agent.release_xfer_handle, handle.handle)
        if handle.files is not None:
            self._limits.give_back(len(handle.files))
        self._requests.discard(handle)

    def close(self, *, abandon: bool) -> None:
        if abandon:
            # The handles too: NIXL's Python layer releases a handle that is garbage. One reference too
            # many, and not a list of this module: that one goes when the interpreter ends, and GDS_MT
            # would keep the process until its I/O has ended.
            left = (self._agent, self._requests)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
        del self._agent


class _Request:
    """A NIXL request, and its rows of files if it has any."""

    __slots__ = ("files", "handle")

    def __init__(self, handle: Any, files: Rows | None) -> None:
        self.handle = handle
        self.files = files


def unique_name(name: str) -> str:
    """`name`, cut if need be, and 12 random digits: peers on all hosts tell agents apart by it."""
    random = uuid.uuid4().hex[:12]
    return f"{name[: LONGEST_NAME - len(random) - 1]}-{random}"


def probe(backend: Backend) -> str | None:
    """Why `backend` cannot be used on this machine, or None if it can: an agent with it is created.

    A plugin that stands in NIXL's list may still be unusable. Takes well under 5 s; safe on any thread.
    """
    try:
        NixlAgent("probe", [backend]).close()
    except NixlError as error:
        return error.reason
    return None


def first_usable(backends: Sequence[Backend]) -> tuple[Backend, tuple[str, ...]]:
    """The first of `backends` that works, and why those before it do not.

    Raises `BackendUnusable` with every reason if none does. The caller says the reasons aloud.
    """
    reasons: list[str] = []
    for backend in backends:
        reason = probe(backend)
        if reason is None:
            return backend, tuple(reasons)
        reasons.append(reason)
    raise BackendUnusable("create_backend", "; ".join(reasons) or "no backend was named")


def _call(name: str, call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception as error:  # the seam: plugins raise NIXL's classes and any C++ exception
        # Whoever keeps the error keeps the frames of its traceback: they must not hold NIXL's agent,
        # which ends, with its connections, when nothing refers to it any more.
        error.__traceback__ = None
        del call, args
        raise NixlError(name, str(error) or type(error).__name__) from error


@functools.cache
def _load() -> Any:
    """NIXL's Python module; `BackendUnusable` with the remedy where it is missing or broken."""
    try:
        import nixl._api as api
    except (ImportError, OSError) as error:
        reason = f"NIXL cannot be imported ({error}); get it by: pip install pdoffload[nixl]"
        raise BackendUnusable("import", reason) from error
    _keep_rdma_out_of_a_machine_without_it()
    # It logs to standard output, where reports and JSON go, and greets there for every agent.
    logger = logging.getLogger("nixl")
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
    return api


def _keep_rdma_out_of_a_machine_without_it() -> None:
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


def _version() -> tuple[int, int]:
    """NIXL's (major, minor); (0, 0), treated as old, where the package does not tell."""
    import importlib.metadata  # here, because it is slow to import

    try:
        major, minor = importlib.metadata.version("nixl").split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0, 0
