"""NIXL's GDS_MT and GDS over the cuFile for tests: run by test_cufile.py, in a process of its own each.

What a failed request of these plugins means stands in `pdoffload.agent.nixl`; here it is tried.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.backends import Backend, GdsBackend, GdsMtBackend, PosixBackend, UcxBackend
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.nixl import NixlAgent
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import Clock
from pdoffload.errors import DeadlineExceeded, NixlError
from pdoffload.testing.agent_contract import AgentContract
from pdoffload.testing.agent_rig import PAGE, SLOTS, Memory, file_rows
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.cufile import MARK, Call, CufileForTests, Fault

NAME = os.environ.get("PDOFFLOAD_TEST_BACKEND", "GDS_MT")
pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(MARK not in os.environ, reason="run by test_cufile.py"),
]
DONE, FAILED, UNKNOWN = TransferState.DONE, TransferState.FAILED, TransferState.UNKNOWN
BACKENDS: dict[str, Backend] = {
    "GDS_MT": GdsMtBackend(num_threads=2),
    "GDS": GdsBackend(max_batches=4, batch_pieces=64, max_piece_bytes=2 * PAGE),
}


class PacedClock(FakeClock):
    """Stands still like any fake clock, but its sleeps leave the plugin's threads the time to work."""

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        threading.Event().wait(duration_s)


@pytest.fixture
def cufile() -> Iterator[CufileForTests]:
    """Heals what a test has broken."""
    cufile = CufileForTests()
    yield cufile
    cufile.heal()


class TestContract(AgentContract):
    @pytest.fixture
    def clock(self, cufile: CufileForTests) -> FakeClock:
        return PacedClock()

    def make_agent(self, clock: Clock) -> NixlAgent:
        return NixlAgent("contract", [UcxBackend(), BACKENDS[NAME]], clock=clock)

    def stall(
        self, agent: NixlAgent, local: Descriptors, tmp_path: Path, *, timeout_s: float
    ) -> tuple[Transfer, Callable[[], None]]:
        path = tmp_path / "stalled"
        path.write_bytes(bytes(PAGE))
        fd = os.open(path, os.O_RDWR)
        agent.register_files([fd], [PAGE])
        cufile = CufileForTests()
        cufile.order(Call.READ, Fault.HANG, count=1)
        transfer = agent.submit(
            Op.READ, local, file_rows(fd, 0), timeout_s=timeout_s, what="stalled load"
        )
        cufile.until(lambda: cufile.hanging() == 1, "the read")
        return transfer, cufile.heal


class Bench:
    """An agent with nothing but the plugin, a memory, and a file of `SLOTS` pages."""

    def __init__(self, tmp_path: Path, flags: int = os.O_RDWR) -> None:
        self.agent = NixlAgent("bench", [BACKENDS[NAME]])
        self.memory = Memory()
        self.memory.fill(*range(SLOTS))
        self.agent.register_memory(self.memory.address, self.memory.size_bytes)
        path = tmp_path / "file"
        path.write_bytes(os.urandom(SLOTS * PAGE))
        self.fd = os.open(path, flags)
        self.agent.register_files([self.fd], [SLOTS * PAGE])

    def submit(self, op: Op, *slots: int, timeout_s: float = 20.0) -> Transfer:
        return self.agent.submit(
            op,
            self.memory.rows(*slots),
            file_rows(self.fd, *slots),
            timeout_s=timeout_s,
            what="a test",
        )

    def move(self, op: Op, *slots: int) -> Transfer:
        return self.agent.wait(self.submit(op, *slots))


@pytest.fixture
def bench(cufile: CufileForTests, tmp_path: Path) -> Iterator[Bench]:
    def live() -> dict[str, int]:
        # Without memory: an agent that was left to its I/O has some of an address that may come again.
        return {name: count for name, count in cufile.live().items() if name != "buffers"}

    before = live()
    bench = Bench(tmp_path)
    yield bench
    bench.agent.check()
    assert bench.agent.close() == []
    os.close(bench.fd)
    assert live() == before


def test_a_read_past_the_end_of_a_file_fails(bench: Bench) -> None:
    os.ftruncate(bench.fd, PAGE + 100)
    assert bench.move(Op.READ, 0).state is DONE
    late = bench.move(Op.READ, 0, 1)
    assert (late.state, late.settled) == (FAILED, True)


