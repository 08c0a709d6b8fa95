from __future__ import annotations

import pytest

from pdoffload.errors import CorruptChunk, DeadlineExceeded, MisuseError, StorageError
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.base import Job, JobResult, Settled
from pdoffload.tiers.jobs import JobBook
from pdoffload.tiers.parts import NONE_FORCED, Outcome, Part, cut, failed_outcome

KEYS = keys_of(*range(6))
JOB = Job(1, KEYS, tuple(range(6)))
BROKEN = StorageError("f", "broken")


def begun(book: JobBook, *, is_load: bool, job: Job = JOB) -> list[Part]:
    parts = cut(job, 2, is_load=is_load, forced=NONE_FORCED)
    book.begin(job, parts, is_load=is_load)
    return parts


def only_news(book: JobBook) -> JobResult | Settled:
    (news,) = book.news
    book.news.clear()
    book.check()
    return news


def test_a_job_ends_with_its_last_part_whatever_the_order() -> None:
    book = JobBook()
    parts = begun(book, is_load=False)
    for number, part in enumerate(parts):
        part.started_s = 10.0 + number
    assert book.take_in(Outcome(part=parts[2], moved_bytes=2, ended_s=13)) is None
    assert (
        book.take_in(Outcome(part=parts[0], moved_bytes=1, already_present=1, ended_s=15)) is None
    )
    assert book.news == []
    live = book.take_in(Outcome(part=parts[1], moved_bytes=2, ended_s=14))
    assert live is not None
    assert only_news(book) == JobResult(
        job_id=1, succeeded=KEYS, moved_bytes=5, already_present=1, elapsed_s=5.0
    )
    stats = book.stats(degraded="")
    assert (stats.stored_chunks, stats.already_present, stats.bytes_written) == (5, 1, 5)
    assert (stats.queued_jobs, stats.failed_stores) == (0, 0)


def test_failed_chunks_are_named_and_the_rest_has_succeeded() -> None:
    book = JobBook()
    parts = begun(book, is_load=True)
    corrupt = CorruptChunk("f", "bad")
    book.take_in(Outcome(part=parts[0], failed=((KEYS[1], corrupt),), verified=1))
    book.take_in(Outcome(part=parts[1], verified=2))
    book.take_in(failed_outcome(parts[2], BROKEN))
    result = only_news(book)
    assert isinstance(result, JobResult)
    assert result.succeeded == (KEYS[0], KEYS[2], KEYS[3])
    assert result.failed == ((KEYS[1], corrupt), (KEYS[4], BROKEN), (KEYS[5], BROKEN))
    stats = book.stats(degraded="")
    assert (stats.loaded_chunks, stats.verified_chunks) == (3, 3)
    assert (stats.corrupt_chunks, stats.failed_loads) == (1, 1), "failures are counted by job"


def test_unsettled_parts_hold_their_slots_until_each_has_settled() -> None:
    book = JobBook()
    parts = begun(book, is_load=True)
    late = DeadlineExceeded("load", 30)
    book.take_in(Outcome(part=parts[0]))
    for part in parts[1:]:
        book.take_in(failed_outcome(part, late, settled=False))
    result = only_news(book)
    assert isinstance(result, JobResult)
    assert not result.settled
    assert book.stats(degraded="").quarantined_slots == 4
    assert book.stats(degraded="").deadlines_exceeded == 2
    assert book.take_in(failed_outcome(parts[1], late, settled=False)) is None, "told again"
    book.take_in(Outcome(part=parts[1]))
    assert book.news == []
    assert book.stats(degraded="").quarantined_slots == 2
    book.take_in(Outcome(part=parts[2], moved_bytes=100))
    assert only_news(book) == Settled(1)
    stats = book.stats(degraded="")
    assert stats.quarantined_slots == 0
    assert stats.bytes_read == 0, "bytes of a job that had failed do not count"


def test_a_part_that_settles_before_its_job_has_ended_is_no_news() -> None:
    book = JobBook()
    parts = begun(book, is_load=True)
    book.take_in(failed_outcome(parts[0], BROKEN, settled=False))
    book.take_in(Outcome(part=parts[0]))
    book.take_in(Outcome(part=parts[1]))
    book.take_in(Outcome(part=parts[2]))
    result = only_news(book)
    assert isinstance(result, JobResult)
    assert result.settled


def test_deadlines_run_from_the_moment_work_begins() -> None:
    book = JobBook()
    parts = begun(book, is_load=False)
    parts[0].started_s = 100.0
    parts[1].started_s = 120.0
    assert book.late(129.9, 30) == []
    assert book.late(130.0, 30) == parts[:1]
    book.take_in(failed_outcome(parts[0], BROKEN, settled=False))
    assert book.late(1000.0, 30) == parts[1:2], "the third is still in the queue"
    assert book.begun() == parts[1:] or set(book.begun()) == set(parts[1:])


def test_misuse_is_refused() -> None:
    book = JobBook()
    parts = begun(book, is_load=False)
    with pytest.raises(MisuseError, match="job 1 is live"):
        begun(book, is_load=True)
    with pytest.raises(MisuseError, match="6 keys, 5 slots"):
        book.begin(Job(2, KEYS, tuple(range(5))), [], is_load=True)
    book.take_in(Outcome(part=parts[0]))
    with pytest.raises(MisuseError, match="ended twice"):
        book.take_in(Outcome(part=parts[0]))


def test_a_dropped_store_is_counted_as_dropped_and_not_as_failed() -> None:
    book = JobBook()
    part = Part(1, False, KEYS, JOB.slots)
    book.begin(JOB, [part], is_load=False, dropped=True)
    book.take_in(failed_outcome(part, BROKEN))
    assert len(only_news(book).failed) == 6  # type: ignore[union-attr]
    stats = book.stats(degraded="full")
    assert (stats.dropped_stores, stats.failed_stores, stats.degraded) == (1, 0, "full")


def test_queued_jobs_are_those_nobody_has_begun() -> None:
    book = JobBook()
    first = begun(book, is_load=False)
    begun(book, is_load=True, job=Job(2, KEYS, JOB.slots))
    assert book.stats(degraded="").queued_jobs == 2
    first[0].started_s = 1.0
    assert book.stats(degraded="").queued_jobs == 1
