"""NIXL itself. The only module that imports it, and the only one that sees its errors and states.

What a failed request means stands in `pdoffload.agent.verdicts`. Of peers, between processes over TCP and
over cma, tried on 1.5.1:

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

LIBFABRIC differs in many of these points: see `pdoffload.agent.fabric`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pdoffload.agent import fabric
from pdoffload.agent.agent import Op
from pdoffload.agent.backends import Backend, ObjBackend
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.driver import RUNNING, Verdict
from pdoffload.agent.limits import FileLimits
from pdoffload.agent.metadata import Metadata, agent_name_in, read_metadata
from pdoffload.agent.plugins import why_not_started
from pdoffload.agent.process import bound_retries, waits_for_a_store
from pdoffload.agent.request import Request
from pdoffload.agent.transfer import TransferState
from pdoffload.agent.ucx import (
    LONGEST_NAME,
    UcxEndpoints,
    keep_rdma_out_of_a_machine_without_it,
    opens_to_cma,
)
from pdoffload.agent.validate import LOCAL_KINDS
from pdoffload.agent.verdicts import Verdicts, was_refused
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import BackendUnusable, ConfigError, NixlError

_abandoned: list[object] = []
"""NIXL objects under which requests of OBJ still ran when their agent was closed. They are destroyed with the
interpreter, which waits for those requests; without that the process aborts."""

_GIVEN_UP_S = 25.0


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
        self.open_to_cma = opens_to_cma(backends)


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
        self._object_backends = [each for each in kinds if "OBJ_SEG" in kinds[each]]
        self._memory_backends = [
            each for each in kinds if not {"FILE_SEG", "OBJ_SEG", "BLK_SEG"} & set(kinds[each])
        ]
        self._verdicts = Verdicts(self.params)
        self._limits = FileLimits(backends)
        self._endpoints = UcxEndpoints(name) if "UCX" in self.params else None
        self._peers: dict[str, Metadata] = {}
        has_fabric = fabric.NAME in self.params
        self._parked = fabric.ParkedPeers() if has_fabric else None
        self._broken = fabric.BrokenConnections() if has_fabric else None
        self._landing_pad: fabric.LandingPad | None = None
        self._requests: set[Request] = set()
        self._clogged = False

    def _create(self, backend: Backend) -> dict[str, str]:
        reason = ""
        if isinstance(backend, ObjBackend):
            bound_retries()
        for params in backend.candidates():
            try:
                _call("create_backend", self._agent.create_backend, backend.name, params)
            except NixlError as error:
                reason = error.reason
            else:
                return params
        why = why_not_started(backend.name)
        raise BackendUnusable("create_backend", f"{backend.name} cannot be used: {why} ({reason})")

    def register(self, kind: MemoryKind, rows: Rows, names: Sequence[str] = ()) -> Any:
        what: Any = rows
        if kind is MemoryKind.OBJECT:
            what = [(*row, name) for row, name in zip(rows.tolist(), names, strict=True)]
        return _call("register_memory", self._agent.register_memory, what, kind.value)

    def query(self, names: Sequence[str]) -> list[bool]:
        if not self._object_backends:
            raise NixlError("query_memory", f"no backend of {list(self.params)} has objects")
        # NIXL's own description of a whole object that is not registered: nothing but its name.
        asked = [(0, 0, 0, name) for name in names]
        backend, kind = self._object_backends[0], MemoryKind.OBJECT.value
        started_s = SYSTEM_CLOCK.monotonic_s()
        try:
            with waits_for_a_store():
                told = _call("query_memory", self._agent.query_memory, asked, backend, kind)
        except NixlError:
            # The plugin gives a question up after 30 s, and its client goes on with it.
            self._clogged |= SYSTEM_CLOCK.monotonic_s() - started_s > _GIVEN_UP_S
            raise
        return [each is not None for each in told]

    def deregister(self, handle: Any) -> None:
        _call("deregister_memory", self._agent.deregister_memory, handle)

    def metadata(self) -> bytes:
        return bytes(_call("get_agent_metadata", self._agent.get_agent_metadata))

    def name_in(self, metadata: bytes) -> str:
        return agent_name_in(metadata)

    def add_peer(self, metadata: bytes) -> None:
        peer = read_metadata(metadata)
        if not set(self._memory_backends) & set(peer.addresses):
            reason = f"no backend in common: {list(self.params)} here, {list(peer.addresses)} there"
            raise NixlError("add_remote_agent", reason)
        if self._endpoints:
            self._endpoints.expect()
        if self._parked is not None:
            if self._backend_of(peer) == fabric.NAME:
                fabric.require_listener(peer)
            self._parked.add(peer, metadata, self._make_known, self._make_unknown)
        else:
            self._make_known(metadata)
        self._peers[peer.name] = peer
        if self._endpoints:
            self._endpoints.note(peer.name)

    def _make_known(self, metadata: bytes) -> None:
        _call("add_remote_agent", self._agent.add_remote_agent, metadata)

    def remove_peer(self, name: str) -> None:
        if self._endpoints:
            self._endpoints.forget(name)
        if self._parked is None:
            self._make_unknown(name)
        self._peers.pop(name, None)

    def _make_unknown(self, name: str) -> None:
        _call("remove_remote_agent", self._agent.remove_remote_agent, name)

    def _backend_of(self, peer: Metadata) -> str:
        """The first backend of ours, in the order they were named in, by which `peer` can be reached."""
        return next(each for each in self._memory_backends if each in peer.addresses)

    def transport_of(self, name: str) -> str:
        backend = self._backend_of(self._peers[name])
        if backend == fabric.NAME:
            return fabric.transport_to(self._peers[name])
        if backend == "UCX" and self._endpoints:
            return self._endpoints.transport_of(name)
        return backend

    def progress(self) -> int:
        try:
            told = _call("get_new_notifs", self._agent.get_new_notifs)
        except NixlError as error:
            if self._broken is None:
                raise
            self._broken.count(error)
            return 0
        if self._broken is not None:
            self._broken.clear()
        return sum(len(messages) for messages in told.values())

    def make(self, op: Op, local: Descriptors, remote: Descriptors, peer: str | None) -> Request:
        to_file = remote.kind is MemoryKind.FILE
        # Of several NIXL takes any: the choice is ours.
        backends = self._backends_for(remote.kind)[:1]
        if peer is not None and backends:
            backends = [self._backend_of(self._peers[peer])]
        if not backends:
            reason = f"no backend of {list(self.params)} moves {local.kind.value} <-> {remote.kind.value}"
            raise NixlError("initialize_xfer", reason)
        refusal = self._limits.refusal(remote.rows) if to_file else ""
        if refusal:
            raise NixlError("initialize_xfer", refusal)
        if op is Op.READ and remote.kind in LOCAL_KINDS and peer is None:
            # Both sides are this process's memory, and UCX's in-process write is a bare memcpy while
            # its read is not.
            op, local, remote = Op.WRITE, remote, local
        handles = [self._initialize(op, (local, remote), peer, backends)]
        if backends[0] == fabric.NAME and op is Op.WRITE:
            try:
                handles.append(self._make_landing(remote, peer, backends))
            except NixlError:
                _call("release_xfer_handle", self._agent.release_xfer_handle, handles[0])
                raise
        request = Request(handles, remote)
        if to_file:
            self._limits.take(len(remote))
        self._requests.add(request)
        return request

    def _initialize(
        self,
        op: Op,
        sides: tuple[Descriptors, Descriptors],
        peer: str | None,
        backends: Sequence[str],
    ) -> Any:
        described = [
            _call("get_xfer_descs", self._agent.get_xfer_descs, side.rows, side.kind.value)
            for side in sides
        ]
        return _call(
            "initialize_xfer",
            self._agent.initialize_xfer,
            op.value,
            *described,
            peer or self._name,
            b"",
            backends,
        )

    def _backends_for(self, remote: MemoryKind) -> list[str]:
        if remote is MemoryKind.FILE:
            return self._file_backends
        return self._object_backends if remote is MemoryKind.OBJECT else self._memory_backends

    def _make_landing(self, remote: Descriptors, peer: str | None, backends: Sequence[str]) -> Any:
        """The read that ends when what was written to `remote` has landed."""
        if self._landing_pad is None:
            pad = fabric.LandingPad()
            self.register(MemoryKind.DRAM, pad.rows)
            self._landing_pad = pad
        local = Descriptors(MemoryKind.DRAM, self._landing_pad.rows)
        sides = local, Descriptors(remote.kind, fabric.tail_of(remote.rows))
        return self._initialize(Op.READ, sides, peer, backends)

    def start(self, handle: Request) -> Verdict:
        return self._judge("transfer", self._agent.transfer, handle)

    def check(self, handle: Request) -> Verdict:
        return self._judge("check_xfer_state", self._agent.check_xfer_state, handle)

    def _judge(self, name: str, call: Callable[[Any], Any], request: Request) -> Verdict:
        try:
            state = _call(name, call, request.handle)
        except NixlError as error:
            return self._diagnose(request, error)
        if state == "PROC":
            return RUNNING
        if state == "DONE":
            if request.advance():
                return self._judge("transfer", self._agent.transfer, request)
            return self._verdicts.of_end(request)
        return self._diagnose(request, NixlError(name, f"state {state}"))

    def _diagnose(self, request: Request, error: NixlError) -> Verdict:
        if was_refused(error) and not request.at:
            return Verdict(TransferState.FAILED, error)
        try:
            backend = _call("query_xfer_backend", self._agent.query_xfer_backend, request.handle)
        except NixlError:
            # Which plugin failed only sharpens the verdict; without it the safe one stands.
            return Verdict(TransferState.UNKNOWN, error)
        return self._verdicts.of_failure(request, backend, error)

    def release(self, handle: Request) -> None:
        while handle.handles:
            _call("release_xfer_handle", self._agent.release_xfer_handle, handle.handles[-1])
            handle.handles.pop()
        if handle.files is not None:
            self._limits.give_back(len(handle.files))
        self._requests.discard(handle)

    def close(self, *, abandon: bool) -> None:
        if abandon or self._clogged:
            # The handles too: NIXL's Python layer releases a handle that is garbage.
            left = (self._agent, self._requests, self._landing_pad)
            if "OBJ" in self.params:
                _abandoned.append(left)
            else:
                # One reference too many, and not a list of this module: that one goes when the
                # interpreter ends, and GDS_MT would keep the process until its I/O has ended, AZURE_BLOB
                # for ever.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
        del self._agent


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
    keep_rdma_out_of_a_machine_without_it()
    # It logs to standard output, where reports and JSON go, and greets there for every agent.
    logger = logging.getLogger("nixl")
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
    return api
