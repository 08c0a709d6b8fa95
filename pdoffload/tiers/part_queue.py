"""The queue between a tier's owner and its I/O threads: loads and stores apart, each served first by its
own threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence

from pdoffload.tiers.parts import Part


class PartQueue:
    """Parts that wait for a thread. Any thread.

    A reader takes loads first, a writer stores first. Each helps the other side when its own is empty and
    the other has all the threads it may have. One reader never helps, so that a load finds a thread even
    while every store is stuck; unless it is the only reader and no store is under way.
    """

    def __init__(self, *, num_readers: int, max_waiting_stores: int, most_chunks: int) -> None:
        lock = threading.Lock()
        self._lock = lock
        # True: readers, False: writers. A wake-up goes to a thread that may take the part.
        self._woken = {True: threading.Condition(lock), False: threading.Condition(lock)}
        self._idle = {True: 0, False: 0}
        self._waking = {True: 0, False: 0}
        self._takes_help = {True: False, False: False}
        self._loads: deque[Part] = deque()
        self._stores: deque[Part] = deque()
        self._num_readers = num_readers
        self._max_waiting_stores = max_waiting_stores
        self._most_chunks = most_chunks
        self._waiting_stores = 0
        self._readers_storing = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<PartQueue {len(self._loads)} loads, {len(self._stores)} stores waiting>"

    def __len__(self) -> int:
        return len(self._loads) + len(self._stores)

    def has_room(self, chunks: int) -> bool:
        """Whether a store of so many chunks may wait here; where none waits, one of any size."""
        with self._lock:
            return not self._stores or self._waiting_stores + chunks <= self._max_waiting_stores

    def put(self, parts: Sequence[Part]) -> None:
        """Queue a job's parts."""
        if not parts:
            return
        is_load = parts[0].is_load
        with self._lock:
            if is_load:
                self._loads.extend(parts)
            else:
                self._stores.extend(parts)
                self._waiting_stores += sum(len(part.keys) for part in parts)
            left = len(parts) - self._wake(is_load, len(parts))
            if self._takes_help[is_load]:
                self._wake(not is_load, left)

    def _wake(self, reader: bool, count: int) -> int:
        count = min(count, self._idle[reader])
        self._idle[reader] -= count
        self._waking[reader] += count
        self._woken[reader].notify(count)
        return count

    def take_help(self, *, reader: bool) -> None:
        """That side has all its threads: idle ones of the other side help it from now on."""
        with self._lock:
            self._takes_help[reader] = True

    def wants_thread(self, *, reader: bool) -> bool:
        """Whether work of that side waits that no thread of that side is on its way to."""
        with self._lock:
            waiting = self._loads if reader else self._stores
            return len(waiting) > self._waking[reader]

    def take(self, *, reader: bool) -> list[Part]:
        """The next parts for a thread of that side, all loads or all stores, up to one request's worth.

        Waits for one; empty once the queue is closed. A reader that was given stores says `stored` when it
        is done with them.
        """
        with self._lock:
            while not self._closed:
                parts = self._next(reader)
                if parts:
                    return parts
                self._idle[reader] += 1
                self._woken[reader].wait()
                self._waking[reader] -= 1
            return []

    def _next(self, reader: bool) -> list[Part]:
        if reader and self._loads:
            return self._up_to_a_request(self._loads)
        if not reader and not self._stores and self._loads and self._takes_help[True]:
            return self._up_to_a_request(self._loads)
        if not self._stores:
            return []
        if reader:
            most = max(1, self._num_readers - 1)
            if not self._takes_help[False] or self._readers_storing >= most:
                return []
            self._readers_storing += 1
        parts = self._up_to_a_request(self._stores)
        self._waiting_stores -= sum(len(part.keys) for part in parts)
        return parts

    def _up_to_a_request(self, side: deque[Part]) -> list[Part]:
        parts = [side.popleft()]
        chunks = len(parts[0].keys)
        while side and chunks + len(side[0].keys) <= self._most_chunks:
            chunks += len(side[0].keys)
            parts.append(side.popleft())
        return parts

    def stored(self) -> None:
        """A reader has ended the stores it was given."""
        with self._lock:
            self._readers_storing -= 1

    def remove_stores(self, parts: Collection[Part]) -> bool:
        """Take `parts` out if all of them still wait; False, and nothing changes, if not."""
        with self._lock:
            kept = deque(part for part in self._stores if part not in parts)
            if len(self._stores) - len(kept) != len(parts):
                return False
            self._stores = kept
            self._waiting_stores -= sum(len(part.keys) for part in parts)
            return True

    def drain(self) -> list[Part]:
        """Take everything that waits out of the queue."""
        with self._lock:
            waiting = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._waiting_stores = 0
        return waiting

    def close(self) -> None:
        """Nothing is taken any more; every waiting thread is told."""
        with self._lock:
            self._closed = True
            for woken in self._woken.values():
                woken.notify_all()
