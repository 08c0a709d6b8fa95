"""The steps of the demo with two servers: a prefiller and a decoder, peers of each other."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

import msgspec

from pdoffload.demo.scenario import (
    DTYPE,
    Listener,
    kv_transfer_config,
    read_prompt,
    require,
    send,
    warm_up,
)
from pdoffload.demo.verdict import BLOCK_SIZE, Pair
from pdoffload.testing.openai_api import Metrics
from pdoffload.testing.serving import ServeOptions, VllmServer, free_port, shares

_HOST = "127.0.0.1"
_PREFIX = "vllm:pdoffload_"


class _Peer(msgspec.Struct, frozen=True):
    server: VllmServer
    port: int

    def source(self, kv_request_id: str) -> dict[str, Any]:
        """What a router puts into a request that is to get blocks from here."""
        return {"kv_request_id": kv_request_id, "remote_host": _HOST, "remote_port": self.port}

    def forget(self) -> None:
        """Nothing is left on the device, nor in the host pool."""
        self.server.reset_prefix_cache(host_too=True)

    def counted(self) -> Metrics:
        """Its metrics after one more step: what an idle engine's threads did is told at the next."""
        self.server.complete("and", max_tokens=1)
        return self.server.metrics()


def p2p_table(port: int, secret_file: Path) -> dict[str, Any]:
    """The tier's table as an operator would write it, for a peer on this host."""
    return {
        "type": "p2p",
        "host": _HOST,
        "port": port,
        "cluster_secret_file": str(secret_file),
    }


class PairScenario:
    """One prompt, sent to the decoder four times; the prefiller helps with two of them. One thread."""

    def __init__(self, model_dir: Path, folder: Path, listener: Listener) -> None:
        require(model_dir)
        self._listener = listener
        secret_file = folder / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(secrets.token_hex(32))

        def peer(name: str, cpus: tuple[int, ...]) -> _Peer:
            port = free_port()
            options = ServeOptions(
                model_dir=model_dir,
                kv_transfer_config=kv_transfer_config(p2p_table(port, secret_file)),
                block_size=BLOCK_SIZE,
                dtype=DTYPE,
                cpus=cpus,
            )
            server = VllmServer(options, folder, name=name, on_progress=listener.detail)
            return _Peer(server, port)

        names = ("prefiller", "decoder")
        self._prefiller, self._decoder = map(peer, names, shares(len(names)))

    def run(self) -> Pair:
        """The four steps. Raises `PdOffloadError`s; no server is left running."""
        prefiller, decoder, say = self._prefiller, self._decoder, self._listener.phase
        say("starting two vLLMs side by side, each with a host pool of 2 GiB and a p2p tier")
        with contextlib.ExitStack() as servers:
            for peer in (prefiller, decoder):
                servers.callback(peer.server.stop)
                peer.server.launch()
            for peer in (prefiller, decoder):
                peer.server.wait_until_up()
            say("warming up with another prompt of the same length; the peers get acquainted")
            self._warm_up()
            result = self._steps()
            say("stopping the servers")
        return result

    def _warm_up(self) -> None:
        """Both compute once; then one pull, so that agents are open and lines are up in the steps."""
        warm_up(self._decoder.server)
        warm_up(self._prefiller.server, remote_decoder={"kv_request_id": "warm-up"})
        warm_up(self._decoder.server, remote_prefiller=self._prefiller.source("warm-up"))
        self._decoder.forget()

    def _steps(self) -> Pair:
        prefiller, decoder, say = self._prefiller, self._decoder, self._listener.phase
        prompt, server = read_prompt(), decoder.server
        before = prefiller.counted()
        say("the decoder computes the prompt by itself")
        cold = send(server, "cold", prompt)
        decoder.forget()
        say("the prefiller computes it, the decoder pulls its blocks")
        leg = prefiller.server.complete(
            prompt,
            max_tokens=1,
            stream=False,
            kv_transfer_params={"remote_decoder": {"kv_request_id": "pair"}},
        )
        pulled = send(server, "pulled", prompt, remote_prefiller=prefiller.source("pair"))
        decoder.forget()
        say("the decoder asks the prefiller what it still has of the prompt, and pulls that")
        prefix = send(server, "prefix pulled", prompt, remote_kv_source=prefiller.source("prefix"))
        decoder.forget()
        say("the decoder computes it by itself again")
        again = send(server, "recomputed", prompt)
        after = prefiller.counted()
        transports = after.by_label(f"{_PREFIX}peer_transport", "transport")
        return Pair(
            cold=cold,
            pulled=pulled,
            prefix=prefix,
            again=again,
            prefill_s=leg.total_s,
            transports=tuple(name for name, peers in transports.items() if peers),
            served_bytes=int(after.since(before).total(f"{_PREFIX}peer_served_bytes_total")),
        )
