"""What an agent over Mooncake's Transfer Engine tells its peers: where it listens, what may be reached.

    b"pdoffload-mooncake|" and one MessagePack array: version, name, host, port, data port, regions

The engine itself would hand the same to everybody who asks at its port. Ours is checked before anything is
dialled, and names the agent.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from pdoffload.agent.descriptors import Rows

MOONCAKE_MAGIC = b"pdoffload-mooncake|"
_VERSION = 1
_MAX_ADDRESS = 2**63

_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_Host = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z")]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Address = Annotated[int, Meta(ge=1)]


class EngineMetadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`regions` are (address, length) pairs in order of their addresses; none overlap."""

    version: int
    name: _Name
    host: _Host
    port: _Port
    data_port: _Port
    regions: tuple[tuple[_Address, _Address], ...]

    @classmethod
    def of(
        cls, name: str, host: str, port: int, data_port: int, regions: list[tuple[int, int]]
    ) -> EngineMetadata:
        """What the agent `name` tells, in the form of this version."""
        return cls(_VERSION, name, host, port, data_port, tuple(sorted(regions)))

    def encode(self) -> bytes:
        return MOONCAKE_MAGIC + msgspec.msgpack.encode(self)

    def holds(self, rows: Rows) -> bool:
        """Whether every one of `rows` lies within one of the regions."""
        if not self.regions:
            return False
        starts, lengths = np.array(self.regions, dtype=np.uint64).T
        at = np.searchsorted(starts, rows[:, 0], side="right")
        if not at.all() or rows[:, 2].any():
            return False
        offsets = rows[:, 0] - starts[at - 1]
        room = lengths[at - 1]
        # In this order nothing overflows: an offset beyond the region is seen before it is added to.
        return bool(((offsets < room) & (rows[:, 1] <= room - np.minimum(offsets, room))).all())


class Garbled(ValueError):
    """The bytes are no whole metadata of this kind and version; the message says why."""


def decode(metadata: bytes) -> EngineMetadata:
    """What `EngineMetadata.encode` made; `Garbled` for anything else."""
    if not metadata.startswith(MOONCAKE_MAGIC):
        raise Garbled("it does not begin as metadata of a Transfer Engine does")
    try:
        told = msgspec.msgpack.decode(metadata[len(MOONCAKE_MAGIC) :], type=EngineMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbled(str(error)) from None
    if told.version != _VERSION:
        raise Garbled(f"version {told.version}, want {_VERSION}")
    if not told.name.isprintable():
        raise Garbled("a name that is not printable")
    end = 0
    for address, length in told.regions:
        if address < end or address + length > _MAX_ADDRESS:
            raise Garbled(f"region of {length} bytes at {address:#x}")
        end = address + length
    return told
