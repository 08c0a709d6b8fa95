"""The I/O threads of the obj tier: each with an agent and staging memory of its own."""

from __future__ import annotations

import logging

from pdoffload.tiers.io_threads import IoThread, Place, as_storage_error
from pdoffload.tiers.obj.lane import Lane, Terms
from pdoffload.tiers.obj.work import load_batch, store_batch
from pdoffload.tiers.parts import Batch

_log = logging.getLogger(__name__)


class ObjectThread(IoThread):
    """Moves batches through a `Lane`, which it makes at the first one and anew after a request hung.

    Every outcome is settled: requests touch staging memory alone.
    """

    def __init__(self, place: Place, terms: Terms) -> None:
        super().__init__(place)
        self._terms = terms
        self._lane: Lane | None = None

    def run_batch(self, batch: Batch) -> None:
        sound = True
        try:
            if self._lane is None:
                self._lane = Lane(self._terms, self.name)
            work = load_batch if batch.is_load else store_batch
            work(self._terms, self._lane, batch)
            sound = not self._lane.in_flight
        except BaseException as error:  # noqa: BLE001
            # The seam where anything at all, a SystemExit out of a plugin included, becomes the
            # batch's result: nobody else would ever tell its jobs, and the thread has to go on.
            batch.fail_rest(as_storage_error(batch, error))
            sound = False
        self.tell(batch, self._terms.format.chunk_bytes, settled=True)
        if sound:
            return
        if self._lane is not None and self._lane.in_flight:
            self.settle_aside()
        self._drop_lane()

    def leave(self) -> None:
        self._drop_lane()

    def _drop_lane(self) -> None:
        """Close the agent, if there is one, when nothing is in flight."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        try:
            lane.settle(self.stopping)
            lane.close()
        except Exception as error:  # noqa: BLE001 - the thread goes on without this agent
            _log.warning("%s: its agent did not close: %s", self.name, error)
