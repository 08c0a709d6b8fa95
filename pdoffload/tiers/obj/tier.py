"""The obj tier: chunks as objects of an S3 or Azure store, moved by NIXL. The owner's side is `QueuedTier`.

Bytes go slot <-> staging memory <-> object, so a store that is silent holds no slot of the pool: a job that
is given up at its deadline is settled at once (`claims`).
"""

from __future__ import annotations

import functools

import msgspec

from pdoffload.config import ObjTierConfig
from pdoffload.errors import DeadlineExceeded, PdOffloadError, StorageError, TransferError
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import TierContext, TierStats
from pdoffload.tiers.obj.diagnosis import Why
from pdoffload.tiers.obj.io_threads import ObjectThread
from pdoffload.tiers.obj.lane import MakeAgent
from pdoffload.tiers.obj.lookup import LookupFaults, object_lookup
from pdoffload.tiers.obj.start import prepare
from pdoffload.tiers.parts import Outcome, Part, failed_outcome
from pdoffload.tiers.queued import Medium, QueuedTier


class ObjTier(QueuedTier):
    """Chunks as objects under `config.prefix` in one bucket; names as in `keys`, bytes as in `chunkfile`.

    Opening it asks the store, and writes and reads two small objects, within ten seconds: it belongs to the
    start of an engine. Raises `ConfigError` before any thread of the tier is started.

    `make_agent` and `why` are for tests, which then have no store to try.
    """

    name = "obj"

    def __init__(
        self,
        config: ObjTierConfig,
        context: TierContext,
        *,
        rank: int = 0,
        make_agent: MakeAgent | None = None,
        why: Why | None = None,
    ) -> None:
        self.locality = config.locality
        self.publishes_events = config.enable_kv_events
        terms = prepare(config, context, rank=rank, make_agent=make_agent, why=why)
        self._terms = terms
        self._faults = LookupFaults(terms)
        medium = Medium(
            base=f"{config.store_config.bucket}/{terms.keys.base}",
            what="the store",
            lookup=object_lookup(terms, self._faults),
            make_thread=functools.partial(ObjectThread, terms=terms),
            num_readers=config.io_threads,
            num_writers=config.io_threads,
            most_chunks=terms.most_chunks,
            num_slots=context.region.geometry.num_slots,
            timeout_s=terms.timeout_s,
            clock=terms.clock,
        )
        super().__init__(medium)

    def key(self, block: BlockKey) -> str:
        """The name of the object that holds the chunk `block`, if any does."""
        return self._terms.keys.key(block)

    def stats(self) -> TierStats:
        return msgspec.structs.replace(super().stats(), failed_lookups=self._faults.failed)

    def _degraded(self) -> str:
        lookups = self._faults.refusing
        return super()._degraded() or (f"lookups {lookups}" if lookups else "")

    def _may_come_back(self, error: PdOffloadError) -> bool:
        # A store that could not be reached still has its objects; only wrong bytes stay wrong. Those errors
        # are about the object itself and carry no cause from outside.
        if isinstance(error, StorageError):
            return error.errno is not None
        return isinstance(error, TransferError)

    def _give_up(self, part: Part, error: DeadlineExceeded, *, ended_s: float) -> None:
        # While a slot is being copied its part is not given up: the next look is soon.
        if self._terms.claims.give_up(part):
            self._enter_outcome(failed_outcome(part, error, ended_s=ended_s))
        elif self._closed:
            super()._give_up(part, error, ended_s=ended_s)

    def _enter_outcome(self, outcome: Outcome) -> None:
        # A part that was given up is settled; how its requests ended afterwards is nobody's news.
        if not outcome.part.told:
            super()._enter_outcome(outcome)
