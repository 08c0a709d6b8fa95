"""Remote memory access of UCX, which ucxx does not bind: registration, put, flush.

The objects are ucxx's own (context, worker, endpoint), by the addresses it tells; the functions are those of
the library that ucxx has loaded. Layouts: `ucp_mem_map_params_t` and `ucp_request_param_t` of UCX 1.21's
ucp/api/ucp.h; the masks in them are UCX's own promise that newer versions still read them right.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_OK, _IN_PROGRESS, _LAST_ERROR = 0, 1, -100
_WITH_ADDRESS, _WITH_LENGTH = 1 << 0, 1 << 1
_WITH_MEMORY_HANDLE, _MULTI_SEND = 1 << 8, 1 << 19


class _MapParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", ctypes.c_int),
        ("exported_memh_buffer", ctypes.c_void_p),
    )


class _RequestParam(ctypes.Structure):
    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", ctypes.c_void_p),
        ("callback", ctypes.c_void_p),
        ("datatype", ctypes.c_uint64),
        ("user_data", ctypes.c_void_p),
        ("reply_buffer", ctypes.c_void_p),
        ("memory_type", ctypes.c_int),
        ("recv_info", ctypes.c_void_p),
        ("memh", ctypes.c_void_p),
    )


class Registration:
    """Memory that a UCX context knows, for as long as the process lives."""

    def __init__(self, context: int, address: int, size_bytes: int) -> None:
        self._context = ctypes.c_void_p(context)
        self._library = _library()
        self.handle = ctypes.c_void_p()
        params = _MapParams(
            field_mask=_WITH_ADDRESS | _WITH_LENGTH, address=address, length=size_bytes
        )
        _check(
            self._library.ucp_mem_map(
                self._context, ctypes.byref(params), ctypes.byref(self.handle)
            )
        )

    def remote_key(self) -> bytes:
        """What a peer needs to reach this memory."""
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        _check(
            self._library.ucp_rkey_pack(
                self._context, self.handle, ctypes.byref(buffer), ctypes.byref(size)
            )
        )
        try:
            return ctypes.string_at(buffer, size.value)
        finally:
            self._library.ucp_rkey_buffer_release(buffer)


class Puts:
    """Writes into one peer's memory through one endpoint. Whoever posts them makes the worker's progress."""

    def __init__(self, endpoint: int, remote_key: bytes, local: Registration) -> None:
        self._library = _library()
        self._endpoint = ctypes.c_void_p(endpoint)
        self._remote_key = ctypes.c_void_p()
        _check(
            self._library.ucp_ep_rkey_unpack(
                self._endpoint, remote_key, ctypes.byref(self._remote_key)
            )
        )
        # As NIXL posts them: the memory is named, and more of them follow.
        self._put = _RequestParam(
            op_attr_mask=_WITH_MEMORY_HANDLE | _MULTI_SEND, memh=local.handle.value
        )
        self._flush = _RequestParam()
        self._requests: list[int] = []

    def post(self, local_address: int, remote_address: int, size_bytes: int) -> None:
        self._note(
            self._library.ucp_put_nbx(
                self._endpoint,
                ctypes.c_void_p(local_address),
                ctypes.c_size_t(size_bytes),
                ctypes.c_uint64(remote_address),
                self._remote_key,
                ctypes.byref(self._put),
            )
        )

    def flush(self) -> None:
        """When what was posted before has ended, it lies in the peer's memory."""
        self._note(self._library.ucp_ep_flush_nbx(self._endpoint, ctypes.byref(self._flush)))

    def done(self) -> bool:
        """Whether all has ended. `RuntimeError` where one has failed."""
        while self._requests:
            status = self._library.ucp_request_check_status(ctypes.c_void_p(self._requests[-1]))
            if status == _IN_PROGRESS:
                return False
            self._library.ucp_request_free(ctypes.c_void_p(self._requests.pop()))
            _check(status)
        return True

    def _note(self, request: int | None) -> None:
        """A request, an error in its place, or nothing where it has ended at once."""
        if request is None:
            return
        as_status = ctypes.c_int64(request).value
        if _LAST_ERROR <= as_status < 0:
            _check(as_status)
        self._requests.append(request)


def version() -> str:
    """Of the UCX that ucxx has loaded."""
    return _library().ucp_get_version_string().decode()


def _check(status: int) -> None:
    if status != _OK:
        raise RuntimeError(f"UCX: {_library().ucs_status_string(status).decode()} ({status})")


def _library() -> Any:
    """libucp as ucxx has loaded it; the same each time."""
    global _loaded
    if _loaded is None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        (path,) = {line[line.index("/") :] for line in lines if "/libucp.so" in line}
        _loaded = ctypes.CDLL(path)
        _loaded.ucp_put_nbx.restype = ctypes.c_void_p
        _loaded.ucp_ep_flush_nbx.restype = ctypes.c_void_p
        _loaded.ucp_get_version_string.restype = ctypes.c_char_p
        _loaded.ucs_status_string.restype = ctypes.c_char_p
        _loaded.ucp_request_free.restype = None
    return _loaded


_loaded: Any = None
