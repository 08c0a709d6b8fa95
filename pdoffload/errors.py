"""Every error this package raises, named by who caused it.

A miss is a value and a failed transfer is a value (`TransferState`, `JobResult.failed`); the classes
here travel inside those values or are raised for misuse and for configuration.

    PdOffloadError
    ├── ConfigError        the operator's settings cannot work          (also a ValueError)
    ├── MisuseError        our caller broke a contract                  (also a RuntimeError)
    ├── NixlError          NIXL refused a call
    │   └── BackendUnusable    a NIXL plugin cannot be used on this machine
    ├── TransferError      bytes did not arrive
    │   └── DeadlineExceeded   ... in time; says what was waited for
    ├── StorageError       a disk or a store refused; carries path and errno
    │   ├── StorageFull        no space, or the quota is reached
    │   └── CorruptChunk       bytes came back, but not the ones that were stored
    └── ProtocolError      a peer sent what may not come at this point
        └── WireError          ... or bytes that are no message at all
"""

from __future__ import annotations

import errno as errno_module
import os
from collections.abc import Sequence


class PdOffloadError(Exception):
    """Root of the tree: catching it catches everything this package raises on purpose."""


class ConfigError(PdOffloadError, ValueError):
    """Settings that cannot work. `problems` holds every one found, each naming key, value, remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in the configuration"
        super().__init__("\n  - ".join((f"{head}:", *self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class MisuseError(PdOffloadError, RuntimeError):
    """Our caller broke a contract: use after close, use after fork, a slot in the wrong state."""


class NixlError(PdOffloadError):
    """NIXL refused a call. `call` is the NIXL method, `reason` its message."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"NIXL {call} failed: {reason}")
        self.call = call
        self.reason = reason

    def __reduce__(self) -> tuple[type[NixlError], tuple[str, str]]:
        return type(self), (self.call, self.reason)


class BackendUnusable(NixlError):
    """A NIXL plugin that was asked for cannot be used on this machine."""


class TransferError(PdOffloadError):
    """Bytes did not arrive. What the destination holds is unknown."""


class DeadlineExceeded(TransferError):
    """A wait ended without an answer. Bytes may still land: the destination stays quarantined."""

    def __init__(self, waited_for: str, timeout_s: float) -> None:
        super().__init__(f"waited {timeout_s:g} s for {waited_for}")
        self.waited_for = waited_for
        self.timeout_s = timeout_s

    def __reduce__(self) -> tuple[type[DeadlineExceeded], tuple[str, float]]:
        return type(self), (self.waited_for, self.timeout_s)


def as_ours(what: str, failure: BaseException) -> PdOffloadError:
    """An error that ends `what`: `failure` itself, or if it is a foreign one, a `TransferError` naming it.

    For the threads that move bytes: whatever a plugin raises, what was waited for ends by it. A foreign
    error is for the caller to log, with its trace.
    """
    if isinstance(failure, PdOffloadError):
        return failure
    return TransferError(f"{what} ended unexpectedly: {type(failure).__name__}: {failure}")


class StorageError(PdOffloadError):
    """A disk or a store refused an operation on `path`. `errno` is None where none applies."""

    def __init__(self, path: str, reason: str, errno: int | None = None) -> None:
        name = f" ({errno_module.errorcode.get(errno, str(errno))})" if errno is not None else ""
        super().__init__(f"{path}: {reason}{name}")
        self.path = path
        self.reason = reason
        self.errno = errno

    @classmethod
    def from_os_error(cls, path: str, error: OSError) -> StorageError:
        """The error for `error` on `path`: `StorageFull` where the disk or a quota is full."""
        full = error.errno in (errno_module.ENOSPC, errno_module.EDQUOT)
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        return (StorageFull if full else StorageError)(path, reason, error.errno)

    def __reduce__(self) -> tuple[type[StorageError], tuple[str, str, int | None]]:
        return type(self), (self.path, self.reason, self.errno)


class StorageFull(StorageError):
    """No space is left, or a quota or the free-space floor is reached."""


class CorruptChunk(StorageError):
    """The bytes under `path` are not the ones that were stored under this key."""


class ProtocolError(PdOffloadError):
    """A peer sent a message that may not come at this point. Its session ends, nothing else does."""


class WireError(ProtocolError):
    """What a peer sent is no message. `field` is the path to what is wrong, empty for the whole frame."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[WireError], tuple[str, str]]:
        return type(self), (self.field, self.reason)
