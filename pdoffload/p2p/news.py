"""What the engine's side says to the peer service, and what it hears back: immutable values in two queues."""

from __future__ import annotations

import msgspec

from pdoffload.errors import PdOffloadError
from pdoffload.layout import BlockKey
from pdoffload.p2p.address import Address


class Ask(msgspec.Struct, frozen=True):
    """Which of `keys` (distinct, not asked before in this request) does `peer` hold?"""

    peer: Address
    kv_request_id: str
    keys: tuple[BlockKey, ...]


class Pull(msgspec.Struct, frozen=True):
    """Have `peer` write `keys[i]` into pool slot `slots[i]`. `job_id` is unique among live pulls."""

    job_id: int
    peer: Address
    kv_request_id: str
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]


class Leave(msgspec.Struct, frozen=True):
    """No more questions under this id: the peer may let go of what it holds for it."""

    peer: Address
    kv_request_id: str


class Keep(msgspec.Struct, frozen=True):
    """A request here computes chunks that a peer will fetch under `kv_request_id`."""

    kv_request_id: str


class Offer(msgspec.Struct, frozen=True):
    """Chunks of that request, resident or about to be: keep them."""

    kv_request_id: str
    keys: tuple[BlockKey, ...]


class KeepEnds(msgspec.Struct, frozen=True):
    """That request has ended, well or not: what is not on its way into the pool will not come."""

    kv_request_id: str


Command = Ask | Pull | Leave | Keep | Offer | KeepEnds


class Answered(msgspec.Struct, frozen=True):
    """Of `keys`, asked under this id, the peer holds `hits`."""

    peer: Address
    kv_request_id: str
    keys: tuple[BlockKey, ...]
    hits: frozenset[BlockKey]


class PullEnded(msgspec.Struct, frozen=True, kw_only=True):
    """How a pull ended; exactly one per `Pull`.

    Where `settled` is False bytes may still land in the slots of the failed keys, until `PullSettled`.
    """

    job_id: int
    failed: tuple[tuple[BlockKey, PdOffloadError], ...] = ()
    settled: bool = True
    tried: bool = True
    """False: the peer is known not to serve us, and it was logged why when that became known."""
    moved_bytes: int = 0
    verified: int = 0


class PullSettled(msgspec.Struct, frozen=True):
    """No byte lands in the slots of this pull any more."""

    job_id: int


News = Answered | PullEnded | PullSettled
