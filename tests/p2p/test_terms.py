"""What a process says of itself, and what it says to those it cannot share with: both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdoffload.layout import Geometry, RunConfig
from pdoffload.p2p.messages import Connect, decode, encode
from pdoffload.p2p.terms import PeerTerms, Target

FIELDS = {"model_name": "org/model", "dtype": "bfloat16", "tp_size": 2}


def terms(
    *,
    worker_bytes: int = 4096,
    seed: str = "seed",
    guards: dict[str, Any] | None = None,
    **fields: Any,
) -> PeerTerms:
    return PeerTerms(
        geometry=Geometry(num_slots=7, worker_bytes=worker_bytes, num_copies=1),
        base_address=0x7000,
        run_config=RunConfig(fields={**FIELDS, **fields}, guards=guards or {"layout": "LBHNC"}),
        hash_seed=lambda: seed,
    )


def introduced(theirs: PeerTerms, **changes: Any) -> Connect:
    """What arrives of their `connect`."""
    message = theirs.introduce("decoder:5710", b"metadata", "incarnation")
    arrived = decode(encode(msgspec.structs.replace(message, **changes)))
    assert isinstance(arrived, Connect)
    return arrived


def the_objection(ours: PeerTerms, theirs: Connect) -> str:
    (objection,) = ours.objections(theirs)
    return objection


def test_an_introduction_says_where_the_pool_lies_and_what_it_holds() -> None:
    message = introduced(terms())
    assert (message.base_addr, message.num_blocks, message.block_len) == (0x7000, 7, 4096)
    assert (message.peer_id, message.agent_metadata) == ("decoder:5710", b"metadata")
    assert (message.hash_seed, message.incarnation) == ("seed", "incarnation")
    assert message.guards["dtype"] == '"bfloat16"'
    assert message.guards["layout"] == '"LBHNC"'


def test_equal_terms_have_no_objections() -> None:
    assert terms().objections(introduced(terms())) == []


def test_the_fingerprint_is_of_the_fields_whatever_their_order() -> None:
    one, other = RunConfig(fields={"a": 1, "b": [2]}), RunConfig(fields={"b": [2], "a": 1})
    geometry = Geometry(num_slots=1, worker_bytes=1, num_copies=1)
    prints = {
        PeerTerms(
            geometry=geometry, base_address=0, run_config=config, hash_seed=lambda: ""
        ).fingerprint
        for config in (one, other)
    }
    (fingerprint,) = prints
    assert len(fingerprint) == 16
    assert fingerprint != terms().fingerprint


def test_c15_another_hash_seed_is_named_with_both_values_and_the_remedy() -> None:
    objection = the_objection(terms(), introduced(terms(seed="0")))
    assert objection.startswith("hash_seed: 'seed' here, '0' there")
    assert "PYTHONHASHSEED" in objection


def test_c21_another_block_length_is_named_with_both_values() -> None:
    objection = the_objection(terms(), introduced(terms(worker_bytes=8192)))
    assert objection == "block_len: 4096 here, 8192 there"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "float8"}, 'dtype: "bfloat16" here, "float8" there'),
        ({"tp_size": 4}, "tp_size: 2 here, 4 there"),
        ({"model_name": "org/other"}, 'model_name: "org/model" here, "org/other" there'),
        ({"guards": {"layout": "NHD"}}, 'layout: "LBHNC" here, "NHD" there'),
    ],
)
def test_c21_another_setting_is_named_with_both_values(change: dict[str, Any], named: str) -> None:
    assert the_objection(terms(), introduced(terms(**change))) == named


def test_all_objections_are_told_together() -> None:
    theirs = introduced(terms(worker_bytes=8192, seed="0", dtype="float8", tp_size=4))
    found = terms().objections(theirs)
    assert [each.partition(":")[0] for each in found] == [
        "block_len",
        "hash_seed",
        "dtype",
        "tp_size",
    ]


def test_a_setting_that_only_one_side_names_is_no_objection() -> None:
    ours, theirs = terms(), introduced(terms())
    more = introduced(terms(), guards={**theirs.guards, "of a newer version": "1"})
    assert ours.objections(more) == []
    fewer = {name: value for name, value in theirs.guards.items() if name != "dtype"}
    assert ours.objections(introduced(terms(), guards=fewer)) == []


def test_stock_vllm_tells_its_fingerprint_alone() -> None:
    other = terms(dtype="float8")
    objection = the_objection(terms(), introduced(other, guards={}))
    assert f"{terms().fingerprint} here, {other.fingerprint} there" in objection
    assert terms().objections(introduced(other, guards={}, config_fingerprint="")) == []


def test_a_seed_is_compared_once_whatever_the_guards_say() -> None:
    ours, theirs = (
        terms(seed=seed, guards={"hash_seed": seed, "layout": "LBHNC"}) for seed in ("1", "2")
    )
    assert len(ours.objections(introduced(theirs))) == 1


def test_what_a_peer_says_is_cut_and_cannot_break_a_log_line() -> None:
    theirs = introduced(terms(), guards={"dtype": "x\ny" * 10_000}, hash_seed="a\nb" * 1000)
    found = terms().objections(theirs)
    assert all("\n" not in each and len(each) < 2000 for each in found)


def test_every_introduction_is_a_target_of_its_own() -> None:
    one, other = (Target("decoder", b"metadata", 0, 1, 1) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2


def by(*backends: str) -> bytes:
    """Metadata of an agent that can be reached by these."""

    def field(tag: str, content: bytes) -> bytes:
        return tag.encode() + len(content).to_bytes(8, "little") + content + b"|"

    addresses = [field("t", name.encode()) + field("c", b"\0address") for name in backends]
    return b"".join(
        (
            b"nixlSerDes|",
            field("Agent", b"theirs"),
            field("Conns", len(backends).to_bytes(8, "little")),
            *addresses,
            field("", b"MemSection"),
            field("nixlSecElms", bytes(8)),
        )
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (("UCX",), ("MOONCAKE",), ["backends: UCX here, MOONCAKE there"]),
        (("UCX", "LIBFABRIC"), ("A", "B"), ["backends: UCX, LIBFABRIC here, A, B there"]),
        (("UCX", "LIBFABRIC"), ("A", "UCX"), []),
        ((), ("MOONCAKE",), []),
    ],
)
def test_peers_need_a_backend_in_common(
    ours: tuple[str, ...], theirs: tuple[str, ...], said: list[str]
) -> None:
    mine = msgspec.structs.replace(terms(), backends=ours)
    assert mine.objections(introduced(terms(), agent_metadata=by(*theirs))) == said


def test_metadata_that_cannot_be_read_is_left_to_the_agent() -> None:
    mine = msgspec.structs.replace(terms(), backends=("UCX",))
    assert mine.objections(introduced(terms(), agent_metadata=b"nonsense")) == []
