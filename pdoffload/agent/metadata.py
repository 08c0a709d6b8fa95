"""The form of NIXL's agent metadata: who made it, and whether it is whole.

It is walked here before NIXL sees it, for two reasons. The name must be known first: metadata that NIXL
refuses halfway takes an earlier peer of the same name with it. And NIXL hands addresses and keys to
UCX without their lengths. What NIXL 1.5.1 does by itself, each tried in a process of its own: cut off
anywhere or random, it refuses them; a memory kind it does not know ends the process (SIGSEGV); so does
a UCX key of less than its header (SIGSEGV), and a UCX address of an unknown version (an assertion of
UCX's, SIGABRT). These are refused here. Of single bits flipped anywhere, one in 464 still ended the
process in one of two runs, deep in a UCX address: the inside of addresses is UCX's own affair, so metadata
is only to be taken from whom one would let write into one's memory.

Read in NIXL's source (src/utils/serdes, nixlAgentData::getLocalMD, nixlDescList::serialize; UCX's
ucp_rkey_packed_size and ucp_address_pack), the same in 1.4 and 1.5:

    "nixlSerDes|"  then fields of  tag  length (8 bytes, little-endian)  content  "|"

    Agent  name
    Conns  8 bytes: number of backends         then for each   t  backend     c  address
    ""     "MemSection"
    nixlSecElms  8 bytes: number of sections   then for each   bknd  backend
                                                               nixlDList  "nixlSDList"
                                                               t  4 bytes: kind of memory
                                                               n  8 bytes: number of rows
                                                               for each row  ""  24 bytes and a key
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdoffload.agent.mooncake_metadata import MOONCAKE_MAGIC
from pdoffload.errors import NixlError

_MAGIC = b"nixlSerDes|"
_LONGEST_NAME = 512
_KINDS = 5
"""DRAM, VRAM, BLOCK, OBJECT, FILE in the order of NIXL's nixl_mem_t."""
_ROW_BYTES = 24
"""Address, length and device id, 8 bytes each; the backend's key follows."""
_UCX_KEY_BYTES = 9
"""The least of a UCX key: 8 bytes of its memory domains, one of its memory type."""
_MOST_RAILS = 256
_UCX_VERSIONS = 2
"""UCX addresses say v1 or v2, counted from 0, in the low four bits of their first byte."""


class Metadata(msgspec.Struct, frozen=True):
    """What is read of an agent's metadata: who made it, and by which backends it can be reached, how."""

    name: str
    addresses: Mapping[str, bytes]
    """By backend, in the order of the metadata; the inside is the backend's own."""


def agent_name_in(metadata: bytes) -> str:
    """The name of the agent that made `metadata`; `NixlError` if it is not whole metadata of one."""
    return read_metadata(metadata).name


def backends_in(metadata: bytes) -> tuple[str, ...]:
    """By which backends the agent that made `metadata` can be reached; empty where that cannot be read."""
    if metadata.startswith(MOONCAKE_MAGIC):
        return ("MOONCAKE",)
    try:
        return tuple(read_metadata(metadata).addresses)
    except NixlError:
        return ()


def read_metadata(metadata: bytes) -> Metadata:
    """Walk over all of `metadata`; `NixlError` if it is not whole metadata of an agent."""
    reader = _Reader(metadata)
    name = reader.field(b"Agent")
    addresses: dict[str, bytes] = {}
    for _ in range(reader.count(b"Conns")):
        backend, address = reader.field(b"t"), reader.field(b"c")
        if not backend or not address:
            raise _garbled("a backend without an address")
        if backend == b"UCX" and address[0] & 15 >= _UCX_VERSIONS:
            raise _garbled(f"a UCX address of version {(address[0] & 15) + 1}")
        if backend == b"LIBFABRIC":
            _walk_rails(address)
        addresses[backend.decode("ascii", "replace")] = address
    if reader.field(b"") != b"MemSection":
        raise _garbled("no memory section")
    for _ in range(reader.count(b"nixlSecElms")):
        backend = reader.field(b"bknd")
        shortest = _ROW_BYTES + (_UCX_KEY_BYTES if backend == b"UCX" else 1)
        if reader.field(b"nixlDList") != b"nixlSDList":
            raise _garbled("not a list of rows with keys")
        kind = reader.field(b"t")
        if len(kind) != 4 or int.from_bytes(kind, "little") >= _KINDS:
            raise _garbled("an unknown kind of memory")
        for _ in range(reader.count(b"n")):
            if len(reader.field(b"")) < shortest:
                raise _garbled("a row without its key")
    reader.end()
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise _garbled("a name that is not UTF-8") from None
    if not text.isprintable() or not 0 < len(text) <= _LONGEST_NAME:
        raise _garbled(f"a name of {len(text)} characters, or not printable")
    return Metadata(text, addresses)


def _walk_rails(address: bytes) -> None:
    """LIBFABRIC's own form, which NIXL 1.4.1 writes: a count of rails in digits, an endpoint for each."""
    reader = _Reader(address)
    count = reader.field(b"num_rails")
    if not count.isdigit() or not 0 < int(count[:4]) <= _MOST_RAILS:
        raise _garbled(f"a LIBFABRIC address with {count[:8]!r} rails")
    for rail in range(int(count)):
        reader.field(f"dest_data_ep_{rail}".encode())
    reader.end()


class _Reader:
    """Walks over the fields; every count is bounded by the bytes that are there."""

    def __init__(self, data: bytes) -> None:
        if not data.startswith(_MAGIC):
            raise _garbled("it does not begin as metadata does")
        self._data = data
        self._at = len(_MAGIC)

    def field(self, tag: bytes) -> bytes:
        start = self._at + len(tag) + 8
        if self._data[self._at : start - 8] != tag or start > len(self._data):
            raise _garbled(f"field {tag.decode()!r} is not at byte {self._at}")
        end = start + int.from_bytes(self._data[start - 8 : start], "little")
        if self._data[end : end + 1] != b"|":
            raise _garbled(f"field {tag.decode()!r} at byte {self._at} is cut off")
        self._at = end + 1
        return self._data[start:end]

    def count(self, tag: bytes) -> int:
        content = self.field(tag)
        if len(content) != 8:
            raise _garbled(f"count {tag.decode()!r} of {len(content)} bytes")
        return int.from_bytes(content, "little")

    def end(self) -> None:
        if self._at != len(self._data):
            raise _garbled(f"{len(self._data) - self._at} bytes follow the end")


def _garbled(reason: str) -> NixlError:
    return NixlError("add_remote_agent", f"metadata is garbled: {reason}")
