"""Two processes and a real NIXL between them: bytes, and what becomes of them when one of the two goes.

UCX's transports are chosen in the children's environment, as an operator would: it is read once a process.
LIBFABRIC needs a Python of its own (`make fabric`), and goes over TCP.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pdoffload.testing.interpreter import Interpreter
from pdoffload.testing.peer_child import PAGE, PeerChild

pytestmark = pytest.mark.nixl

SIZE_BYTES = 32 << 20
PIECE_BYTES = 1 << 20
PIECES = SIZE_BYTES // PIECE_BYTES

Start = Callable[[], PeerChild]


FABRIC = "LIBFABRIC"


@pytest.fixture(scope="module", params=["tcp", "cma,tcp", FABRIC])
def transports(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(transports: str, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts processes that end with the test."""
    interpreter: Interpreter | None = None
    if transports == FABRIC:
        interpreter = request.getfixturevalue("fabric")

    def start_one() -> PeerChild:
        if interpreter is not None:
            return PeerChild(SIZE_BYTES, FABRIC, interpreter=interpreter)
        return PeerChild(SIZE_BYTES, UCX_TLS=transports)

    with ExitStack() as stack:
        yield lambda: stack.enter_context(start_one())


def serve(child: PeerChild, name: str = "") -> dict[str, Any]:
    """Open an agent that lets bytes land; its metadata and address."""
    child.ask(f"open {name}")
    child.ask("serve")
    return child.ask("metadata")


def connect(writer: PeerChild, told: dict[str, Any]) -> None:
    """Add the peer and write a page to it: the connection is made, both sides can write at once."""
    added = writer.ask(f"add {told['metadata']}")
    assert "peer" in added, added
    assert write(writer, told, 1, piece_bytes=PAGE)["state"] == "done"


def write(
    writer: PeerChild,
    told: dict[str, Any],
    count: int = PIECES,
    *,
    piece_bytes: int = PIECE_BYTES,
    timeout_s: float = 60,
) -> dict[str, Any]:
    writer.ask(f"write {told['address']} {piece_bytes} {count} {timeout_s}")
    return writer.ask("wait")


def same(writer: PeerChild, reader: PeerChild) -> bool:
    return writer.ask("digest") == reader.ask("digest")


def replace(writer: PeerChild) -> None:
    """What a caller does after UNKNOWN: the agent is closed, another takes its place."""
    writer.ask("close")
    writer.ask("open")


def test_bytes_arrive_and_the_transport_is_told(start: Start, transports: str) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    connect(writer, told)
    done = write(writer, told)
    assert done["state"] == "done"
    assert same(writer, reader)
    expected = {"tcp": "tcp/", "cma,tcp": "cma/memory", FABRIC: "LIBFABRIC/tcp"}[transports]
    assert done["transport"].startswith(expected), done


def test_c17_a_peer_killed_in_the_middle_fails_its_write_at_once_and_may_come_back(
    start: Start, transports: str
) -> None:
    writer = start()
    writer.ask("open")
    for name in ("same", "same", "other"):
        reader = start()
        told = serve(reader, name)
        connect(writer, told)
        reader.ask("rest")
        posted = writer.ask(f"write {told['address']} {PIECE_BYTES} {PIECES} 60")
        reader.signal(signal.SIGKILL)
        ended = writer.ask("wait")
        if posted["state"] == "done":
            assert "cma" in transports, "cma alone writes without the reader"
            ended = write(writer, told, 1)
        assert ended["state"] == "unknown"
        said = "NIXL_ERR_BACKEND" if transports == FABRIC else "REMOTE_DISCONNECT"
        assert said in ended["error"]
        assert "still in use" in writer.ask("remove")["error"]
        replace(writer)


def test_a_peer_that_is_gone_is_refused_or_its_first_write_fails(start: Start) -> None:
    writer, added, reader = start(), start(), start()
    writer.ask("open")
    told, late = serve(added), serve(reader, "again")
    assert "peer" in writer.ask(f"add {told['metadata']}")
    added.signal(signal.SIGKILL)
    assert write(writer, told)["state"] == "unknown"
    replace(writer)
    reader.signal(signal.SIGKILL)
    # Its host answers that nobody listens there. The name may be added when somebody does.
    assert "failed" in writer.ask(f"add {late['metadata']}")["error"]
    connect(writer, serve(start(), "again"))


def test_a_stopped_peer_costs_a_deadline_and_serves_others_when_it_goes_on(
    start: Start, transports: str
) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    if transports == FABRIC:  # which waits for a peer that is new: see test_fabric.py
        connect(writer, told)
        reader.signal(signal.SIGSTOP)
    else:
        reader.signal(signal.SIGSTOP)
        writer.ask(f"add {told['metadata']}")
    late = write(writer, told, timeout_s=0.5)
    assert late["state"] == "unknown"
    assert "waited 0.5 s" in late["error"]
    replace(writer)
    reader.signal(signal.SIGCONT)
    connect(writer, told)
    assert write(writer, told)["state"] == "done"
    assert same(writer, reader)


def test_a_peer_that_stops_in_the_middle_and_goes_on_gets_all_bytes(start: Start) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    connect(writer, told)
    reader.signal(signal.SIGSTOP)
    writer.ask(f"write {told['address']} {PIECE_BYTES} {PIECES} 60")
    reader.signal(signal.SIGCONT)
    assert writer.ask("wait")["state"] == "done"
    assert same(writer, reader)


def test_a_reader_that_closes_its_agent_ends_the_write_and_can_open_another(
    start: Start, transports: str
) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    connect(writer, told)
    reader.ask("rest")
    writer.ask(f"write {told['address']} {PIECE_BYTES} {PIECES} 60")
    assert reader.ask("close") == {}
    ended = writer.ask("wait")["state"]
    assert ended == ("done" if "cma" in transports else "unknown")
    replace(writer)
    told = serve(reader)
    connect(writer, told)
    assert write(writer, told)["state"] == "done"
    assert same(writer, reader)


def test_a_writer_killed_in_the_middle_leaves_the_reader_to_others(start: Start) -> None:
    first, second, reader = start(), start(), start()
    first.ask("open")
    second.ask("open")
    told = serve(reader)
    connect(first, told)
    reader.ask("rest")
    first.ask(f"write {told['address']} {PIECE_BYTES} {PIECES} 60")
    first.signal(signal.SIGKILL)
    reader.ask("serve")
    connect(second, told)
    assert write(second, told)["state"] == "done"
    assert same(second, reader)


def test_c17_handles_and_descriptors_stay_flat_while_peers_come_and_go(start: Start) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    open_fds = []
    for _ in range(20):
        told = serve(reader, "again")
        assert writer.ask(f"cycle {told['metadata']} {told['address']} 1") == {"balanced": True}
        reader.ask("close")
        # What a closed connection leaves is cleared by the progress of the next one.
        open_fds.append((writer.ask("fds")["fds"], reader.ask("fds")["fds"]))
    assert max(open_fds[1:]) <= (open_fds[1][0] + 2, open_fds[1][1])


def test_a_peer_added_again_and_again_leaves_nothing_when_the_agent_is_closed(
    start: Start,
) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    writer.ask("close")
    before = writer.ask("fds")["fds"]
    writer.ask("open")
    told = serve(reader)
    done = writer.ask(f"cycle {told['metadata']} {told['address']} 200")
    assert done == {"balanced": True}
    writer.ask("close")
    assert writer.ask("fds")["fds"] == before
    writer.ask("open")
    connect(writer, told)
    assert write(writer, told)["state"] == "done"
    assert same(writer, reader)
