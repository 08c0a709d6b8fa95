"""The contract of a tier.

A tier keeps chunks somewhere else than the host pool, or reaches those of other engines, and moves them
between there and the pool's slots, always through NIXL. Seven verbs, batch first. Nothing blocks the caller:
`store` and `load` queue, and `poll` hands over what has ended. A miss is a value, a failed chunk is a value,
misuse raises. Four more verbs, all optional, are for tiers that serve single requests and other engines.

One thread, the owner, calls every verb. The bytes of a job's slots belong to the tier from the call that
queued the job until the `JobResult` with `settled=True` (or the later `Settled`) for it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.config import Locality as Locality
from pdoffload.config import Verify as Verify
from pdoffload.errors import MisuseError, PdOffloadError
from pdoffload.layout import BlockKey, RunConfig
from pdoffload.memory.host import HostRegion
from pdoffload.memory.lending import Lender
from pdoffload.p2p.stats import PeerStats as PeerStats


class Lookup(enum.Enum):
    """Where a chunk stands in a tier."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"
    """Not known yet: the question is on its way. Ask again; it ends as HIT or MISS by a deadline."""


class Medium(enum.Enum):
    """What a tier stores on; the word in KV events."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class TierContext(msgspec.Struct, frozen=True, kw_only=True):
    """What every tier is given: the pool it moves to and from, and the terms."""

    region: HostRegion
    run_config: RunConfig
    verify: Verify = Verify.ALWAYS
    transfer_timeout_s: float = 30.0
    clock: Clock = SYSTEM_CLOCK


class TierRequest(msgspec.Struct, frozen=True):
    """A request of the engine, as far as a tier may care."""

    request_id: str
    params: Mapping[str, Any] | None = None
    """`kv_transfer_params` as the client or a router sent them: any JSON object, not checked."""


class Job(msgspec.Struct, frozen=True):
    """One batch to store or to load. `keys[i]` is the chunk of pool slot `slots[i]`; keys are distinct.

    `job_id` is unique among the tier's live jobs, stores and loads together. `request_id` is the request
    that a load is for; it may have finished. Empty for stores.
    """

    job_id: int
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    request_id: str = ""


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended: exactly one per job. `succeeded` and `failed` together are the job's keys.

    After a failed load the slot's bytes are undefined. Where `settled` is False bytes may still be read
    from any slot of a store, and may still land in the slots of a load's failed keys: those slots may not
    be reused until the `Settled` for the job.
    """

    job_id: int
    succeeded: tuple[BlockKey, ...]
    failed: tuple[tuple[BlockKey, PdOffloadError], ...] = ()
    settled: bool = True
    moved_bytes: int = 0
    """Bytes really moved; chunks that were there already count 0."""
    already_present: int = 0
    """Stores only: chunks of `succeeded` that the tier held already."""
    verified: int = 0
    """Loads only: chunks of `succeeded` whose checksum was compared."""
    elapsed_s: float = 0.0
    """From the moment work on the job began, time in the queue left out."""


class Settled(msgspec.Struct, frozen=True):
    """The slots of a job that ended with `settled=False` are free of its bytes from now on."""

    job_id: int


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the tier was opened; they never fall. Gauges say so."""

    stored_chunks: int = 0
    already_present: int = 0
    loaded_chunks: int = 0
    verified_chunks: int = 0
    corrupt_chunks: int = 0
    vanished_chunks: int = 0
    """Loads of a chunk that a lookup had found."""
    failed_stores: int = 0
    """Jobs of which any chunk failed; dropped ones are counted below instead."""
    failed_loads: int = 0
    """Jobs of which any chunk failed."""
    failed_lookups: int = 0
    """Chunks looked up of which the medium said nothing, or refused to; a lookup calls that a miss."""
    dropped_stores: int = 0
    """Stores refused because the queue was full, or the tier full or degraded."""
    deadlines_exceeded: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    quarantined_slots: int = 0
    """Gauge: slots of jobs that are not settled."""
    queued_jobs: int = 0
    """Gauge."""
    degraded: str = ""
    """Gauge: why stores are off, or empty."""
    peers: PeerStats | None = None
    """Of a tier that reaches other engines."""

    def plus(self, **increments: int) -> TierStats:
        """With so much more in the counters of these names."""
        more = {name: getattr(self, name) + by for name, by in increments.items()}
        return msgspec.structs.replace(self, **more)


class Tier(ABC):
    """Seven verbs, and four for requests. `name` is the tier's type in configuration, logs and metrics."""

    name: str
    medium: Medium | None = Medium.STORAGE
    """None: unknown, as the pools of peers are. A request that chooses tiers by medium excludes none such."""
    locality: Locality | None = None
    publishes_events: bool = False
    """Only with a known `medium`."""
    takes_stores: bool = True
    """Whether chunks go out to it. If False, `store` is never called."""
    from_peers: bool = False
    """Whether what it loads comes out of other engines' host pools; told in cache-hit metrics."""

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey], request_id: str = "") -> list[Lookup]:
        """Whether each chunk can be loaded, as far as is known now. Never waits, never touches a medium.

        `request_id` is who wants them, for a tier whose answer depends on that.
        """

    def store(self, job: Job) -> None:
        """Queue chunks to be kept. Chunks the tier already holds count as stored and move no byte."""
        raise MisuseError(f"tier {self.name} takes no stores: job {job.job_id}")

    @abstractmethod
    def load(self, job: Job) -> None:
        """Queue chunks to be brought into their slots. Loads never wait behind queued stores."""

    @abstractmethod
    def poll(self) -> list[JobResult | Settled]:
        """What has ended since the last call. Also where deadlines of running jobs expire.

        Called at least once per step of the scheduler, after that step's lookups: what they have
        gathered may be sent in one piece here. While chunks of a load are awaited the engine keeps
        stepping.
        """

    def touch(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 - optional verb
        """These chunks were used again: a tier with a quota evicts them later. Best effort."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Counters since the tier was opened."""

    @abstractmethod
    def close(self, *, timeout_s: float) -> list[JobResult | Settled]:
        """Finish what runs, fail what is queued, stop all threads, release everything; idempotent.

        Returns what ended, as `poll` does. Work still running after `timeout_s` is left to a daemon
        thread and logged; its slots stay unsettled.
        """

    # --- for tiers that serve single requests and other engines ---

    def borrow_from(self, lender: Lender) -> None:  # noqa: B027 - optional verb
        """The pool, for a tier that reads it unasked. Once, before every other verb but `close`.

        From `close` on, nothing may be borrowed.
        """

    def request_started(self, request: TierRequest) -> bool:
        """A request has come. True: have every chunk of it kept in the pool, those found there too, and
        have them `offered`."""
        return False

    def offered(self, keys: Sequence[BlockKey], request_id: str) -> None:  # noqa: B027 - optional verb
        """Chunks of a request that asked for this, as the engine computes them: each is resident, or its
        bytes are on their way from the device. A chunk that found no slot is left out."""

    def request_finished(self, request_id: str) -> None:  # noqa: B027 - optional verb
        """The request has ended, whatever became of it: also for unknown ids and twice. Chunks offered for
        it may still be on their way from the device, and a load for it may still run."""
