"""Two real engines with two connectors each: NixlConnector for prefill/decode, ours for a peer's prefix.

The main connector moves its bytes by UCX. Ours moves them by UCX too, or by MOONCAKE: the Transfer Engine's
own package, in one process with NIXL.

NixlConnector's NIXL has a thread that spins. On two CPUs for two servers all else then stands still for
seconds at times, and a peer that does counts as gone. What is asked of every try: the right tokens. What is
asked of one: that the bytes took the way they were meant to.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from offloading import ask
from peering import (
    CHUNKS,
    ONE_HOST,
    PROMPTS,
    STEPS,
    TOKENS,
    TRIES,
    TWO_HOSTS,
    Pair,
    given_up,
    pair_of_engines,
    transports,
    verified,
)

from pdoffload.testing import verbs
from pdoffload.testing.openai_api import Metrics

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(600)]


MOONCAKE = "one host, MOONCAKE"


@pytest.fixture(
    scope="module",
    params=[ONE_HOST, TWO_HOSTS, pytest.param(MOONCAKE, marks=pytest.mark.mooncake)],
)
def way(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(way, tiny_llama, tmp_path_factory, right) -> Iterator[Pair]:
    """Our agents are told to use TCP, the main connector's are not."""
    folder = tmp_path_factory.mktemp("pair")
    by_mooncake = way == MOONCAKE
    with pair_of_engines(
        tiny_llama,
        folder,
        two_hosts=way == TWO_HOSTS,
        with_nixl=True,
        tier={"backends": ["MOONCAKE"]} if by_mooncake else {"ucx_tls": "tcp"},
        variables=verbs.environment() if by_mooncake else None,
        extra_args=STEPS,
    ) as pair:
        yield pair


def test_a_prefix_comes_from_a_peer_and_the_rest_the_main_way(pair, right):
    for number in range(TRIES):
        first, second = turns(pair, f"turns {number}", right[f"turns {number}"])
        if not given_up(first):
            break
    assert first.cached_tokens_by_source() == {"p2p": 800}
    assert first.computed_tokens() == TOKENS - 800
    assert verified(first) == CHUNKS // 2
    assert second.cached_tokens_by_source() == {"p2p": TOKENS}
    assert second.total("vllm:nixl_bytes_transferred_sum") > 0
    assert second.total("vllm:pdoffload_tier_loaded_chunks_total") == 0


def turns(pair: Pair, name: str, right: tuple[int, ...]) -> tuple[Metrics, Metrics]:
    """A conversation's second turn: the decoder still has the first one in host memory. The prefiller takes
    it from there, computes what is new, and the decoder reads all of it through NixlConnector.

    What the prefiller counted, and the decoder.
    """
    prefiller, decoder = pair.prefiller, pair.decoder
    prefiller.forget()
    decoder.forget()
    decoder.server.complete(PROMPTS[name][:801], max_tokens=1)
    before = prefiller.server.metrics()
    first = prefiller.server.complete(
        PROMPTS[name],
        max_tokens=1,
        stream=False,
        kv_transfer_params={
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_kv_source": decoder.source(name),
        },
    )
    counted = prefiller.server.metrics().since(before)
    decoder.forget()
    answer, then = ask(decoder.server, PROMPTS[name], kv_transfer_params=first.kv_transfer_params)
    assert answer.token_ids == right
    return counted, then


def test_the_two_connectors_took_different_ways(pair, way):
    """As UCX has logged it. Two hosts have one way between them, and the cable has counted what took it."""
    if way == MOONCAKE:
        by_mooncake = pair.decoder.counted().total(
            "vllm:pdoffload_peer_transport", transport="MOONCAKE/tcp"
        )
        assert by_mooncake == 1
    for peer in (pair.prefiller, pair.decoder):
        used = transports(peer.server)
        assert used["ours"] == (set() if way == MOONCAKE else {"tcp"})
        if (cable := peer.server.options.namespace) is not None:
            assert used["main"] == {"tcp"}
            assert cable.received_bytes() > 0
        else:
            assert "cma" in used["main"]
