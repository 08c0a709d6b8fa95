"""The server's life, with a stand-in of forty lines in place of vLLM."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdoffload.errors import MisuseError
from pdoffload.testing import netns, processes
from pdoffload.testing.netns import NetworkNamespace
from pdoffload.testing.openai_api import ApiError
from pdoffload.testing.serving import (
    ServeOptions,
    ServerFailed,
    VllmServer,
    shares,
    threads_bind,
)

STAND_IN = """
import http.server, json, mmap, os, signal, socket, subprocess, sys

mode, port = sys.argv[1], int(sys.argv[2])
if mode == "dies":
    print("RuntimeError: no such model")
    print("a trace that says nothing")
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pids = [os.getpid()]
if mode != "alone":
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pids.append(child.pid)
maps = []
for kind in ("psm_", "pdoffload-") if mode == "shares" else ():
    name = kind + str(os.getpid())
    with open(f"/dev/shm/{name}", "wb+") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
print("loading weights", flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    reset_answers = [False, True]
    log_message = lambda *words: None

    def answer(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/metrics":
            env = os.environ
            return self.answer(
                'vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 64\\n'
                'vllm:prompt_tokens_cached_by_source_total{engine="1",source="host"} 32\\n'
                'vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 0\\n'
                f'host_ip{{ip="{env.get("VLLM_HOST_IP", "unset")}"}} 1\\n'
                f'seen{{pid="{pids[-1]}",seed="{env.get("PYTHONHASHSEED", "unset")}"}} 1\\n'
            )
        self.answer("", 200 if mode != "sick" else 503)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path == "/reset_prefix_cache?reset_external=false":
            return self.answer(json.dumps({"success": self.reset_answers.pop(0)}))
        if body["prompt"] == "too long":
            return self.answer("prompt too long", 400)
        if not body["stream"]:
            choice = {"text": "ab", "token_ids": [5, 6]}
            whole = {"choices": [choice], "usage": {"prompt_tokens": 7}}
            whole["kv_transfer_params"] = {"got": body.get("kv_transfer_params")}
            return self.answer(json.dumps(whole))
        events = [
            {"choices": [{"text": "a", "token_ids": [5]}]},
            {"choices": [{"text": "b", "token_ids": [6]}]},
            {"choices": [], "usage": {"prompt_tokens": 7}},
        ]
        if body["prompt"] == "fails":
            events = [{"error": {"message": "engine died"}}]
        lines = [f"data: {json.dumps(event)}\\n\\n" for event in events]
        self.answer("".join(lines) + "data: [DONE]\\n\\n")

class UnixServer(http.server.HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self):
        self.socket.bind(self.server_address)

    def get_request(self):
        return self.socket.accept()[0], ("a Unix socket", 0)

if "--uds" in sys.argv:
    UnixServer(sys.argv[-1], Handler).serve_forever()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

PARENT = """
import sys
from pathlib import Path
from pdoffload.testing.serving import ServeOptions, VllmServer

folder = Path(sys.argv[1])
command = lambda port: [sys.executable, str(folder / "stand_in.py"), "alone", str(port)]
server = VllmServer(ServeOptions(model_dir=folder), folder, command=command)
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""

Build = Callable[..., VllmServer]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A server over the stand-in in one of its modes: well, alone, shares, stubborn, sick, dies."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def make(
        mode: str = "well", namespace: NetworkNamespace | None = None, **arguments: object
    ) -> VllmServer:
        options = ServeOptions(
            model_dir=tmp_path,
            start_timeout_s=1.0 if mode == "sick" else 30.0,
            namespace=namespace,
        )
        return VllmServer(
            options,
            tmp_path,
            command=lambda port: [sys.executable, str(script), mode, str(port)],
            **arguments,
        )

    return make


def _state(pid: int) -> str:
    """The kernel's letter for it: Z is a zombie, T a stopped process; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def _is_alive(pid: int) -> bool:
    return _state(pid) not in "XZ"


def _child_pid(server: VllmServer) -> int:
    return int(next(iter(server.metrics().by_label("seen", "pid"))))


def test_a_completion_has_text_tokens_and_the_time_to_the_first(build: Build) -> None:
    with build() as server:
        done = server.complete("hello", max_tokens=2)
    assert (done.text, done.token_ids, done.prompt_tokens) == ("ab", (5, 6), 7)
    assert 0 < done.ttft_s <= done.total_s


def test_an_answer_in_one_piece_carries_what_goes_to_the_next_server(build: Build) -> None:
    with build() as server:
        done = server.complete(
            "hello", max_tokens=2, stream=False, kv_transfer_params={"do_remote_decode": True}
        )
    assert (done.text, done.token_ids, done.prompt_tokens) == ("ab", (5, 6), 7)
    assert done.kv_transfer_params == {"got": {"do_remote_decode": True}}


def test_a_request_that_is_given_up_leaves_the_client_usable(build: Build) -> None:
    with build() as server, contextlib.closing(server.connect()) as second:
        server.freeze()
        with pytest.raises(ApiError, match="timed out"):
            second.complete("hello", max_tokens=2, timeout_s=0.1)
        server.thaw()
        assert second.complete("hello", max_tokens=2).text == "ab"


def test_a_refused_request_says_what_the_server_said(build: Build) -> None:
    with build() as server:
        with pytest.raises(ApiError, match=r"prompt too long \(HTTP 400\)"):
            server.complete("too long", max_tokens=1)
        with pytest.raises(ApiError, match="engine died"):
            server.complete("fails", max_tokens=1)


def test_reset_asks_again_while_blocks_are_held(build: Build) -> None:
    with build() as server:
        server.reset_prefix_cache(timeout_s=10)


def test_metrics_sum_over_engines_and_leave_out_zeros(build: Build) -> None:
    with build() as server:
        metrics = server.metrics()
    assert metrics.cached_tokens_by_source() == {"host": 96}
    assert metrics.total("vllm:prompt_tokens_cached_by_source_total", engine="1") == 32
    assert metrics.total("no_such_metric") == 0
    assert metrics.since(metrics).cached_tokens_by_source() == {}


def test_the_hash_seed_of_the_caller_does_not_reach_the_server(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "123")
    with build() as server:
        assert server.metrics().by_label("seen", "seed") == {"unset": 1.0}


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_ending_a_server_ends_its_children_too(build: Build, end: str) -> None:
    server = build()
    server.start()
    child = _child_pid(server)
    getattr(server, end)()
    assert not _is_alive(child)
    getattr(server, end)()


def test_a_killed_server_leaves_no_shared_memory_of_vllm_and_hides_none_of_ours(
    build: Build,
) -> None:
    server = build("shares")
    server.start()
    theirs, ours = Path(f"/dev/shm/psm_{server.pid}"), Path(f"/dev/shm/pdoffload-{server.pid}")
    assert theirs.exists()
    server.kill()
    assert not theirs.exists()
    ours.unlink()  # fails if it was gone


def test_a_server_that_ignores_sigterm_is_killed(build: Build) -> None:
    server = build("stubborn")
    server.start()
    child = _child_pid(server)
    server.stop(timeout_s=0.2)
    assert not _is_alive(child)


def test_a_server_may_be_started_again_after_a_kill(build: Build) -> None:
    with build() as server:
        first = server.log_path
        server.kill()
        with pytest.raises(MisuseError, match="not up"):
            server.metrics()
        server.start()
        assert server.log_path != first
        assert server.complete("hello", max_tokens=2).text == "ab"


def test_two_servers_start_side_by_side(build: Build) -> None:
    with contextlib.ExitStack() as servers:
        pair = [build(name=name) for name in ("one", "two")]
        for server in pair:
            servers.callback(server.stop)
            server.launch()
        for server in pair:
            server.wait_until_up()
        assert len({server.port for server in pair}) == 2
        assert [server.complete("hello", max_tokens=2).text for server in pair] == ["ab", "ab"]


def test_a_frozen_server_does_nothing_until_it_is_thawed(build: Build) -> None:
    with build() as server:
        members = processes.members(server.pid)
        server.freeze()
        assert not server.api.is_healthy()
        assert [_state(pid) for pid in members] == ["T", "T"]
        server.thaw()
        assert server.complete("hello", max_tokens=2).text == "ab"


def test_a_frozen_server_stops_without_being_killed(build: Build) -> None:
    server = build()
    server.start()
    child = _child_pid(server)
    server.freeze()
    server.stop()
    assert not _is_alive(child)


def test_a_server_in_a_namespace_is_reached_and_ended_like_any_other(build: Build) -> None:
    if reason := netns.why_unavailable():
        pytest.skip(f"no network namespaces here: {reason}")
    with netns.joined_pair() as (inside, _), build(namespace=inside) as server:
        assert server.complete("hello", max_tokens=2).text == "ab"
        assert server.metrics().by_label("host_ip", "ip") == {inside.address: 1.0}
        members = processes.members(server.pid)
        assert len(members) == 2
        for pid in members:
            assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
        server.kill()
        assert not any(map(_is_alive, members))


def test_starting_twice_is_misuse(build: Build) -> None:
    with build() as server, pytest.raises(MisuseError, match="runs already"):
        server.start()


def test_a_server_that_dies_while_starting_shows_its_cause(build: Build) -> None:
    server = build("dies")
    with pytest.raises(ServerFailed, match="status 3") as failure:
        server.start()
    assert "RuntimeError: no such model" in str(failure.value)
    assert "a trace that says nothing" in str(failure.value)


def test_a_server_that_never_gets_healthy_is_not_left_running(build: Build) -> None:
    server = build("sick")
    with pytest.raises(ServerFailed, match="no answer on /health in 1 s"):
        server.start()
    assert server.pid is None
    port_is_free = socket.create_server(("127.0.0.1", server.port))
    port_is_free.close()


def test_progress_is_told_while_the_server_starts(build: Build) -> None:
    lines: list[str] = []
    with pytest.raises(ServerFailed):
        build("sick", on_progress=lines.append).start()
    assert "loading weights" in lines


def test_an_error_inside_the_with_block_carries_the_log(build: Build) -> None:
    with pytest.raises(ValueError, match="mine") as failure, build():
        raise ValueError("mine")
    assert "loading weights" in failure.value.__notes__[0]


def test_a_server_ends_with_the_process_that_started_it(build: Build, tmp_path: Path) -> None:
    # A test run that is shot dead runs no clean-up code: the kernel has to tell the server.
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    server_pid = int(parent.stdout.readline())
    ended = os.pidfd_open(server_pid)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    # A pidfd turns readable when its process ends.
    readable, _, _ = select.select([ended], [], [], 30)
    os.close(ended)
    assert readable


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "bind"),
    [
        ([0, 1], 1, "0,1"),
        ([0, 1], 2, "0|1"),
        ([2, 3, 6, 7], 2, "2,3|6,7"),
        ([0, 1, 2], 2, "0|1"),
        ([0], 2, "nobind"),
    ],
)
def test_cpus_are_split_evenly_among_ranks(cpus: list[int], num_ranks: int, bind: str) -> None:
    assert threads_bind(cpus, num_ranks) == bind


@pytest.mark.parametrize(
    ("cpus", "num_servers", "split"),
    [
        ({0, 1}, 1, [(0, 1)]),
        ({0, 1}, 2, [(0,), (1,)]),
        ({3, 5, 7, 8, 9}, 2, [(3, 5), (7, 8)]),
        ({4}, 2, [(4,), (4,)]),
        ({0, 1}, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_cpus_are_split_evenly_among_servers(
    cpus: set[int],
    num_servers: int,
    split: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    assert shares(num_servers) == split


def test_a_server_computes_on_the_cpus_it_was_given(tmp_path: Path) -> None:
    options = ServeOptions(model_dir=tmp_path, cpus=(4, 5), tensor_parallel=2)
    assert options.environment()["VLLM_CPU_OMP_THREADS_BIND"] == "4|5"


def test_the_processes_of_a_server_wait_by_sleeping_and_find_what_ours_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children too: the environment is theirs."""
    (tmp_path / "elsewhere.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = subprocess.run(
        [sys.executable, "-c", "import os, elsewhere; print(os.sched_yield.__module__)"],
        env=ServeOptions(model_dir=tmp_path).environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout.strip() == "sitecustomize"
