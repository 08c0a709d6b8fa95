"""What the end of a NIXL request means, plugin by plugin: NIXL says done or failed, which is not all.

Read in NIXL's source and tried on 1.4.1 and 1.5.1:

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
- OBJ and AZURE_BLOB likewise tell the first error of a request: of a request of one row nothing moves
  after it, of others nobody knows. Their agent's end waits, under the interpreter lock, for requests
  that still run (AZURE_BLOB: for queued ones too), minutes with a silent store: such an agent is kept.
- UCX tells the first error of a request while other pieces of it may still move: UNKNOWN until the
  agent, and with it UCX's worker, is gone.

LIBFABRIC differs in many points: see `pdoffload.agent.fabric`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

import numpy as np

from pdoffload.agent import fabric
from pdoffload.agent.driver import DONE, Verdict
from pdoffload.agent.plugins import nixl_version
from pdoffload.agent.request import Request
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import NixlError

_OBJECTS = ("OBJ", "AZURE_BLOB")
# Raised by NIXL's core before a plugin has seen the request.
_NOT_POSTED = (
    "nixlNotFoundError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotSupportedError",
)


def was_refused(error: NixlError) -> bool:
    """Whether NIXL refused a request that it was to post before anything of it could move."""
    return error.call == "transfer" and type(error.__cause__).__name__ in _NOT_POSTED


class Verdicts:
    """Of the requests of one agent, whose backends are the keys of `params`."""

    def __init__(self, params: Mapping[str, Mapping[str, str]]) -> None:
        before_1_5 = nixl_version() < (1, 5)
        self._posix_loses_track = before_1_5 or "use_posix_aio" in params.get("POSIX", {})
        self._short_is_done = before_1_5 or "GDS" in params

    def of_failure(self, request: Request, backend: str, error: NixlError) -> Verdict:
        """NIXL has said that `request`, which `backend` carried, failed."""
        loses_track = backend == "POSIX" and self._posix_loses_track
        if loses_track or backend in (fabric.NAME, "GDS"):
            return Verdict(TransferState.UNKNOWN, error, spreads=True)
        is_over = (
            backend == "POSIX"
            or (backend == "GDS_MT" and error.call == "check_xfer_state")
            or (backend in _OBJECTS and request.rows == 1)
        )
        if is_over and type(error.__cause__).__name__ == "nixlBackendError":
            return Verdict(TransferState.FAILED, error)
        return Verdict(TransferState.UNKNOWN, error)

    def of_end(self, request: Request) -> Verdict:
        """NIXL has said that `request` is done."""
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
