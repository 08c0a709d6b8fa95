"""Two real engines as peers: prefill/decode, a prefix from elsewhere, beside vLLM's own NixlConnector.

Starting engines takes most of the time here, so all tests of a pair share it, in the order in which they
stand: the last one kills the prefiller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from offloading import ask, prompt
from peering import WAIT_S, Pair, pair_beside_nixl, transports, wait_for, write_secret

from pdoffload.testing import netns
from pdoffload.testing.openai_api import ApiError, Completion, Metrics
from pdoffload.testing.serving import ServeOptions, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(600)]

TOKENS, CHUNKS = 1601, 50
LONG_TOKENS = 3201
TRIES = 4
PROMPTS = {
    "pair": prompt(TOKENS, seed=30),
    "early": prompt(TOKENS, seed=31),
    "prefix": prompt(801, seed=32) + prompt(800, seed=33),
    "turns": prompt(801, seed=34) + prompt(800, seed=35),
    "thawed": prompt(TOKENS, seed=36),
    "aborted": prompt(LONG_TOKENS, seed=37),
    "killed": prompt(TOKENS, seed=38),
    "stranger": prompt(TOKENS, seed=39),
    **{f"frozen {number}": prompt(LONG_TOKENS, seed=40 + number) for number in range(TRIES)},
}
# Small steps, so that a long prompt is on its way for a while.
STEPS = ("--max-num-batched-tokens", "256")
ONE_HOST, TWO_HOSTS = "one host", "two hosts"
one_host_only = pytest.mark.parametrize("pair", [ONE_HOST], indirect=True)


@pytest.fixture(scope="module")
def right(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """The tokens that a single vLLM, without any connector, gives for each prompt."""
    options = ServeOptions(model_dir=tiny_llama, dtype="float32", extra_args=STEPS)
    with VllmServer(options, tmp_path_factory.mktemp("single")) as single:
        answers = {name: ask(single, tokens)[0].token_ids for name, tokens in PROMPTS.items()}
    assert len(set(answers.values())) == len(PROMPTS), "the model answers everything alike"
    return answers


@pytest.fixture(scope="module", params=[ONE_HOST, TWO_HOSTS])
def pair(request, tiny_llama, tmp_path_factory, right) -> Iterator[Pair]:
    """Two hosts are two namespaces, with a cable between them."""
    with contextlib.ExitStack() as stack:
        ends, env = (None, None), {}
        if request.param == TWO_HOSTS:
            if reason := netns.why_unavailable():
                pytest.skip(f"no network namespaces here: {reason}")
            ends = stack.enter_context(netns.joined_pair())
            # Else UCX sees one machine, and copies past the cable.
            env = {"UCX_TLS": "tcp"}
        folder = tmp_path_factory.mktemp("pair")
        pair = pair_beside_nixl(tiny_llama, folder, ends, env=env, extra_args=STEPS)
        yield stack.enter_context(pair)


@pytest.fixture(autouse=True)
def _nothing_cached(pair: Pair) -> None:
    pair.prefiller.forget()
    pair.decoder.forget()


def verified(counted: Metrics) -> float:
    assert counted.total("vllm:pdoffload_tier_corrupt_chunks_total") == 0
    return counted.total("vllm:pdoffload_tier_verified_chunks_total", tier="p2p")


def pull(pair: Pair, name: str) -> tuple[Completion, Metrics]:
    """The second leg, at the decoder; the id is the prompt's name."""
    params = {"remote_prefiller": pair.prefiller.source(name)}
    return ask(pair.decoder.server, PROMPTS[name], kv_transfer_params=params)


def given_up(counted: Metrics) -> float:
    """Pulls that ended because the peer said nothing: at their deadline, or as its line was lost."""
    return counted.total("vllm:pdoffload_peer_load_deadlines_total") + counted.total(
        "vllm:pdoffload_peer_peers_lost_total"
    )


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


def test_beside_nixl_connector_a_prefix_comes_from_a_peer_and_the_rest_the_main_way(pair, right):
    """A conversation's second turn: the decoder still has the first one in host memory. The prefiller
    takes it from there, computes what is new, and the decoder reads all of it through NixlConnector."""
    prefiller, decoder = pair.prefiller, pair.decoder
    decoder.server.complete(PROMPTS["turns"][:801], max_tokens=1)
    before = prefiller.server.metrics()
    first = prefiller.server.complete(
        PROMPTS["turns"],
        max_tokens=1,
        stream=False,
        kv_transfer_params={
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_kv_source": decoder.source("turns"),
        },
    )
    counted = prefiller.server.metrics().since(before)
    assert counted.cached_tokens_by_source() == {"p2p": 800}
    assert counted.computed_tokens() == TOKENS - 800
    assert verified(counted) == CHUNKS // 2

    decoder.forget()
    answer, counted = ask(
        decoder.server, PROMPTS["turns"], kv_transfer_params=first.kv_transfer_params
    )
    assert answer.token_ids == right["turns"]
    assert counted.cached_tokens_by_source() == {"p2p": TOKENS}
    assert counted.total("vllm:nixl_bytes_transferred_sum") > 0
    assert counted.total("vllm:pdoffload_tier_loaded_chunks_total") == 0


def test_bytes_took_the_way_they_were_sent(pair):
    """What UCX has logged by now; on two hosts also what the cable has counted."""
    for peer in (pair.prefiller, pair.decoder):
        used = transports(peer.server)
        assert all(used.values()), used
        if (cable := peer.server.options.namespace) is not None:
            assert set.union(*used.values()) == {"tcp"}
            assert cable.received_bytes() > 0


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
