"""Messages on the wire, read by another MessagePack reader, and what a strict reader refuses."""

from __future__ import annotations

import importlib.util
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pytest

from pdoffload.errors import MisuseError, WireError
from pdoffload.layout import make_key
from pdoffload.p2p import messages
from pdoffload.p2p.messages import (
    MAX_FRAME_BYTES,
    MAX_KEYS,
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

KEYS = (make_key(b"\x01" * 32, 0), make_key(b"\x02" * 32, 1))
CONNECT = Connect(
    peer_id="node-a:5710",
    agent_metadata=b"metadata",
    base_addr=0x7F0000000000,
    num_blocks=8,
    block_len=4096,
    config_fingerprint="ab12",
    hash_seed="0",
)
CONNECT_FIELDS = {
    "type": "connect",
    "peer_id": "node-a:5710",
    "agent_metadata": b"metadata",
    "base_addr": 0x7F0000000000,
    "num_blocks": 8,
    "block_len": 4096,
    "config_fingerprint": "ab12",
    "hash_seed": "0",
}

# Every message as stock vLLM reads it, and with all that is ours.
ON_THE_WIRE: list[tuple[Message, dict[str, Any]]] = [
    (CONNECT, CONNECT_FIELDS),
    (
        Connect(
            peer_id="node-a:5710",
            agent_metadata=b"metadata",
            base_addr=0,
            num_blocks=1,
            block_len=1,
            config_fingerprint="",
            hash_seed="",
            incarnation="a1",
            guards={"hash_algo": '"sha256"'},
            process="p",
        ),
        CONNECT_FIELDS
        | {"base_addr": 0, "num_blocks": 1, "block_len": 1, "config_fingerprint": ""}
        | {"hash_seed": "", "incarnation": "a1", "guards": {"hash_algo": '"sha256"'}}
        | {"process": "p"},
    ),
    (ConnectAck("node-b:5710"), {"type": "connect_ack", "peer_id": "node-b:5710"}),
    (
        ConnectAck("node-b:5710", "a1", "p"),
        {"type": "connect_ack", "peer_id": "node-b:5710", "incarnation": "a1", "process": "p"},
    ),
    (
        Lookup("r1", KEYS, 0),
        {"type": "lookup", "kv_request_id": "r1", "keys": list(KEYS), "round_seq": 0},
    ),
    (
        LookupResp("r1", KEYS, (True, False)),
        {"type": "lookup_resp", "kv_request_id": "r1", "keys": list(KEYS), "hits": [True, False]},
    ),
    (
        Fetch("r1", KEYS, (7, 0), 3),
        {"type": "fetch", "kv_request_id": "r1", "keys": list(KEYS), "block_indexes": [7, 0]}
        | {"round_seq": 3},
    ),
    (
        Fetch("r1", (), (), 0),
        {"type": "fetch", "kv_request_id": "r1", "keys": [], "block_indexes": [], "round_seq": 0},
    ),
    (
        TransferDone("r1", False, 0),
        {"type": "transfer_done", "kv_request_id": "r1", "success": False, "round_seq": 0},
    ),
    (
        TransferDone("r1", True, 0, (b"c" * 16,), False),
        {"type": "transfer_done", "kv_request_id": "r1", "success": True, "round_seq": 0}
        | {"checksums": [b"c" * 16], "settled": False},
    ),
    (AbortFetch("r1", 0), {"type": "abort_fetch", "kv_request_id": "r1", "round_seq": 0}),
    (AbortAck("r1", 0), {"type": "abort_ack", "kv_request_id": "r1", "round_seq": 0}),
    (
        AbortAck("r1", 0, False),
        {"type": "abort_ack", "kv_request_id": "r1", "round_seq": 0, "settled": False},
    ),
    (Disconnect(), {"type": "disconnect"}),
    (Disconnect("going down"), {"type": "disconnect", "reason": "going down"}),
]


def name_of(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize(("message", "fields"), ON_THE_WIRE, ids=name_of)
def test_a_message_is_one_map_with_exactly_the_documented_fields(
    message: Message, fields: dict[str, Any]
) -> None:
    assert msgpack.unpackb(encode(message)) == fields
    assert decode(msgpack.packb(fields)) == message
    assert type(decode(encode(message))) is type(message)


@pytest.mark.parametrize(("message", "fields"), ON_THE_WIRE, ids=name_of)
def test_fields_that_nobody_knows_are_ignored(message: Message, fields: dict[str, Any]) -> None:
    later = fields | {"lease": {"ends": [1, 2.5, None, {"deep": b"x"}]}, "version": 7}
    assert decode(msgpack.packb(later)) == message


@pytest.mark.parametrize(("message", "fields"), ON_THE_WIRE, ids=name_of)
def test_a_message_without_one_of_its_fields_is_refused_by_name(
    message: Message, fields: dict[str, Any]
) -> None:
    optional = {"incarnation", "guards", "process", "checksums", "settled", "reason"}
    for name in fields.keys() - optional:
        with pytest.raises(WireError, match=name):
            decode(msgpack.packb({key: fields[key] for key in fields if key != name}))


@pytest.mark.parametrize(("message", "fields"), ON_THE_WIRE, ids=name_of)
def test_a_field_of_another_type_is_refused_by_name(
    message: Message, fields: dict[str, Any]
) -> None:
    for name, right in fields.items():
        for wrong in (None, 1.0, "text", b"bytes", 5, True, [], [None], {}, {"a": 1}):
            if type(wrong) is type(right) or (name == "type" and isinstance(wrong, str)):
                continue
            with pytest.raises(WireError) as caught:
                decode(msgpack.packb(fields | {name: wrong}))
            assert caught.value.field.split("[")[0] == name


@pytest.mark.parametrize(
    ("kind", "changed", "field", "reason"),
    [
        ("connect", {"num_blocks": 0}, "num_blocks", ">= 1"),
        ("connect", {"block_len": 0}, "block_len", ">= 1"),
        ("connect", {"base_addr": -1}, "base_addr", ">= 0"),
        ("connect", {"base_addr": 2**63}, "base_addr", "<="),
        ("connect", {"num_blocks": 2**63 - 1}, "", "beyond 2**64"),
        ("connect", {"peer_id": ""}, "peer_id", "length >= 1"),
        ("connect", {"peer_id": "x" * 1025}, "peer_id", "length <= 1024"),
        ("connect", {"agent_metadata": b""}, "agent_metadata", "length >= 1"),
        ("connect", {"guards": {"a": 1}}, "guards[...]", "Expected `str`"),
        ("connect", {"guards": {str(i): "" for i in range(257)}}, "guards", "length <= 256"),
        ("lookup", {"kv_request_id": ""}, "kv_request_id", "length >= 1"),
        ("lookup", {"kv_request_id": "x" * 1025}, "kv_request_id", "length <= 1024"),
        ("lookup", {"round_seq": -1}, "round_seq", ">= 0"),
        ("lookup", {"round_seq": 2**63}, "round_seq", "<="),
        ("lookup", {"round_seq": True}, "round_seq", "got `bool`"),
        ("lookup", {"keys": [KEYS[0], b"four"]}, "keys[1]", "length >= 5"),
        ("lookup", {"keys": [b"k" * 257]}, "keys[0]", "length <= 256"),
        ("lookup", {"keys": ["a text"]}, "keys[0]", "Expected `bytes`"),
        ("lookup_resp", {"hits": [True]}, "", "2 keys, 1 hits"),
        ("lookup_resp", {"hits": [True, 1]}, "hits[1]", "Expected `bool`"),
        ("fetch", {"block_indexes": [1]}, "", "2 keys, 1 block_indexes"),
        ("fetch", {"block_indexes": [1, -1]}, "block_indexes[1]", ">= 0"),
        ("fetch", {"block_indexes": [4, 4]}, "", "a slot twice"),
        ("transfer_done", {"checksums": [b"c" * 15]}, "checksums[0]", "length >= 16"),
        ("transfer_done", {"checksums": [b"c" * 17]}, "checksums[0]", "length <= 16"),
        ("disconnect", {"reason": "x" * 4097}, "reason", "length <= 4096"),
        ("disconnect", {"type": "hello"}, "type", "Invalid value 'hello'"),
        ("disconnect", {"type": 7}, "type", "Expected `str`"),
    ],
)
def test_a_value_outside_its_bounds_is_refused_with_field_and_reason(
    kind: str, changed: dict[str, Any], field: str, reason: str
) -> None:
    fields = next(fields for _, fields in ON_THE_WIRE if fields["type"] == kind)
    with pytest.raises(WireError) as caught:
        decode(msgpack.packb(fields | changed))
    assert caught.value.field == field
    assert reason in caught.value.reason


def test_memory_that_ends_at_the_last_address_is_right() -> None:
    fields = CONNECT_FIELDS | {"base_addr": 2**63 - 1, "num_blocks": 2**63 - 1, "block_len": 1}
    assert isinstance(decode(msgpack.packb(fields)), Connect)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xc0",
        msgpack.packb([1, 2]),
        msgpack.packb({}),
        msgpack.packb({b"type": "disconnect"}),
        msgpack.packb({"type": "disconnect"}) + b"\x00",
        b"\x81\xa4type\xa1\xff",
        b"\x82\xa4type\xaadisconnect\xa1x" + b"\x91" * 1_000_000,
        b"\x91" * 1_000_000,
    ],
    ids=lambda frame: repr(frame[:20]),
)
def test_a_frame_that_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


