"""Whether a tier takes stores at present. Pure: no I/O, no thread.

    TAKING --- storage is full, or `SAME_REASON` store jobs in a row failed alike ---> REFUSING
       ^                                                                                 |
       +------------ a store went through ----- one store is let in as a trial <---------+
                                                 every `retry_s`, which doubles

Refusing spares the disk and the queue while nothing can come of it; loads are not concerned.
"""

from __future__ import annotations

from pdoffload.errors import PdOffloadError, StorageError, StorageFull

SAME_REASON = 3
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


class StoreHealth:
    """The state machine above. One thread; instants are of the caller's monotonic clock."""

    def __init__(self) -> None:
        self.refusing = ""
        """Why stores are refused, or empty. Begins with `full` or `failing`."""
        self._cause: PdOffloadError | None = None
        self._last: object = None
        self._in_a_row = 0
        self._retry_at_s = 0.0
        self._retry_s = FIRST_RETRY_S

    def __repr__(self) -> str:
        return f"<StoreHealth {self.refusing or 'taking stores'}>"

    def admits(self, now_s: float) -> bool:
        """Whether a store may be queued now. While refusing, one at each end of the back-off."""
        if not self.refusing:
            return True
        if now_s < self._retry_at_s:
            return False
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)
        return True

    def refusal(self) -> PdOffloadError:
        """The error of a store that is not admitted: of the same class as the cause."""
        if isinstance(self._cause, StorageError):
            return type(self._cause)(self._cause.path, f"not tried: {self.refusing}")
        return StorageError("stores", f"not tried: {self.refusing}")

    def succeeded(self) -> bool:
        """A store job went through. True if stores are taken again by this."""
        was_refusing = bool(self.refusing)
        self.refusing, self._cause = "", None
        self._last, self._in_a_row = None, 0
        self._retry_s = FIRST_RETRY_S
        return was_refusing

    def failed(self, error: PdOffloadError, now_s: float) -> bool:
        """A store job failed by `error`. True if stores are refused from now on, for a new reason."""
        reason = (type(error), error.errno if isinstance(error, StorageError) else str(error))
        self._in_a_row = self._in_a_row + 1 if reason == self._last else 1
        self._last = reason
        full = isinstance(error, StorageFull)
        if not full and self._in_a_row < SAME_REASON:
            return False
        was = self.refusing.partition(":")[0]
        self.refusing = f"{'full' if full else 'failing'}: {error}"
        self._cause = error
        self._retry_at_s = max(self._retry_at_s, now_s + self._retry_s)
        return was != self.refusing.partition(":")[0]
