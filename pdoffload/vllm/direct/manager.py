"""The scheduler's side: vLLM's OffloadingManager over what is known of chunk files. It moves no byte.

The truth is the file system, asked by a thread of its own (`FileLookup`). Workers tell how their jobs fared;
without their word (it comes by our connector, one step after a job at the latest) the files are asked again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Locality as TierLocality
from pdoffload.tiers.base import Lookup
from pdoffload.tiers.fs.lookup import FileLookup
from pdoffload.vllm.direct.jobs import DirectNews, KeysSpec
from pdoffload.vllm.metrics import DirectStatsReader

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )


MAX_STORING = 4096
"""Chunks on their way to files at a time; beyond it the next step asks again."""
_CLOSE_S = 1.0

_ANSWERS = {
    Lookup.HIT: LookupResult.HIT,
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.RETRY,
}


class NixlDirectManager(OffloadingManager):
    """Owns `lookup`. Everything runs on the engine's scheduler thread and answers at once."""

    def __init__(
        self,
        lookup: FileLookup,
        *,
        fingerprint: bytes,
        locality: TierLocality | None = None,
        publishes_events: bool = False,
    ) -> None:
        self._lookup = lookup
        self._fingerprint = fingerprint
        self._locality = None if locality is None else Locality[locality.name]
        self._publishes_events = publishes_events
        self._storing: set[BlockKey] = set()
        self._excluded: set[str] = set()
        """Requests that take nothing from storage."""
        self._events: list[OffloadingEvent] = []
        self._stats = DirectStatsReader()

    def __repr__(self) -> str:
        return f"<NixlDirectManager {len(self._storing)} storing, {self._lookup!r}>"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._stats.lookups += 1
        known = BlockKey(key)
        # Waiting for a file that is being written can take longer than to compute the chunk.
        if known in self._storing or req_context.req_id in self._excluded:
            return LookupResult.MISS
        return _ANSWERS[self._lookup.ask((known,))[0]]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> KeysSpec:
        # Nothing is kept in place meanwhile: a file that goes is a failed load.
        return KeysSpec(tuple(map(BlockKey, keys)), self._fingerprint)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        wanted = tuple(
            key
            for key in dict.fromkeys(map(BlockKey, keys))
            if key not in self._storing and not self._lookup.known(key)
        )
        # A job of any size where nothing is under way: it would never fit otherwise.
        if self._storing and len(self._storing) + len(wanted) > MAX_STORING:
            self._stats.stores_refused += len(wanted)
            return None
        self._storing.update(wanted)
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in wanted],
            store_spec=KeysSpec(wanted, self._fingerprint),
            evicted_keys=[],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        # What the worker's news did not name: not stored, or no news came.
        unsure = [key for key in map(BlockKey, keys) if key in self._storing]
        self._storing.difference_update(unsure)
        self._lookup.forget(unsure)

    def on_news(self, news: DirectNews) -> None:
        """From the worker, by our connector, before vLLM completes the jobs concerned."""
        self._storing.difference_update(news.stored)
        self._lookup.stored(news.stored)
        self._lookup.gone(news.gone)
        self._lookup.failed(news.unusable)
        self._stats.failed_device_loads += len(news.gone) + len(news.unusable)
        if news.stats is not None:
            self._stats.tier = news.stats
        if news.stored and self._publishes_events:
            self._events.append(
                OffloadingEvent(
                    keys=[OffloadKey(key) for key in news.stored],
                    medium=Medium.STORAGE,
                    removed=False,
                    locality=self._locality,
                )
            )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if not req_context.load_tier_filter.allows(Medium.STORAGE, self._locality):
            self._excluded.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._excluded.discard(req_context.req_id)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> None:
        """Files stay. Of jobs that run vLLM tells nothing any more; the workers' news still come."""
        self._lookup.forget(self._storing)
        self._storing.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._stats.read()

    def shutdown(self) -> None:
        self._lookup.close(timeout_s=_CLOSE_S)
