"""A prefix outlives a killed server in an object store."""

from __future__ import annotations

import pytest
from offloading import ask, offloading, prompt

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.s3, pytest.mark.timeout(600)]


def wait_for_chunks(server: S3Server, prefix: str, count: int) -> list[str]:
    deadline_s = SYSTEM_CLOCK.monotonic_s() + 60
    while True:
        names = [name for name in server.names("chunks") if name.startswith(prefix)]
        chunks = [name for name in names if name.endswith(".bin")]
        if len(chunks) >= count:
            return chunks
        assert SYSTEM_CLOCK.monotonic_s() < deadline_s, f"{len(chunks)} of {count} after a minute"
        SYSTEM_CLOCK.sleep(0.1)


def test_a_prefix_outlives_a_killed_server_in_a_store(serve, tiny_llama, s3_server):
    tokens = prompt(801, seed=21)
    # Not in the configuration: vLLM prints that.
    env = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    store = {"bucket": "chunks", "endpoint_override": s3_server.host}
    tier = {"type": "obj", "store_config": store, "prefix": "engine"}
    server = serve(tiny_llama, offloading(tier=tier), max_model_len=2048, env=env)
    right = ask(server, tokens)[0].token_ids
    chunks = wait_for_chunks(s3_server, "engine/", 25)
    server.kill()
    first_log = server.log_text()

    server.start()
    back, counted = ask(server, tokens)
    assert back.token_ids == right
    assert counted.cached_tokens_by_source() == {"disk": 800}
    assert counted.total("vllm:pdoffload_tier_verified_chunks_total", tier="obj") == len(chunks)
    assert counted.total("vllm:pdoffload_tier_failed_lookups_total", tier="obj") == 0
    for text in (first_log, server.log_text()):
        assert "store_config.bucket" in text
        assert ACCESS_KEY not in text
        assert SECRET_KEY not in text
