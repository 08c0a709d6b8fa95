"""The outer form of NIXL's agent metadata: who made it, and whether it is whole.

NIXL takes metadata apart itself, but hands what lies inside to its plugins without its length, and
those read on behind the end of what was cut off. So the form is walked once here before. Read in NIXL's
source (src/utils/serdes, nixlAgentData::getLocalMD, nixlDescList::serialize), 1.4 and 1.5:

    "nixlSerDes|"  then fields of  tag  length (8 bytes, little-endian)  content  "|"

    Agent  name
    Conns  8 bytes: number of backends         then for each   t  backend     c  address
    ""     "MemSection"
    nixlSecElms  8 bytes: number of sections   then for each   bknd  backend
                                                               nixlDList  "nixlSDList"
                                                               t  4 bytes   n  8 bytes: number of rows
                                                               for each row  ""  24 bytes and a key
"""

from __future__ import annotations

from pdoffload.errors import NixlError

_MAGIC = b"nixlSerDes|"
_LONGEST_NAME = 512


def agent_name_in(metadata: bytes) -> str:
    """The name of the agent that made `metadata`; `NixlError` if it is not whole metadata of one."""
    reader = _Reader(metadata)
    name = reader.field(b"Agent")
    for _ in range(reader.count(b"Conns")):
        if not reader.field(b"t") or not reader.field(b"c"):
            raise _garbled("a backend without an address")
    if reader.field(b"") != b"MemSection":
        raise _garbled("no memory section")
    for _ in range(reader.count(b"nixlSecElms")):
        reader.field(b"bknd")
        if reader.field(b"nixlDList") != b"nixlSDList":
            raise _garbled("not a list of rows with keys")
        if len(reader.field(b"t")) != 4:
            raise _garbled("a memory kind of the wrong length")
        for _ in range(reader.count(b"n")):
            if len(reader.field(b"")) <= 24:
                raise _garbled("a row without a key")
    reader.end()
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise _garbled("a name that is not UTF-8") from None
    if not text.isprintable() or not 0 < len(text) <= _LONGEST_NAME:
        raise _garbled(f"a name of {len(text)} characters, or not printable")
    return text


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
