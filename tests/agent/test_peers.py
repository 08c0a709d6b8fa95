"""Two processes and a real backend between them: bytes, and what becomes of them when one of the two goes.

UCX's transports are chosen in the children's environment, as an operator would: UCX reads it once a process.
LIBFABRIC needs a Python of its own (`make fabric`), and goes over TCP. MOONCAKE is the Transfer Engine by its
own package; threads of its own let bytes land, so a process that shall not let them is stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from pdoffload.testing import verbs
from pdoffload.testing.interpreter import Interpreter, this_one
from pdoffload.testing.peer_child import PAGE, PeerChild

pytestmark = pytest.mark.nixl

SIZE_BYTES = 32 << 20
PIECE_BYTES = 1 << 20
PIECES = SIZE_BYTES // PIECE_BYTES

Start = Callable[[], PeerChild]


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes reach each other, and what is special to it."""

    backend: str = "UCX"
    environment: Callable[[], Mapping[str, str]] = dict
    has_its_python: bool = False
    transport: str
    lost: str
    """What is said of a write whose peer is gone."""
    writes_alone: bool = False
    """Whether the reader has no part in a write."""
    has_threads: bool = False
    """Whether bytes land by threads of the backend's own."""
    greets: bool = False
    """Whether a peer that is new is waited for: see test_fabric.py."""


WAYS = {
    "tcp": Way(environment=lambda: {"UCX_TLS": "tcp"}, transport="tcp/", lost="REMOTE_DISCONNECT"),
    "cma,tcp": Way(
        environment=lambda: {"UCX_TLS": "cma,tcp"},
        transport="cma/memory",
        lost="REMOTE_DISCONNECT",
        writes_alone=True,
    ),
    "LIBFABRIC": Way(
        backend="LIBFABRIC",
        has_its_python=True,
        transport="LIBFABRIC/tcp",
        lost="NIXL_ERR_BACKEND",
        greets=True,
    ),
    "MOONCAKE": Way(
        backend="MOONCAKE",
        environment=verbs.environment,
        transport="MOONCAKE/tcp",
        lost="did not reach",
        has_threads=True,
    ),
}


@pytest.fixture(
    scope="module",
    params=["tcp", "cma,tcp", "LIBFABRIC", pytest.param("MOONCAKE", marks=pytest.mark.mooncake)],
)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def start(way: Way, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts processes that end with the test."""
    python: Interpreter = this_one()
    if way.has_its_python:
        python = request.getfixturevalue("fabric")

    def start_one() -> PeerChild:
        return PeerChild(SIZE_BYTES, way.backend, interpreter=python, **way.environment())

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


def hold(reader: PeerChild, way: Way) -> None:
    """No byte lands from now on, unless the writer needs nobody for that."""
    if way.has_threads:
        reader.signal(signal.SIGSTOP)
    else:
        reader.ask("rest")


def test_bytes_arrive_and_the_transport_is_told(start: Start, way: Way) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    connect(writer, told)
    done = write(writer, told)
    assert done["state"] == "done"
    assert same(writer, reader)
    assert done["transport"].startswith(way.transport), done


def test_c17_a_peer_killed_in_the_middle_fails_its_write_at_once_and_may_come_back(
    start: Start, way: Way
) -> None:
    writer = start()
    writer.ask("open")
    for name in ("same", "same", "other"):
        reader = start()
        told = serve(reader, name)
        connect(writer, told)
        hold(reader, way)
        posted = writer.ask(f"write {told['address']} {PIECE_BYTES} {PIECES} 60")
        reader.signal(signal.SIGKILL)
        ended = writer.ask("wait")
        if posted["state"] == "done":
            assert way.writes_alone
            ended = write(writer, told, 1)
        assert ended["state"] == "unknown"
        assert way.lost in ended["error"]
        assert "still in use" in writer.ask("remove")["error"]
        replace(writer)


def test_a_peer_that_is_gone_is_refused_or_its_first_write_fails(start: Start, way: Way) -> None:
    writer, added, reader = start(), start(), start()
    writer.ask("open")
    told, late = serve(added), serve(reader, "again")
    assert "peer" in writer.ask(f"add {told['metadata']}")
    added.signal(signal.SIGKILL)
    # An engine that is asked for first tells that nobody answers; not a byte has gone.
    assert write(writer, told)["state"] == ("failed" if way.has_threads else "unknown")
    replace(writer)
    reader.signal(signal.SIGKILL)
    # Its host answers that nobody listens there. The name may be added when somebody does.
    answer = writer.ask(f"add {late['metadata']}")
    if way.has_threads:
        answer = write(writer, late)
        writer.ask("remove")
    assert "failed" in answer["error"]
    connect(writer, serve(start(), "again"))


def test_a_stopped_peer_costs_a_deadline_and_serves_others_when_it_goes_on(
    start: Start, way: Way
) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    if way.greets:
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
    start: Start, way: Way
) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    connect(writer, told)
    reader.ask("rest")
    writer.ask(f"write {told['address']} {PIECE_BYTES} {PIECES} 60")
    assert reader.ask("close") == {}
    ended = writer.ask("wait")["state"]
    # Threads of its own may have let the last byte land before.
    assert ended == ("done" if way.writes_alone else "unknown") or way.has_threads
    replace(writer)
    told = serve(reader)
    connect(writer, told)
    assert write(writer, told)["state"] == "done"
    assert same(writer, reader)


def test_a_writer_killed_in_the_middle_leaves_the_reader_to_others(start: Start, way: Way) -> None:
    first, second, reader = start(), start(), start()
    first.ask("open")
    second.ask("open")
    told = serve(reader)
    connect(first, told)
    hold(reader, way)
    first.ask(f"write {told['address']} {PIECE_BYTES} {PIECES} 60")
    first.signal(signal.SIGKILL)
    reader.signal(signal.SIGCONT)
    reader.ask("serve")
    connect(second, told)
    assert write(second, told)["state"] == "done"
    assert same(second, reader)


def test_c17_handles_and_descriptors_stay_flat_while_peers_come_and_go(
    start: Start, way: Way
) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    open_fds = []
    for _ in range(20):
        told = serve(reader, "again")
        assert writer.ask(f"cycle {told['metadata']} {told['address']} 1") == {"balanced": True}
        reader.ask("close")
        # What a closed connection leaves is cleared by the progress of the next one.
        open_fds.append((writer.ask("fds")["fds"], reader.ask("fds")["fds"]))
    first, last = open_fds[1], open_fds[-1]
    # A Transfer Engine keeps the connection to a peer that is gone until it is closed itself.
    kept = len(open_fds) - 2 if way.has_threads else 2
    assert max(open_fds[1:])[0] <= first[0] + kept
    assert last[1] <= first[1]


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
