"""NIXL itself keeps the contract, and fails in words."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.backends import PluginBackend, PosixBackend, UcxBackend
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.nixl import NixlAgent, first_usable, probe, unique_name
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import BackendUnusable, ConfigError, MisuseError, NixlError
from pdoffload.testing.agent_contract import AgentContract
from pdoffload.testing.agent_rig import PAGE, Memory, file_rows
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.peer_contract import PeerContract

pytestmark = pytest.mark.nixl

_fifos = itertools.count()


class PacedClock(FakeClock):
    """Stands still like any fake clock, but its sleeps leave the kernel the time to do real I/O."""

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        threading.Event().wait(duration_s)


class TestContract(AgentContract):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return PacedClock()

    def make_agent(self, clock: Clock) -> NixlAgent:
        return NixlAgent("contract", [UcxBackend(), PosixBackend(queue="uring")], clock=clock)

    def stall(
        self, agent: NixlAgent, local: Descriptors, tmp_path: Path, *, timeout_s: float
    ) -> tuple[Transfer, Callable[[], None]]:
        """A read of a FIFO runs until somebody writes to it."""
        path = tmp_path / f"fifo{next(_fifos)}"
        os.mkfifo(path)
        fd = os.open(path, os.O_RDWR)
        agent.register_files([fd], [PAGE])
        transfer = agent.submit(
            Op.READ, local, file_rows(fd, 0), timeout_s=timeout_s, what="stalled load"
        )
        return transfer, lambda: assert_all_written(fd)


class TestPeers(PeerContract):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return PacedClock()

    def make_agent(self, clock: Clock) -> NixlAgent:
        return NixlAgent("contract", [UcxBackend(reach="network")], clock=clock)


def assert_all_written(fd: int) -> None:
    assert os.write(fd, bytes(PAGE)) == PAGE


def run_python(source: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- C13: a plugin that is not there ---


def test_c13_a_listed_plugin_that_cannot_start_says_so() -> None:
    reason = probe(PluginBackend("GDS_MT"))
    assert reason is not None
    assert "GDS_MT cannot be used" in reason
    if "refuses to start" not in reason:  # a machine with CUDA's runtime, and without a GPU
        assert re.search(r"it does not load: \S+\.so\S*: cannot open shared object file", reason)
    assert "NIXL_ERR_" in reason
    with pytest.raises(BackendUnusable, match="GDS_MT"):
        NixlAgent("gds", [PluginBackend("GDS_MT")])


def test_c13_the_first_that_works_is_taken_and_the_others_are_explained() -> None:
    backend, reasons = first_usable([PluginBackend("GDS_MT"), PosixBackend()])
    assert backend == PosixBackend()
    assert len(reasons) == 1
    assert "GDS_MT" in reasons[0]
    with pytest.raises(BackendUnusable, match=r"GDS_MT.*LIBFABRIC"):
        first_usable([PluginBackend("GDS_MT"), PluginBackend("LIBFABRIC")])


def test_c13_an_empty_plugin_folder_is_named_as_the_cause(tmp_path: Path) -> None:
    done = run_python(
        """
        from pdoffload.agent.nixl import probe
        from pdoffload.agent.backends import PosixBackend, UcxBackend
        for backend in (PosixBackend(), UcxBackend()):
            print(probe(backend))
        """,
        NIXL_PLUGIN_DIR=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No plugins available") == 2


def test_c13_without_nixl_the_module_imports_and_its_use_says_how_to_get_it() -> None:
    done = run_python(
        """
        import sys
        sys.modules["nixl"] = None
        import pdoffload
        from pdoffload.agent.nixl import probe
        from pdoffload.agent.backends import UcxBackend
        print(probe(UcxBackend()))
        """
    )
    assert done.returncode == 0, done.stderr
    assert "pip install pdoffload[nixl]" in done.stdout


def test_importing_the_module_loads_no_nixl() -> None:
    done = run_python(
        """
        import sys
        import pdoffload.agent.nixl
        print([name for name in sys.modules if name.startswith("nixl")])
        """
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- agents ---


def test_a_process_that_closed_a_ucx_agent_exits_cleanly_and_silently() -> None:
    done = run_python(
        """
        from pdoffload.agent.nixl import NixlAgent
        from pdoffload.agent.backends import UcxBackend
        agent = NixlAgent("brief", [UcxBackend(reach="network")])
        agent.close()
        """
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_request_of_file_io_that_goes_on_is_never_destroyed(tmp_path: Path) -> None:
    def handles() -> int:
        gc.collect()
        return sum(type(each).__name__ == "nixl_xfer_handle" for each in gc.get_objects())

    before = handles()
    memory = Memory()
    agent = NixlAgent("left", [PosixBackend(queue="uring")])
    agent.register_memory(memory.address, memory.size_bytes)
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path / "fifo", os.O_RDWR)
    agent.register_files([fd], [PAGE])
    agent.submit(Op.READ, memory.rows(0), file_rows(fd, 0), timeout_s=5, what="load")
    assert len(agent.close(timeout_s=0.01)) == 1
    del agent
    assert handles() == before + 1
    assert_all_written(fd)


def test_two_agents_of_one_name_are_told_apart() -> None:
    first, second = (NixlAgent("twin", [PosixBackend()]) for _ in range(2))
    assert first.name != second.name
    assert all(re.fullmatch("twin-[0-9a-f]{12}", agent.name) for agent in (first, second))
    for agent in (first, second):
        agent.close()


def test_a_name_of_any_length_stays_unique_where_ucx_cuts_it() -> None:
    names = {unique_name("a-rather-long-purpose-of-an-agent")[:31] for _ in range(100)}
    assert len(names) == 100


def test_errors_that_are_kept_do_not_keep_the_agent() -> None:
    """It ends, and its connections with it, when nothing refers to NIXL's object any more."""
    agent, memory = NixlAgent("kept", [UcxBackend(reach="network")]), Memory()
    other = NixlAgent("other", [UcxBackend(reach="network")])
    agent.register_memory(memory.address, memory.size_bytes)
    peer = agent.add_peer(other.metadata())
    kept: list[object] = [
        agent.submit(Op.WRITE, memory.rows(0), memory.rows(1), timeout_s=5, what="write", peer=peer)
    ]
    with pytest.raises(NixlError) as caught:
        agent._driver.add_peer(b"what NIXL refuses itself")
    kept.append(caught.value)
    alive = weakref.ref(agent._driver._agent)  # type: ignore[attr-defined]
    agent.close()
    assert alive() is None
    assert len(kept) == 2
    other.close()


