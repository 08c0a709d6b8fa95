"""NIXL itself keeps the part of the contract that needs a store, over S3 and over Azurite."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.backends import AzureBlobBackend, ObjBackend, PosixBackend
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.agent.nixl import NixlAgent
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import Clock
from pdoffload.config.stores import endpoint_of
from pdoffload.errors import NixlError
from pdoffload.testing.agent_rig import PAGE, Memory
from pdoffload.testing.azurite_server import AzuriteServer
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.object_contract import ObjectContract
from pdoffload.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from pdoffload.testing.store_server import Reply, StoreServer

pytestmark = [pytest.mark.nixl, pytest.mark.s3]


def s3_backend(url: str) -> ObjBackend:
    return ObjBackend(
        bucket="chunks", endpoint=url, scheme="http", access_key=ACCESS_KEY, secret_key=SECRET_KEY
    )


_KEPT: list[Memory] = []
"""Memory into which a store's client may still write."""


class PacedClock(FakeClock):
    """Stands still like any fake clock, but its sleeps leave the store the time to answer."""

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        threading.Event().wait(duration_s)


class TestOverS3(ObjectContract):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return PacedClock()

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self._url = s3_server.url

    def make_agent(self, clock: Clock) -> NixlAgent:
        return NixlAgent("objects", [s3_backend(self._url)], clock=clock)


class TestOverAzurite(ObjectContract):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return PacedClock()

    @pytest.fixture(autouse=True)
    def _server(self, azurite_server: AzuriteServer) -> None:
        self._connection_string = azurite_server.connection_string
        assert endpoint_of(azurite_server.tier("chunks")).port == azurite_server.port

    def make_agent(self, clock: Clock) -> NixlAgent:
        backend = AzureBlobBackend(container="chunks", connection_string=self._connection_string)
        return NixlAgent("objects", [backend], clock=clock)


def test_an_agent_without_a_store_says_so() -> None:
    agent = NixlAgent("files", [PosixBackend()])
    try:
        with pytest.raises(NixlError, match="no backend of \\['POSIX'\\] has objects"):
            agent.query_objects(["x"])
    finally:
        agent.close()


def test_a_failed_transfer_of_several_objects_is_unknown_until_the_end(
    s3_server: S3Server,
) -> None:
    agent = NixlAgent("several", [s3_backend(s3_server.url)])
    memory = Memory()
    _KEPT.append(memory)
    agent.register_memory(memory.address, memory.size_bytes)
    names = ["several/absent", "several/absent too"]
    ids = agent.register_objects(names, [PAGE, PAGE]).rows[:, 2].tolist()
    lost = agent.submit(
        Op.READ,
        memory.rows(0, 1),
        pieces(MemoryKind.OBJECT, [0, 0], PAGE, ids),
        timeout_s=30,
        what="two objects",
    )
    agent.wait(lost)
    assert (lost.state, lost.settled) == (TransferState.UNKNOWN, False)
    assert agent.close(timeout_s=0.1) == [lost], "its client may still write: the agent stays"


@pytest.mark.parametrize("status", [403, 500])
def test_a_question_that_is_refused_is_an_error_not_an_absence(status: int) -> None:
    with StoreServer(lambda *_: Reply(status)) as server:
        agent = NixlAgent("refused", [s3_backend(server.url)])
        try:
            with pytest.raises(NixlError, match="query_memory"):
                agent.query_objects(["a", "b"])
            attempts = server.asked.count("HEAD /chunks/a")
            assert attempts == 1 if status == 403 else 2 <= attempts <= 4
        finally:
            agent.close()


def test_an_operators_own_retries_stand() -> None:
    """Two settings of the SDK are made for the process, unless the operator has made them."""
    program = """
        import os
        from pdoffload.agent.process import bound_retries
        bound_retries()
        print(os.environ["AWS_MAX_ATTEMPTS"], os.environ["AWS_RETRY_MODE"])
    """
    env = {**os.environ, "AWS_MAX_ATTEMPTS": "9", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["9", "standard"]


def test_a_process_ends_well_while_the_store_is_silent() -> None:
    """Two calls hang: a question on one thread, a write on another. Neither may abort the process."""
    program = """
        import sys, threading
        from pdoffload.agent.agent import Op
        from pdoffload.agent.nixl import NixlAgent
        from pdoffload.testing.agent_rig import PAGE, Memory, object_rows
        from pdoffload.testing.store_server import Reply, StoreServer
        sys.path.insert(0, "tests/agent")
        from test_objects import s3_backend

        never, asked = threading.Event(), threading.Event()

        def script(method, path):
            if method == "HEAD":
                asked.set()
            return Reply(wait=never)

        server = StoreServer(script).__enter__()

        def ask():
            NixlAgent("asks", [s3_backend(server.url)]).query_objects(["x"])

        threading.Thread(target=ask, daemon=True).start()
        agent = NixlAgent("writes", [s3_backend(server.url)])
        memory = Memory()
        agent.register_memory(memory.address, memory.size_bytes)
        (device,) = agent.register_objects(["y"], [PAGE]).rows[:, 2].tolist()
        late = agent.submit(
            Op.WRITE, memory.rows(0), object_rows(device), timeout_s=0.2, what="a write"
        )
        agent.wait(late)
        assert asked.wait(30)
        assert agent.close(timeout_s=0.1) == [late]
        print("left behind", flush=True)
        import ctypes
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_RETRY_MODE": "standard",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "left behind"), done.stderr[-3000:]