def test_c08_files_and_memory_are_given_back_whatever_happens(
    bench: Bench, cufile: CufileForTests, tmp_path: Path
) -> None:
    def open_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, live = open_fds(), cufile.live()
    cufile.order(Call.WRITE, Fault.FAIL, value=errno.ENOSPC, first=3, count=7)
    for number in range(50):
        fd = os.open(tmp_path / f"{number}", os.O_RDWR | os.O_CREAT)
        region = bench.agent.register_files([fd], [PAGE])
        bench.agent.wait(
            bench.agent.submit(
                Op.WRITE, bench.memory.rows(0), file_rows(fd, 0), timeout_s=20, what="store"
            )
        )
        region.release()
        os.close(fd)
    assert (open_fds(), cufile.live()) == (before, live)


def test_a_file_that_cufile_refuses_is_not_registered(bench: Bench, cufile: CufileForTests) -> None:
    cufile.order(Call.HANDLE, Fault.FAIL, value=5008)
    fd = os.open("/dev/null", os.O_RDWR)
    with pytest.raises(NixlError, match="register_memory"):
        bench.agent.register_files([fd], [PAGE])
    os.close(fd)
    bench.agent.check()
    assert bench.move(Op.READ, 0).state is DONE


def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    cufile: CufileForTests, tmp_path: Path
) -> None:
    cufile.order(Call.BUFFER, Fault.FAIL, value=5036)
    bench = Bench(tmp_path)
    assert bench.move(Op.WRITE, 0, 1).state is DONE
    assert os.pread(bench.fd, PAGE, PAGE) == bench.memory.page(1)
    assert bench.agent.close() == []
    os.close(bench.fd)


def test_a_deadline_leaves_the_transfer_unknown_until_the_io_has_ended(
    bench: Bench, cufile: CufileForTests
) -> None:
    cufile.order(Call.READ, Fault.HANG)
    late = bench.submit(Op.READ, 0, 1, timeout_s=0.05)
    bench.agent.wait(late)
    assert (late.state, late.settled) == (UNKNOWN, False)
    assert isinstance(late.error, DeadlineExceeded)
    cufile.heal()

    def settled() -> bool:
        bench.agent.poll()
        return late.settled

    cufile.until(settled, "the end of the read")
    assert bench.move(Op.READ, 2).state is DONE


def test_c20_two_agents_move_one_file_through_descriptors_of_their_own(
    bench: Bench, cufile: CufileForTests, tmp_path: Path
) -> None:
    """The one that ends first closes nothing of the other's."""
    other = NixlAgent("other", [BACKENDS[NAME]])
    memory = Memory()
    other.register_memory(memory.address, memory.size_bytes)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    region = other.register_files([fd], [SLOTS * PAGE])
    cufile.order(Call.READ, Fault.HANG, count=1)
    first = bench.submit(Op.READ, *range(8))
    cufile.until(lambda: cufile.hanging() == 1, "the first read")
    second = other.wait(
        other.submit(
            Op.READ, memory.rows(*range(8)), file_rows(fd, *range(8)), timeout_s=20, what="load"
        )
    )
    assert second.state is DONE
    region.release()
    os.close(fd)
    assert other.close() == []
    cufile.heal()
    assert bench.agent.wait(first).state is DONE
    assert [bench.memory.page(i) for i in range(8)] == [memory.page(i) for i in range(8)]


