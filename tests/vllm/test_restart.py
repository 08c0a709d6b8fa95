"""The main story: a prefix outlives eviction and a killed server, and what is on disk is right."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import xxhash
import zmq
from offloading import ask, offloading, prompt

from pdoffload.testing.serving import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(600)]


def wait_for_chunks(root: Path, count: int) -> list[Path]:
    deadline = time.monotonic() + 60
    while len(files := sorted(root.rglob("*.bin"))) < count:
        assert time.monotonic() < deadline, f"{len(files)} of {count} chunk files after a minute"
        time.sleep(0.05)
    return files


def regions() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("pdoffload-")}


def test_a_prefix_outlives_eviction_and_a_killed_server(serve, tiny_llama, tmp_path):
    root = tmp_path / "kv"
    tokens = prompt(1601, seed=7)
    plain = serve(tiny_llama, name="without", max_model_len=2048)
    right = ask(plain, tokens)[0].token_ids
    plain.stop()

    before = regions()
    server = serve(tiny_llama, offloading(root), max_model_len=2048)
    assert regions() == before, "the pool has a name although everybody has mapped it"
    cold, counted = ask(server, tokens)
    assert cold.token_ids == right
    assert counted.cached_tokens_by_source() == {}

    server.reset_prefix_cache()
    hit, counted = ask(server, tokens)
    assert hit.token_ids == right
    assert counted.cached_tokens_by_source() == {"host": 1600}
    assert counted.computed_tokens() == 1

    files = wait_for_chunks(root, 50)
    server.kill()
    assert regions() == before
    check_files(root, files)

    server.start()
    back, counted = ask(server, tokens)
    assert back.token_ids == right
    assert counted.cached_tokens_by_source() == {"disk": 1600}
    assert counted.total("vllm:pdoffload_tier_verified_chunks_total", tier="fs") == 50
    assert counted.total("vllm:pdoffload_tier_bytes_read_total", tier="fs") >= 50 * chunk_bytes(
        files
    )

    # What is there already is not written again.
    server.reset_prefix_cache()
    ask(server, tokens)
    assert sorted(root.rglob("*.bin")) == files


def chunk_bytes(files: list[Path]) -> int:
    return files[0].stat().st_size - 4096


def check_files(root: Path, files: list[Path]) -> None:
    """Read the files as docs/storage.md describes them, with nothing of the package."""
    (namespace,) = (path.parent for path in root.glob("*/config.json"))
    config = json.loads((namespace / "config.json").read_text())
    fields = {key: value for key, value in config.items() if key != "pdoffload"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert namespace.name == f"{fields['model_name'].replace('/', '_')}_{digest}"
    seen = set()
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
        body, trailer = path.read_bytes()[:-4096], path.read_bytes()[-4096:]
        name = path.stem
        expected = Path(f"{namespace.name}_r0") / name[:3] / f"{name[3:5]}_g0" / path.name
        assert path.relative_to(root) == expected
        assert bytes.fromhex(name) + struct.pack(">I", 0) in trailer, "the trailer names its key"
        assert xxhash.xxh3_128_digest(body) in trailer, "the trailer holds the chunk's checksum"
        assert len(body) % 4096 == 0
        assert any(body)
        seen.add(xxhash.xxh3_128_digest(body))
    assert len(seen) == len(files), "different chunks have different bytes"


def test_limits_of_a_request_are_kept(serve, tiny_llama):
    server = serve(tiny_llama, offloading(), max_model_len=2048)
    first, second = prompt(801, seed=8), prompt(801, seed=9)
    ask(server, first, kv_transfer_params={"max_offload_tokens": 320})
    ask(server, second, kv_transfer_params={"max_offload_tokens": 0})
    server.reset_prefix_cache()
    assert ask(server, first)[1].cached_tokens_by_source() == {"host": 320}
    assert ask(server, second)[1].cached_tokens_by_source() == {}
    server.reset_prefix_cache()
    counted = ask(server, first, kv_transfer_params={"max_load_tokens": 160})[1]
    assert counted.cached_tokens_by_source() == {"host": 160}
    server.reset_prefix_cache()
    counted = ask(server, first, kv_transfer_params={"max_load_tokens": True})[1]
    assert counted.cached_tokens_by_source() == {"host": 800}
    assert "max_load_tokens must be a non-negative int" in server.log_text()


def test_c22_a_reset_of_the_host_pool_leaves_the_files_and_the_right_tokens(
    serve, tiny_llama, tmp_path
):
    """The reset comes right after a prompt, while its chunks are still on their way to the disk."""
    server = serve(tiny_llama, offloading(tmp_path / "kv"), max_model_len=2048)
    for seed in (12, 13):
        tokens = prompt(801, seed=seed)
        right, _ = ask(server, tokens)
        server.reset_prefix_cache(host_too=True)
        wait_for_chunks(tmp_path / "kv", 25 * (seed - 11))
        answer, counted = ask(server, tokens)
        assert answer.token_ids == right.token_ids
        assert counted.cached_tokens_by_source() == {"disk": 800}
        server.reset_prefix_cache(host_too=True)
    ask(server, prompt(33, seed=14))
    assert server.metrics().total("vllm:pdoffload_host_quarantined_slots") == 0


def test_events_name_medium_and_locality(serve, tiny_llama, tmp_path):
    port = free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
    events["endpoint"] = f"tcp://127.0.0.1:{port}"
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 500)
        # vLLM's publisher connects where its endpoint names a host.
        subscriber.bind(f"tcp://127.0.0.1:{port}")
        config = offloading(tmp_path / "kv", tier={"enable_kv_events": True, "locality": "LOCAL"})
        arguments = ("--kv-events-config", json.dumps(events))
        server = serve(tiny_llama, config, max_model_len=2048, extra_args=arguments)
        ask(server, prompt(801, seed=10))
        wait_for_chunks(tmp_path / "kv", 25)
        seen: set[str] = set()
        for number in range(40):
            ask(server, prompt(33, seed=100 + number))
            while True:
                try:
                    _, _, payload = subscriber.recv_multipart()
                except zmq.Again:
                    break
                seen.add(repr(msgspec.msgpack.decode(payload)))
            if {"GPU", "CPU", "STORAGE", "LOCAL"} <= words(seen):
                break
        assert {"GPU", "CPU", "STORAGE", "LOCAL"} <= words(seen)
    finally:
        subscriber.close(linger=0)
        zmq.Context.instance().term()


def words(texts: set[str]) -> set[str]:
    return {
        word for word in ("GPU", "CPU", "STORAGE", "LOCAL") for text in texts if f"'{word}'" in text
    }


CHECK_033 = """
import inspect, sys
import vllm
assert sys.argv[1] in vllm.__file__, vllm.__file__
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload import base
from pdoffload.vllm import NixlCPUOffloadingSpec, NixlTieringOffloadingSpec, PdOffloadConnector
from pdoffload.vllm import NixlDirectOffloadingSpec
from pdoffload.vllm.direct.manager import NixlDirectManager
from pdoffload.vllm.direct.worker import NixlDirectWorker
from pdoffload.vllm.manager import NixlOffloadingManager
from pdoffload.vllm.worker import NixlOffloadingWorker

