"""How work is handed between a tier's owner and its I/O threads.

    owner: Job --cut--> Parts --PartQueue--> Batch --I/O thread--> an Outcome per Part --> owner

A job is cut so that no part is more than one request should carry; a thread takes several small parts
together, of one job or of many, and moves them with one NIXL request.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdoffload.errors import PdOffloadError
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import Job

Failures = tuple[tuple[BlockKey, PdOffloadError], ...]
NONE_FORCED: frozenset[BlockKey] = frozenset()


class Part:
    """Chunks of one job. Constant but for `started_s`, set once by the thread that works on it, and
    `expired` and `told`, set once by the owner."""

    __slots__ = ("expired", "forced", "is_load", "job_id", "keys", "slots", "started_s", "told")

    def __init__(
        self,
        job_id: int,
        is_load: bool,
        keys: tuple[BlockKey, ...],
        slots: tuple[int, ...],
        forced: frozenset[BlockKey] = NONE_FORCED,
    ) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.keys = keys
        self.slots = slots
        self.forced = forced
        """Stores only: keys to write although a file stands there, because it could not be loaded."""
        self.started_s: float | None = None
        self.expired = False
        """Its deadline has passed: its thread is stuck."""
        self.told = False
        """How it ended has been taken in."""

    def __repr__(self) -> str:
        state = "queued" if self.started_s is None else "expired" if self.expired else "begun"
        return f"<Part of job {self.job_id}: {self.what}, {state}>"

    @property
    def what(self) -> str:
        """Names the work in errors."""
        return _what(self.is_load, len(self.keys))


def _what(is_load: bool, chunks: int) -> str:
    return f"{'load' if is_load else 'store'} of {chunks} chunks"


def cut(job: Job, most_chunks: int, *, is_load: bool, forced: frozenset[BlockKey]) -> list[Part]:
    """`job` in parts of equal size, as far as that goes; none for a job without chunks."""
    if not job.keys:
        return []
    count = -(-len(job.keys) // most_chunks)
    size = -(-len(job.keys) // count)
    return [
        Part(job.job_id, is_load, job.keys[at : at + size], job.slots[at : at + size], forced)
        for at in range(0, len(job.keys), size)
    ]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a part ended. Where `settled` is False another one follows when it is, and says only that."""

    part: Part
    failed: Failures = ()
    settled: bool = True
    moved_bytes: int = 0
    already_present: int = 0
    verified: int = 0
    vanished: int = 0
    ended_s: float = 0.0


def failed_outcome(
    part: Part, error: PdOffloadError, *, settled: bool = True, ended_s: float = 0.0
) -> Outcome:
    """All of `part` failed by `error`."""
    failed = tuple((key, error) for key in part.keys)
    return Outcome(part=part, failed=failed, settled=settled, ended_s=ended_s)


class Batch:
    """Parts that one thread moves together, all loads or all stores, and how it goes with each chunk.

    Chunk i of the batch is `keys[i]`, `slots[i]`; the marks are one byte per chunk.
    """

    __slots__ = (
        "errors",
        "is_load",
        "keys",
        "moved",
        "parts",
        "present",
        "slots",
        "started_s",
        "vanished",
        "verified",
    )

    def __init__(self, parts: Sequence[Part], started_s: float) -> None:
        self.parts = tuple(parts)
        self.is_load = parts[0].is_load
        self.started_s = started_s
        self.keys = [key for part in parts for key in part.keys]
        self.slots = [slot for part in parts for slot in part.slots]
        count = len(self.keys)
        self.errors: dict[int, PdOffloadError] = {}
        self.present = bytearray(count)
        self.moved = bytearray(count)
        self.verified = bytearray(count)
        self.vanished = bytearray(count)
        for part in parts:
            part.started_s = started_s

    def __repr__(self) -> str:
        return f"<Batch {self.what} in {len(self.parts)} parts, {len(self.errors)} failed>"

    @property
    def what(self) -> str:
        return _what(self.is_load, len(self.keys))

    def forced(self) -> frozenset[BlockKey]:
        """Keys to store although a file stands there."""
        return frozenset().union(*(part.forced for part in self.parts))

    def fail_rest(self, error: PdOffloadError) -> None:
        """Whatever is not known to have succeeded, or failed otherwise, failed by `error`."""
        for number in range(len(self.keys)):
            stored = self.present[number] or (self.moved[number] and not self.is_load)
            if not stored:
                self.errors.setdefault(number, error)
                self.verified[number] = False

    def outcomes(self, chunk_bytes: int, *, settled: bool, ended_s: float) -> list[Outcome]:
        """How each part ended."""
        found = []
        first = 0
        for part in self.parts:
            last = first + len(part.keys)
            numbers = range(first, last) if self.errors else range(0)
            found.append(
                Outcome(
                    part=part,
                    failed=tuple(
                        (self.keys[i], self.errors[i]) for i in numbers if i in self.errors
                    ),
                    settled=settled,
                    moved_bytes=sum(self.moved[first:last]) * chunk_bytes,
                    already_present=sum(self.present[first:last]),
                    verified=sum(self.verified[first:last]),
                    vanished=sum(self.vanished[first:last]),
                    ended_s=ended_s,
                )
            )
            first = last
        return found
