"""How the fetches of one session are numbered, and what stock vLLM holds under a number. Pure.

Among ourselves a number is a serial of the whole process, so that an answer which comes late, from a session
that is over, fits nothing. Stock vLLM counts the rounds of each id from 0 and holds what a lookup found under
the round it was asked in, until the fetch of that round; what a later fetch names it waits for in vain.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdoffload.layout import BlockKey


class _Round:
    """The round of one id that no fetch has closed."""

    __slots__ = ("asked", "promised", "seq")

    def __init__(self) -> None:
        self.seq = 0
        self.asked = False
        """Whether there was ever a lookup under this id: without one, all that is fetched is promised."""
        self.promised: set[BlockKey] = set()


class Numbers:
    """Numbers for lookups and fetches to one peer. `whole`: it is stock vLLM."""

    def __init__(self, serials: Iterator[int]) -> None:
        self.whole = False
        self._serials = serials
        self._rounds: dict[str, _Round] = {}

    def for_lookup(self, kv_request_id: str) -> int:
        """The round of a lookup that is sent now."""
        if not self.whole:
            return 0
        round_ = self._rounds.setdefault(kv_request_id, _Round())
        round_.asked = True
        return round_.seq

    def note_hit(self, kv_request_id: str, key: BlockKey, round_seq: int | None) -> bool:
        """The peer has found `key`, asked in this round: whether a fetch may still come for it."""
        if not self.whole:
            return True
        round_ = self._rounds.get(kv_request_id)
        if round_ is None or round_.seq != round_seq:
            return False
        round_.promised.add(key)
        return True

    def may_fetch(self, kv_request_id: str, key: BlockKey) -> bool:
        """Whether a fetch that is sent now would find `key`, as far as we know."""
        round_ = self._rounds.get(kv_request_id)
        return round_ is None or not round_.asked or key in round_.promised

    def for_fetch(self, kv_request_id: str) -> int:
        """The round of a fetch that is sent now, which closes it."""
        if not self.whole:
            return next(self._serials)
        round_ = self._rounds.setdefault(kv_request_id, _Round())
        round_.seq += 1
        round_.promised = set()
        return round_.seq - 1

    def leave(self, kv_request_id: str) -> int:
        """Forget an id; the number of its last, empty fetch."""
        round_ = self._rounds.pop(kv_request_id, None)
        return round_.seq if round_ is not None else 0

    def clear(self) -> None:
        """The session is over."""
        self._rounds.clear()
