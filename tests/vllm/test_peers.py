"""Two real engines as peers: prefill/decode, a prefix from elsewhere, peers that fail.

Starting engines takes most of the time here, so all tests of a pair share it, in the order in which they
stand: the last one kills the prefiller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from offloading import ask
from peering import (
    CHUNK_BYTES,
    CHUNKS,
    ONE_HOST,
    PROMPTS,
    STEPS,
    TOKENS,
    TRIES,
    TWO_HOSTS,
    WAIT_S,
    Pair,
    given_up,
    pair_of_engines,
    transports,
    verified,
    wait_for,
    write_secret,
)

from pdoffload.testing.openai_api import ApiError, Completion, Metrics

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(600)]

one_host_only = pytest.mark.parametrize("pair", [ONE_HOST], indirect=True)


@pytest.fixture(scope="module", params=[ONE_HOST, TWO_HOSTS])
def pair(request, tiny_llama, tmp_path_factory, right) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    two_hosts = request.param == TWO_HOSTS
    with pair_of_engines(tiny_llama, folder, two_hosts=two_hosts, extra_args=STEPS) as pair:
        yield pair


@pytest.fixture(autouse=True)
def _nothing_cached(pair: Pair) -> None:
    pair.prefiller.forget()
    pair.decoder.forget()


def pull(pair: Pair, name: str) -> tuple[Completion, Metrics]:
    """The second leg, at the decoder; the id is the prompt's name."""
    params = {"remote_prefiller": pair.prefiller.source(name)}
    return ask(pair.decoder.server, PROMPTS[name], kv_transfer_params=params)


def recomputed(answer: Completion, counted: Metrics, right: tuple[int, ...]) -> bool:
    return answer.token_ids == right and counted.cached_tokens_by_source() == {}


def test_a_decoder_takes_a_prefillers_blocks_and_computes_one_token(pair, right, record_property):
    before = pair.prefiller.counted()
    pair.prefill(PROMPTS["pair"], "pair")
    answer, counted = pull(pair, "pair")
    record_property("ttft_s", answer.ttft_s)
    assert answer.token_ids == right["pair"]
    assert counted.cached_tokens_by_source() == {"p2p": 1600}
    assert counted.computed_tokens() == 1
    assert verified(counted) == CHUNKS
    after = pair.prefiller.counted()
    assert after.since(before).total("vllm:pdoffload_peer_served_chunks_total") == CHUNKS
    assert after.total("vllm:pdoffload_host_pinned_slots") == 0, "kept beyond the fetch"


def test_the_decoder_may_be_asked_before_the_prefiller(pair, right):
    before = pair.decoder.server.metrics()
    params = {"remote_prefiller": pair.prefiller.source("early")}
    answer = pair.later(pair.decoder, PROMPTS["early"], kv_transfer_params=params)
    wait_for("the decoder waits for its blocks", pair.decoder.waits)
    pair.prefill(PROMPTS["early"], "early")
    assert answer.result(WAIT_S).token_ids == right["early"]
    counted = pair.decoder.server.metrics().since(before)
    assert counted.cached_tokens_by_source() == {"p2p": 1600}


def test_a_prefix_comes_from_the_peer_that_has_it(pair, right, record_property):
    """The peer computed the first half for a request of its own."""
    pair.prefiller.server.complete(PROMPTS["prefix"][:801], max_tokens=1)
    answer, counted = ask(
        pair.decoder.server,
        PROMPTS["prefix"],
        kv_transfer_params={"remote_kv_source": pair.prefiller.source("prefix")},
    )
    record_property("ttft_s", answer.ttft_s)
    assert answer.token_ids == right["prefix"]
    assert counted.cached_tokens_by_source() == {"p2p": 800}
    assert counted.computed_tokens() == TOKENS - 800
    assert verified(counted) == CHUNKS // 2


def test_bytes_took_the_way_they_were_sent(pair):
    """As UCX has logged it, and on two hosts as the cable has counted it."""
    used = transports(pair.prefiller.server)["ours"]
    if (cable := pair.decoder.server.options.namespace) is not None:
        assert used == {"tcp"}
        assert cable.received_bytes() > CHUNKS * CHUNK_BYTES
    else:
        assert "cma" in used


