"""Chunks that a request here computes for a peer to fetch, kept until it does. One thread, the service's.

Keep --> open: every chunk offered is borrowed from the pool as it becomes ready
  |--- the first fetch under the id --------> bound: the fetch has what it wants; the rest is let go
  |                                           at once (stock vLLM) or when the peer says so
  '--- nobody fetched for `unbound_store_timeout_s` since the last offer --> expired, and remembered:
       a fetch that still comes is refused at once
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

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
    """Its request has ended: only what is on its way into the pool can still come."""
    EXPIRED = "expired"


class _Keep:
    """What is kept under one id. Waits for its chunks itself."""

    def __init__(self, kv_request_id: str, expires_s: float) -> None:
        self.kv_request_id = kv_request_id
        self.expires_s = expires_s
        self.loans: dict[BlockKey, int] = {}
        self.awaited: set[BlockKey] = set()
        self.bound = False
        self.computing = True

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
        self._expired: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Keeping {len(self._keeps)} ids, {len(self._expired)} expired>"

    def __len__(self) -> int:
        return len(self._keeps)

    def stage(self, kv_request_id: str) -> Stage:
        if kv_request_id in self._expired:
            return Stage.EXPIRED
        keep = self._keeps.get(kv_request_id)
        if keep is None:
            return Stage.UNKNOWN
        return Stage.COMPUTING if keep.computing else Stage.COMPUTED

    def begin(self, kv_request_id: str, now_s: float) -> None:
        """A request computes for this id. A second request under the same id adds to the keep."""
        self._expired.pop(kv_request_id, None)
        keep = self._keeps.get(kv_request_id)
        if keep is None:
            self._keeps[kv_request_id] = _Keep(kv_request_id, now_s + self._timeout_s)
        else:
            keep.computing = True

    def offer(self, kv_request_id: str, keys: Sequence[BlockKey], now_s: float) -> None:
        """Keep these, unless the peer has said already what it wants, or the pool has none to spare."""
        keep = self._keeps.get(kv_request_id)
        if keep is None:
            return
        keep.expires_s = now_s + self._timeout_s
        if keep.bound:
            return
        room = max(0, self._lender.num_to_spare)
        new = [key for key in keys if key not in keep.loans and key not in keep.awaited][:room]
        ready = self._watches.wait(new, keep)
        keep.loans.update(ready)
        keep.awaited.update(key for key in new if key not in ready)

    def computed(self, kv_request_id: str) -> None:
        """The request has ended: of its chunks only those on their way into the pool can still come."""
        keep = self._keeps.get(kv_request_id)
        if keep is not None:
            keep.computing = False

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
        keep.bound = True
        keep.expires_s = now_s + self._timeout_s
        if only:
            self.release(kv_request_id)
        return taken

    def release(self, kv_request_id: str) -> None:
        """The peer wants nothing more of what is kept under this id."""
        keep = self._keeps.get(kv_request_id)
        if keep is not None:
            self._release(keep)
            keep.bound = True

    def tick(self, now_s: float) -> list[str]:
        """Let go of what nobody fetched in time; the ids. Forget old ones."""
        for kv_request_id in [id_ for id_, at_s in self._expired.items() if now_s >= at_s]:
            del self._expired[kv_request_id]
        late = [keep for keep in self._keeps.values() if now_s >= keep.expires_s]
        for keep in late:
            self._release(keep)
            del self._keeps[keep.kv_request_id]
            if not keep.bound:
                self.expired_keeps += 1
                self._expired[keep.kv_request_id] = now_s + self._remember_s
        return [keep.kv_request_id for keep in late if not keep.bound]

    @property
    def next_deadline_s(self) -> float | None:
        return min((keep.expires_s for keep in self._keeps.values()), default=None)

    def close(self) -> None:
        """Let go of everything."""
        for keep in self._keeps.values():
            self._release(keep)
        self._keeps.clear()

    def _release(self, keep: _Keep) -> None:
        self._watches.drop(keep.awaited, keep)
        keep.awaited.clear()
        self._lender.give_back(keep.loans.values())
        keep.loans.clear()
