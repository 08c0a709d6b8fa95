"""The reference tier: keeps chunks in this process's memory.

It really copies every byte and really compares checksums, so that what is built and tested on it meets
the data errors other tiers have. All work is done inside the verbs, on the owner's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from pdoffload.errors import CorruptChunk, MisuseError, PdOffloadError, StorageError, StorageFull
from pdoffload.layout import BlockKey
from pdoffload.tiers.base import (
    Job,
    JobResult,
    Lookup,
    Medium,
    Settled,
    Tier,
    TierContext,
    TierStats,
    Verify,
)


class MemoryTier(Tier):
    """Chunks by key, each with its own bytes. With `max_bytes`, least recently used ones go first.

    Raises `MisuseError` for any verb but `poll`, `stats` and `close` after `close`.
    """

    name = "memory"
    medium = Medium.CPU

    def __init__(self, context: TierContext, *, max_bytes: int | None = None) -> None:
        self._region = context.region
        self._verify = context.verify
        self._max_bytes = max_bytes
        self._chunk_bytes = context.region.geometry.chunk_bytes
        self.chunks: OrderedDict[BlockKey, bytearray] = OrderedDict()
        """The kept bytes, least recently used first. Tests reach in here to spoil them."""
        self._digests: dict[BlockKey, bytes] = {}
        self._ended: list[JobResult | Settled] = []
        self._counts = TierStats()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<MemoryTier {state}, {len(self.chunks)} chunks, {len(self._ended)} results to poll>"
        )

    def lookup(self, keys: Sequence[BlockKey], request_id: str = "") -> list[Lookup]:
        self._require_open()
        return [Lookup.HIT if key in self.chunks else Lookup.MISS for key in keys]

    def store(self, job: Job) -> None:
        self._require_open()
        present = 0
        failed: list[tuple[BlockKey, PdOffloadError]] = []
        for key, slot in zip(job.keys, job.slots, strict=True):
            if key in self.chunks:
                self.chunks.move_to_end(key)
                present += 1
            elif not self._make_room():
                failed.append((key, StorageFull("memory", f"a quota of {self._max_bytes} bytes")))
            else:
                self.chunks[key] = bytearray(self._region.slot_view(slot))
                self._digests[key] = self._region.checksum(slot)
        stored = len(job.keys) - present - len(failed)
        moved_bytes = stored * self._chunk_bytes
        self._counts = self._counts.plus(
            stored_chunks=stored,
            already_present=present,
            bytes_written=moved_bytes,
            failed_stores=bool(failed),
        )
        self._end(job, failed, moved_bytes=moved_bytes, already_present=present)

    def load(self, job: Job) -> None:
        self._require_open()
        failed: list[tuple[BlockKey, PdOffloadError]] = []
        for key, slot in zip(job.keys, job.slots, strict=True):
            try:
                self._load_one(key, slot)
            except StorageError as error:
                failed.append((key, error))
        loaded = len(job.keys) - len(failed)
        verified = loaded if self._verify is not Verify.OFF else 0
        self._counts = self._counts.plus(
            loaded_chunks=loaded,
            verified_chunks=verified,
            bytes_read=loaded * self._chunk_bytes,
            failed_loads=bool(failed),
            corrupt_chunks=sum(isinstance(error, CorruptChunk) for _, error in failed),
            vanished_chunks=sum(not isinstance(error, CorruptChunk) for _, error in failed),
        )
        self._end(job, failed, moved_bytes=loaded * self._chunk_bytes, verified=verified)

    def poll(self) -> list[JobResult | Settled]:
        ended, self._ended = self._ended, []
        return ended

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._require_open()
        for key in keys:
            if key in self.chunks:
                self.chunks.move_to_end(key)

    def stats(self) -> TierStats:
        return self._counts

    def close(self, *, timeout_s: float) -> list[JobResult | Settled]:
        self._closed = True
        return self.poll()

    def _load_one(self, key: BlockKey, slot: int) -> None:
        self._region.forget_checksum(slot)
        chunk = self.chunks.get(key)
        if chunk is None:
            raise StorageError(key.hex(), "no such chunk")
        if self._verify is not Verify.OFF and xxhash.xxh3_128_digest(chunk) != self._digests[key]:
            self._forget(key)
            raise CorruptChunk(key.hex(), "does not match its checksum")
        self._region.slot_view(slot)[:] = chunk
        self.chunks.move_to_end(key)
        if self._verify is not Verify.OFF:
            self._region.set_checksum(slot, self._digests[key])

    def _make_room(self) -> bool:
        """Evict until one more chunk fits; False if none ever will."""
        if self._max_bytes is None:
            return True
        if self._chunk_bytes > self._max_bytes:
            return False
        while (len(self.chunks) + 1) * self._chunk_bytes > self._max_bytes:
            self._forget(next(iter(self.chunks)))
        return True

    def _forget(self, key: BlockKey) -> None:
        self.chunks.pop(key, None)
        self._digests.pop(key, None)

    def _end(
        self,
        job: Job,
        failed: list[tuple[BlockKey, PdOffloadError]],
        *,
        moved_bytes: int,
        already_present: int = 0,
        verified: int = 0,
    ) -> None:
        bad = {key for key, _ in failed}
        self._ended.append(
            JobResult(
                job_id=job.job_id,
                succeeded=tuple(key for key in job.keys if key not in bad),
                failed=tuple(failed),
                moved_bytes=moved_bytes,
                already_present=already_present,
                verified=verified,
            )
        )

    def _require_open(self) -> None:
        if self._closed:
            raise MisuseError("the tier is closed")
