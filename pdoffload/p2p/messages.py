"""The messages peers exchange: typed, decoded strictly, checked once.

On the wire a message is one MessagePack map in one ZeroMQ frame; the key `type` names it. Names and types
of the fields are those of vLLM 0.32's p2p tier (`kv_offload/tiering/p2p/session/protocol.py`); the file is
the same, byte for byte, in vLLM 0.33.0. What 0.33 changed lies around it: `connect_ack` comes only once the
peer's memory is registered, which may take seconds, and a lookup unanswered for 30 s ends the session.

Both of them demand every field that has no default here and read `config_fingerprint` with a default of "".
Fields with a default are ours: they are left out where they say nothing, stock vLLM ignores them, and we
ignore fields that we do not know.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pdoffload.errors import MisuseError, WireError
from pdoffload.layout import BlockKey

MAX_FRAME_BYTES = 64 * 2**20
"""Longer frames are neither sent nor read. A million keys of 36 bytes (SHA-256 and group) take 38 MB."""
MAX_KEYS = 1_000_000
CHECKSUM_BYTES = 16

_LONGEST_TEXT = 4096
_LONGEST_REASON = 200
_MEMORY_END = 2**64

# MessagePack counts to 2**64 - 1; what fits a signed 64-bit integer is enough for every count here.
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Size = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Text = Annotated[str, Meta(max_length=_LONGEST_TEXT)]
_Id = Annotated[str, Meta(min_length=1, max_length=1024)]
_Keys = Annotated[
    tuple[Annotated[BlockKey, Meta(min_length=5, max_length=256)], ...], Meta(max_length=MAX_KEYS)
]


class _Body(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag=None):
    """What all messages have in common. A message breaks its own rules with a ValueError."""


class Connect(_Body, frozen=True, kw_only=True, tag="connect"):
    """Consumer to producer: write chunks into this memory, if our settings agree with yours.

    The memory is `num_blocks` slots of `block_len` bytes, one after the other from `base_addr` in the
    sender's address space. That it can be reached is in `agent_metadata`, a NIXL agent's own words.
    """

    peer_id: _Id
    """The sender's identity, `host:port`."""
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=16 * 2**20)]
    base_addr: _Count
    num_blocks: _Size
    block_len: _Size
    config_fingerprint: _Text
    """Hex digits over the model's configuration; an empty one claims nothing."""
    hash_seed: _Text
    incarnation: _Text = ""
    """Of the receiving agent; another one under the same address is another agent. Empty: stock vLLM."""
    guards: Annotated[
        dict[_Text, Annotated[str, Meta(max_length=2**16)]], Meta(max_length=256)
    ] = {}
    """The settings behind the fingerprint, by name, so that a refusal can show both values."""
    process: _Text = ""
    """The sender as a process of its host: `pdoffload.p2p.neighbours`."""

    def __post_init__(self) -> None:
        if self.base_addr + self.num_blocks * self.block_len > _MEMORY_END:
            raise ValueError(
                f"{self.num_blocks} blocks of {self.block_len} bytes from address {self.base_addr} on "
                "end beyond 2**64"
            )


class ConnectAck(_Body, frozen=True, tag="connect_ack"):
    """Producer to consumer: your memory is known here, ask."""

    peer_id: _Id
    """The producer's identity, `host:port`."""
    incarnation: _Text = ""
    """Of the agent whose metadata is acknowledged, as the `connect` gave it."""
    process: _Text = ""
    """The producer as a process of its host. If the consumer is a neighbour of it, no write of an earlier
    session is under way any more."""


class Lookup(_Body, frozen=True, tag="lookup"):
    """Consumer to producer: which of these chunks have you?"""

    kv_request_id: _Id
    keys: _Keys
    round_seq: _Count
    """Counts the fetches of a request; this lookup's hits are kept for the fetch of the same round."""


