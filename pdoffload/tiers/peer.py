"""The p2p tier: what other engines hold in their host pools, and what they are given from ours.

The engine's side of `pdoffload.p2p.service`: it knows requests and their roles, asks and pulls by posting
commands, and never waits. Nothing is stored in this tier; what peers fetch is lent by the pool itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import msgspec

from pdoffload.agent.backends import Backend
from pdoffload.agent.opening import open_agent, peer_backends
from pdoffload.config import P2pTierConfig
from pdoffload.config.peers import exposed, memory_exposed
from pdoffload.errors import (
    BackendUnusable,
    ConfigError,
    CorruptChunk,
    MisuseError,
    TransferError,
)
from pdoffload.layout import BlockKey
from pdoffload.memory.lending import Lender
from pdoffload.p2p.address import Address, is_loopback
from pdoffload.p2p.link import Link
from pdoffload.p2p.news import Answered, Ask, Keep, KeepEnds, Leave, News, Offer, Pull, PullEnded
from pdoffload.p2p.receiving import OpenAgent
from pdoffload.p2p.roles import Roles, Source, roles_of
from pdoffload.p2p.secret import read_cluster_secret
from pdoffload.p2p.service import PeerService
from pdoffload.p2p.terms import Deadlines, PeerTerms
from pdoffload.tiers.base import (
    Job,
    JobResult,
    Lookup,
    PeerStats,
    Settled,
    Tier,
    TierContext,
    TierRequest,
    TierStats,
)

logger = logging.getLogger(__name__)

_MISS, _HIT, _PENDING = Lookup.MISS, Lookup.HIT, Lookup.PENDING


def open_peer_tier(
    table: P2pTierConfig,
    address: Address,
    context: TierContext,
    hash_seed: Callable[[], str],
) -> PeerTier:
    """The tier of `table`, bound to `address`: `pdoffload.config.peers.resolve_p2p_address` says which.

    `hash_seed` is asked at the first handshake. Raises `ConfigError` with every problem: the secret's
    file, a host that is no loopback and unguarded, a port that is taken, a backend that cannot be used.
    """
    secret = None
    if table.cluster_secret_file is not None:
        secret = read_cluster_secret(table.cluster_secret_file)
    elif not table.allow_unauthenticated and not is_loopback("host", address.host):
        raise ConfigError([f"host: {exposed(address.host)}"])
    host = address.host
    if "MOONCAKE" in table.backends:
        if is_loopback("host", host):
            host = "localhost"  # a name that only means it would not close the engine's ports
        elif not table.allow_unauthenticated:
            raise ConfigError([f"backends: {memory_exposed(host)}"])
    backends = peer_backends(table.backends, ucx_tls=table.ucx_tls or "", host=host)
    _require_usable(table, backends)
    return PeerTier(
        context,
        Link.bind(address, secret=secret, clock=context.clock),
        lambda purpose: open_agent(f"peers-{purpose}", backends),
        hash_seed,
        backends=table.backends,
        deadlines=Deadlines(
            lookup_timeout_s=table.lookup_timeout_s,
            load_timeout_s=table.load_timeout_s,
            store_timeout_s=table.store_timeout_s,
            abort_timeout_s=table.abort_timeout_s,
            unbound_store_timeout_s=table.unbound_store_timeout_s,
        ),
        num_threads=table.num_threads,
        max_peers=table.max_peers,
    )


def _require_usable(table: P2pTierConfig, backends: Sequence[Backend]) -> None:
    """`ConfigError` if no agent can be made with them."""
    for_all = os.environ.get("UCX_TLS")
    if for_all and table.ucx_tls:
        logger.warning(
            "p2p tier: ucx_tls %s is not in force: UCX_TLS=%s of the environment wins over it",
            table.ucx_tls,
            for_all,
        )
    try:
        open_agent("probe", backends).close()
    except BackendUnusable as error:
        has_ucx = "UCX" in table.backends
        says = "" if not table.ucx_tls else f', with ucx_tls "{table.ucx_tls}"'
        says += "" if not for_all or not has_ucx else f", with UCX_TLS={for_all} in the environment"
        problem = (
            f"backends: got {list(table.backends)}{says}, with which no agent can be made: {error}"
        )
        raise ConfigError([problem]) from error


class _Asked:
    """What is known of one id at one source: shared by all requests that carry it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.requests: set[str] = set()
        self.answers: dict[BlockKey, Lookup] = {}
        self.unsent: list[BlockKey] = []
        self.failed: set[BlockKey] = set()
        """Chunks whose pull failed: they are computed, or the same pull would be tried for ever."""


