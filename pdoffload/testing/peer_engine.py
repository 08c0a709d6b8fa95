"""An engine as peers see it: a host pool, its tiering and a p2p tier, stepped as vLLM's scheduler steps them.

There is no model and no vLLM. A chunk is called by a name and a number; key and bytes follow from those, so
that every process knows the right bytes of every chunk.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from pdoffload.agent.agent import Agent
from pdoffload.agent.opening import open_agent as open_real_agent
from pdoffload.agent.opening import peer_backends
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.config import Verify
from pdoffload.layout import BlockKey, Geometry, RunConfig, make_key
from pdoffload.memory.host import HostRegion, SlotStatus
from pdoffload.p2p.address import Address
from pdoffload.p2p.line import Heartbeat
from pdoffload.p2p.link import DIAL_TIMEOUT_S, Link
from pdoffload.p2p.secret import ClusterSecret
from pdoffload.p2p.terms import Deadlines
from pdoffload.policy.lru import Lru
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.tier_rig import ShiftedClock
from pdoffload.tiering.manager import ARRIVING, ASKING, HIT, Tiering
from pdoffload.tiers.base import PeerStats, TierContext, TierRequest, TierStats
from pdoffload.tiers.peer import PeerTier

HOST = "127.0.0.1"
PATIENCE_S = 20.0
_PAUSE_S = 0.001
_numbers = itertools.count()


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is set up. Its deadlines pass by `PeerEngine.advance`, not by waiting."""

    port: int = 0
    agent_name: str = ""
    """Of its agents, if they shall be named as those of another process are."""
    num_slots: int = 64
    chunk_bytes: int = 1 << 16
    num_threads: int = 2
    fields: Mapping[str, Any] = msgspec.field(
        default_factory=lambda: {"model_name": "org/model", "dtype": "bfloat16", "tp_size": 1}
    )
    guards: Mapping[str, Any] = {}
    hash_seed: str = "0"
    secret: str = ""
    """Empty: the control channel is open."""
    verify: Verify = Verify.ALWAYS
    deadlines: Deadlines = Deadlines()
    heartbeat: Heartbeat = Heartbeat()
    dial_timeout_s: float = DIAL_TIMEOUT_S
    backends: tuple[str, ...] = ("UCX",)
    ucx_tls: str = ""
    environment: Mapping[str, str] = {}
    """Variables of a process of its own, such as UCX_TLS; not heeded in the caller's."""
    ends_at_once: bool = True
    """Whether a process of its own leaves out what Python does at exit, which takes a while."""