def test_a_frame_longer_than_agreed_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match="at most"):
        decode(bytes(MAX_FRAME_BYTES + 1))
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 10)
    with pytest.raises(MisuseError, match="at most"):
        encode(CONNECT)


def test_a_peers_own_text_is_cut_and_quoted_before_it_reaches_a_log() -> None:
    with pytest.raises(WireError) as caught:
        decode(msgpack.packb({"type": "x" * 1_000_000}))
    assert len(str(caught.value)) < 300
    with pytest.raises(WireError) as caught:
        decode(msgpack.packb({"type": "a\nWARNING all is well\x1b[2J"}))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "claim",
    [
        b"\xa4keys\xdd\x00\x0f\x42\x40",  # 1,000,000 elements: as many as are allowed
        b"\xa4keys\xdd\xff\xff\xff\xff",
        b"\xa4keys\x91\xc6\xff\xff\xff\xff",  # one key of 4 GiB
        b"\xadkv_request_id\xdb\xff\xff\xff\xff",
        b"\xa1x\xdf\xff\xff\xff\xff",  # in a field nobody knows: a map of 2**32 - 1
        b"\xa1x\xc9\xff\xff\xff\xff\x01",
    ],
    ids=lambda claim: claim.hex(),
)
def test_nothing_is_allocated_on_the_senders_word(claim: bytes) -> None:
    frame = b"\x82\xa4type\xa6lookup" + claim + b"\xc4\x05hello"
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000


