"""The start of the obj tier: settings tried out on the store, until only threads are missing."""

from __future__ import annotations

import logging

from pdoffload.agent.agent import Agent
from pdoffload.agent.backends import AzureBlobBackend, ObjBackend
from pdoffload.agent.nixl import NixlAgent
from pdoffload.config import ObjTierConfig
from pdoffload.config.stores import endpoint_of
from pdoffload.tiers.base import TierContext
from pdoffload.tiers.chunkfile import ChunkFormat
from pdoffload.tiers.obj.claims import Claims
from pdoffload.tiers.obj.diagnosis import Diagnosis, Why
from pdoffload.tiers.obj.keys import ObjectKeys
from pdoffload.tiers.obj.lane import MakeAgent, Terms
from pdoffload.tiers.obj.probe import StoreProbe
from pdoffload.tiers.obj.requests import StoreRequests

_log = logging.getLogger(__name__)

ASKING_THREADS = 8
"""A question is small, and the store may be far away."""
_MOST_CHUNKS = 4
_MOST_BYTES = 8 << 20
"""Of one batch, and so of each thread's staging memory, unless a single chunk is larger."""


def prepare(
    config: ObjTierConfig,
    context: TierContext,
    *,
    rank: int,
    make_agent: MakeAgent | None,
    why: Why | None,
) -> Terms:
    """Try the store, and write or compare its `config.json`. Raises `ConfigError`, named by key."""
    keys = ObjectKeys(config.prefix, context.run_config, rank)
    requests: StoreRequests | None = None
    if make_agent is None:
        requests = StoreRequests(config, context.clock)
        why = Diagnosis(requests, keys.probe, context.clock)
        make_agent = _agent_maker(config, context, num_threads=1)
        make_asking_agent = _agent_maker(config, context, num_threads=ASKING_THREADS)
    else:
        make_asking_agent = make_agent
    StoreProbe(config, keys, context.run_config, make_agent, requests, context.clock).run()
    form = ChunkFormat(context.region.geometry.chunk_bytes, context.run_config.fingerprint)
    return Terms(
        region=context.region,
        keys=keys,
        make_agent=make_agent,
        make_asking_agent=make_asking_agent,
        why=why or Why(),
        verify=context.verify,
        format=form,
        most_chunks=max(1, min(_MOST_CHUNKS, _MOST_BYTES // form.file_bytes)),
        timeout_s=context.transfer_timeout_s,
        clock=context.clock,
        claims=Claims(),
    )


def backend_of(config: ObjTierConfig, *, num_threads: int) -> ObjBackend | AzureBlobBackend:
    """The plugin's parameters for `config`. `num_threads`: requests at a time of one agent."""
    store = config.store_config
    if config.backend == "AZURE_BLOB":
        return AzureBlobBackend(
            container=store.bucket,
            account_url=store.endpoint_override,
            connection_string=store.connection_string,
            ca_bundle=store.ca_bundle,
            num_threads=num_threads,
        )
    endpoint = endpoint_of(config)
    return ObjBackend(
        bucket=store.bucket,
        endpoint=endpoint.url if store.endpoint_override else "",
        scheme="https" if endpoint.scheme == "https" else "http",
        region=store.region,
        access_key=store.access_key,
        secret_key=store.secret_key,
        session_token=store.session_token,
        ca_bundle=store.ca_bundle,
        num_threads=num_threads,
    )


def _agent_maker(config: ObjTierConfig, context: TierContext, *, num_threads: int) -> MakeAgent:
    backend = backend_of(config, num_threads=num_threads)

    def make(name: str) -> Agent:
        return NixlAgent(name, [backend], clock=context.clock)

    return make
