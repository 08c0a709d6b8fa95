"""The I/O threads of the fs tier: each with an agent and the files of its present batch."""

from __future__ import annotations

import logging

from pdoffload.tiers.fs.lane import Files, Lane, Terms
from pdoffload.tiers.fs.load import load_batch
from pdoffload.tiers.fs.store import store_batch
from pdoffload.tiers.io_threads import IoThread, Place, as_storage_error
from pdoffload.tiers.parts import Batch

_log = logging.getLogger(__name__)


class FileThread(IoThread):
    """Moves batches through a `Lane`, which it makes at the first one and anew after a failure."""

    def __init__(self, place: Place, terms: Terms) -> None:
        super().__init__(place)
        self._terms = terms
        self._lane: Lane | None = None

    def run_batch(self, batch: Batch) -> None:
        files = Files()
        chunk_bytes = self._terms.format.chunk_bytes
        try:
            if self._lane is None:
                self._lane = Lane(self._terms, self.name)
            work = load_batch if batch.is_load else store_batch
            work(self._terms, self._lane, batch, files)
            sound = not self._lane.failed
        except BaseException as error:  # noqa: BLE001
            # The seam where anything at all, a SystemExit out of a plugin included, becomes the
            # batch's result: nobody else would ever tell its jobs, and the thread has to go on.
            batch.fail_rest(as_storage_error(batch, error))
            sound = False
        told = not sound and self._lane is not None and self._lane.in_flight
        if told:
            files.drop_names()
            self.tell(batch, chunk_bytes, settled=False)
            self.settle_aside()
        if sound or self._drop_lane():
            files.close()
            self.tell(batch, chunk_bytes, settled=True)
            return
        files.drop_names()
        if not told:
            self.tell(batch, chunk_bytes, settled=False)

    def leave(self) -> None:
        self._drop_lane()

    def _drop_lane(self) -> bool:
        """Close the agent, if there is one, when nothing is in flight. False if something stays so."""
        lane, self._lane = self._lane, None
        if lane is None:
            return True
        try:
            lane.settle(self.stopping)
            return lane.close()
        except Exception as error:  # noqa: BLE001 - the thread goes on without this agent
            _log.warning("%s: its agent did not close: %s", self.name, error)
            return not lane.in_flight
