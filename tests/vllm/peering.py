"""Two engines that are peers, for the tests with real servers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from offloading import beside_nixl, offloading, prompt

from pdoffload.testing import netns, processes
from pdoffload.testing.netns import NetworkNamespace
from pdoffload.testing.openai_api import Completion, Metrics
from pdoffload.testing.serving import ServeOptions, VllmServer, free_port, shares

LOOPBACK = "127.0.0.1"
WAIT_S = 120.0
ONE_HOST, TWO_HOSTS = "one host", "two hosts"
TOKENS, CHUNKS, CHUNK_BYTES = 1601, 50, 65536
LONG_TOKENS = 3201
TRIES = 4
"""Of what depends on the moment, or on a machine on which nothing else runs meanwhile."""
PROMPTS = {
    "pair": prompt(TOKENS, seed=30),
    "early": prompt(TOKENS, seed=31),
    "prefix": prompt(801, seed=32) + prompt(800, seed=33),
    **{f"turns {number}": prompt(TOKENS, seed=50 + number) for number in range(TRIES)},
    "thawed": prompt(TOKENS, seed=36),
    "aborted": prompt(LONG_TOKENS, seed=37),
    "killed": prompt(TOKENS, seed=38),
    "stranger": prompt(TOKENS, seed=39),
    **{f"frozen {number}": prompt(LONG_TOKENS, seed=40 + number) for number in range(TRIES)},
}
# Small steps, so that a long prompt is on its way for a while.
STEPS = ("--max-num-batched-tokens", "256")


def verified(counted: Metrics) -> float:
    """Chunks from peers of which the checksum was compared; none was wrong."""
    assert counted.total("vllm:pdoffload_tier_corrupt_chunks_total") == 0
    return counted.total("vllm:pdoffload_tier_verified_chunks_total", tier="p2p")


def given_up(counted: Metrics) -> float:
    """Pulls that ended because the peer said nothing: at their deadline, or as its line was lost."""
    return counted.total("vllm:pdoffload_peer_load_deadlines_total") + counted.total(
        "vllm:pdoffload_peer_peers_lost_total"
    )


class Peer(msgspec.Struct, frozen=True):
    """An engine with the p2p tier, and where its peers dial it."""

    server: VllmServer
    host: str
    port: int
    secret_file: Path

    def source(self, kv_request_id: str) -> dict[str, Any]:
        """The table in `remote_prefiller` and `remote_kv_source` that names this peer."""
        return {
            "kv_request_id": kv_request_id,
            "remote_host": self.host,
            "remote_port": self.port,
        }

    def counted(self) -> Metrics:
        """Its metrics after one more step: what an idle engine's threads have counted is told then."""
        self.server.complete(prompt(3, seed=0), max_tokens=1)
        return self.server.metrics()

    def served_chunks(self) -> float:
        return self.server.metrics().total("vllm:pdoffload_peer_served_chunks_total")

    def waits(self) -> bool:
        """Whether a request waits here: for blocks from elsewhere, or for its turn."""
        return self.server.metrics().total("vllm:num_requests_waiting") > 0

    @contextlib.contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """Its engine and peer service do nothing meanwhile; its HTTP front end lives."""
        (pid,) = (
            pid
            for pid in processes.members(self.server.pid or 0)
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def forget(self) -> None:
        """Nothing is left on its device, nor in its host pool."""
        self.server.reset_prefix_cache(host_too=True)


class Pair(msgspec.Struct, frozen=True):
    """A prefiller and a decoder, and a thread for each to wait for an answer."""

    prefiller: Peer
    decoder: Peer
    threads: ThreadPoolExecutor

    def prefill(self, tokens: list[int], kv_request_id: str) -> None:
        """The first leg: computed by the prefiller, and kept."""
        params = {"remote_decoder": {"kv_request_id": kv_request_id}}
        self.prefiller.server.complete(
            tokens, max_tokens=1, stream=False, kv_transfer_params=params
        )

    def later(self, peer: Peer, tokens: list[int], **parameters: Any) -> Future[Completion]:
        """A request of its own thread; its connection is closed when it has ended."""

        def complete() -> Completion:
            with contextlib.closing(peer.server.connect()) as client:
                return client.complete(tokens, **{"max_tokens": 16, **parameters})

        return self.threads.submit(complete)


def peering_table(host: str, port: int, secret_file: Path, **table: Any) -> dict[str, Any]:
    """A p2p tier's table. A pull may take long on a busy machine; a peer that has stopped is noticed
    sooner, by the pings of its line."""
    return {
        "type": "p2p",
        "host": host,
        "port": port,
        "cluster_secret_file": str(secret_file),
        "load_timeout_s": 60,
        "store_timeout_s": 60,
        "abort_timeout_s": 3,
        **table,
    }


def write_secret(path: Path, text: str = "one secret for the whole cluster") -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def pair_of_engines(
    model_dir: Path,
    folder: Path,
    *,
    two_hosts: bool = False,
    with_nixl: bool = False,
    tier: dict[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Pair]:
    """Two servers with the p2p tier, started side by side, with these `variables` in their environment.

    Two hosts are two namespaces, with a cable between them. `with_nixl`: each has vLLM's NixlConnector too.
    """
    with contextlib.ExitStack() as stack:
        namespaces, env = _hosts(stack) if two_hosts else ((None, None), {})
        threads = stack.enter_context(ThreadPoolExecutor(4))
        peers = []
        names = ("prefiller", "decoder")
        for name, namespace, cpus in zip(names, namespaces, shares(2), strict=True):
            host = namespace.address if namespace else LOOPBACK
            port = free_port()
            secret_file = write_secret(folder / f"{name}.secret")
            ours = offloading(tier=peering_table(host, port, secret_file, **(tier or {})))
            side_channel = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }
            wanted = ServeOptions(
                model_dir=model_dir,
                kv_transfer_config=beside_nixl(ours) if with_nixl else ours,
                dtype="float32",
                cpus=cpus,
                namespace=namespace,
                env={"UCX_LOG_LEVEL": "info"} | side_channel | env | dict(variables or {}),
                **options,
            )
            server = VllmServer(wanted, folder, name=name)
            stack.callback(server.stop)
            server.launch()
            peers.append(Peer(server, host, port, secret_file))
        for peer in peers:
            peer.server.wait_until_up()
        yield Pair(*peers, threads)


def _hosts(
    stack: contextlib.ExitStack,
) -> tuple[tuple[NetworkNamespace, NetworkNamespace], dict[str, str]]:
    if reason := netns.why_unavailable():
        pytest.skip(f"no network namespaces here: {reason}")
    # Else UCX sees one machine, and copies past the cable.
    return stack.enter_context(netns.joined_pair()), {"UCX_TLS": "tcp"}


_LANES = re.compile(r"UCX  INFO +(\S+) int(?:er|ra)-node cfg#\d+ .*? am\(([^)]*)\)")


def transports(server: VllmServer) -> dict[str, set[str]]:
    """What UCX says it moves bytes between processes by: our agents' under "ours", all other agents'
    under "main"."""
    found: dict[str, set[str]] = {"ours": set(), "main": set()}
    for agent, lanes in _LANES.findall(server.log_text()):
        found["ours" if agent.startswith("peers-") else "main"] |= {
            lane.split("/")[0] for lane in lanes.split()
        }
    return found


def wait_for(what: str, holds: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not in {timeout_s:g} s: {what}"
        time.sleep(0.02)