def test_as_many_keys_as_allowed_fit_one_frame_and_one_more_is_refused() -> None:
    keys = tuple(make_key(i.to_bytes(32, "big"), 0) for i in range(MAX_KEYS))
    frame = encode(Lookup("r1", keys, 0))
    assert len(frame) < MAX_FRAME_BYTES
    assert decode(frame) == Lookup("r1", keys, 0)
    with pytest.raises(WireError, match=r"keys: .*length <= 1000000"):
        decode(encode(Lookup("r1", (*keys, keys[0]), 0)))


def protocol_in(package: Path) -> ModuleType:
    """vLLM's file of message classes, loaded on its own: it imports nothing."""
    path = package / "v1/kv_offload/tiering/p2p/session/protocol.py"
    spec = importlib.util.spec_from_file_location("vllm_p2p_protocol", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_against(protocol: ModuleType) -> None:
    """Their messages decode here, ours pass their checks, and neither side knows one the other does not."""
    classes = [each for name, each in vars(protocol).items() if name.endswith("Msg")]
    theirs = {each.TYPE: each for each in classes}
    assert theirs.keys() == {fields["type"] for _, fields in ON_THE_WIRE}
    for message, fields in ON_THE_WIRE:
        there = theirs[fields["type"]]
        names = {getattr(there, name) for name in vars(there) if name.isupper() and name != "TYPE"}
        stock = {name: fields[name] for name in names} | {protocol.TYPE_KEY: there.TYPE}
        assert type(decode(msgpack.packb(stock))) is type(message)
        if hasattr(there, "validate"):
            there.validate(msgpack.unpackb(encode(message)))


@pytest.mark.vllm
def test_stock_vllm_032_speaks_these_messages() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    check_against(protocol_in(Path(spec.origin).parent))


def test_stock_vllm_033_speaks_these_messages(vllm_033_sources: Path) -> None:
    check_against(protocol_in(vllm_033_sources / "vllm"))
