"""The fs tier: chunk files in a directory, moved by NIXL. The owner's side is `QueuedTier`; a quota has a
thread of its own that keeps the ledger and evicts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pdoffload.config import FsTierConfig
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Job, TierContext
from pdoffload.tiers.fs.io_threads import FileThread
from pdoffload.tiers.fs.lane import MakeAgent
from pdoffload.tiers.fs.lookup import file_lookup
from pdoffload.tiers.fs.memory import FsContext
from pdoffload.tiers.fs.start import prepare
from pdoffload.tiers.jobs import LiveJob
from pdoffload.tiers.queued import Medium, QueuedTier

_QUOTA_THREAD_S = 1.0
"""What `close` gives the quota's thread, which holds nothing of the pool."""


class FsTier(QueuedTier):
    """Chunks as files under `config.root_dir`; the layout is in `paths` and `chunkfile`.

    Opening it makes folders, writes one small file to try the file system, removes what dead writers
    left, and waits for all that: it belongs to the start of an engine. Raises `ConfigError` before any
    thread is started.

    `make_agent` is for tests; by default each I/O thread has a `NixlAgent` with the backend that `prepare`
    found.
    """

    name = "fs"

    def __init__(
        self,
        config: FsTierConfig,
        context: TierContext | FsContext,
        *,
        rank: int = 0,
        make_agent: MakeAgent | None = None,
    ) -> None:
        self.locality = config.locality
        self.publishes_events = config.enable_kv_events
        start = prepare(config, context, rank=rank, make_agent=make_agent)
        self._terms = terms = start.terms
        lookup = file_lookup(
            terms.space, terms.sound_sizes, timeout_s=terms.timeout_s, clock=terms.clock
        )
        medium = Medium(
            base=terms.space.base,
            what="the file system",
            lookup=lookup,
            make_thread=functools.partial(FileThread, terms=terms),
            num_readers=start.num_readers,
            num_writers=start.num_writers,
            most_chunks=terms.most_chunks,
            num_slots=terms.memory.num_slots,
            timeout_s=terms.timeout_s,
            clock=terms.clock,
        )
        super().__init__(medium)

    def path(self, key: BlockKey) -> str:
        """The file that holds the chunk `key`, if any does."""
        return self._terms.space.path(key)

    # --- the quota ---

    def touch(self, keys: Sequence[BlockKey]) -> None:
        super().touch(keys)
        if self._terms.quota is not None:
            self._terms.quota.used(keys)

    def _load_begun(self, job: Job) -> None:
        if self._terms.quota is not None:
            self._terms.quota.hold(job.keys)

    def _load_ended(self, live: LiveJob) -> None:
        if self._terms.quota is not None:
            self._terms.quota.let_go(live.job.keys)

    def _take_in(self) -> None:
        super()._take_in()
        quota = self._terms.quota
        while quota is not None and quota.evicted:
            self._lookup.gone((quota.evicted.popleft(),))

    def _closing(self) -> None:
        if self._terms.quota is not None:
            self._terms.quota.refuse()

    def _release(self, *, all_ended: bool) -> None:
        if self._terms.quota is not None:
            self._terms.quota.close(timeout_s=_QUOTA_THREAD_S)
        if all_ended:
            self._terms.writer.close()
