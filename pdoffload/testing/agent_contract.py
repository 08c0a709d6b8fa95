"""The contract of `pdoffload.agent.agent.Agent` as tests: inherit `AgentContract` and run it by pytest.

A subclass says how to make an agent and how to start a transfer that does not end by itself.
"""

from __future__ import annotations

import os
import random
import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, pieces
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.region import Region
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.errors import DeadlineExceeded, MisuseError, TransferError
from pdoffload.testing.agent_rig import PAGE, SLOTS, AgentRig, Memory, file_rows
from pdoffload.testing.clock import FakeClock


class AgentContract(AgentRig):
    """Every agent passes this."""

    @abstractmethod
    def stall(
        self, agent: DrivenAgent, local: Descriptors, tmp_path: Path, *, timeout_s: float
    ) -> tuple[Transfer, Callable[[], None]]:
        """A READ from a file into one page that runs until the returned function has been called."""

    # --- bytes ---

    def test_a_write_and_a_read_between_memories_move_each_row(
        self, agent: DrivenAgent, here: Memory, there: Memory
    ) -> None:
        here.fill(0, 1, 2)
        there.fill(7)
        sent = self.move(agent, Op.WRITE, here.rows(0, 2), there.rows(5, 3))
        back = self.move(agent, Op.READ, here.rows(9), there.rows(7))
        assert (sent.state, back.state) == (TransferState.DONE, TransferState.DONE)
        assert (there.page(5), there.page(3)) == (here.page(0), here.page(2))
        assert here.page(9) == there.page(7)
        assert there.page(4) == bytes(PAGE), "a byte outside the rows has changed"
        assert sent.settled
        assert sent.error is None
        assert sent.size_bytes == 2 * PAGE

    def test_a_file_takes_and_gives_back_each_row(
        self, agent: DrivenAgent, here: Memory, fd: int
    ) -> None:
        here.fill(0, 1)
        sent = self.move(agent, Op.WRITE, here.rows(0, 1), file_rows(fd, 3, 1))
        assert os.pread(fd, PAGE, 3 * PAGE) == here.page(0)
        back = self.move(agent, Op.READ, here.rows(8, 9), file_rows(fd, 3, 1))
        assert (sent.state, back.state) == (TransferState.DONE, TransferState.DONE)
        assert (here.page(8), here.page(9)) == (here.page(0), here.page(1))

    def test_one_source_may_feed_two_destinations(
        self, agent: DrivenAgent, here: Memory, there: Memory
    ) -> None:
        here.fill(0)
        self.move(agent, Op.WRITE, here.rows(0, 0), there.rows(1, 2))
        assert there.page(1) == there.page(2) == here.page(0)

    def test_a_file_that_is_too_short_fails_its_transfer_and_not_the_next(
        self, agent: DrivenAgent, here: Memory, fd: int
    ) -> None:
        os.pwrite(fd, b"x" * PAGE, 0)
        os.ftruncate(fd, PAGE + 100)
        cut = self.move(agent, Op.READ, here.rows(0, 1), file_rows(fd, 0, 1))
        assert cut.state is TransferState.FAILED
        assert cut.settled
        assert isinstance(cut.error, TransferError)
        assert "a test" in str(cut.error)
        good = self.move(agent, Op.READ, here.rows(2), file_rows(fd, 0))
        assert good.state is TransferState.DONE
        assert here.page(2) == b"x" * PAGE

    # --- what is told, and when ---

    def test_an_end_is_told_once(self, agent: DrivenAgent, here: Memory, fd: int) -> None:
        waited = self.move(agent, Op.READ, here.rows(0), file_rows(fd, 0))
        assert agent.poll() == []
        polled = agent.submit(Op.READ, here.rows(1), file_rows(fd, 1), timeout_s=30, what="polled")
        told: list[Transfer] = []
        while polled.state is TransferState.RUNNING:
            told += agent.poll()
        assert told in ([polled], []), "submit may have ended it already"
        assert agent.poll() == []
        assert agent.wait(polled) is polled
        assert waited.state is TransferState.DONE

    def test_a_deadline_leaves_the_transfer_unknown_until_it_is_over(
        self, agent: DrivenAgent, clock: FakeClock, here: Memory, tmp_path: Path
    ) -> None:
        late, finish = self.stall(agent, here.rows(0), tmp_path, timeout_s=0.05)
        start_s = clock.monotonic_s()
        assert agent.wait(late) is late
        assert clock.monotonic_s() - start_s < 0.06, "wait is bounded by the transfer's deadline"
        assert late.state is TransferState.UNKNOWN
        assert not late.settled
        assert isinstance(late.error, DeadlineExceeded)
        assert "stalled" in str(late.error)
        assert agent.poll() == []
        finish()
        told = self.poll_until(agent, late)
        assert told == [late]
        assert (late.state, late.settled_state) == (TransferState.UNKNOWN, TransferState.DONE)

    def test_others_end_while_one_stalls(
        self, agent: DrivenAgent, here: Memory, there: Memory, tmp_path: Path
    ) -> None:
        slow, finish = self.stall(agent, here.rows(0), tmp_path, timeout_s=1000.0)
        here.fill(1)
        finish_first = self.move(agent, Op.WRITE, here.rows(1), there.rows(1))
        if finish_first.state is TransferState.RUNNING:
            agent.wait(finish_first)
        assert slow.state is TransferState.RUNNING
        finish()
        assert agent.wait(slow).state is TransferState.DONE

    # --- what is refused before NIXL sees it ---

    def test_rows_that_do_not_match_are_refused(
        self, agent: DrivenAgent, here: Memory, there: Memory
    ) -> None:
        self.refuse(agent, here.rows(0, 1), there.rows(0), "2 local rows and 1 remote")
        self.refuse(agent, here.rows(0), there.rows(0, size_bytes=100), "length of a row")

    def test_rows_outside_every_region_are_refused(
        self, agent: DrivenAgent, here: Memory, there: Memory, fd: int
    ) -> None:
        end = SLOTS - 1
        for bad in (
            here.rows(0, SLOTS),
            here.rows(0, -1),
            here.rows(0, end, size_bytes=PAGE + 1),
            pieces(MemoryKind.DRAM, [here.address, 8], PAGE),
            pieces(MemoryKind.DRAM, np.array([here.address, 2**64 - 100], np.uint64), PAGE),
            pieces(MemoryKind.DRAM, [here.address, here.address + PAGE], PAGE, [0, 3]),
        ):
            size = int(bad.rows[0, 1])
            self.refuse(agent, bad, there.rows(0, 2, size_bytes=size), "local row 1")
        self.refuse(agent, here.rows(0), file_rows(fd, SLOTS), "remote row 0")
        self.refuse(agent, here.rows(0), file_rows(fd + 1, 0), "remote row 0")
        self.refuse(agent, pieces(MemoryKind.VRAM, [8], PAGE), there.rows(0), "no live VRAM")

    def test_two_rows_into_one_place_are_refused(
        self, agent: DrivenAgent, here: Memory, there: Memory, fd: int
    ) -> None:
        near = pieces(MemoryKind.DRAM, [there.address + 8191, there.address], PAGE)
        self.refuse(agent, here.rows(0, 1), there.rows(4, 4), "same bytes")
        self.refuse(agent, here.rows(4, 4), there.rows(0, 1), "same bytes", op=Op.READ)
        self.refuse(agent, here.rows(0, 1), file_rows(fd, 2, 2), "same bytes")
        assert self.move(agent, Op.WRITE, here.rows(0, 1), near).state is TransferState.DONE

    def test_what_is_no_descriptor_list_is_refused(
        self, agent: DrivenAgent, here: Memory, there: Memory
    ) -> None:
        good = here.rows(0)
        bad: tuple[Any, ...] = (
            good.rows.astype(np.float64),
            good.rows.astype(np.int64),
            good.rows[:, :2],
            good.rows[:0],
        )
        for rows in bad:
            self.refuse(agent, Descriptors(MemoryKind.DRAM, rows), there.rows(0), "want uint64")
        self.refuse(agent, file_rows(0, 0), there.rows(0), "cannot be this side")

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_transfer_has_a_deadline(
        self, agent: DrivenAgent, here: Memory, there: Memory, timeout_s: float
    ) -> None:
        self.refuse(agent, here.rows(0), there.rows(0), "timeout_s", timeout_s=timeout_s)

    # --- regions ---

    def test_c20_nothing_is_registered_twice(
        self, agent: DrivenAgent, here: Memory, fd: int
    ) -> None:
        attempts: tuple[Callable[[], Region], ...] = (
            lambda: agent.register_files([fd], [PAGE]),
            lambda: agent.register_files([fd + 100, fd + 100], [PAGE, PAGE]),
            lambda: agent.register_memory(here.address, PAGE),
            lambda: agent.register_memory(here.address - 100, 101),
            lambda: agent.register_memory(here.address + here.size_bytes - 1, PAGE),
        )
        for again in attempts:
            with pytest.raises(MisuseError, match="part of a live region"):
                again()
        agent.check()

    def test_c20_a_region_is_released_once_and_then_free(
        self, agent: DrivenAgent, here: Memory, tmp_path: Path
    ) -> None:
        fd = os.open(tmp_path / "again", os.O_RDWR | os.O_CREAT)
        first = agent.register_files([fd], [PAGE])
        first.release()
        assert first.released
        with pytest.raises(MisuseError, match="released already"):
            first.release()
        self.refuse(agent, here.rows(0), file_rows(fd, 0), "FILE")
        second = agent.register_files([fd], [PAGE])
        assert second.generation != first.generation
        assert self.move(agent, Op.WRITE, here.rows(0), file_rows(fd, 0)).settled
        second.release()
        os.close(fd)

    def test_c20_random_overlaps_of_files_balance(
        self, agent: DrivenAgent, here: Memory, tmp_path: Path
    ) -> None:
        rng = random.Random(20)
        here.fill(*range(8))
        fds = [os.open(tmp_path / f"{i}", os.O_RDWR | os.O_CREAT) for i in range(8)]
        live = {}
        for _ in range(1000):
            i = rng.randrange(8)
            if i not in live:
                live[i] = agent.register_files([fds[i]], [PAGE])
                done = self.move(agent, Op.WRITE, here.rows(i), file_rows(fds[i], 0))
                assert done.state is TransferState.DONE
            elif rng.random() < 0.5:
                with pytest.raises(MisuseError):
                    agent.register_files([fds[i]], [PAGE])
            else:
                live.pop(i).release()
                assert os.pread(fds[i], PAGE, 0) == here.page(i)
        agent.check()
        for region in live.values():
            region.release()
        for fd in fds:
            os.close(fd)

    def test_a_region_outlives_the_transfers_that_use_it(
        self, agent: DrivenAgent, clock: FakeClock, tmp_path: Path
    ) -> None:
        memory = Memory()
        region = agent.register_memory(memory.address, memory.size_bytes)
        slow, finish = self.stall(agent, memory.rows(0), tmp_path, timeout_s=0.05)
        with pytest.raises(MisuseError, match="in use"):
            region.release()
        agent.wait(slow)
        with pytest.raises(MisuseError, match="in use"):
            region.release()
        finish()
        self.poll_until(agent, slow)
        region.release()

    @pytest.mark.parametrize(("address", "size_bytes"), [(0, 10), (4096, 0), (4096, -1), (-1, 1)])
    def test_no_memory_is_no_region(
        self, agent: DrivenAgent, address: int, size_bytes: int
    ) -> None:
        with pytest.raises(MisuseError):
            agent.register_memory(address, size_bytes)

    def test_no_file_is_no_region(self, agent: DrivenAgent) -> None:
        for fds, sizes in (([], []), ([5], []), ([-1], [1]), ([5], [0])):
            with pytest.raises(MisuseError):
                agent.register_files(fds, sizes)

    # --- counts, owner, end ---

    def test_c08_everything_made_is_given_back(
        self, agent: DrivenAgent, here: Memory, there: Memory, fd: int
    ) -> None:
        for i in range(100):
            self.move(agent, Op.WRITE, here.rows(i % SLOTS), there.rows(i % SLOTS))
            self.move(agent, Op.READ, here.rows(i % SLOTS), file_rows(fd, i % SLOTS))
        counts = agent.counts
        assert counts.transfers_made == counts.transfers_released == 200
        assert (counts.registrations_made, counts.registrations_released) == (3, 0)

    def test_another_thread_is_refused(self, agent: DrivenAgent, here: Memory) -> None:
        seen: list[BaseException] = []

        def intrude() -> None:
            for call in (
                agent.poll,
                agent.close,
                lambda: agent.register_files([0], [1]),
                lambda: agent.submit(
                    Op.READ, here.rows(0), here.rows(1), timeout_s=1, what="intrusion"
                ),
            ):
                try:
                    call()
                except MisuseError as error:
                    seen.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        assert ["another thread" in str(error) for error in seen] == [True] * 4

    def test_a_forked_child_is_refused(self, agent: DrivenAgent, here: Memory) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                agent.poll()
            except MisuseError as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert self.move(agent, Op.READ, here.rows(0), here.rows(1)).settled

    def test_a_closed_agent_refuses_and_has_given_everything_back(
        self, clock: FakeClock, tmp_path: Path
    ) -> None:
        agent = self.make_agent(clock)
        memory = Memory()
        region = agent.register_memory(memory.address, memory.size_bytes)
        assert agent.close() == []
        assert agent.close() == []
        assert agent.counts.balanced
        assert region.released
        with pytest.raises(MisuseError, match="closed"):
            agent.poll()
        with pytest.raises(MisuseError):
            region.release()

    def test_closing_waits_for_what_ends_in_time(self, clock: FakeClock, tmp_path: Path) -> None:
        agent = self.make_agent(clock)
        memory = Memory()
        agent.register_memory(memory.address, memory.size_bytes)
        fd = os.open(tmp_path / "late", os.O_RDWR | os.O_CREAT)
        agent.register_files([fd], [PAGE])
        memory.fill(0)
        last = agent.submit(
            Op.WRITE, memory.rows(0), file_rows(fd, 0), timeout_s=30, what="the last store"
        )
        assert agent.close(timeout_s=1000.0) == []
        assert last.settled_state is TransferState.DONE
        assert os.pread(fd, PAGE, 0) == memory.page(0)
        assert agent.counts.balanced
        os.close(fd)

    def test_closing_tells_of_file_io_that_goes_on(self, clock: FakeClock, tmp_path: Path) -> None:
        agent = self.make_agent(clock)
        memory = Memory()
        region = agent.register_memory(memory.address, memory.size_bytes)
        stuck, finish = self.stall(agent, memory.rows(0), tmp_path, timeout_s=1000.0)
        assert agent.close(timeout_s=0.05) == [stuck]
        assert agent.close() == [stuck]
        assert stuck.state is TransferState.UNKNOWN
        assert not stuck.settled
        assert not region.released
        finish()
