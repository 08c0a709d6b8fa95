"""Chunks that a request here computes for a peer to fetch, kept until it does. One thread, the service's.

Keep --> open: every chunk offered is borrowed from the pool as it becomes ready
  |--- the first fetch under the id --> bound: the fetch has what it wants; the rest is let go at once
  |                                     (stock vLLM), when the peer says so, or at the timeout from then
  '--- its last request has ended, and nobody fetched for `unbound_store_timeout_s` --> expired

A request may compute for long between two chunks: an open keep has no deadline while it runs. So what bounds
a keep is its request, whose end always comes (`computed`), and after that the timeout, whatever is still on
its way into the pool. How much all keeps may hold, the pool says (`Lender.num_to_spare`).

Ids of keeps that are over are remembered for a while: under one that has expired a late fetch is refused at
once, and under one that its peer was done with it gets what is still in the pool, or fails at once.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence

from pdoffload.layout import BlockKey
from pdoffload.memory.lending import Lender
from pdoffload.p2p.terms import REMEMBER_S, Deadlines
from pdoffload.p2p.watches import Watches


class Stage(enum.Enum):
    """How far a keep is. UNKNOWN: no request here has spoken of this id (yet)."""

    UNKNOWN = "unknown"
    COMPUTING = "computing"
    """Its request still runs: chunks may come."""
    COMPUTED = "computed"
    """Its request has ended, and maybe the peer has said since that it is done: only what is on its way into
    the pool can still come."""
    EXPIRED = "expired"


class _Keep:
    """What is kept under one id. Waits for its chunks itself."""

    def __init__(self) -> None:
        self.requests = 0
        """That compute for this id, and have not ended."""
        self.expires_s = math.inf
        self.bound = False
        self.released = False
        """The peer has said that it is done."""
        self.loans: dict[BlockKey, int] = {}
        self.awaited: set[BlockKey] = set()

    def arrived(self, key: BlockKey, slot: int | None) -> None:
        self.awaited.discard(key)
        if slot is not None:
            self.loans[key] = slot


class Keeping:
    """All keeps of a process, by id."""

    def __init__(self, lender: Lender, watches: Watches, deadlines: Deadlines) -> None:
        self.expired_keeps = 0
        self._lender = lender
        self._watches = watches
        self._timeout_s = deadlines.unbound_store_timeout_s
        self._remember_s = max(REMEMBER_S, deadlines.load_timeout_s)
        self._keeps: dict[str, _Keep] = {}
        self._past: dict[str, tuple[Stage, float]] = {}
        """Ids of keeps that are over, oldest first: EXPIRED or COMPUTED, and until when it is remembered."""

    def __repr__(self) -> str:
        return f"<Keeping {len(self._keeps)} ids, {len(self._past)} remembered>"

    def __len__(self) -> int:
        return len(self._keeps)

    def stage(self, kv_request_id: str) -> Stage:
        keep = self._keeps.get(kv_request_id)
        if keep is not None:
            return Stage.COMPUTING if keep.requests else Stage.COMPUTED
        past, _ = self._past.get(kv_request_id, (Stage.UNKNOWN, 0.0))
        return past

    def begin(self, kv_request_id: str, *, fetched: bool) -> None:
        """A request computes for this id. A second request under the same id adds to the keep.

        `fetched`: a peer fetches under it already, and waits by itself for what it wants.
        """
        self._past.pop(kv_request_id, None)
        keep = self._keeps.setdefault(kv_request_id, _Keep())
        keep.requests += 1
        keep.bound = fetched
        keep.released = False
        if not keep.bound or not keep.loans:
            keep.expires_s = math.inf

    def offer(self, kv_request_id: str, keys: Sequence[BlockKey]) -> None:
        """Keep these, unless the peer has said already what it wants, or the pool has none to spare."""
        keep = self._keeps.get(kv_request_id)
        if keep is None or keep.bound:
            return
        room = max(0, self._lender.num_to_spare)
        known = keep.loans.keys() | keep.awaited
        new = [key for key in dict.fromkeys(keys) if key not in known][:room]
        ready = self._watches.wait(new, keep)
        keep.loans.update(ready)
        keep.awaited.update(key for key in new if key not in ready)

    def computed(self, kv_request_id: str, now_s: float) -> None:
        """A request has ended, well or not: of its chunks only those on their way into the pool can still
        come."""
        keep = self._keeps.get(kv_request_id)
        if keep is not None:
            keep.requests = max(0, keep.requests - 1)
            if not keep.requests:
                keep.expires_s = min(keep.expires_s, now_s + self._timeout_s)
                self._forget_if_over(kv_request_id, keep, now_s)

    def bind(
        self, kv_request_id: str, keys: Sequence[BlockKey], now_s: float, *, only: bool
    ) -> dict[BlockKey, int]:
        """A peer fetches `keys`: the loans of those that are kept go over to the caller.

        Nothing more is kept under this id from now on: the fetch waits by itself for what is not here.
        `only`: this is the only fetch, what it does not ask for is let go; otherwise that stays until
        other fetches, `release` or the deadline.
        """
        keep = self._keeps.get(kv_request_id)
        if keep is None:
            return {}
        taken = {key: keep.loans.pop(key) for key in keys if key in keep.loans}
        wanted = keep.awaited.intersection(keys)
        self._watches.drop(wanted, keep)
        keep.awaited -= wanted
        keep.bound = True
        keep.expires_s = now_s + self._timeout_s
        if only:
            self._let_go(keep)
        return taken

    def release(self, kv_request_id: str, now_s: float) -> None:
        """The peer wants nothing more of what is kept under this id: it says so when the last of its requests
        that name the id has ended."""
        keep = self._keeps.get(kv_request_id)
        if keep is not None:
            self._let_go(keep)
            keep.bound = keep.released = True
            self._forget_if_over(kv_request_id, keep, now_s)

    def tick(self, now_s: float) -> list[str]:
        """Let go of what nobody fetched in time; the ids under which something was kept. Forget old ones."""
        while self._past:
            oldest = next(iter(self._past))
            if now_s < self._past[oldest][1]:
                break
            del self._past[oldest]
        unfetched = []
        late = [(id_, keep) for id_, keep in self._keeps.items() if now_s >= keep.expires_s]
        for kv_request_id, keep in late:
            if keep.loans and not keep.bound:
                unfetched.append(kv_request_id)
            self._let_go(keep)
            if keep.requests:
                # It was fetched and holds nothing now; more may be fetched as it is computed.
                keep.expires_s = math.inf
                continue
            del self._keeps[kv_request_id]
            if not keep.bound:
                self._remember(kv_request_id, Stage.EXPIRED, now_s)
        self.expired_keeps += len(unfetched)
        return unfetched

    @property
    def next_deadline_s(self) -> float | None:
        first_s = min((keep.expires_s for keep in self._keeps.values()), default=math.inf)
        return None if math.isinf(first_s) else first_s

    def close(self) -> None:
        """Let go of everything."""
        for keep in self._keeps.values():
            self._let_go(keep)
        self._keeps.clear()

    def borrowed(self) -> Iterator[int]:
        """Every slot on loan here, once per loan; for tests."""
        for keep in self._keeps.values():
            yield from keep.loans.values()

    def _forget_if_over(self, kv_request_id: str, keep: _Keep, now_s: float) -> None:
        if keep.released and not keep.requests:
            del self._keeps[kv_request_id]
            self._remember(kv_request_id, Stage.COMPUTED, now_s)

    def _remember(self, kv_request_id: str, stage: Stage, now_s: float) -> None:
        self._past[kv_request_id] = stage, now_s + self._remember_s

    def _let_go(self, keep: _Keep) -> None:
        self._watches.drop(keep.awaited, keep)
        keep.awaited.clear()
        self._lender.give_back(keep.loans.values())
        keep.loans.clear()
