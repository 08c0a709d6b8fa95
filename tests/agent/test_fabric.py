"""What LIBFABRIC does otherwise than UCX, between real processes and in parts."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from pdoffload.agent import fabric as fabric_module
from pdoffload.agent.fabric import (
    BrokenConnections,
    ParkedPeers,
    require_listener,
    tail_of,
    transport_to,
)
from pdoffload.agent.metadata import Metadata
from pdoffload.errors import NixlError
from pdoffload.testing.interpreter import Interpreter
from pdoffload.testing.peer_child import PAGE, PeerChild

SIZE_BYTES = 8 << 20
PIECE_BYTES = 1 << 20
PIECES = SIZE_BYTES // PIECE_BYTES

Start = Callable[[], PeerChild]


@pytest.fixture
def start(fabric: Interpreter) -> Iterator[Start]:
    """Starts processes that end with the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(PeerChild(SIZE_BYTES, "LIBFABRIC", interpreter=fabric))


def serve(child: PeerChild) -> dict[str, Any]:
    child.ask("open")
    child.ask("serve")
    return child.ask("metadata")


def write(
    writer: PeerChild, told: dict[str, Any], size_bytes: int, count: int = 1, timeout_s: float = 30
) -> dict[str, Any]:
    writer.ask(f"write {told['address']} {size_bytes} {count} {timeout_s}")
    return writer.ask("wait")


def connect(writer: PeerChild, told: dict[str, Any]) -> None:
    added = writer.ask(f"add {told['metadata']}")
    assert "peer" in added, added
    assert write(writer, told, PAGE)["state"] == "done"


# --- between processes ---


@pytest.mark.parametrize("size_bytes", [PAGE, 1 << 16, PIECE_BYTES])
def test_a_write_is_done_when_its_bytes_have_landed_not_when_they_have_left(
    size_bytes: int, start: Start
) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    connect(writer, told)
    reader.signal(signal.SIGSTOP)
    # So little fits into the buffers of the sockets.
    assert write(writer, told, size_bytes, timeout_s=0.5)["state"] == "unknown"
    reader.signal(signal.SIGCONT)
    assert write(writer, told, PIECE_BYTES, PIECES)["state"] == "done"
    assert writer.ask("digest") == reader.ask("digest")


def test_a_new_peer_that_stands_still_costs_the_agent_and_not_its_owner(start: Start) -> None:
    writer, frozen, reader = start(), start(), start()
    writer.ask("open")
    told = serve(frozen)
    frozen.signal(signal.SIGSTOP)
    assert "not returned within" in writer.ask(f"add {told['metadata']}")["error"]
    assert "lost" in writer.ask("metadata")["error"]
    # It cannot be said to be closed: bytes might move.
    assert "lost" in writer.ask("close")["error"]
    writer.ask("open")
    connect(writer, told := serve(reader))
    assert write(writer, told, PIECE_BYTES, PIECES)["state"] == "done"
    assert writer.ask("digest") == reader.ask("digest")
    frozen.signal(signal.SIGCONT)


def test_a_peer_that_is_gone_is_refused_at_once_and_costs_no_agent(start: Start) -> None:
    writer, gone, reader = start(), start(), start()
    writer.ask("open")
    told, late = serve(reader), serve(gone)
    gone.signal(signal.SIGKILL)
    assert "nobody listens" in writer.ask(f"add {late['metadata']}")["error"]
    connect(writer, told)


def test_a_reader_goes_on_when_one_of_its_writers_is_killed(start: Start) -> None:
    writers, reader = [start(), start()], start()
    told = serve(reader)
    for writer in writers:
        writer.ask("open")
        connect(writer, told)
    reader.ask("rest")
    writers[0].ask(f"write {told['address']} {PIECE_BYTES} {PIECES} 30")
    writers[0].signal(signal.SIGKILL)
    reader.ask("serve")
    assert write(writers[1], told, PIECE_BYTES, PIECES)["state"] == "done"
    assert writers[1].ask("digest") == reader.ask("digest")


