"""The seam below an agent: what is asked of NIXL, one call at a time, without any bookkeeping.

`pdoffload.agent.nixl.NixlDriver` is the real one; `pdoffload.testing.FakeDriver` moves bytes itself and
can be told to fail. Foreign exceptions do not pass this seam: a driver raises `NixlError` or answers
with a `Verdict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import NixlError


class Verdict(msgspec.Struct, frozen=True):
    """What a driver knows of a posted request.

    RUNNING: ask again. DONE, FAILED: no byte moves any more. UNKNOWN: it failed, bytes may still move,
    and asking again tells nothing. `spreads`: so did every other request of this driver that touches
    files, or every other one that does not, because what they share has lost track; files: no request
    will work any more.
    """

    state: TransferState
    error: NixlError | None = None
    spreads: bool = False


RUNNING = Verdict(TransferState.RUNNING)
DONE = Verdict(TransferState.DONE)


class Driver(Protocol):
    """Called by one thread. Handles are opaque to the caller and stay valid until given back."""

    def register(self, kind: MemoryKind, rows: Rows, names: Sequence[str] = ()) -> Any:
        """Make memory, files or objects (those have `names`, one a row) known; raises `NixlError`."""
        ...

    def query(self, names: Sequence[str]) -> list[bool]:
        """Whether the store holds each object. Waits for it; raises `NixlError`."""
        ...

    def deregister(self, handle: Any) -> None:
        """Forget one registration. After a `NixlError` it is as before."""
        ...

    def metadata(self) -> bytes:
        """What others need to reach the memory registered now; raises `NixlError`."""
        ...

    def name_in(self, metadata: bytes) -> str:
        """The name of the agent that made `metadata`; a `NixlError` if it is not whole."""
        ...

    def add_peer(self, metadata: bytes) -> None:
        """Take in what `name_in` accepted, under a name that is not known. On `NixlError` it is not."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget a peer that no request uses. After a `NixlError` it is as before."""
        ...

    def transport_of(self, name: str) -> str:
        """How bytes go to a peer; "unknown" where it cannot be told."""
        ...

    def progress(self) -> int:
        """Let peers' bytes land; how many notifications were dropped. Raises `NixlError`."""
        ...

    def make(self, op: Op, local: Descriptors, remote: Descriptors, peer: str | None) -> Any:
        """A request, not posted yet. A `NixlError` means that nothing was made.

        `peer` names the agent in whose memory the remote rows lie; None: this one's.
        """
        ...

    def start(self, handle: Any) -> Verdict:
        """Post a request. A `NixlError` counts as UNKNOWN."""
        ...

    def check(self, handle: Any) -> Verdict:
        """Make progress and tell how a posted request stands. A `NixlError` counts as UNKNOWN."""
        ...

    def release(self, handle: Any) -> None:
        """Free a request that is over. After a `NixlError` it may be tried again."""
        ...

    def close(self, *, abandon: bool) -> None:
        """Tear everything down. `abandon`: file or object I/O still runs: touch nothing, leak it all."""
        ...
