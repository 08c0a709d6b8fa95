"""The sockets of a Transfer Engine: who listens at an address, and who may reach our own.

Read in Mooncake's source and tried on 0.3.13: an engine listens at two ports of **all** interfaces, whatever
host it is given. At the first ("handshake") it tells everybody its data port and the memory registered; at
the second everybody reads and writes that memory. There is no authentication and no setting for either.
Therefore `keep_to_loopback` ties both to the loopback device, which Linux (from 5.7) lets everybody do.

A handshake, both ways:  8 bytes: length (little-endian)   1 byte: kind (1: metadata)   JSON
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator

import msgspec

_LENGTH = struct.Struct("<Q")
_METADATA = b"\x01"
_LONGEST_ANSWER = 1 << 20
_A_MILLISECOND = struct.pack("ll", 0, 1000)
_ACKNOWLEDGED = 2


class Contact(msgspec.Struct, frozen=True):
    """What an engine says of itself; more than this is not heeded."""

    name: str
    protocol: str
    tcp_data_port: int = 0
    tcp_proto_version: int = 1

    @property
    def acknowledges(self) -> bool:
        """Whether a write counts as done when it is in the peer's memory, not when it has been sent."""
        return self.tcp_proto_version >= _ACKNOWLEDGED


def ask(connection: socket.socket) -> Contact:
    """Ask the engine at the other end; `OSError` or `ValueError` if no answer of that kind comes.

    Every single wait is bounded by the timeout of the socket.
    """
    connection.sendall(_LENGTH.pack(3) + _METADATA + b"{}")
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if not 1 < length <= _LONGEST_ANSWER:
        raise ValueError(f"an answer of {length} bytes")
    answer = _exactly(connection, length)
    # The engine ends its side, and complains aloud where ours has ended before.
    connection.recv(1)
    try:
        return msgspec.json.decode(answer[1:], type=Contact)
    except msgspec.DecodeError as error:
        raise ValueError(f"no answer of a Transfer Engine: {error}") from None


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(min(count - len(received), 65536))
        if not piece:
            raise ConnectionResetError("the other side hung up")
        received += piece
    return bytes(received)


def keep_to_loopback(ports: Collection[int]) -> None:
    """Let no other host connect to these ports of this process; `OSError` where that cannot be had."""
    for each in _sockets_at(ports):
        if _listens(each):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    # Whoever came before is not let in either.
    hang_up(ports)


def rouse(port: int) -> None:
    """Have the engine's handshake thread at `port` look up every millisecond from now on, not every second.

    The destruction of an engine waits for that, and holds the interpreter lock meanwhile.
    """
    for each in _sockets_at((port,)):
        if _listens(each):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _A_MILLISECOND)
    # It is waiting by the old value until somebody comes.
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()


def hang_up(ports: Collection[int]) -> None:
    """End the connections that others have made to these ports of this process."""
    for each in _sockets_at(ports):
        if not _listens(each):
            with contextlib.suppress(OSError):  # it may have ended by itself
                each.shutdown(socket.SHUT_RDWR)


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets_at(ports: Collection[int]) -> Iterator[socket.socket]:
    """This process's TCP sockets whose own end has one of `ports`; each is closed after its turn."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # closed since it was listed
            continue
        with found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and (
                found.type == socket.SOCK_STREAM
            )
            with contextlib.suppress(OSError):
                if is_tcp and found.getsockname()[1] in ports:
                    yield found
