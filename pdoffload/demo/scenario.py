"""The steps of the demo with one server, and what every demo does with a server."""

from __future__ import annotations

import importlib.util
import os
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.demo.verdict import BLOCK_SIZE, Restart, Step
from pdoffload.errors import ConfigError, DeadlineExceeded
from pdoffload.testing.serving import ServeOptions, VllmServer

MAX_TOKENS = 32
HOST_BYTES = 2 << 30
DTYPE = "float32"
"""A prompt whose prefix is restored is cut into other steps than one that is computed whole. In bfloat16
the last bits may then differ, and with them a token whose runner-up is close."""
_DISK_TIMEOUT_S = 60.0
_POLL_S = 0.1

# A prompt of the same length that shares no block with the real one: the first long request of a
# process pays for one-time preparations, which would flatter every later figure.
_WARM_UP_TOKENS = 2400
_WARM_UP_ID = 100


class Listener(Protocol):
    """Hears how far the demo is."""

    def phase(self, text: str) -> None:
        """A new phase begins."""

    def detail(self, text: str) -> None:
        """A sign of life within the phase."""


class ChunkFiles(msgspec.Struct, frozen=True):
    """What lies under the file tier's root, found by walking it, without any of the tier's code."""

    paths: tuple[Path, ...]

    @classmethod
    def under(cls, root: Path) -> ChunkFiles:
        return cls(tuple(sorted(root.rglob("*.bin"))))

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def leave_page_cache(self) -> None:
        """Make the kernel forget the files' pages, so that the next read is one of the disk."""
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # only clean pages can be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def kv_transfer_config(tier: dict[str, Any]) -> dict[str, Any]:
    """What an operator would write: a host pool, then `tier`."""
    return {
        "kv_connector": "PdOffloadConnector",
        "kv_connector_module_path": "pdoffload.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "NixlTieringOffloadingSpec",
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [tier],
        },
    }


def require(model_dir: Path) -> None:
    """Raise `ConfigError` if there is no checkpoint in `model_dir`, or nothing to serve it with."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError([f"{model_dir} is not a model checkpoint: it has no config.json"])
    for module, remedy in (("vllm", "make setup"), ("nixl", "pip install 'pdoffload[nixl]'")):
        if importlib.util.find_spec(module) is None:
            raise ConfigError([f"{module} is not installed: {remedy}"])


def read_prompt() -> str:
    """About 2,400 tokens of a story."""
    return files("pdoffload.demo").joinpath("prompt.txt").read_text().strip()


def warm_up(server: VllmServer, **kv_transfer_params: Any) -> None:
    """Have another prompt of the same length computed, and the device forget it.

    By default nothing of it is offloaded.
    """
    server.complete(
        [_WARM_UP_ID] * _WARM_UP_TOKENS,
        max_tokens=2,
        kv_transfer_params=kv_transfer_params or {"max_offload_tokens": 0},
    )
    server.reset_prefix_cache()


def send(server: VllmServer, name: str, prompt: str, **kv_transfer_params: Any) -> Step:
    """One step: the prompt is sent, with these request keys, and the server's counters are compared."""
    before, physical = server.metrics(), server.physical_read_bytes()
    parameters = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else {}
    completion = server.complete(prompt, max_tokens=MAX_TOKENS, **parameters)
    physical = server.physical_read_bytes() - physical
    return Step.between(name, completion, server.metrics().since(before), physical)


class RestartScenario:
    """Three sendings of one prompt, with a cache reset and a crash in between. One thread."""

    def __init__(
        self, model_dir: Path, folder: Path, listener: Listener, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        require(model_dir)
        self._root_dir = folder / "chunks"
        self._listener = listener
        self._clock = clock
        self._server = VllmServer(
            ServeOptions(
                model_dir=model_dir,
                kv_transfer_config=kv_transfer_config(
                    {"type": "fs", "root_dir": str(self._root_dir)}
                ),
                block_size=BLOCK_SIZE,
                dtype=DTYPE,
            ),
            folder,
            on_progress=listener.detail,
            clock=clock,
        )

    def run(self) -> Restart:
        """The three steps. Raises `PdOffloadError`s; no server is left running."""
        server, prompt, say = self._server, read_prompt(), self._listener.phase
        say("starting vLLM with a host pool of 2 GiB and a file tier")
        with server:
            say("warming up with another prompt of the same length")
            warm_up(server)
            say("the prompt is computed; its KV goes to host memory and to disk")
            cold = send(server, "cold", prompt)
            on_disk = self._wait_for_files(cold.completion.prompt_tokens // BLOCK_SIZE)
            say("the device forgets everything; the same prompt again")
            server.reset_prefix_cache()
            host = send(server, "device reset", prompt)
            say("the server is killed (SIGKILL); only files are left")
            server.kill()
            on_disk.leave_page_cache()
            say("starting vLLM anew over the same files")
            server.start()
            say("warming up with another prompt of the same length")
            warm_up(server)
            say("the same prompt a third time")
            disk = send(server, "server killed", prompt)
            say("stopping the server")
        return Restart(
            cold=cold,
            host=host,
            disk=disk,
            files=len(on_disk.paths),
            file_bytes=on_disk.size_bytes,
        )

    def _wait_for_files(self, wanted: int) -> ChunkFiles:
        """The chunk files, once there are at least `wanted` of them."""
        deadline_s = self._clock.monotonic_s() + _DISK_TIMEOUT_S
        while True:
            found = ChunkFiles.under(self._root_dir)
            if len(found.paths) >= wanted:
                return found
            self._listener.detail(f"{len(found.paths)} of {wanted} chunk files are on disk")
            if self._clock.monotonic_s() >= deadline_s:
                raise DeadlineExceeded(
                    f"{wanted} chunk files under {self._root_dir} ({len(found.paths)} came)",
                    _DISK_TIMEOUT_S,
                )
            self._clock.sleep(_POLL_S)
