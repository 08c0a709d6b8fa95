"""Events in, commands out: the rules of tiering, with no I/O, clock, thread or log.

    a chunk's way out                           a chunk's way back
    -----------------                           ------------------
    reserve_store   slot taken, filling         lookup      absent here, a tier has it
    complete_store  ready -> StoreTo each tier  promote     slot taken, filling
    job_ended       pin of that tier released   flush       LoadFrom that tier
                                                job_ended   ready, held for who waited
                                                prepare_load   pinned for the device
                                                complete_load  unpinned

A promoted chunk is *held* (pinned once per waiting request) from its arrival until that request loads
it, is scheduled without it, or ends: otherwise waiting requests would evict one another's chunks before
use. Holds, promotions and slots lent to peers together never take more than `HOLD_SHARE` of the pool, so
stores of running requests always find slots, and a promotion beyond that is a miss, so nobody waits for
another's hold.

After `reset` the slots that a transfer still reads or writes are quarantined, for one reason per tier's
job and device copy; the index counts them and frees the slot when the last one has gone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey
from pdoffload.memory.lending import FILLING, READY, Presence
from pdoffload.policy.base import Policy
from pdoffload.tiering.index import Index, Reservation
from pdoffload.tiers.base import Job, JobResult, Settled


class StoreTo(msgspec.Struct, frozen=True):
    """Command: have tier number `tier` keep the chunks of `job`."""

    tier: int
    job: Job


class LoadFrom(msgspec.Struct, frozen=True):
    """Command: have tier number `tier` bring the chunks of `job` into their slots."""

    tier: int
    job: Job


Command = StoreTo | LoadFrom


class Moved(msgspec.Struct, frozen=True):
    """News for KV-event consumers: `keys` entered or left the host pool (`tier` None) or a tier."""

    keys: tuple[BlockKey, ...]
    removed: bool
    tier: int | None = None


class PlanCounts(msgspec.Struct):
    """Counters since the start; they never fall."""

    lookups: int = 0
    host_hits: int = 0
    promoted_chunks: int = 0
    promotions_refused: int = 0
    failed_promotions: int = 0
    evicted_chunks: int = 0
    stored_chunks: int = 0
    loaded_chunks: int = 0
    stores_refused: int = 0
    stores_below_threshold: int = 0
    failed_device_stores: int = 0
    failed_device_loads: int = 0


class _LiveJob(msgspec.Struct):
    tier: int
    job: Job
    is_load: bool
    ended: bool = False
    stale: bool = False
    """A reset has forgotten its keys: only its slots still matter."""
    quarantined: tuple[int, ...] = ()
    """Slots that are in quarantine because of this job, until it settles."""


class _Request(msgspec.Struct):
    barred: bool = False
    """A load for it failed: it computes the rest itself, or it would try the same load for ever."""
    held: set[BlockKey] = msgspec.field(default_factory=set)
    sources: dict[BlockKey, int] = msgspec.field(default_factory=dict)
    """Chunks brought back for this request, and from which tier."""
    failed: set[tuple[int, BlockKey]] = msgspec.field(default_factory=set)
    """Tiers that had announced a chunk to this request and did not deliver it: not asked again for it,
    or the request would try the same load for ever."""


class Plan:
    """The state of tiering for one host pool; `store_to` numbers the tiers that take stores.

    One owner thread; others reach the pool through `index`, as its `Lender`.
    """

    def __init__(
        self,
        num_slots: int,
        policy: Policy,
        store_to: Sequence[int] = (),
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        record_moves: bool = False,
    ) -> None:
        self.index = Index(num_slots, policy, promised=self._num_promised)
        self.counts = PlanCounts()
        self._store_to = tuple(store_to)
        self._store_threshold = store_threshold
        self._max_tracker_size = max_tracker_size
        self._offers: OrderedDict[BlockKey, int] = OrderedDict()
        self._requests: dict[str, _Request] = {}
        self._jobs: dict[int, _LiveJob] = {}
        self._next_job_id = 1
        # Chunks on their way in from a tier, and the requests that wait for each.
        self._waiters: dict[BlockKey, set[str]] = {}
        self._queued: dict[tuple[int, str], list[BlockKey]] = {}
        self._holds: Counter[BlockKey] = Counter()
        # Chunks that a device copy reads or writes; tiers' jobs are in _jobs.
        self._device_loads: Counter[BlockKey] = Counter()
        self._device_stores: set[BlockKey] = set()
        self._flush_slots: list[int] = []
        self._moves: list[Moved] | None = [] if record_moves else None

    def __repr__(self) -> str:
        return (
            f"<Plan {self.index!r}, {len(self._requests)} requests, {len(self._jobs)} tier jobs, "
            f"{len(self._waiters)} arriving, {len(self._holds)} held>"
        )

    # --- requests ---

    def request_started(self, request_id: str) -> None:
        self._requests.setdefault(request_id, _Request())

    def request_scheduled(self, request_id: str) -> None:
        """The request runs: what it wanted from here it has pinned, or does without."""
        request = self._requests.get(request_id)
        if request is not None and request.held:
            self._release_holds(request, request.held)

    def request_finished(self, request_id: str) -> None:
        """Forget the request, whatever stage it reached; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._release_holds(request, request.held)
        for waiting in self._waiters.values():
            waiting.discard(request_id)

    def source_of(self, key: BlockKey, request_id: str) -> int | None:
        """The tier that `key` was brought back from for this request; None for the host pool."""
        request = self._requests.get(request_id)
        return None if request is None else request.sources.get(key)

    def _release_holds(self, request: _Request, keys: Iterable[BlockKey]) -> None:
        for key in list(keys):
            if key not in request.held:
                continue
            request.held.discard(key)
            self.index.unpin((key,))
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]

    # --- the way back ---

    def is_barred(self, request_id: str) -> bool:
        """Whether a load for this request has failed: it gets nothing from outside any more."""
        request = self._requests.get(request_id)
        return request is not None and request.barred

    def has_failed(self, tier: int, key: BlockKey, request_id: str) -> bool:
        """Whether `tier` has failed to deliver `key` to this request: to it the chunk is not there."""
        request = self._requests.get(request_id)
        return request is not None and (tier, key) in request.failed

    def lookup(self, key: BlockKey, request_id: str) -> Presence:
        """Where `key` stands in the host pool. ABSENT: ask the tiers, then `promote`."""
        self.counts.lookups += 1
        presence = self.index.find(key)
        if presence is READY:
            self.counts.host_hits += 1
        elif presence is FILLING and key in self._waiters:
            self._waiters[key].add(request_id)
        return presence

    def promote(self, tier: int, key: BlockKey, request_id: str) -> bool:
        """Make room for `key`, which `tier` holds; False (a miss) where there is none to spare."""
        if self.index.num_to_spare < 1:
            self.counts.promotions_refused += 1
            return False
        reservation = self.index.reserve((key,))
        if reservation is None:
            self.counts.promotions_refused += 1
            return False
        self._note_evicted(reservation)
        self._waiters[key] = {request_id}
        self._queued.setdefault((tier, request_id), []).append(key)
        request = self._requests.get(request_id)
        if request is not None:
            request.sources[key] = tier
        return True

    def flush(self) -> list[Command]:
        """The promotions asked for since the last call, one job per tier and request."""
        if not self._queued:
            return []
        commands: list[Command] = []
        for (tier, request_id), keys in self._queued.items():
            slots = tuple(self.index.slot_of(key) for key in keys)
            job = self._new_job(tier, tuple(keys), slots, is_load=True, request_id=request_id)
            commands.append(LoadFrom(tier, job))
        self._queued.clear()
        return commands

    def prepare_load(self, keys: Collection[BlockKey], request_id: str) -> list[int]:
        """Pin ready chunks for a copy to the device; the request's holds on them end."""
        slots = self.index.pin(keys)
        self.index.touch(keys)
        self._device_loads.update(keys)
        request = self._requests.get(request_id)
        if request is not None and request.held:
            self._release_holds(request, keys)
        return slots

    def complete_load(
        self, keys: Collection[BlockKey], request_id: str, failed: Collection[BlockKey] = ()
    ) -> None:
        """A copy to the device ended. Of `failed` some worker did not get its part.

        Their request computes them itself. The chunks stay: it was the copy that failed, not they.
        """
        self.index.unpin(keys)
        self.counts.loaded_chunks += len(keys) - len(failed)
        self.counts.failed_device_loads += len(failed)
        for key in keys:
            self._device_loads[key] -= 1
            if not self._device_loads[key]:
                del self._device_loads[key]
        request = self._requests.get(request_id)
        if request is not None and failed:
            request.barred = True

    # --- the way out ---

    def reserve_store(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], Reservation] | None:
        """Slots for those of `keys` that are absent and worth storing; None when there is no room."""
        wanted = list(dict.fromkeys(key for key in keys if key not in self.index))
        self.index.touch(keys)
        if self._store_threshold >= 2:
            wanted = self._often_enough(keys, wanted)
        if not wanted:
            return [], Reservation([], [])
        reservation = self.index.reserve(wanted, keep=frozenset(keys))
        if reservation is None:
            self.counts.stores_refused += len(wanted)
            return None
        self._note_evicted(reservation)
        self._device_stores.update(wanted)
        return wanted, reservation

    def complete_store(
        self, keys: Iterable[BlockKey], arrived: Callable[[int], bool]
    ) -> list[Command]:
        """A device copy ended; `arrived(slot)` tells whether every worker wrote its part of the slot.

        What arrived is ready and goes to every tier that takes it; what did not is forgotten.
        """
        stored: list[BlockKey] = []
        lost: list[BlockKey] = []
        for key in keys:
            if key in self._device_stores:
                self._device_stores.discard(key)
                (stored if arrived(self.index.slot_of(key)) else lost).append(key)
        if lost:
            self.index.abandon(lost)
            self.counts.failed_device_stores += len(lost)
        if not stored:
            return []
        self.index.commit(stored)
        self.counts.stored_chunks += len(stored)
        self._note(stored, removed=False)
        commands: list[Command] = []
        for tier in self._store_to:
            slots = tuple(self.index.pin(stored))
            job = self._new_job(tier, tuple(stored), slots, is_load=False)
            commands.append(StoreTo(tier, job))
        return commands

    def _often_enough(self, offered: Sequence[BlockKey], wanted: list[BlockKey]) -> list[BlockKey]:
        offers = self._offers
        for key in offered:
            offers[key] = offers.pop(key, 0) + 1
        worth = [key for key in wanted if offers[key] >= self._store_threshold]
        self.counts.stores_below_threshold += len(wanted) - len(worth)
        while len(offers) > self._max_tracker_size:
            offers.popitem(last=False)
        return worth

    # --- tiers' answers ---

    def job_ended(self, result: JobResult) -> None:
        """A tier reports the end of a job, exactly once per job."""
        live = self._jobs.get(result.job_id)
        if live is None or live.ended:
            raise MisuseError(f"a tier reported job {result.job_id}, which is not running")
        live.ended = True
        if not live.stale:
            if live.is_load:
                self._load_ended(live, result)
            elif result.succeeded:
                self._note(result.succeeded, removed=False, tier=live.tier)
        if result.settled:
            self.job_settled(Settled(result.job_id))

    def job_settled(self, settled: Settled) -> None:
        """No byte of this job moves any more: what it kept in place is free to go."""
        live = self._jobs.pop(settled.job_id, None)
        if live is None or not live.ended:
            raise MisuseError(f"a tier settled job {settled.job_id}, which has not ended")
        self.index.release(live.quarantined)
        if not live.is_load and not live.stale:
            self.index.unpin(live.job.keys)

    def _load_ended(self, live: _LiveJob, result: JobResult) -> None:
        self.index.commit(result.succeeded)
        for key in result.succeeded:
            self._hold_for_waiters(key)
        self.counts.promoted_chunks += len(result.succeeded)
        if result.succeeded:
            self._note(result.succeeded, removed=False)
        self.counts.failed_promotions += len(result.failed)
        for key, _ in result.failed:
            for request_id in self._waiters.pop(key, ()):
                request = self._requests.get(request_id)
                if request is not None:
                    request.sources.pop(key, None)
                    request.failed.add((live.tier, key))
        failed = [key for key, _ in result.failed]
        if result.settled:
            self.index.abandon(failed)
        else:
            live.quarantined = tuple(self.index.quarantine(failed))

    def _hold_for_waiters(self, key: BlockKey) -> None:
        for request_id in self._waiters.pop(key, ()):
            request = self._requests.get(request_id)
            if request is None:
                continue
            self.index.pin((key,))
            request.held.add(key)
            self._holds[key] += 1

    # --- reset ---

    def reset(self) -> None:
        """Forget every chunk. Slots in use are quarantined until their jobs settle or `flushed`."""
        device_keys = [*self._device_loads, *self._device_stores]
        moving = [live for live in self._jobs.values() if not (live.stale or self._at_rest(live))]
        self.counts.evicted_chunks += len(self.index)
        self._flush_slots += [self.index.slot_of(key) for key in device_keys]
        self.index.clear([*device_keys, *(key for live in moving for key in live.job.keys)])
        for live in moving:
            live.quarantined = live.job.slots
        for live in self._jobs.values():
            live.stale = True
        for request in self._requests.values():
            request.held.clear()
            request.sources.clear()
        for state in (self._waiters, self._queued, self._holds, self._device_loads, self._offers):
            state.clear()
        self._device_stores.clear()

    @staticmethod
    def _at_rest(live: _LiveJob) -> bool:
        """A load that has ended moves no byte but into slots that are in quarantine already."""
        return live.is_load and live.ended

    def flushed(self) -> None:
        """The workers have ended every device copy that ran at the last reset."""
        slots, self._flush_slots = self._flush_slots, []
        self.index.release(slots)

    # --- news and proofs ---

    @property
    def num_jobs(self) -> int:
        """Tier jobs that have not settled."""
        return len(self._jobs)

    @property
    def num_arriving(self) -> int:
        return len(self._waiters)

    @property
    def num_held(self) -> int:
        return len(self._holds)

    def _num_promised(self) -> int:
        """Slots that promotions and holds take; asked on any thread."""
        return len(self._waiters) + len(self._holds)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def awaits_flush(self) -> bool:
        return bool(self._flush_slots)

    def take_moves(self) -> list[Moved]:
        """What entered and left since the last call; empty unless `record_moves` was asked for."""
        if not self._moves:
            return []
        moves, self._moves = self._moves, []
        return moves

    def _new_job(
        self,
        tier: int,
        keys: tuple[BlockKey, ...],
        slots: tuple[int, ...],
        *,
        is_load: bool,
        request_id: str = "",
    ) -> Job:
        job = Job(self._next_job_id, keys, slots, request_id)
        self._next_job_id += 1
        self._jobs[job.job_id] = _LiveJob(tier, job, is_load)
        return job

    def _note_evicted(self, reservation: Reservation) -> None:
        if reservation.evicted:
            self.counts.evicted_chunks += len(reservation.evicted)
            self._note(reservation.evicted, removed=True)

    def _note(self, keys: Sequence[BlockKey], *, removed: bool, tier: int | None = None) -> None:
        if self._moves is not None and keys:
            self._moves.append(Moved(tuple(keys), removed, tier))

    def check(self) -> None:
        """Prove that pins, holds, jobs and quarantine explain each other; AssertionError otherwise."""
        pins: Counter[BlockKey] = Counter(self._device_loads)
        pins.update(self._holds)
        reasons = Counter(self._flush_slots)
        for live in self._jobs.values():
            reasons.update(live.quarantined)
            if not live.is_load and not live.stale:
                pins.update(live.job.keys)
        self.index.check(pins, reasons)
        held = Counter(key for request in self._requests.values() for key in request.held)
        assert held == self._holds, "holds of requests and of chunks disagree"
        arriving = set(self._waiters) | self._device_stores
        assert self.index.pool.num_filling == len(arriving), "a filling slot has no source"