class _Job(msgspec.Struct, frozen=True):
    job: Job
    asked: _Asked
    started_s: float


class PeerTier(Tier):
    """Owner thread as for every tier; `open_peer_tier` makes one. Takes ownership of `link`, which is bound.

    A request's roles are read when it starts. Wrong ones are logged, counted, and the request runs without
    peers: it computes what it could have pulled.
    """

    name = "p2p"
    medium = None
    takes_stores = False
    from_peers = True

    def __init__(
        self,
        context: TierContext,
        link: Link,
        open_agent: OpenAgent,
        hash_seed: Callable[[], str],
        *,
        backends: tuple[str, ...] = (),
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        num_threads: int = 4,
        max_peers: int = 128,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._link = link
        self._open_agent = open_agent
        self._num_threads = num_threads
        self._max_peers = max_peers
        self._chunk_bytes = context.region.geometry.chunk_bytes
        self._terms = PeerTerms(
            geometry=context.region.geometry,
            base_address=context.region.address,
            run_config=context.run_config,
            hash_seed=hash_seed,
            deadlines=deadlines,
            verify=context.verify,
            backends=backends,
        )
        self._service: PeerService | None = None
        self._roles: dict[str, Roles] = {}
        self._asked: dict[Source, _Asked] = {}
        self._jobs: dict[int, _Job] = {}
        self._unsettled: dict[int, Job] = {}
        self._told: list[JobResult | Settled] = []
        self._counts = TierStats()
        self._refused_requests = 0
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<PeerTier {self._link.address} {state}, {len(self._roles)} requests, "
            f"{len(self._jobs)} pulls>"
        )

    @property
    def address(self) -> Address:
        """Where peers reach this process; with the real port."""
        return self._link.address

    def borrow_from(self, lender: Lender) -> None:
        self._service = PeerService(
            self._link,
            self._terms,
            lender,
            self._context.region,
            self._open_agent,
            num_threads=self._num_threads,
            max_peers=self._max_peers,
            clock=self._clock,
        )

    # --- requests ---

    def request_started(self, request: TierRequest) -> bool:
        roles = roles_of(request.params)
        if not isinstance(roles, Roles):
            self._refused_requests += 1
            logger.warning(
                "request %s runs without peers: %s", request.request_id, "; ".join(roles)
            )
            return False
        if roles.producer_id is None and roles.source is None:
            return False
        self._roles[request.request_id] = roles
        if roles.source is not None:
            asked = self._asked.setdefault(roles.source, _Asked(roles.source))
            asked.requests.add(request.request_id)
        if roles.producer_id is not None:
            self._open().post(Keep(roles.producer_id))
        return roles.producer_id is not None

    def offered(self, keys: Sequence[BlockKey], request_id: str) -> None:
        roles = self._roles.get(request_id)
        if roles is not None and roles.producer_id is not None and keys:
            self._open().post(Offer(roles.producer_id, tuple(keys)))

    def request_finished(self, request_id: str) -> None:
        roles = self._roles.pop(request_id, None)
        if roles is None or self._closed:
            return
        if roles.producer_id is not None:
            self._open().post(KeepEnds(roles.producer_id))
        if roles.source is not None:
            asked = self._asked[roles.source]
            asked.requests.discard(request_id)
            if not asked.requests:
                del self._asked[roles.source]
                self._open().post(Leave(roles.source.address, roles.source.kv_request_id))

    # --- chunks ---

    def lookup(self, keys: Sequence[BlockKey], request_id: str = "") -> list[Lookup]:
        self._require_open()
        roles = self._roles.get(request_id)
        if roles is None or roles.source is None:
            return [_MISS] * len(keys)
        asked = self._asked[roles.source]
        if roles.source.asks:
            return [self._look_up(asked, key) for key in keys]
        return [_MISS if key in asked.failed else _HIT for key in keys]

    def _look_up(self, asked: _Asked, key: BlockKey) -> Lookup:
        answer = asked.answers.get(key)
        if answer is None:
            asked.answers[key] = answer = _PENDING
            asked.unsent.append(key)
        return answer

    def load(self, job: Job) -> None:
        self._require_open()
        if job.job_id in self._jobs or job.job_id in self._unsettled:
            raise MisuseError(f"job {job.job_id} is live already")
        roles = self._roles.get(job.request_id)
        if roles is None or roles.source is None or not job.keys:
            # The request has ended since its lookup, and with it what is known of its peer.
            error = TransferError(f"request {job.request_id!r} has no peer to load from")
            failed = tuple((key, error) for key in job.keys)
            self._told.append(JobResult(job_id=job.job_id, succeeded=(), failed=failed))
            return
        source = roles.source
        self._jobs[job.job_id] = _Job(job, self._asked[source], self._clock.monotonic_s())
        for slot in job.slots:
            self._context.region.forget_checksum(slot)
        self._open().post(
            Pull(job.job_id, source.address, source.kv_request_id, job.keys, job.slots)
        )

    def poll(self) -> list[JobResult | Settled]:
        if self._closed:
            return []
        service = self._open()
        for asked in self._asked.values():
            if asked.unsent:
                keys, asked.unsent = tuple(asked.unsent), []
                service.post(Ask(asked.source.address, asked.source.kv_request_id, keys))
        return self._take_in(service.take_news())

    def _take_in(self, news: Sequence[News]) -> list[JobResult | Settled]:
        told, self._told = self._told, []
        for each in news:
            if isinstance(each, Answered):
                self._note_answers(each)
            elif isinstance(each, PullEnded):
                told.append(self._ended(each))
            else:
                del self._unsettled[each.job_id]
                told.append(Settled(each.job_id))
        return told

    def _note_answers(self, news: Answered) -> None:
        asked = self._asked.get(Source(news.kv_request_id, news.peer, True))
        if asked is None:
            return
        for key in news.keys:
            if asked.answers.get(key) is _PENDING:
                asked.answers[key] = _HIT if key in news.hits else _MISS

    def _ended(self, news: PullEnded) -> JobResult:
        live = self._jobs.pop(news.job_id)
        bad = {key for key, _ in news.failed}
        corrupt = sum(isinstance(error, CorruptChunk) for _, error in news.failed)
        if bad:
            live.asked.failed |= bad
            live.asked.answers.update(dict.fromkeys(bad, _MISS))
            first = news.failed[0][1]
            logger.log(
                logging.WARNING if news.tried else logging.DEBUG,
                "pull of %d chunks from %s: %d failed: %s",
                len(live.job.keys),
                live.asked.source.address,
                len(bad),
                first,
            )
        # What was fetched is here; the peer does not hold it for us any more.
        for key in live.job.keys:
            if key not in bad:
                live.asked.answers.pop(key, None)
        if not news.settled:
            self._unsettled[news.job_id] = live.job
        loaded = len(live.job.keys) - len(bad)
        self._counts = self._counts.plus(
            loaded_chunks=loaded,
            verified_chunks=news.verified,
            bytes_read=news.moved_bytes,
            failed_loads=bool(bad),
            corrupt_chunks=corrupt,
            vanished_chunks=len(bad) - corrupt,
        )
        return JobResult(
            job_id=news.job_id,
            succeeded=tuple(key for key in live.job.keys if key not in bad),
            failed=news.failed,
            settled=news.settled,
            moved_bytes=news.moved_bytes,
            verified=news.verified,
            elapsed_s=self._clock.monotonic_s() - live.started_s,
        )

    # --- the rest ---

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Nothing to do: what peers hold they evict by their own rules."""
        self._require_open()

    def stats(self) -> TierStats:
        service = self._service
        peers = msgspec.structs.replace(
            service.stats if service is not None else PeerStats(),
            refused_requests=self._refused_requests,
        )
        return msgspec.structs.replace(
            self._counts,
            bytes_written=peers.served_bytes,
            deadlines_exceeded=peers.load_deadlines + peers.lookup_deadlines,
            quarantined_slots=sum(len(job.slots) for job in self._unsettled.values()),
            queued_jobs=len(self._jobs),
            peers=peers,
        )

    def close(self, *, timeout_s: float) -> list[JobResult | Settled]:
        if self._closed:
            return []
        self._closed = True
        if self._service is None:
            self._link.close()
            return []
        told = self._take_in(self._service.close(timeout_s))
        self._roles.clear()
        self._asked.clear()
        error = TransferError("the tier was closed")
        for job_id, live in list(self._jobs.items()):  # only if a thread was left behind
            failed = tuple((key, error) for key in live.job.keys)
            told.append(self._ended(PullEnded(job_id=job_id, failed=failed, settled=False)))
        return told

    def _open(self) -> PeerService:
        self._require_open()
        if self._service is None:
            raise MisuseError("borrow_from comes before every other verb")
        return self._service

    def _require_open(self) -> None:
        if self._closed:
            raise MisuseError("the tier is closed")
