"""Checksums of a write's slots, computed while its bytes move, by whichever thread has time."""

from __future__ import annotations

import contextlib
import threading

from pdoffload.errors import MisuseError, PdOffloadError
from pdoffload.layout import BlockKey
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.serving import Write


class Hashing:
    """Any thread. The slots are on loan until `finish` or `stop` has returned; no slot is read after that."""

    def __init__(self, region: HostRegion, write: Write) -> None:
        self._region = region
        self._write = write
        self._lock = threading.Lock()
        """Held for one chunk at a time: threads that come together share the work."""
        self._is_over = False

    def __repr__(self) -> str:
        state = "over" if self._is_over else "open"
        return f"<Hashing {len(self._write.slots)} chunks: {state}>"

    def go_ahead(self) -> None:
        """Compute what is not known yet, until the end. What goes wrong here does so again in `finish`."""
        with contextlib.suppress(PdOffloadError):
            for slot in self._write.slots:
                with self._lock:
                    if self._is_over:
                        return
                    self._region.checksum(slot)

    def finish(self) -> dict[BlockKey, bytes]:
        """All of them, by key; once, then nothing is computed any more. Raises what `checksum` raises."""
        checksums: dict[BlockKey, bytes] = {}
        try:
            for key, slot in zip(self._write.keys, self._write.slots, strict=True):
                with self._lock:
                    if self._is_over:
                        raise MisuseError(f"{self!r} was ended before")
                    checksums[key] = self._region.checksum(slot)
        finally:
            self.stop()
        return checksums

    def stop(self) -> None:
        """Nothing is computed any more. Waits for one chunk at most; idempotent."""
        with self._lock:
            self._is_over = True