class LookupResp(_Body, frozen=True, tag="lookup_resp"):
    """Producer to consumer: `hits[i]` tells whether chunk `keys[i]` is here. May come in parts."""

    kv_request_id: _Id
    keys: _Keys
    hits: Annotated[tuple[bool, ...], Meta(max_length=MAX_KEYS)]

    def __post_init__(self) -> None:
        _refuse_unequal("keys", self.keys, "hits", self.hits)


class Fetch(_Body, frozen=True, tag="fetch"):
    """Consumer to producer: write chunk `keys[i]` into my slot `block_indexes[i]`.

    Without keys: the request is finished, nothing more will be asked under its id. The indexes are
    distinct, since two writes into one slot leave neither chunk; the pool they point into is not known here.
    """

    kv_request_id: _Id
    keys: _Keys
    block_indexes: Annotated[tuple[_Count, ...], Meta(max_length=MAX_KEYS)]
    round_seq: _Count

    def __post_init__(self) -> None:
        _refuse_unequal("keys", self.keys, "block_indexes", self.block_indexes)
        if len(set(self.block_indexes)) != len(self.block_indexes):
            raise ValueError("block_indexes name a slot twice")


class TransferDone(_Body, frozen=True, tag="transfer_done"):
    """Producer to consumer: the fetch of this round has ended."""

    kv_request_id: _Id
    success: bool
    round_seq: _Count
    checksums: Annotated[
        tuple[Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)], ...],
        Meta(max_length=MAX_KEYS),
    ] = ()
    """xxh3-128 of every chunk, in the order of the fetch's keys; empty from stock vLLM."""
    settled: bool = True
    """False: bytes may still land in the slots of this round."""


class AbortFetch(_Body, frozen=True, tag="abort_fetch"):
    """Consumer to producer: stop the fetch of this round and say when no byte of it can land any more."""

    kv_request_id: _Id
    round_seq: _Count


class AbortAck(_Body, frozen=True, tag="abort_ack"):
    """Producer to consumer: the fetch of this round has ended by its abort."""

    kv_request_id: _Id
    round_seq: _Count
    settled: bool = True
    """As in `TransferDone`."""


class Disconnect(_Body, frozen=True, tag="disconnect"):
    """Either way: this session is over, whatever was asked in it has failed."""

    reason: _Text = ""


Message: TypeAlias = (
    Connect
    | ConnectAck
    | Lookup
    | LookupResp
    | Fetch
    | TransferDone
    | AbortFetch
    | AbortAck
    | Disconnect
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_PATH = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`", re.DOTALL)


def encode(message: Message) -> bytes:
    """The frame of `message`. `MisuseError` if it is longer than peers read."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise MisuseError(
            f"{type(message).__name__} of {len(frame)} bytes; {MAX_FRAME_BYTES} at most"
        )
    return frame


def decode(frame: bytes) -> Message:
    """The message in `frame`, all its rules checked. `WireError` names the field and what is wrong.

    Memory is taken for what the frame holds, never for what it announces. Any thread.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("", f"a frame of {len(frame)} bytes; {MAX_FRAME_BYTES} at most")
    try:
        return _decoder.decode(frame)
    except RecursionError:
        # Raised by the decoder itself at a fixed depth, while it skips a field that nobody knows.
        raise WireError("", "nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _wire_error(str(error)) from None


def _refuse_unequal(
    name: str, first: tuple[object, ...], other_name: str, other: tuple[object, ...]
) -> None:
    if len(first) != len(other):
        raise ValueError(f"{len(first)} {name}, {len(other)} {other_name}")


def _wire_error(told: str) -> WireError:
    """The decoder's words as an error that is fit for a log: a peer's own text in it is cut, and quoted."""
    match = _PATH.fullmatch(told)
    reason, field = match.groups() if match else (told, "")
    return WireError(fit_for_a_log(field), fit_for_a_log(reason))


def fit_for_a_log(text: str, longest: int = _LONGEST_REASON) -> str:
    """What a peer has said, cut to `longest` and without line breaks or other control characters."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return cut if cut.isprintable() else ascii(cut)
