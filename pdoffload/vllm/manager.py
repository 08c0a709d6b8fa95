"""The scheduler's side: vLLM's OffloadingManager over a `Tiering`.

Everything here runs on the engine's scheduler thread and answers at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.layout import BlockKey
from pdoffload.tiering.manager import ARRIVING, ASKING, HIT, MISS, Tiering
from pdoffload.tiers.base import Tier, TierRequest
from pdoffload.vllm import compat
from pdoffload.vllm.metrics import StatsReader

logger = logging.getLogger(__name__)

# By identity: hashing an enum member runs Python code, and this is asked a thousand times a step.
_ANSWERS = {
    id(HIT): LookupResult.HIT,
    id(MISS): LookupResult.MISS,
    id(ARRIVING): LookupResult.HIT_PENDING,
    id(ASKING): LookupResult.RETRY,
}


class NixlOffloadingManager(OffloadingManager):
    """Owns `tiering`. `flush_bound_s` is when copies that ran at a reset have ended at the latest."""

    def __init__(
        self, tiering: Tiering, *, flush_bound_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.tiering = tiering
        self._flush_bound_s = flush_bound_s
        self._clock = clock
        self._polled = False
        self._reset_at_s: float | None = None
        self._allowed_tiers: dict[str, frozenset[int]] = {}
        self._stats = StatsReader(tiering)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._poll_once_per_step()
        request_id = req_context.req_id
        allowed = self._allowed_tiers.get(request_id) if self._allowed_tiers else None
        return _ANSWERS[id(self.tiering.lookup(BlockKey(key), request_id, allowed))]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        number = self.tiering.plan.source_of(BlockKey(key), req_context.req_id)
        return compat.hit_source(None if number is None else self.tiering.tiers[number])

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(self.tiering.prepare_load(_keys(keys), req_context.req_id))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.tiering.touch(_keys(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.tiering.complete_load(_keys(keys), req_context.req_id)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._poll_once_per_step()
        reserved = self.tiering.reserve_store(_keys(keys), req_context.req_id)
        if reserved is None:
            return None
        wanted, slots, evicted = reserved
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in wanted],
            store_spec=CPULoadStoreSpec(slots),
            evicted_keys=[OffloadKey(key) for key in evicted],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.tiering.complete_store(_keys(keys), success=success)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        wants_all = self.tiering.request_started(
            TierRequest(req_context.req_id, req_context.kv_transfer_params)
        )
        wanted = req_context.load_tier_filter
        if wanted is not TierFilter.ALL:
            self._allowed_tiers[req_context.req_id] = frozenset(
                number
                for number, tier in enumerate(self.tiering.tiers)
                if wanted.allows(_medium(tier), _locality(tier))
            )
        return RequestOffloadingContext(
            OffloadPolicy.REQUEST_LEVEL if wants_all else OffloadPolicy.CHUNK_LEVEL
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._allowed_tiers.pop(req_context.req_id, None)
        self.tiering.request_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.tiering.poll()
        self._polled = False
        self.tiering.flush()
        for request_id in context.new_req_ids:
            self.tiering.plan.request_scheduled(request_id)
        if self._reset_at_s is not None:
            self._release_after_bound()

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping without requests: only for promotions, which a
        request waits for. A store to a tier ends by itself, and an idle engine should sleep."""
        return self.tiering.plan.num_arriving > 0

    def take_events(self) -> Iterable[OffloadingEvent]:
        for move in self.tiering.take_moves():
            tier = None if move.tier is None else self.tiering.tiers[move.tier]
            if tier is not None and not tier.publishes_events:
                continue
            medium = Medium.CPU if tier is None else _medium(tier)
            if medium is None:
                continue
            yield OffloadingEvent(
                keys=[OffloadKey(key) for key in move.keys],
                medium=medium,
                removed=move.removed,
                locality=None if tier is None else _locality(tier),
            )

    def reset_cache(self) -> None:
        self.tiering.reset()
        self._polled = False
        self._reset_at_s = self._clock.monotonic_s() if self.tiering.plan.awaits_flush else None

    def on_reset_flushed(self) -> None:
        """The workers have reported every copy that ran at the last reset (vLLM 0.33 and our
        connector call this; elsewhere the copies' deadline stands in for it)."""
        self._reset_at_s = None
        self.tiering.plan.flushed()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._stats.read()

    def shutdown(self) -> None:
        self.tiering.close(timeout_s=self._flush_bound_s)

    def _poll_once_per_step(self) -> None:
        if not self._polled:
            self._polled = True
            self.tiering.poll()

    def _release_after_bound(self) -> None:
        assert self._reset_at_s is not None
        if self._clock.monotonic_s() - self._reset_at_s > self._flush_bound_s:
            logger.info(
                "copies that ran at the last cache reset are past their deadline: slots freed"
            )
            self.on_reset_flushed()


def _keys(keys: Collection[OffloadKey]) -> list[BlockKey]:
    return [BlockKey(key) for key in keys]


def _medium(tier: Tier) -> Medium | None:
    return None if tier.medium is None else Medium[tier.medium.name]


def _locality(tier: Tier) -> Locality | None:
    return None if tier.locality is None else Locality[tier.locality.name]
