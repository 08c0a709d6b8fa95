"""What the peer service counts; the metrics and the doctor read it.

`PeerStats` is what others see. The parts below it are counted in place, each by one owner, on the service's
thread; they never fall.
"""

from __future__ import annotations

import msgspec


class AskCounts(msgspec.Struct):
    """What became of our own questions, over all peers."""

    expired_lookups: int = 0
    """Keys that no peer answered in `lookup_timeout_s`."""
    expired_loads: int = 0
    expired_aborts: int = 0


class ServeCounts(msgspec.Struct):
    """What peers asked of us."""

    lookups: int = 0
    hits: int = 0
    chunks: int = 0
    refused_fetches: int = 0
    expired_stores: int = 0


class SessionCounts(msgspec.Struct):
    """Contacts with peers."""

    handshakes_done: int = 0
    handshakes_refused: int = 0
    bad_messages: int = 0
    peers_lost: int = 0


class PeerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier of peers adds to its `TierStats`; chunks pulled are `loaded_chunks` there.

    Counters since the tier was opened, which never fall, but for the gauges.
    """

    peers_up: int = 0
    """Gauge: peers whose handshake is done and whose line is up."""
    kept_slots: int = 0
    """Gauge: distinct slots of the pool that are kept for peers or being sent to them."""
    transports: tuple[tuple[str, int], ...] = ()
    """Gauge: each transport really in use, and how many peers are reached by it."""
    handshakes_done: int = 0
    handshakes_refused: int = 0
    """By either side: another model, layout, block length or hash seed."""
    logins_refused: int = 0
    """Connections that did not prove the cluster's secret."""
    bad_messages: int = 0
    """Messages dropped because they did not parse or came out of turn."""
    peers_lost: int = 0
    served_lookups: int = 0
    """Keys that peers asked for, found or not."""
    served_chunks: int = 0
    served_bytes: int = 0
    expired_keeps: int = 0
    """Requests whose chunks were kept for a consumer that did not come in `unbound_store_timeout_s`."""
    refused_fetches: int = 0
    """Fetches answered with a failure without moving a byte."""
    refused_requests: int = 0
    """Requests whose roles in `kv_transfer_params` were wrong; they run without peers."""
    lookup_deadlines: int = 0
    load_deadlines: int = 0
    store_deadlines: int = 0
    abort_deadlines: int = 0