def test_metadata_of_its_own_form_that_is_garbled_is_refused_before_nixl_sees_it(
    start: Start,
) -> None:
    writer, reader = start(), start()
    writer.ask("open")
    told = serve(reader)
    good = bytes.fromhex(told["metadata"])
    for bad in (
        good.replace(b"num_rails", b"num_railz"),
        good.replace(b"dest_data_ep_0", b"dest_data_ep_1"),
        good[: len(good) // 2],
        good + b"x",
    ):
        assert bad != good
        assert "garbled" in writer.ask(f"add {bad.hex()}")["error"]
    connect(writer, told)


def test_an_agent_by_ucx_and_one_by_libfabric_have_nothing_in_common(
    start: Start, fabric: Interpreter
) -> None:
    reader = start()
    told = serve(reader)
    with PeerChild(SIZE_BYTES, interpreter=fabric) as writer:
        writer.ask("open")
        refused = writer.ask(f"add {told['metadata']}")["error"]
    assert "no backend in common: ['UCX'] here, ['LIBFABRIC'] there" in refused


# --- in parts ---


class Calls:
    """What NIXL is asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def add(self, metadata: bytes) -> None:
        self.seen.append(f"add {metadata.decode()}")

    def remove(self, name: str) -> None:
        self.seen.append(f"remove {name}")


def peer(address: bytes = b"a") -> Metadata:
    return Metadata("a peer", {"LIBFABRIC": address})


def test_a_removed_peer_is_taken_up_again_as_it_is() -> None:
    calls, parked = Calls(), ParkedPeers()
    for metadata in (b"1", b"1", b"2"):  # the third time with more memory
        parked.add(peer(), metadata, calls.add, calls.remove)
    assert calls.seen == ["add 1", "add 2"]


def test_another_agent_of_the_same_name_takes_the_place_of_the_one_before() -> None:
    calls, parked = Calls(), ParkedPeers()
    parked.add(peer(), b"1", calls.add, calls.remove)
    parked.add(peer(b"b"), b"2", calls.add, calls.remove)
    assert calls.seen == ["add 1", "remove a peer", "add 2"]


def test_a_peer_that_nixl_has_refused_is_not_known() -> None:
    def refuse(metadata: bytes) -> None:
        raise NixlError("add_remote_agent", "no")

    calls, parked = Calls(), ParkedPeers()
    with pytest.raises(NixlError):
        parked.add(peer(), b"1", refuse, calls.remove)
    parked.add(peer(), b"1", calls.add, calls.remove)
    assert calls.seen == ["add 1"]


def test_errors_of_progress_pass_until_there_are_too_many_in_a_row() -> None:
    error, broken = NixlError("get_new_notifs", "NIXL_ERR_BACKEND"), BrokenConnections()
    for _ in range(3):
        for _ in range(50):
            broken.count(error)
        broken.clear()
    for _ in range(99):
        broken.count(error)
    with pytest.raises(NixlError, match="NIXL_ERR_BACKEND"):
        broken.count(error)


def test_the_tail_is_the_last_byte_of_the_last_row() -> None:
    rows = np.array([[1000, 10, 0], [5000, 4096, 3]], dtype=np.uint64)
    assert tail_of(rows).tolist() == [[9095, 1, 3]]
    assert tail_of(rows).dtype == np.uint64


def reached_at(endpoint: bytes) -> Metadata:
    endpoint += bytes(56 - len(endpoint))
    field = b"dest_data_ep_0" + len(endpoint).to_bytes(8, "little") + endpoint + b"|"
    return Metadata("x", {"LIBFABRIC": b"nixlSerDes|" + field})


def by_ipv4(port: int) -> Metadata:
    address = socket.inet_pton(socket.AF_INET, "127.0.0.1")
    return reached_at(struct.pack("<H", socket.AF_INET) + struct.pack(">H", port) + address)


def by_ipv6(port: int) -> Metadata:
    address = bytes(4) + socket.inet_pton(socket.AF_INET6, "::1")
    return reached_at(struct.pack("<H", socket.AF_INET6) + struct.pack(">H", port) + address)


NO_SOCKET = reached_at(bytes.fromhex("fe80"))


def test_a_socket_s_address_tells_the_provider() -> None:
    assert transport_to(by_ipv4(1)) == transport_to(by_ipv6(1)) == "LIBFABRIC/tcp"
    assert transport_to(NO_SOCKET) == "LIBFABRIC"


@pytest.mark.parametrize(
    ("family", "host", "reached"),
    [(socket.AF_INET, "127.0.0.1", by_ipv4), (socket.AF_INET6, "::1", by_ipv6)],
)
def test_who_listens_is_asked_before_nixl_is(
    family: int, host: str, reached: Callable[[int], Metadata]
) -> None:
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        require_listener(reached(port))
    with pytest.raises(NixlError, match=f"nobody listens at {host} port {port}"):
        require_listener(reached(port))


def test_a_provider_that_was_never_tried_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    fabric_module._say_what_was_never_tried.cache_clear()
    for _ in range(2):
        require_listener(NO_SOCKET)
    (line,) = [each for each in caplog.messages if "another provider than TCP" in each]
    assert "never been run" in line
