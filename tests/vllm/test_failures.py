"""A copy or a file that fails costs a recompute: the engine lives and the tokens are right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from offloading import MiB, ask, offloading, prompt

from pdoffload.testing.serving import ServerFailed

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(600)]

HERE = Path(__file__).parent


def faults(*wanted: str) -> dict[str, str]:
    """The environment of a server whose copies fail like "READ refuse", one after the other."""
    listed = [dict(zip(("op", "kind"), each.split(), strict=True)) for each in wanted]
    return {
        "PDOFFLOAD_TEST_FAULTS": json.dumps(listed),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }


def faulty(**extra):
    return offloading(spec="FaultyCPUSpec", spec_module_path="faulty_spec", **extra)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_hybrid"])
def test_a_failed_copy_to_the_device_is_recomputed(model, serve, request):
    """Refused by NIXL, an exception nobody thought of, and one that never ends: each in turn."""
    server = serve(
        request.getfixturevalue(model),
        faulty(transfer_timeout_s=2),
        env=faults("READ refuse", "READ raise", "READ stuck"),
        max_model_len=2048,
    )
    tokens = prompt(801, seed=3)
    right = ask(server, tokens)[0].token_ids
    for kind in ("refuse", "raise", "stuck"):
        server.reset_prefix_cache()
        answer, counted = ask(server, tokens)
        assert answer.token_ids == right, kind
        assert counted.total("vllm:pdoffload_failed_device_loads_total") > 0, kind
        assert counted.computed_tokens() == 801, kind
    server.reset_prefix_cache()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == right
    assert counted.cached_tokens_by_source() == {"host": 800}


def test_a_failed_copy_from_the_device_is_never_served(serve, tiny_llama):
    server = serve(tiny_llama, faulty(), env=faults("WRITE refuse"), max_model_len=2048)
    tokens = prompt(801, seed=4)
    first, counted = ask(server, tokens)
    server.reset_prefix_cache()
    again, counted = ask(server, tokens)
    assert again.token_ids == first.token_ids
    assert counted.cached_tokens_by_source().get("host", 0) == 0
    assert server.metrics().total("vllm:pdoffload_failed_device_stores_total") > 0
    server.reset_prefix_cache()
    third, counted = ask(server, tokens)
    assert third.token_ids == first.token_ids
    assert counted.cached_tokens_by_source() == {"host": 800}


def test_under_the_stock_connector_a_copy_that_fails_twice_stops_the_engine(serve, tiny_llama):
    """It has no way to hear of wrong blocks: once more, then loudly down, never wrong tokens."""
    config = offloading(connector="OffloadingConnector", spec="FaultyCPUSpec")
    config["kv_connector_extra_config"]["spec_module_path"] = "faulty_spec"
    server = serve(
        tiny_llama,
        config,
        env=faults("READ refuse", "READ none", "READ refuse", "READ refuse"),
        max_model_len=2048,
    )
    tokens = prompt(801, seed=5)
    right = ask(server, tokens)[0].token_ids
    server.reset_prefix_cache()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == right
    assert counted.cached_tokens_by_source().get("host", 0) == 800, "the second try worked"
    server.reset_prefix_cache()
    with pytest.raises(Exception, match=r"."):
        ask(server, tokens)
    assert "load of 25 blocks from host memory failed" in server.log_text()


def flip_a_byte(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def damage(files: list[Path]) -> None:
    """A cut, a tail too many, a missing file, a folder in its place, in turn."""
    for number, path in enumerate(files):
        match number % 4:
            case 0:
                os.truncate(path, path.stat().st_size // 2)
            case 1:
                with path.open("ab") as tail:
                    tail.write(bytes(100))
            case 2:
                path.unlink()
            case _:
                path.unlink()
                path.mkdir()


def test_damaged_chunk_files_are_misses_and_the_tokens_are_right(serve, tiny_llama, tmp_path):
    root = tmp_path / "kv"
    server = serve(tiny_llama, offloading(root, cpu_bytes_to_use=64 * MiB), max_model_len=2048)
    tokens = prompt(801, seed=6)
    right = ask(server, tokens)[0].token_ids
    server.stop()
    files = sorted(root.rglob("*.bin"))
    assert len(files) == 25
    for path in files:
        flip_a_byte(path)

    server.start()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == right
    assert counted.computed_tokens() == 801
    assert counted.total("vllm:pdoffload_tier_corrupt_chunks_total", tier="fs") == 25
    assert counted.total("vllm:pdoffload_failed_promotions_total") == 25
    server.stop()
    assert sorted(root.rglob("*.bin")) == files, "what was computed anew is stored anew"
    damage(files)

    server.start()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == right
    assert counted.computed_tokens() == 801
    server.reset_prefix_cache()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == right
    assert counted.cached_tokens_by_source() == {"host": 800}


def test_settings_that_cannot_work_stop_the_server_before_it_starts(serve, tiny_llama, tmp_path):
    config = offloading(tmp_path / "kv", tier={"n_read_thread": 4, "io": "fast"})
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = "10GB"
    with pytest.raises(ServerFailed) as failure:
        serve(tiny_llama, config, max_model_len=2048)
    log = failure.value.log_path.read_text()
    for word in ("n_read_thread", "n_read_threads", "'fast'", "uring", "cpu_bytes_to_use", "10GB"):
        assert word in log, word
    assert not (tmp_path / "kv").exists(), "something had started"


def test_places_that_cannot_work_are_told_in_one_message(serve, tiny_llama, tmp_path):
    """A root that is a file, and a pool below one chunk: both at once, and no pool was made."""
    (tmp_path / "file").write_text("not a folder")
    config = offloading(tmp_path / "file", cpu_bytes_to_use=4096)
    with pytest.raises(ServerFailed) as failure:
        serve(tiny_llama, config, max_model_len=2048)
    log = failure.value.log_path.read_text()
    assert "2 problems in the configuration" in log
    assert "cpu_bytes_to_use: got 4" in log
    assert "secondary_tiers[0].root_dir" in log
    assert "is not a folder" in log