pairs = [
    (NixlOffloadingManager, base.OffloadingManager),
    (NixlOffloadingWorker, base.OffloadingWorker),
    (NixlDirectManager, base.OffloadingManager),
    (NixlDirectWorker, base.OffloadingWorker),
    (NixlDirectOffloadingSpec, base.OffloadingSpec),
    (NixlCPUOffloadingSpec, base.OffloadingSpec),
    (NixlTieringOffloadingSpec, base.OffloadingSpec),
    (PdOffloadConnector, OffloadingConnector),
]
for ours, theirs in pairs:
    assert not ours.__abstractmethods__, (ours, ours.__abstractmethods__)
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        mine = getattr(ours, name)
        if mine is method or name.startswith("_"):
            continue
        wanted, given = inspect.signature(method), inspect.signature(mine)
        for parameter in wanted.parameters.values():
            has = given.parameters.get(parameter.name)
            assert has is not None, f"{ours.__name__}.{name} lacks {parameter.name}"
            assert has.kind is parameter.kind, f"{ours.__name__}.{name}({parameter.name})"
            assert (has.default is inspect.Parameter.empty) <= (
                parameter.default is inspect.Parameter.empty
            ), f"{ours.__name__}.{name}({parameter.name}) has no default"
print("ok")
"""


@pytest.mark.parametrize("version", ["installed", "0.33.0"])
def test_the_adapter_fits_the_interfaces_of(version, request):
    """Every abstract method is there, and takes what that version of vLLM passes."""
    where = "vllm"
    env = dict(os.environ)
    if version != "installed":
        folder = request.getfixturevalue("vllm_033_sources")
        where = str(folder)
        env["PYTHONPATH"] = os.pathsep.join([str(folder), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK_033, where],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip().endswith("ok"), done.stdout + done.stderr[-4000:]


def test_beside_vllms_own_nixl_connector(serve, tiny_llama, tmp_path):
    """As a member of MultiConnector, with an agent of our own beside the main connector's."""
    main = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [offloading(tmp_path / "kv"), main]},
    }
    env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    server = serve(tiny_llama, config, max_model_len=2048, env=env)
    tokens = prompt(801, seed=11)
    right = ask(server, tokens)[0].token_ids
    server.reset_prefix_cache()
    answer, counted = ask(server, tokens)
    assert answer.token_ids == right
    assert counted.cached_tokens_by_source() == {"host": 800}
