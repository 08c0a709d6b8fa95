"""How many I/O threads are of use: found out, because it depends on how far away the disk is. Pure.

A thread waits for its request; a near disk is busy with two of them, a network file system may want
many. Each thread costs processor time, though. So while work waits, one more is started, and kept
adding only as long as the last one has made things faster.
"""

from __future__ import annotations

AT_ONCE = 2
"""Started without looking: one computes checksums while the other waits."""
LOOK_S = 0.1
"""How long a backlog lasts, per thread there is, before its pace is judged."""
PAUSE_S = 0.5
"""A backlog not heard of for so long is over; the next is a new one."""


class Growth:
    """One side's threads. Not thread-safe: the pool asks under its lock."""

    def __init__(self) -> None:
        self._chunks = 0
        self._heard_s = float("-inf")
        self._since_s = 0.0
        self._rate = 0.0
        """Chunks per second, the best so far."""

    def __repr__(self) -> str:
        return f"<Growth {self._rate:.0f} chunks/s at best>"

    def moved(self, chunks: int) -> None:
        """A thread has ended a batch."""
        self._chunks += chunks

    def one_more(self, count: int, now_s: float) -> bool:
        """Work waits and `count` threads are at it: whether one more should be started now."""
        new_backlog = now_s - self._heard_s > PAUSE_S
        self._heard_s = now_s
        if count < AT_ONCE or new_backlog:
            self._begin(now_s)
            return count < AT_ONCE
        elapsed_s = now_s - self._since_s
        if elapsed_s < LOOK_S * count:
            return False
        rate = self._chunks / elapsed_s
        # Had the last thread brought its full share, the pace would have grown by 1 / (count - 1).
        faster = rate > self._rate * (1 + 0.5 / (count - 1))
        self._rate = max(self._rate, rate)
        self._begin(now_s)
        return faster

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._chunks = 0