def test_closing_over_io_that_hangs_leaves_it_and_the_process_can_end() -> None:
    """NIXL itself would wait for the end of the I/O, for ever."""
    program = f"""
    import os, tempfile
    from pdoffload.agent.agent import Op
    from pdoffload.agent.backends import *
    from pdoffload.agent.nixl import NixlAgent
    from pdoffload.testing.agent_rig import *
    from pdoffload.testing.cufile import *
    agent = NixlAgent("left", [{type(BACKENDS[NAME]).__name__}()])
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    file = tempfile.TemporaryFile()
    file.write(bytes(PAGE)); file.flush()
    agent.register_files([file.fileno()], [PAGE])
    cufile = CufileForTests()
    cufile.order(Call.READ, Fault.HANG)
    move = agent.submit(Op.READ, memory.rows(0), file_rows(file.fileno(), 0), timeout_s=5, what="load")
    cufile.until(lambda: cufile.hanging() == 1, "the read")
    assert agent.close(timeout_s=0.01) == [move]
    del agent
    print("closed", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


if NAME == "GDS_MT":

    @pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
    @pytest.mark.parametrize("fault", [Fault.FAIL, Fault.SHORT])
    def test_one_failed_or_short_piece_fails_its_own_transfer_alone(
        bench: Bench, cufile: CufileForTests, op: Op, fault: Fault
    ) -> None:
        call = Call.READ if op is Op.READ else Call.WRITE
        cufile.order(call, fault, value=errno.EIO, first=2, count=1)
        bad = bench.move(op, 0, 1, 2, 3)
        assert (bad.state, bad.settled) == (FAILED, True)
        assert "NIXL_ERR_BACKEND" in str(bad.error)
        assert bench.move(op, 4, 5).state is DONE

    def test_a_failure_is_told_when_every_piece_has_ended(
        cufile: CufileForTests, tmp_path: Path
    ) -> None:
        bench = Bench(tmp_path, os.O_RDONLY)  # every write fails
        cufile.order(Call.WRITE, Fault.HANG, first=2, count=1)
        bad = bench.submit(Op.WRITE, 0, 1)
        cufile.until(lambda: cufile.calls(Call.WRITE) == 2 and cufile.hanging() == 1, "both writes")
        for _ in range(20):
            bench.agent.poll()
            assert bad.state is TransferState.RUNNING
        cufile.heal()
        assert bench.agent.wait(bad).state is FAILED
        assert bench.agent.close() == []
        os.close(bench.fd)


if NAME == "GDS":

    @pytest.mark.parametrize("fault", [Fault.FAIL, Fault.SHORT])
    def test_what_failed_is_told_as_done(
        bench: Bench, cufile: CufileForTests, fault: Fault
    ) -> None:
        """Why this plugin needs somebody above it who sees that bytes are missing."""
        old = os.pread(bench.fd, PAGE, PAGE)
        cufile.order(Call.WRITE, fault, value=errno.ENOSPC)
        assert bench.move(Op.WRITE, 1).state is DONE
        assert os.pread(bench.fd, PAGE, PAGE) != bench.memory.page(1)
        assert os.pread(bench.fd, PAGE // 2, PAGE + PAGE // 2) == old[PAGE // 2 :]

    def test_a_refused_submit_is_unknown_and_the_agent_is_used_up(
        cufile: CufileForTests, tmp_path: Path
    ) -> None:
        bench = Bench(tmp_path)
        cufile.order(Call.SUBMIT, Fault.FAIL, value=5035)
        bad = bench.move(Op.WRITE, 0)
        assert (bad.state, bad.settled) == (UNKNOWN, False)
        cufile.heal()
        assert bench.move(Op.WRITE, 1).state is FAILED
        assert bench.agent.close(timeout_s=0.05) == [bad]

    def test_a_request_is_one_batch_or_is_refused(bench: Bench) -> None:
        assert "batch_pieces 64" in str(_tiny_pieces(bench, 65, FAILED).error)
        _tiny_pieces(bench, 64, DONE)
        _tiny_pieces(bench, 64, DONE)
        whole = pieces(MemoryKind.DRAM, [bench.memory.address], SLOTS * PAGE)
        file = pieces(MemoryKind.FILE, [0], SLOTS * PAGE, bench.fd)
        move = bench.agent.submit(Op.WRITE, whole, file, timeout_s=20, what="store")
        assert bench.agent.wait(move).state is DONE, "cut into 16 pieces"
        assert os.pread(bench.fd, PAGE, (SLOTS - 1) * PAGE) == bench.memory.page(SLOTS - 1)

    def _tiny_pieces(bench: Bench, count: int, state: TransferState) -> Transfer:
        starts = [bench.memory.address + i * 16 for i in range(count)]
        local = pieces(MemoryKind.DRAM, starts, 16)
        remote = pieces(MemoryKind.FILE, [i * 16 for i in range(count)], 16, bench.fd)
        move = bench.agent.submit(Op.WRITE, local, remote, timeout_s=20, what="store")
        assert bench.agent.wait(move).state is state
        return move

    def test_a_request_that_finds_no_batch_is_refused_and_harms_nobody(
        bench: Bench, cufile: CufileForTests
    ) -> None:
        cufile.order(Call.READ, Fault.HANG)
        running = [bench.submit(Op.READ, slot) for slot in range(4)]
        fifth = bench.submit(Op.READ, 4)
        assert fifth.state is FAILED
        assert "max_batches" in str(fifth.error)
        cufile.heal()
        assert [bench.agent.wait(each).state for each in running] == [DONE] * 4
        assert bench.move(Op.READ, 4).state is DONE


def test_a_posix_backend_beside_it_still_counts_its_own(
    cufile: CufileForTests, tmp_path: Path
) -> None:
    agent = NixlAgent("both", [PosixBackend(max_ios=64), BACKENDS[NAME]])
    memory = Memory()
    agent.register_memory(memory.address, memory.size_bytes)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    region = agent.register_files([fd], [SLOTS * PAGE])
    moved = agent.wait(
        agent.submit(Op.WRITE, memory.rows(0, 1), file_rows(fd, 0, 1), timeout_s=20, what="store")
    )
    assert moved.state is DONE
    region.release()
    os.close(fd)
    assert agent.close() == []
