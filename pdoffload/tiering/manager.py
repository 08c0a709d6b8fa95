"""The shell of tiering: carries the plan's commands out on a pool and its tiers.

One owner thread, the engine's scheduler. No call waits, except `close`. Tiers may borrow from the pool on
threads of their own.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Sequence

from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.memory.lending import FILLING, READY
from pdoffload.policy.base import Policy
from pdoffload.tiering.plan import Command, Moved, Plan, StoreTo
from pdoffload.tiers.base import JobResult, Lookup, Settled, Tier, TierRequest, TierStats

logger = logging.getLogger(__name__)


class Answer(enum.Enum):
    """What a lookup says to the engine."""

    HIT = "hit"
    MISS = "miss"
    ARRIVING = "arriving"
    """Here soon: its bytes are on their way into the host pool."""
    ASKING = "asking"
    """A tier has not answered yet whether it has the chunk."""


HIT, MISS, ARRIVING, ASKING = Answer.HIT, Answer.MISS, Answer.ARRIVING, Answer.ASKING
_IN_TIER, _PENDING = Lookup.HIT, Lookup.PENDING


class Tiering:
    """A host pool and the tiers behind it, asked in their order.

    Takes ownership of `region` and `tiers` and closes them.
    """

    def __init__(
        self,
        region: HostRegion,
        policy: Policy,
        tiers: Sequence[Tier] = (),
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        record_moves: bool = False,
    ) -> None:
        self.region = region
        self.tiers = tuple(tiers)
        self.plan = Plan(
            region.geometry.num_slots,
            policy,
            [number for number, tier in enumerate(self.tiers) if tier.takes_stores],
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            record_moves=record_moves,
        )
        # Requests whose every chunk is offered to some tiers, and to which.
        self._offered_to: dict[str, list[Tier]] = {}
        self._closed = False
        for tier in self.tiers:
            tier.borrow_from(self.plan.index)

    def __repr__(self) -> str:
        return f"<Tiering {self.plan!r} tiers={[tier.name for tier in self.tiers]}>"

    def request_started(self, request: TierRequest) -> bool:
        """A request has come. True if a tier wants every chunk of it, those in the pool too."""
        self.plan.request_started(request.request_id)
        keepers = [tier for tier in self.tiers if tier.request_started(request)]
        if keepers:
            self._offered_to[request.request_id] = keepers
        return bool(keepers)

    def request_finished(self, request_id: str) -> None:
        """The request has ended, at whatever stage; unknown ids are ignored."""
        self._offered_to.pop(request_id, None)
        self.plan.request_finished(request_id)
        for tier in self.tiers:
            tier.request_finished(request_id)

    def lookup(
        self, key: BlockKey, request_id: str, allowed_tiers: Collection[int] | None = None
    ) -> Answer:
        """Where `key` is. A hit in a tier starts its way back; `allowed_tiers` limits who is asked."""
        if self.plan.is_barred(request_id):
            return MISS
        presence = self.plan.lookup(key, request_id)
        if presence is READY:
            return HIT
        if presence is FILLING:
            return ARRIVING
        asking = False
        for number, tier in enumerate(self.tiers):
            if allowed_tiers is not None and number not in allowed_tiers:
                continue
            if self.plan.has_failed(number, key, request_id):
                continue
            found = tier.lookup((key,), request_id)[0]
            if found is _IN_TIER:
                return ARRIVING if self.plan.promote(number, key, request_id) else MISS
            asking = asking or found is _PENDING
        return ASKING if asking else MISS

    def reserve_store(
        self, keys: Sequence[BlockKey], request_id: str = ""
    ) -> tuple[list[BlockKey], list[int], list[BlockKey]] | None:
        """(keys to store, their slots, keys evicted for them), or None when the pool has no room."""
        reserved = self.plan.reserve_store(keys)
        if self._offered_to:
            # Only now: those that are stored have their slots, and what had no room is absent.
            self._offer(keys, request_id)
        if reserved is None:
            return None
        wanted, reservation = reserved
        self._forget(reservation.slots)
        return wanted, reservation.slots, reservation.evicted

    def complete_store(self, keys: Collection[BlockKey], *, success: bool = True) -> None:
        """A device copy into the pool ended; the workers' status words say which chunks arrived."""
        arrived = self.region.all_stored if success else _never
        failures = self.plan.counts.failed_device_stores
        self._carry_out(self.plan.complete_store(keys, arrived))
        failures = self.plan.counts.failed_device_stores - failures
        if failures:
            logger.warning(
                "%d of %d chunks did not reach host memory and will not be served; "
                "the worker's log has the reason",
                failures,
                len(keys),
            )

    def prepare_load(self, keys: Collection[BlockKey], request_id: str) -> list[int]:
        """Pin ready chunks for a copy to the device; their slots, in the keys' order."""
        return self.plan.prepare_load(keys, request_id)

    def complete_load(self, keys: Collection[BlockKey], request_id: str) -> None:
        """A copy to the device ended; the workers' status words say which chunks did not get there."""
        slots = [self.plan.index.slot_of(key) for key in keys]
        failed: list[BlockKey] = []
        if failed_slots := self.region.failed_among(slots):
            failed = [key for key, slot in zip(keys, slots, strict=True) if slot in failed_slots]
            logger.warning(
                "request %s: %d of %d chunks did not reach the device; it computes them itself",
                request_id,
                len(failed),
                len(keys),
            )
            self.region.reset_status(failed_slots)
        self.plan.complete_load(keys, request_id, failed)

    def touch(self, keys: Collection[BlockKey]) -> None:
        """These chunks were used, here and in every tier."""
        self.plan.index.touch(keys)
        for tier in self.tiers:
            tier.touch(tuple(keys))

    def poll(self) -> None:
        """Take in what the tiers have finished."""
        for tier in self.tiers:
            for news in tier.poll():
                self._take_in(tier, news)

    def flush(self) -> None:
        """Start the promotions that lookups asked for."""
        commands = self.plan.flush()
        if commands:
            for command in commands:
                self._forget(command.job.slots)
            self._carry_out(commands)

    def take_moves(self) -> list[Moved]:
        return self.plan.take_moves()

    def tier_stats(self) -> dict[str, TierStats]:
        """Counters by tier name; two tiers of one type are told apart by their number."""
        names = [tier.name for tier in self.tiers]
        return {
            name if names.count(name) == 1 else f"{name}-{number}": tier.stats()
            for number, (name, tier) in enumerate(zip(names, self.tiers, strict=True))
        }

    def reset(self) -> None:
        """Forget the host pool's chunks; what the tiers keep stays. Never waits: see `Plan.reset`."""
        self.poll()
        self.plan.reset()

    def close(self, *, timeout_s: float) -> None:
        """Let the tiers finish within `timeout_s` each, then release everything; idempotent."""
        if self._closed:
            return
        self._closed = True
        for tier in self.tiers:
            for news in tier.close(timeout_s=timeout_s):
                self._take_in(tier, news)
        self.region.close()

    def check(self) -> None:
        self.plan.check()

    def _offer(self, keys: Sequence[BlockKey], request_id: str) -> None:
        """Tell the tiers that want every chunk of this request which of `keys` are or will be here."""
        keepers = self._offered_to.get(request_id)
        if keepers and (present := tuple(key for key in keys if key in self.plan.index)):
            for tier in keepers:
                tier.offered(present, request_id)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            tier = self.tiers[command.tier]
            (tier.store if isinstance(command, StoreTo) else tier.load)(command.job)

    def _take_in(self, tier: Tier, news: JobResult | Settled) -> None:
        if isinstance(news, Settled):
            self.plan.job_settled(news)
            return
        for key, error in news.failed[:1]:
            logger.info(
                "tier %s: %d of %d chunks of job %d failed; first: %s: %s",
                tier.name,
                len(news.failed),
                len(news.failed) + len(news.succeeded),
                news.job_id,
                key.hex(),
                error,
            )
        self.plan.job_ended(news)

    def _forget(self, slots: Sequence[int]) -> None:
        """New bytes come into these slots: no checksum or status word of the old ones may be left."""
        for slot in slots:
            self.region.forget_checksum(slot)
        if slots:
            self.region.reset_status(slots)


def _never(_: int) -> bool:
    return False