def test_an_agent_without_a_network_has_no_metadata() -> None:
    agent = NixlAgent("files-only", [PosixBackend()])
    with pytest.raises(NixlError, match="get_agent_metadata"):
        agent.metadata()
    assert agent.close() == []


def test_notifications_of_peers_are_counted_and_dropped() -> None:
    agent, other = (NixlAgent("told", [UcxBackend(reach="network")]) for _ in range(2))
    other.add_peer(agent.metadata())
    raw = other._driver._agent  # type: ignore[attr-defined]
    for _ in range(3):
        raw.send_notif(agent.name, b"hello")
    pause = threading.Event()
    for _ in range(20000):
        agent.progress()
        other.progress()
        if agent.notifications_dropped == 3:
            break
        pause.wait(0.001)
    assert agent.notifications_dropped == 3
    for each in (agent, other):
        assert each.close() == []


def test_backends_are_named_once() -> None:
    for backends in ([], [PosixBackend(), PosixBackend(queue="aio")]):
        with pytest.raises(ConfigError):
            NixlAgent("x", backends)


def test_what_no_backend_moves_is_a_failed_transfer() -> None:
    agent = NixlAgent("files-only", [PosixBackend()])
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    copy = agent.submit(Op.WRITE, memory.rows(0), memory.rows(1), timeout_s=5, what="copy")
    assert copy.state is TransferState.FAILED
    assert "no backend" in str(copy.error)
    assert agent.close() == []


