"""Whatever comes over the wire is a right message or a `WireError`, and closes nothing else."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.errors import WireError
from pdoffload.layout import BlockKey
from pdoffload.p2p.messages import (
    AbortAck,
    AbortFetch,
    Connect,
    ConnectAck,
    Disconnect,
    Fetch,
    Lookup,
    LookupResp,
    Message,
    TransferDone,
    decode,
    encode,
)
from pdoffload.testing.link_rig import Ends

EXAMPLES = 200
counts = st.integers(0, 2**63 - 1)
texts = st.text(max_size=8)
ids = st.text(min_size=1, max_size=8)
block_keys = st.binary(min_size=5, max_size=8).map(BlockKey)
checksums = st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple)


@st.composite
def connects(draw: st.DrawFn) -> Connect:
    num_blocks = draw(st.integers(1, 2**63 - 1))
    block_len = draw(st.integers(1, min(2**64 // num_blocks, 2**63 - 1)))
    base_addr = draw(st.integers(0, min(2**64 - num_blocks * block_len, 2**63 - 1)))
    return Connect(
        peer_id=draw(ids),
        agent_metadata=draw(st.binary(min_size=1, max_size=8)),
        base_addr=base_addr,
        num_blocks=num_blocks,
        block_len=block_len,
        config_fingerprint=draw(texts),
        hash_seed=draw(texts),
        incarnation=draw(texts),
        guards=draw(st.dictionaries(texts, texts, max_size=2)),
        process=draw(texts),
    )


def unzipped(pairs: list[tuple[Any, Any]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(first for first, _ in pairs), tuple(second for _, second in pairs)


answers = st.lists(st.tuples(block_keys, st.booleans()), max_size=4).map(unzipped)
targets = st.lists(st.tuples(block_keys, counts), max_size=4, unique_by=lambda pair: pair[1]).map(
    unzipped
)

messages = st.one_of(
    connects(),
    st.builds(ConnectAck, ids, texts),
    st.builds(Lookup, ids, st.lists(block_keys, max_size=4).map(tuple), counts),
    st.builds(lambda kv_id, answer: LookupResp(kv_id, *answer), ids, answers),
    st.builds(lambda kv_id, target, seq: Fetch(kv_id, *target, seq), ids, targets, counts),
    st.builds(TransferDone, ids, st.booleans(), counts, checksums, st.booleans()),
    st.builds(AbortFetch, ids, counts),
    st.builds(AbortAck, ids, counts, st.booleans()),
    st.builds(Disconnect, texts),
)
"""Any right message."""

# Everything a MessagePack document can be, and what a field of one of our messages may be mistaken for.
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=20)
)
documents = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=6,
)
kinds = st.sampled_from([each.__struct_config__.tag for each in Message.__args__])
names = st.sampled_from(
    sorted({field for each in Message.__args__ for field in each.__struct_fields__})
)


def only_a_wire_error(frame: bytes) -> Message | None:
    """The message in `frame` if it is one; anything but a `WireError` fails the test."""
    try:
        return decode(frame)
    except WireError as error:
        told = str(error)
    assert told.isprintable()
    assert len(told) < 500
    return None


@settings(max_examples=EXAMPLES, deadline=None)
@given(message=messages)
def test_every_message_round_trips_and_another_reader_sees_the_same_fields(
    message: Message,
) -> None:
    frame = encode(message)
    assert decode(frame) == message
    fields: dict[str, Any] = msgpack.unpackb(frame)
    assert fields.pop("type") == message.__struct_config__.tag
    for name, value in fields.items():
        own = getattr(message, name)
        assert value == (list(own) if isinstance(own, tuple) else own)
    # What is left out is what has a default, and has it.
    left_out = set(message.__struct_fields__) - fields.keys()
    assert left_out <= {"incarnation", "guards", "process", "checksums", "settled", "reason"}
    assert decode(msgpack.packb(fields | {"type": message.__struct_config__.tag})) == message


@settings(max_examples=EXAMPLES, deadline=None)
@given(frame=st.binary(max_size=200))
def test_random_bytes_are_no_message(frame: bytes) -> None:
    only_a_wire_error(frame)


@settings(max_examples=EXAMPLES, deadline=None)
@given(message=messages, data=st.data())
def test_a_frame_that_is_cut_or_goes_on_is_no_message(
    message: Message, data: st.DataObject
) -> None:
    frame = encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    assert only_a_wire_error(frame[:cut]) is None
    assert only_a_wire_error(frame + data.draw(st.binary(min_size=1, max_size=5))) is None


@settings(max_examples=EXAMPLES, deadline=None)
@given(message=messages, data=st.data())
def test_a_frame_with_flipped_bytes_is_a_message_or_none(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decoded = only_a_wire_error(bytes(frame))
    if decoded is not None:
        assert decode(encode(decoded)) == decoded


@settings(max_examples=EXAMPLES, deadline=None)
@given(document=documents)
def test_any_other_document_is_no_message(document: Any) -> None:
    only_a_wire_error(msgpack.packb(document))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    message=messages, wrong=st.dictionaries(names, documents, min_size=1, max_size=3), kind=kinds
)
def test_wrongly_typed_fields_are_refused_or_right_after_all(
    message: Message, wrong: dict[str, Any], kind: str
) -> None:
    fields: dict[str, Any] = msgpack.unpackb(encode(message))
    for changed in (fields | wrong, fields | wrong | {"type": kind}):
        decoded = only_a_wire_error(msgpack.packb(changed))
        if decoded is not None:
            assert decode(encode(decoded)) == decoded


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    message=messages,
    length=st.integers(0, 2**32 - 1),
    marker=st.sampled_from([0xDD, 0xDF, 0xC6, 0xDB, 0xC9]),
    name=names,
)
def test_a_length_that_is_only_claimed_is_refused(
    message: Message, length: int, marker: int, name: str
) -> None:
    """An array, a map, bytes, a text or an extension of up to 2**32 - 1 elements, and then nothing."""
    fields: dict[str, Any] = msgpack.unpackb(encode(message))
    fields.pop(name, None)
    body = b"".join(msgpack.packb(part) for item in fields.items() for part in item)
    claim = msgpack.packb(name) + bytes([marker]) + length.to_bytes(4, "big")
    frame = bytes([0x80 | (len(fields) + 1)]) + body + claim
    decoded = only_a_wire_error(frame)
    assert decoded is None or length == 0


def test_garbage_over_a_socket_reaches_the_owner_as_it_is_and_closes_nothing() -> None:
    """The link carries frames without reading them; the next right message arrives."""
    ends = Ends()
    try:
        sent: list[bytes] = []

        @settings(max_examples=200, deadline=None, database=None)
        @given(frame=st.binary(max_size=500))
        def gather(frame: bytes) -> None:
            sent.append(frame)

        gather()
        a, b = ends.open(), ends.open()
        a.connect(b.address)
        assert all(a.send(b.address, frame) for frame in sent)
        a.send(b.address, encode(Disconnect("right")))
        ends.until(lambda: len(ends.frames(b)) == len(sent) + 1)
        assert ends.frames(b)[:-1] == sent
        assert decode(ends.frames(b)[-1]) == Disconnect("right")
        for frame in sent:
            only_a_wire_error(frame)
        assert not ends.downs(a)
    finally:
        ends.close()
