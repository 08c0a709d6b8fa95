"""How much one agent may have in flight to files: what a plugin would only half take is refused before.

POSIX queues a part of a request that exceeds its pool, and then refuses it. GDS spreads a request that
exceeds a batch over several, and gives the first of them back twice (see `pdoffload.agent.nixl`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdoffload.agent.backends import Backend, GdsBackend, PosixBackend
from pdoffload.agent.descriptors import Rows


class FileLimits:
    """Counts the file requests of one driver. One thread."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._posix = next((each for each in backends if isinstance(each, PosixBackend)), None)
        self._gds = next((each for each in backends if isinstance(each, GdsBackend)), None)
        self._pieces = 0
        self._requests = 0

    def refusal(self, files: Rows) -> str:
        """Why a request for these rows cannot be posted now; empty if it can."""
        posix, gds = self._posix, self._gds
        if posix is not None and self._pieces + len(files) > posix.max_ios:
            return (
                f"{self._pieces} pieces in flight, {len(files)} more exceed max_ios {posix.max_ios}"
            )
        if gds is None:
            return ""
        if self._requests >= gds.max_batches:
            return f"{self._requests} requests in flight, which is max_batches"
        pieces = int(np.sum(-(-files[:, 1].astype(np.int64) // gds.max_piece_bytes)))
        if pieces > gds.batch_pieces:
            return (
                f"{pieces} pieces of at most {gds.max_piece_bytes} bytes exceed batch_pieces "
                f"{gds.batch_pieces}"
            )
        return ""

    def take(self, pieces: int) -> None:
        """A request of so many rows was made."""
        self._pieces += pieces
        self._requests += 1

    def give_back(self, pieces: int) -> None:
        """It is over."""
        self._pieces -= pieces
        self._requests -= 1
