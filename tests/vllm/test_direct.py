"""Device memory straight to files: the same tokens from files as computed, whatever becomes of the files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from offloading import ask, direct, offloading, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(900)]


def wait_for_chunks(root: Path, count: int) -> list[Path]:
    deadline = time.monotonic() + 60
    while len(files := sorted(root.rglob("*.bin"))) < count:
        assert time.monotonic() < deadline, f"{len(files)} of {count} chunk files after a minute"
        time.sleep(0.05)
    return files


def flip_a_byte(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def test_a_prefix_comes_back_from_files_after_eviction_and_a_killed_server(
    serve, tiny_llama, tmp_path
):
    root = tmp_path / "kv"
    tokens, others, cut_off = (prompt(n, seed=s) for n, s in ((1601, 31), (801, 32), (801, 34)))
    server = serve(tiny_llama, direct(root), name="direct", max_model_len=2048)
    cold, counted = ask(server, tokens)
    assert counted.cached_tokens_by_source() == {}
    first_files = wait_for_chunks(root, 50)

    server.reset_prefix_cache()
    hit, counted = ask(server, tokens)
    assert hit.token_ids == cold.token_ids
    assert counted.cached_tokens_by_source() == {"disk": 1600}
    assert counted.computed_tokens() == 1

    # Killed while the files of another prompt are being written: what is whole is used, the rest is not.
    half = ask(server, cut_off)[0].token_ids
    server.kill()
    server.start()
    assert not list(root.glob("*/.tmp/*/*.part")), "remains of the killed process"
    assert ask(server, cut_off)[0].token_ids == half
    files = wait_for_chunks(root, 75)
    before = server.metrics()
    back, counted = ask(server, tokens)
    assert back.token_ids == cold.token_ids
    assert counted.cached_tokens_by_source() == {"disk": 1600}
    told = server.metrics().since(before)
    assert told.total("vllm:pdoffload_tier_verified_chunks_total", tier="fs") == 50
    assert sorted(root.rglob("*.bin")) == files, "what was there is not written again"

    # A damaged file and one that goes behind the lookup's back: what stands before them is used.
    damaged, missing = first_files[10], first_files[30]
    flip_a_byte(damaged)
    missing.unlink()
    server.reset_prefix_cache()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == cold.token_ids
    assert counted.total("vllm:pdoffload_tier_corrupt_chunks_total", tier="fs") == 1
    assert counted.total("vllm:pdoffload_tier_vanished_chunks_total", tier="fs") == 1
    assert counted.total("vllm:pdoffload_failed_device_loads_total") == 2
    assert not damaged.exists(), "a damaged file is removed"

    # Computed anew they are stored anew, and then come back like the others.
    server.reset_prefix_cache()
    assert ask(server, tokens)[0].token_ids == cold.token_ids
    assert wait_for_chunks(root, 75) == files
    server.reset_prefix_cache()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == cold.token_ids
    assert counted.cached_tokens_by_source() == {"disk": 1600}
    server.stop()

    # The files are the tiering spec's own.
    staged = serve(tiny_llama, offloading(root), name="staged", max_model_len=2048)
    answer, counted = ask(staged, tokens)
    assert answer.token_ids == cold.token_ids
    assert counted.cached_tokens_by_source() == {"disk": 1600}
    right = ask(staged, others)[0].token_ids
    wait_for_chunks(root, 100)
    staged.stop()
    server.start()
    answer, counted = ask(server, others)
    assert answer.token_ids == right
    assert counted.cached_tokens_by_source() == {"disk": 800}


def test_several_groups_come_back_and_a_damaged_file_costs_a_recompute(
    serve, tiny_hybrid, tmp_path
):
    """Sliding and full layers: chunks that use part of the tensors, requests named instead of blocks."""
    root = tmp_path / "kv"
    tokens = prompt(801, seed=33)
    server = serve(tiny_hybrid, direct(root, blocks_per_chunk=2), max_model_len=2048)
    right = ask(server, tokens)[0].token_ids
    wait_for_chunks(root, 12)
    quiet = sorted(root.rglob("*.bin"))
    server.reset_prefix_cache()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == right
    assert counted.computed_tokens() < 801 - 64 * 10
    loaded = counted.total("vllm:pdoffload_tier_loaded_chunks_total", tier="fs")
    assert loaded > 0

    for path in quiet:
        flip_a_byte(path)
    server.reset_prefix_cache()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == right
    assert counted.total("vllm:pdoffload_tier_corrupt_chunks_total", tier="fs") > 0
    server.reset_prefix_cache()
    assert ask(server, tokens)[0].token_ids == right
    server.reset_prefix_cache()
    assert ask(server, tokens)[0].token_ids == right