@one_host_only
def test_a_prefiller_frozen_midway_costs_a_recompute_and_serves_again_once_thawed(pair, right):
    for number in range(TRIES):
        counted = freeze_midway(pair, f"frozen {number}", right[f"frozen {number}"])
        if not counted.cached_tokens_by_source():
            break
        pair.decoder.forget()  # it had all its blocks before the signal came: again
    else:
        pytest.fail(f"the prefiller was never stopped in time in {TRIES} tries")
    assert given_up(counted) > 0
    pair.prefill(PROMPTS["thawed"], "thawed")
    wait_for("the decoder pulls again", lambda: pulls_again(pair, right["thawed"]))


def freeze_midway(pair: Pair, name: str, right: tuple[int, ...]) -> Metrics:
    """Stop the prefiller when it has served some blocks of a prompt, until the decoder has answered."""
    prefiller, decoder = pair.prefiller, pair.decoder
    served = prefiller.counted().total("vllm:pdoffload_peer_served_chunks_total")
    before = decoder.counted()
    params = {"remote_prefiller": prefiller.source(name)}
    answer = pair.later(decoder, PROMPTS[name], kv_transfer_params=params)
    wait_for("the decoder waits for its blocks", decoder.waits)
    params = {"remote_decoder": {"kv_request_id": name}}
    leg = pair.later(prefiller, PROMPTS[name], max_tokens=1, kv_transfer_params=params)
    wait_for("blocks are on their way", lambda: prefiller.served_chunks() > served)
    prefiller.server.freeze()
    try:
        assert answer.result(WAIT_S).token_ids == right
    finally:
        prefiller.server.thaw()
    assert leg.result(WAIT_S).token_ids[0] == right[0]
    return decoder.counted().since(before)


def pulls_again(pair: Pair, right: tuple[int, ...]) -> bool:
    """A peer that did not answer is left alone for a while."""
    pair.decoder.forget()
    params = {"remote_kv_source": pair.prefiller.source("thawed")}
    answer, counted = ask(pair.decoder.server, PROMPTS["thawed"], kv_transfer_params=params)
    assert answer.token_ids == right
    return counted.cached_tokens_by_source() == {"p2p": 1600}


@one_host_only
def test_a_producer_request_that_is_aborted_fails_the_fetch_at_once(pair, right):
    """Its client goes away while the engine sleeps, so the engine hears of both at its next step."""
    prefiller, decoder = pair.prefiller, pair.decoder
    before = decoder.counted()
    params = {"remote_prefiller": prefiller.source("aborted")}
    answer = pair.later(decoder, PROMPTS["aborted"], kv_transfer_params=params)
    wait_for("the decoder waits for its blocks", decoder.waits)
    with (
        prefiller.engine_stopped(),
        pytest.raises(ApiError, match="timed out"),
        contextlib.closing(prefiller.server.connect()) as client,
    ):
        client.complete(
            PROMPTS["aborted"],
            max_tokens=1,
            timeout_s=2,
            kv_transfer_params={"remote_decoder": {"kv_request_id": "aborted"}},
        )
    assert answer.result(WAIT_S).token_ids == right["aborted"]
    counted = decoder.counted().since(before)
    assert counted.cached_tokens_by_source() == {}
    assert given_up(counted) == 0


@one_host_only
def test_a_killed_prefiller_and_one_without_the_secret_cost_a_recompute(pair, right):
    """The second one comes up under the first one's address."""
    prefiller, decoder = pair.prefiller, pair.decoder
    pair.prefill(PROMPTS["killed"], "killed")
    prefiller.server.kill()
    answer, counted = pull(pair, "killed")
    assert recomputed(answer, counted, right["killed"])

    write_secret(prefiller.secret_file, "another secret, of another cluster")
    prefiller.server.start()
    pair.prefill(PROMPTS["stranger"], "stranger")
    answer, counted = pull(pair, "stranger")
    assert recomputed(answer, counted, right["stranger"])
    counted = prefiller.counted()
    assert counted.total("vllm:pdoffload_peer_logins_refused_total") > 0
    assert counted.total("vllm:pdoffload_peer_served_chunks_total") == 0
    assert decoder.server.api.is_healthy()
