"""The books of a tier's owner: jobs from their verb to their result, and the counters. Pure.

begin --> parts run --> all have ended or expired --> JobResult --> the unsettled have settled --> Settled
                                                           '--- (all settled: nothing follows) ---'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pdoffload.errors import CorruptChunk, DeadlineExceeded, MisuseError, PdOffloadError
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Job, JobResult, Settled, TierStats
from pdoffload.tiers.parts import Outcome, Part


class LiveJob:
    """What is known of one job so far."""

    __slots__ = (
        "dropped",
        "failed",
        "is_load",
        "job",
        "outcomes",
        "parts",
        "result",
        "unsettled",
    )

    def __init__(self, job: Job, parts: Iterable[Part], *, is_load: bool, dropped: bool) -> None:
        self.job = job
        self.is_load = is_load
        self.dropped = dropped
        self.parts = set(parts)
        """Those that have not ended."""
        self.unsettled: set[Part] = set()
        self.failed: list[tuple[BlockKey, PdOffloadError]] = []
        self.outcomes: list[Outcome] = []
        self.result: JobResult | None = None


class JobBook:
    """Live jobs and counters. Owner thread. `news` is what `poll` will hand over next."""

    def __init__(self) -> None:
        self.news: list[JobResult | Settled] = []
        self._jobs: dict[int, LiveJob] = {}
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<JobBook {len(self._jobs)} live jobs, {len(self.news)} news>"

    def begin(
        self, job: Job, parts: Sequence[Part], *, is_load: bool, dropped: bool = False
    ) -> None:
        """A job was taken on. `dropped`: only to fail at once, and a store then counts as dropped.

        Raises `MisuseError` if a job of that id is live or keys and slots differ in number.
        """
        if job.job_id in self._jobs:
            raise MisuseError(f"job {job.job_id} is live already")
        if len(job.keys) != len(job.slots):
            raise MisuseError(f"job {job.job_id}: {len(job.keys)} keys, {len(job.slots)} slots")
        live = LiveJob(job, parts, is_load=is_load, dropped=dropped)
        self._jobs[job.job_id] = live
        if not parts:
            self._tell(live)

    def late(self, now_s: float, timeout_s: float) -> list[Part]:
        """Parts that were begun `timeout_s` ago or earlier and have not ended."""
        return [
            part
            for live in self._jobs.values()
            for part in live.parts
            if part.started_s is not None and now_s - part.started_s >= timeout_s
        ]

    def drop(self, job_id: int) -> list[Part]:
        """Count the store as dropped, and return its parts, which the caller fails at once."""
        live = self._jobs[job_id]
        live.dropped = True
        return list(live.parts)

    def parts_of(self, job_id: int) -> list[Part]:
        """Parts of the job that have not ended; none for a job that is not live."""
        live = self._jobs.get(job_id)
        return [] if live is None else list(live.parts)

    def begun(self) -> list[Part]:
        """Parts that have not ended."""
        return [part for live in self._jobs.values() for part in live.parts]

    def take_in(self, outcome: Outcome) -> LiveJob | None:
        """Enter how a part ended. Its job, if this made its result."""
        part = outcome.part
        live = self._jobs.get(part.job_id)
        if live is not None and part in live.unsettled:
            if outcome.settled:
                live.unsettled.remove(part)
                if live.result is not None and not live.unsettled:
                    self.news.append(Settled(part.job_id))
                    del self._jobs[part.job_id]
            return None
        if live is None or part not in live.parts:
            raise MisuseError(f"{part!r} ended twice")
        live.parts.remove(part)
        live.failed += outcome.failed
        live.outcomes.append(outcome)
        if not outcome.settled:
            live.unsettled.add(part)
        self._count(outcome)
        if live.parts:
            return None
        self._tell(live)
        return live

    def _tell(self, live: LiveJob) -> None:
        outcomes, job = live.outcomes, live.job
        bad = dict(live.failed)
        starts = [o.part.started_s for o in outcomes if o.part.started_s is not None]
        live.result = JobResult(
            job_id=job.job_id,
            succeeded=tuple(key for key in job.keys if key not in bad) if bad else job.keys,
            failed=tuple((key, bad[key]) for key in job.keys if key in bad),
            settled=not live.unsettled,
            moved_bytes=sum(o.moved_bytes for o in outcomes),
            already_present=sum(o.already_present for o in outcomes),
            verified=sum(o.verified for o in outcomes),
            elapsed_s=max(o.ended_s for o in outcomes) - min(starts) if starts else 0.0,
        )
        if bad:
            self._counts[_failure_counter(live)] += 1
        self.news.append(live.result)
        if not live.unsettled:
            del self._jobs[job.job_id]

    def _count(self, outcome: Outcome) -> None:
        counts, part = self._counts, outcome.part
        done = len(part.keys) - len(outcome.failed)
        if part.is_load:
            counts["loaded_chunks"] += done
            counts["verified_chunks"] += outcome.verified
            counts["vanished_chunks"] += outcome.vanished
            counts["bytes_read"] += outcome.moved_bytes
        else:
            counts["stored_chunks"] += done - outcome.already_present
            counts["already_present"] += outcome.already_present
            counts["bytes_written"] += outcome.moved_bytes
        for _, error in outcome.failed:
            counts["corrupt_chunks"] += isinstance(error, CorruptChunk)
        if outcome.failed and isinstance(outcome.failed[0][1], DeadlineExceeded):
            counts["deadlines_exceeded"] += 1

    def stats(self, *, degraded: str) -> TierStats:
        """The counters, and the gauges as they stand."""
        jobs = self._jobs.values()
        held = (part for live in jobs if live.result for part in live.unsettled)
        waiting = (
            live for live in jobs if live.parts and all(b.started_s is None for b in live.parts)
        )
        return TierStats(
            quarantined_slots=sum(len(part.slots) for part in held),
            queued_jobs=sum(not live.outcomes for live in waiting),
            degraded=degraded,
            peers=None,
            **self._counts,
        )

    def check(self) -> None:
        """Prove that every live job still has something to wait for; for tests."""
        for number, live in self._jobs.items():
            assert number == live.job.job_id
            assert live.unsettled if live.result else live.parts
            assert not live.parts & live.unsettled
        assert all(count >= 0 for count in self._counts.values())


def _failure_counter(live: LiveJob) -> str:
    if live.is_load:
        return "failed_loads"
    return "dropped_stores" if live.dropped else "failed_stores"