def test_more_pieces_than_the_queue_holds_are_refused_whole(tmp_path: Path) -> None:
    agent = NixlAgent("small", [PosixBackend(queue="uring", max_ios=64)])
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    agent.register_files([fd], [PAGE * 100])
    memory.fill(0)
    starts = [memory.address + i * 16 for i in range(65)]
    places = [i * 16 for i in range(65)]
    results = [
        agent.wait(
            agent.submit(
                Op.WRITE,
                pieces(MemoryKind.DRAM, starts[:count], 16),
                pieces(MemoryKind.FILE, places[:count], 16, fd),
                timeout_s=5,
                what="store",
            )
        )
        for count in (65, 64, 64)
    ]
    assert [each.state.name for each in results] == ["FAILED", "DONE", "DONE"]
    assert "max_ios 64" in str(results[0].error)
    assert os.pread(fd, 64 * 16, 0) == memory.page(0)[: 64 * 16]
    assert agent.close() == []
    os.close(fd)


OLD = importlib.util.find_spec("nixl") and importlib.metadata.version("nixl").startswith("1.4")


@pytest.mark.skipif(bool(OLD), reason="NIXL 1.4 loses track on every queue, as posix_aio does")
@pytest.mark.parametrize("queue", ["uring", "aio"])
def test_c16_a_failed_write_is_told_to_its_own_transfer_alone(queue, tmp_path: Path) -> None:
    agent = NixlAgent("faults", [PosixBackend(queue=queue)])
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * PAGE))
    readable = os.open(path, os.O_RDONLY)
    agent.register_files([readable], [8 * PAGE])
    bad = agent.submit(Op.WRITE, memory.rows(0), file_rows(readable, 0), timeout_s=5, what="store")
    good = agent.submit(Op.READ, memory.rows(1), file_rows(readable, 1), timeout_s=5, what="load")
    assert agent.wait(good).state is TransferState.DONE
    assert agent.wait(bad).state is TransferState.FAILED
    assert agent.poll() == []
    assert agent.close() == []
    assert agent.counts.balanced
    os.close(readable)


def test_posix_aio_loses_track_after_a_failed_io_and_says_so(tmp_path: Path) -> None:
    agent = NixlAgent("lost", [PosixBackend(queue="posix_aio")])
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * PAGE))
    readable = os.open(path, os.O_RDONLY)
    agent.register_files([readable], [8 * PAGE])
    bad = agent.submit(Op.WRITE, memory.rows(0), file_rows(readable, 0), timeout_s=5, what="store")
    assert agent.wait(bad).state is TransferState.UNKNOWN
    late = agent.submit(Op.READ, memory.rows(1), file_rows(readable, 1), timeout_s=5, what="load")
    assert late.state is TransferState.FAILED
    assert agent.close(timeout_s=0.1) == [bad]
    os.close(readable)


def test_a_finished_transfer_is_not_asked_about_again() -> None:
    """NIXL answers DONE for a handle that was released: ours is never handed to it again."""
    agent = NixlAgent("after", [UcxBackend()])
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    copy = agent.submit(Op.WRITE, memory.rows(0), memory.rows(1), timeout_s=5, what="copy")
    assert agent.wait(copy) is agent.wait(copy)
    other = NixlAgent("other", [UcxBackend()])
    running = Transfer("foreign", size_bytes=1, timeout_s=1, deadline_s=0)
    with pytest.raises(MisuseError, match="another agent"):
        other.wait(running)
    for each in (agent, other):
        assert each.close() == []


def test_without_an_rdma_device_its_libraries_stay_out_of_the_process() -> None:
    """They bring a second libnl, and a process with two of them crashes at exit."""
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        pytest.skip("this machine has an RDMA device, whose libraries are needed")
    program = (
        "from pdoffload.agent.backends import UcxBackend\n"
        "from pdoffload.agent.nixl import NixlAgent\n"
        "NixlAgent('a', [UcxBackend()])\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('libucp' in maps, 'libibverbs' in maps, 'libnl-route' in maps)\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "UCX_MODULES"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "False"]
