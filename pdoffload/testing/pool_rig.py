"""A pool that lends, for tests of borrowers: a real index, and its arrivals when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pdoffload.layout import BlockKey
from pdoffload.memory.lending import ABSENT, Arrival
from pdoffload.p2p.watches import Watches
from pdoffload.policy.lru import Lru
from pdoffload.tiering.index import Index


class LendingPool:
    """`num_slots` slots, three quarters of which may be lent, and who waits for their chunks."""

    def __init__(self, num_slots: int = 16) -> None:
        self.index = Index(num_slots, Lru(num_slots))
        self.watches = Watches(self.index)
        self.arrivals: deque[Arrival] = deque()
        self.index.listen(self.arrivals.extend)

    def __repr__(self) -> str:
        return f"<LendingPool {self.index!r}, {self.watches!r}, {len(self.arrivals)} arrivals>"

    def hold(self, keys: Sequence[BlockKey]) -> None:
        """Chunks that are here."""
        self.fill(keys)
        self.index.commit(keys)

    def fill(self, keys: Sequence[BlockKey]) -> None:
        """Chunks on their way; `ready` or `index.abandon` ends that."""
        assert self.index.reserve(keys) is not None, "the test has filled the pool"

    def ready(self, keys: Sequence[BlockKey]) -> None:
        """They have arrived, and whoever waits has heard of it."""
        self.index.commit(keys)
        self.tell()

    def tell(self) -> None:
        """Whoever waits hears what has become of it."""
        while self.arrivals:
            self.watches.arrived(self.arrivals.popleft())

    def evict(self, keys: Iterable[BlockKey]) -> None:
        """Make room until none of `keys` is here; those on loan stay."""
        others = (BlockKey(b"evicting" + bytes([number, 0, 0, 0, 0])) for number in range(255))
        while any(self.index.find(key) is not ABSENT for key in keys):
            other = next(others)
            self.hold([other])

    def slot_of(self, key: BlockKey) -> int:
        return self.index.slot_of(key)

    def loans(self, key: BlockKey) -> int:
        """How often the chunk, which is here, is lent."""
        return self.index.pool.pins(self.index.slot_of(key))

    @property
    def is_at_rest(self) -> bool:
        """Nothing is lent or waited for."""
        return not (self.index.num_lent or len(self.watches) or self.arrivals)
