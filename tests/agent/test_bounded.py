"""Calls that do not return are given up, and what they leave is cleared when they do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pdoffload.agent.bounded import BoundedDriver
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.errors import BackendUnusable, NixlError
from pdoffload.testing.agents import FakeDriver

PATIENCE_S = 20.0


class SlowDriver(FakeDriver):
    """Adding a peer takes until it is allowed to end."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.current_thread()
        self.may_end = threading.Event()
        self.closed = threading.Event()

    def add_peer(self, metadata: bytes) -> None:
        assert threading.current_thread() is self.thread
        self.may_end.wait(PATIENCE_S)

    def close(self, *, abandon: bool) -> None:
        super().close(abandon=abandon)
        self.closed.set()


@pytest.fixture
def made() -> list[SlowDriver]:
    return []


@pytest.fixture
def bounded(made: list[SlowDriver]) -> Iterator[BoundedDriver]:
    def open_driver() -> SlowDriver:
        made.append(SlowDriver())
        return made[-1]

    yield BoundedDriver("slow", open_driver, timeout_s=0.05)
    made[-1].may_end.set()


def test_calls_and_errors_come_through_and_closing_ends_the_thread(
    bounded: BoundedDriver, made: list[SlowDriver]
) -> None:
    memory = bytearray(8)
    rows = pieces(MemoryKind.DRAM, [4096], len(memory)).rows
    bounded.deregister(bounded.register(MemoryKind.DRAM, rows))
    with pytest.raises(NixlError, match="garbled"):
        bounded.name_in(b"nonsense")
    assert not bounded.lost
    bounded.close(abandon=False)
    assert made[0].closed.is_set()
    made[0].thread.join(PATIENCE_S)
    assert not made[0].thread.is_alive()


def test_a_late_call_loses_the_driver_which_is_closed_when_the_call_returns(
    bounded: BoundedDriver, made: list[SlowDriver]
) -> None:
    with pytest.raises(NixlError, match=r"not returned within 0\.05 s"):
        bounded.add_peer(b"")
    assert bounded.lost
    with pytest.raises(NixlError, match="lost: add_remote_agent has not returned"):
        bounded.progress()
    with pytest.raises(NixlError, match="lost"):
        bounded.close(abandon=False)
    assert not made[0].closed.is_set()
    made[0].may_end.set()
    assert made[0].closed.wait(PATIENCE_S)
    made[0].thread.join(PATIENCE_S)
    assert not made[0].thread.is_alive()


def test_a_driver_that_cannot_be_opened_leaves_no_thread() -> None:
    seen: list[threading.Thread] = []

    def refuse() -> SlowDriver:
        seen.append(threading.current_thread())
        raise BackendUnusable("create_backend", "no such thing")

    with pytest.raises(BackendUnusable, match="no such thing"):
        BoundedDriver("none", refuse)
    seen[0].join(PATIENCE_S)
    assert not seen[0].is_alive()