class Chunks(msgspec.Struct, frozen=True):
    """Chunks `first` .. `first + count - 1` of `name`."""

    name: str
    count: int
    first: int = 0

    @property
    def keys(self) -> list[BlockKey]:
        numbers = range(self.first, self.first + self.count)
        return [self._key(number) for number in numbers]

    def bytes_of(self, number: int, chunk_bytes: int) -> npt.NDArray[np.uint8]:
        """The right bytes of the chunk; no word of 8 bytes comes twice in a pool."""
        start = np.uint64(xxhash.xxh3_64_intdigest(self._key(number)))
        return (np.arange(chunk_bytes // 8, dtype=np.uint64) + start).view(np.uint8)

    def _key(self, number: int) -> BlockKey:
        return make_key(hashlib.sha256(f"{self.name} {number}".encode()).digest(), 0)


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """How far a request has come that wants chunks."""

    ended: bool
    num_loaded: int = 0
    """Chunks at the beginning that were there."""
    num_right: int = 0
    """Those of them that had the right bytes."""
    took_s: float = 0.0
    """From its start until the last of them was there; the comparison comes after."""
    cpu_s: float = 0.0
    """CPU seconds of the whole process meanwhile."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment, proved by `Tiering.check`."""

    stats: TierStats
    num_lent: int
    num_quarantined: int
    num_jobs: int
    num_requests: int
    num_fds: int
    num_threads: int
    log: Sequence[str] = ()
    """What a process of its own has logged at INFO or above since the last look."""
    received: Mapping[str, int] = {}
    """Messages of peers by type, in a process of its own."""

    @property
    def peers(self) -> PeerStats:
        assert self.stats.peers is not None
        return self.stats.peers


class PeerEngine:
    """Owned by one thread, which calls `step` again and again while anything is awaited."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        open_agent: Callable[[str, Clock], Agent] | None = None,
        link_class: type[Link] = Link,
    ) -> None:
        """Without `open_agent` bytes move by NIXL. `ConfigError` where the port cannot be bound."""
        self.options = options
        self.clock = ShiftedClock()
        self._link = link = link_class.bind(
            Address(HOST, options.port),
            secret=ClusterSecret(options.secret.encode()) if options.secret else None,
            heartbeat=options.heartbeat,
            dial_timeout_s=options.dial_timeout_s,
            clock=self.clock,
        )
        self.address = link.address
        self.region = HostRegion.private(
            Geometry(num_slots=options.num_slots, worker_bytes=options.chunk_bytes, num_copies=1)
        )
        run_config = RunConfig(fields=dict(options.fields), guards=dict(options.guards))
        self.tier = PeerTier(
            TierContext(
                region=self.region,
                run_config=run_config,
                verify=options.verify,
                clock=self.clock,
            ),
            link,
            lambda purpose: (open_agent or self._open_agent)(purpose, self.clock),
            lambda: options.hash_seed,
            backends=options.backends,
            deadlines=options.deadlines,
            num_threads=options.num_threads,
        )
        self.tiering = Tiering(self.region, Lru(options.num_slots), [self.tier])
        self._wanted: dict[str, _Wanted] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<PeerEngine {self.address}: {self.tiering!r}>"

    @property
    def busy(self) -> bool:
        """Whether something is awaited: then `step` is due about once a millisecond."""
        waiting = any(not wanted.ended for wanted in self._wanted.values())
        return not self._closed and (waiting or self.tiering.plan.num_jobs > 0)

    def source(self, kv_request_id: str) -> dict[str, Any]:
        """What the table of a role says about this engine."""
        return source(self.address, kv_request_id)

    # --- requests ---

    def begin(self, request_id: str, params: Mapping[str, Any] | None = None) -> None:
        """A request that computes comes."""
        self.tiering.request_started(TierRequest(request_id, params))

    def reserve(self, chunks: Chunks, request_id: str = "") -> None:
        """Chunks begin to come from the device: they have slots."""
        reserved = self.tiering.reserve_store(chunks.keys, request_id)
        assert reserved is not None, "the pool has no room"

    def arrive(self, chunks: Chunks, *, success: bool = True) -> None:
        """The device's copies of reserved chunks have ended."""
        numbers = range(chunks.first, chunks.first + chunks.count)
        for number, key in zip(numbers, chunks.keys, strict=True):
            slot = self.tiering.plan.index.slot_of(key)
            self.region.slot_view(slot)[:] = chunks.bytes_of(number, self.options.chunk_bytes).data
            self.region.status[slot, 0] = SlotStatus.STORED
        self.tiering.complete_store(chunks.keys, success=success)

    def want(self, request_id: str, params: Mapping[str, Any], chunks: Chunks) -> None:
        """A request that wants chunks from elsewhere comes; it ends by itself when it knows all."""
        self.begin(request_id, params)
        self._wanted[request_id] = _Wanted(chunks, self.clock.monotonic_s())

    def pulled(self, request_id: str) -> Pulled:
        return self._wanted[request_id].told()

    def finish(self, request_id: str) -> None:
        """A request ends, whatever it has reached; it is forgotten."""
        self._wanted.pop(request_id, None)
        self.tiering.request_finished(request_id)

    def forget(self) -> None:
        """Empty the pool."""
        self.tiering.reset()

    def hold(self, chunks: Chunks, request_id: str = "") -> None:
        """Have these chunks in the pool."""
        self.reserve(chunks, request_id)
        self.arrive(chunks)

    def flip(self, chunks: Chunks) -> None:
        """Flip a bit in the middle of these chunks, after their checksums have been taken."""
        for key in chunks.keys:
            slot = self.tiering.plan.index.slot_of(key)
            self.region.checksum(slot)
            self.region.slot_view(slot)[self.options.chunk_bytes // 2] ^= 1

    def step(self) -> None:
        """One step of the scheduler."""
        self.tiering.poll()
        for request_id, wanted in self._wanted.items():
            if not wanted.ended:
                self._ask(request_id, wanted)
        self.tiering.poll()
        self.tiering.flush()

    def _ask(self, request_id: str, wanted: _Wanted) -> None:
        """Look its chunks up as vLLM does: as far as the prefix goes, and all anew in each step."""
        found: list[BlockKey] = []
        complete = True
        for key in wanted.chunks.keys:
            answer = self.tiering.lookup(key, request_id)
            if answer in (ARRIVING, ASKING):
                complete = False
            elif answer is HIT:
                found.append(key)
            else:
                break
        if not complete:
            return
        wanted.end(self.clock.monotonic_s())
        slots = self.tiering.prepare_load(found, request_id)
        wanted.num_loaded = len(found)
        wanted.num_right = sum(
            bytes(self.region.slot_view(slot))
            == wanted.chunks.bytes_of(
                wanted.chunks.first + number, self.options.chunk_bytes
            ).tobytes()
            for number, slot in enumerate(slots)
        )
        self.tiering.complete_load(found, request_id)
        self.tiering.plan.request_scheduled(request_id)
        self.tiering.request_finished(request_id)

    def advance(self, duration_s: float) -> None:
        """Let time pass for this engine: for all of its deadlines, not for libzmq's heartbeats."""
        self.clock.shift_s += duration_s
        if not self._closed:
            self._link.wake()

    # --- what there is to see ---

    def look(self) -> Seen:
        """`AssertionError` where the books of pool and tiers disagree."""
        self.step()
        self.tiering.check()
        plan = self.tiering.plan
        return Seen(
            stats=self.tier.stats(),
            num_lent=plan.index.num_lent,
            num_quarantined=plan.index.pool.num_quarantined,
            num_jobs=plan.num_jobs,
            num_requests=plan.num_requests,
            num_fds=len(os.listdir("/proc/self/fd")),
            num_threads=len(os.listdir("/proc/self/task")),
        )

    def _open_agent(self, purpose: str, clock: Clock) -> Agent:
        options = self.options
        backends = peer_backends(options.backends, ucx_tls=options.ucx_tls, host=HOST)
        return open_real_agent(f"peers-{purpose}", backends, clock=clock)

    def close(self, timeout_s: float = 10.0) -> None:
        """Close tier and pool; idempotent. `AssertionError` if anything is still lent."""
        if self._closed:
            return
        self._closed = True
        self.tiering.close(timeout_s=timeout_s)
        assert self.tiering.plan.index.num_lent == 0
        self.tiering.check()


def open_fake_agent(purpose: str, clock: Clock) -> Agent:
    """Moves bytes between engines of one process."""
    return FakeAgent(purpose, clock=clock)


def step_until(condition: Callable[[], object], what: str, *engines: PeerEngine) -> None:
    """Step engines of this process until `condition()`; `AssertionError` if it does not come."""
    give_up_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
    while not condition():
        assert SYSTEM_CLOCK.monotonic_s() < give_up_s, f"waited {PATIENCE_S:g} s for {what}"
        for engine in engines:
            engine.step()
        SYSTEM_CLOCK.sleep(_PAUSE_S)


def pull(consumer: PeerEngine, producer: PeerEngine, chunks: Chunks, role: str) -> int:
    """Pull between engines of this process, in a request of its own: how many chunks, all right."""
    request_id = f"pull {next(_numbers)}"
    consumer.want(request_id, {role: producer.source(request_id)}, chunks)
    step_until(lambda: consumer.pulled(request_id).ended, "a pull", consumer, producer)
    pulled = consumer.pulled(request_id)
    consumer.finish(request_id)
    assert pulled.num_right == pulled.num_loaded
    return pulled.num_loaded


def at_rest(*engines: PeerEngine) -> list[Seen]:
    """Step engines of this process until nothing is lent, in quarantine or under way in any."""
    seen: list[Seen] = []

    def rest() -> bool:
        seen[:] = [engine.look() for engine in engines]
        return not any(each.num_lent or each.num_quarantined or each.num_jobs for each in seen)

    step_until(rest, "engines at rest", *engines)
    return seen


def source(address: Address, kv_request_id: str) -> dict[str, Any]:
    """What the table of a role says about a peer at `address`."""
    return {
        "kv_request_id": kv_request_id,
        "remote_host": address.host,
        "remote_port": address.port,
    }


class _Wanted:
    """A request that wants chunks."""

    def __init__(self, chunks: Chunks, started_s: float) -> None:
        self.chunks = chunks
        self.ended = False
        self.num_loaded = 0
        self.num_right = 0
        self._started_s, self._started_cpu_s = started_s, _cpu_seconds()
        self._took_s = self._took_cpu_s = 0.0

    def end(self, now_s: float) -> None:
        self.ended = True
        self._took_s = now_s - self._started_s
        self._took_cpu_s = _cpu_seconds() - self._started_cpu_s

    def told(self) -> Pulled:
        return Pulled(
            ended=self.ended,
            num_loaded=self.num_loaded,
            num_right=self.num_right,
            took_s=self._took_s,
            cpu_s=self._took_cpu_s,
        )


def _cpu_seconds() -> float:
    """User and system seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
