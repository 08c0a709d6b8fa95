"""One transfer, from the call that submitted it to the moment its memory is free again.

              submit
                |
             RUNNING ----------- all bytes are there ----------------> DONE     settled
                |  \\------------ NIXL refused, or all I/O ended badly -> FAILED   settled
                |
                +--- deadline passed, or a state check failed -------> UNKNOWN  not settled
                                                                          |
                                       NIXL said DONE or FAILED after all, or the agent was torn down
                                                                          v
                                                             UNKNOWN with `settled_state`, settled

`state` changes once. Until a transfer is settled its memory and its files are in use: bytes may still
be read or land there.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from pdoffload.errors import MisuseError, PdOffloadError

if TYPE_CHECKING:
    from pdoffload.agent.peer import Peer
    from pdoffload.agent.region import Region


class TransferState(enum.Enum):
    """Where a transfer stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """Over, and not all bytes arrived: what the destination holds is undefined."""
    UNKNOWN = "unknown"
    """No longer waited for, but bytes may still land."""


class Transfer:
    """Made by `Agent.submit`, changed by its agent alone, on the agent's thread; read by anybody.

    `error` is None for RUNNING and DONE; `deadline_s` is an instant of the agent's clock.
    """

    __slots__ = (
        "_error",
        "_settled_state",
        "_state",
        "deadline_s",
        "peer",
        "regions",
        "size_bytes",
        "timeout_s",
        "touches_storage",
        "what",
    )

    def __init__(
        self,
        what: str,
        *,
        size_bytes: int,
        timeout_s: float,
        deadline_s: float,
        regions: tuple[Region, ...] = (),
        touches_storage: bool = False,
        peer: Peer | None = None,
    ) -> None:
        self.what = what
        self.size_bytes = size_bytes
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.regions = regions
        self.touches_storage = touches_storage
        self.peer = peer
        self._state = TransferState.RUNNING
        self._error: PdOffloadError | None = None
        self._settled_state: TransferState | None = None
        for used in self.uses:
            used.unsettled += 1

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def error(self) -> PdOffloadError | None:
        return self._error

    @property
    def settled_state(self) -> TransferState | None:
        """How an UNKNOWN transfer ended after all; equal to `state` for DONE and FAILED."""
        return self._settled_state

    @property
    def settled(self) -> bool:
        """No byte moves any more on behalf of this transfer."""
        return self._settled_state is not None

    def end(self, state: TransferState, error: PdOffloadError | None = None) -> None:
        """For the agent: leave RUNNING, once. DONE carries no error, the others must."""
        if self._state is not TransferState.RUNNING or state is TransferState.RUNNING:
            raise MisuseError(f"{self!r} cannot become {state.value}")
        if (error is None) != (state is TransferState.DONE):
            raise MisuseError(f"{self!r} cannot become {state.value} with error {error!r}")
        self._state = state
        self._error = error
        if state is not TransferState.UNKNOWN:
            self._free(state)

    def settle(self, state: TransferState) -> None:
        """For the agent: an UNKNOWN transfer is over now, as `state` (DONE or FAILED)."""
        over = state in (TransferState.DONE, TransferState.FAILED)
        if self._state is not TransferState.UNKNOWN or self.settled or not over:
            raise MisuseError(f"{self!r} cannot settle as {state.value}")
        self._free(state)

    def _free(self, state: TransferState) -> None:
        self._settled_state = state
        for used in self.uses:
            used.unsettled -= 1

    @property
    def uses(self) -> tuple[Region | Peer, ...]:
        """What counts this transfer until it is settled."""
        return (*self.regions, self.peer) if self.peer else self.regions

    def __repr__(self) -> str:
        then = ""
        if self._state is TransferState.UNKNOWN:
            then = f", settled {self._settled_state.value}" if self._settled_state else ", open"
        return f"<Transfer {self.what!r} {self.size_bytes} B: {self._state.value}{then}>"
