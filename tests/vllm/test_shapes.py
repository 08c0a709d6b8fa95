"""Chunks of several blocks, several KV-cache groups, two ranks: the tokens stay the same."""

from __future__ import annotations

import pytest
from offloading import MiB, ask, offloading, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(600)]

SHAPES = {
    "hybrid": {"model": "tiny_hybrid", "options": {}, "extra": {"blocks_per_chunk": 2}},
    "hybrid-single-blocks": {"model": "tiny_hybrid", "options": {}, "extra": {}},
    "two-ranks": {
        "model": "tiny_llama",
        "options": {"tensor_parallel": 2},
        "extra": {"block_size": 96, "n_transfer_threads": 2},
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_the_same_with_and_without_offloading(shape, serve, request, tmp_path):
    case = SHAPES[shape]
    model = request.getfixturevalue(case["model"])
    whole, longer = prompt(801, seed=1), prompt(801, seed=1)[:700] + prompt(300, seed=2)

    plain = serve(model, name="without", max_model_len=2048, **case["options"])
    expected = [ask(plain, tokens)[0].token_ids for tokens in (whole, longer)]
    plain.stop()
    assert expected[0] != expected[1], "the model answers everything alike: the test shows nothing"

    config = offloading(tmp_path / "kv", cpu_bytes_to_use=64 * MiB, **case["extra"])
    server = serve(model, config, name="with", max_model_len=2048, **case["options"])
    first = [ask(server, tokens)[0].token_ids for tokens in (whole, longer)]
    assert first == expected
    server.reset_prefix_cache()
    for tokens, right in ((whole, expected[0]), (longer, expected[1])):
        answer, counted = ask(server, tokens)
        assert answer.token_ids == right
        assert counted.cached_tokens_by_source().get("host", 0) >= 600
        server.reset_prefix_cache()
    server.stop()

    server.start()
    answer, counted = ask(server, whole)
    assert answer.token_ids == expected[0]
    assert counted.cached_tokens_by_source().get("disk", 0) >= 600
    assert counted.total("vllm:pdoffload_tier_verified_chunks_total", tier="fs") > 0
