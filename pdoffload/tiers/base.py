"""The contract of a tier.

A tier keeps chunks somewhere else than the host pool and moves them between there and the pool's slots,
always through NIXL. Seven verbs, batch first. Nothing blocks the caller: `store` and `load` queue, and
`poll` hands over what has ended. A miss is a value, a failed chunk is a value, misuse raises.

One thread, the owner, calls every verb. The bytes of a job's slots belong to the tier from the call that
queued the job until the `JobResult` with `settled=True` (or the later `Settled`) for it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.config import Locality as Locality
from pdoffload.config import Verify as Verify
from pdoffload.errors import PdOffloadError
from pdoffload.layout import BlockKey, RunConfig
from pdoffload.memory.host import HostRegion


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


class Job(msgspec.Struct, frozen=True):
    """One batch to store or to load. `keys[i]` is the chunk of pool slot `slots[i]`; keys are distinct.

    `job_id` is unique among the tier's live jobs, stores and loads together.
    """

    job_id: int
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]


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


class Tier(ABC):
    """Seven verbs. `name` is the tier's type in configuration, logs and metrics."""

    name: str
    medium: Medium = Medium.STORAGE
    locality: Locality | None = None
    publishes_events: bool = False

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        """Whether each chunk can be loaded, as far as is known now. Never waits, never touches a medium."""

    @abstractmethod
    def store(self, job: Job) -> None:
        """Queue chunks to be kept. Chunks the tier already holds count as stored and move no byte."""

    @abstractmethod
    def load(self, job: Job) -> None:
        """Queue chunks to be brought into their slots. Loads never wait behind queued stores."""

    @abstractmethod
    def poll(self) -> list[JobResult | Settled]:
        """What has ended since the last call. Also where deadlines of running jobs expire."""

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
