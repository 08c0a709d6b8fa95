"""Who may touch a slot: the I/O thread that copies it, or the owner that gives its job up.

A request to a store can hang for minutes, so no request touches a slot: bytes are copied between slot and
staging memory, which takes no time. A part that is given up in between is never copied any more, and its
slots are free at once.
"""

from __future__ import annotations

import threading

from pdoffload.tiers.parts import Part


class Claims:
    """Parts whose slots are being copied now. Any thread; the lock is held for a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copied: set[Part] = set()

    def take(self, part: Part) -> bool:
        """For the thread, before it copies: False if the part was given up. To be ended by `drop`."""
        with self._lock:
            if part.expired:
                return False
            self._copied.add(part)
            return True

    def drop(self, part: Part) -> None:
        with self._lock:
            self._copied.discard(part)

    def give_up(self, part: Part) -> bool:
        """For the owner: mark the part as expired. False if it is being copied this moment."""
        with self._lock:
            if part in self._copied:
                return False
            part.expired = True
            return True
