"""Keys, sizes and configurations: values that other programs and other machines must agree on."""

from __future__ import annotations

import hashlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoffload.layout import (
    PAGE_BYTES,
    Geometry,
    RunConfig,
    block_hash,
    group_index,
    make_key,
    round_up,
)

FIELDS = {"model_name": "org/model", "block_size": 16, "dtype": "bfloat16", "tp_size": 2}


@settings(deadline=None, database=None)
@given(digest=st.binary(max_size=64), group=st.integers(0, 2**32 - 1))
def test_a_key_gives_back_hash_and_group(digest, group):
    key = make_key(digest, group)
    assert block_hash(key) == digest
    assert group_index(key) == group


def test_a_key_is_the_hash_and_then_the_group_big_endian():
    """vLLM's own form: chunks of equal keys are shared with it."""
    assert make_key(b"\xaa\xbb", 258) == b"\xaa\xbb\x00\x00\x01\x02"


@pytest.mark.parametrize("group", [-1, 2**32])
def test_a_group_that_does_not_fit_is_no_key(group):
    with pytest.raises(OverflowError):
        make_key(b"hash", group)


@settings(deadline=None, database=None)
@given(value=st.integers(0, 2**60), multiple=st.integers(1, 2**30))
def test_round_up_gives_the_next_multiple(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@pytest.mark.parametrize(
    ("worker_bytes", "num_copies", "chunk_bytes"),
    [(4096, 1, 4096), (4096, 2, 8192), (1, 1, 4096), (1500, 3, 8192), (2048, 2, 4096)],
)
def test_a_chunk_is_all_workers_parts_padded_to_a_page_once(worker_bytes, num_copies, chunk_bytes):
    geometry = Geometry(num_slots=3, worker_bytes=worker_bytes, num_copies=num_copies)
    assert geometry.chunk_bytes == chunk_bytes
    assert geometry.chunk_bytes % PAGE_BYTES == 0
    assert geometry.pool_bytes == 3 * chunk_bytes


def test_values_do_not_change_once_made():
    with pytest.raises(AttributeError):
        Geometry(num_slots=1, worker_bytes=1, num_copies=1).num_slots = 2
    with pytest.raises(AttributeError):
        RunConfig(fields=FIELDS).fields = {}


def test_the_namespace_is_the_model_and_a_digest_of_all_fields():
    compact = json.dumps(FIELDS, sort_keys=True, separators=(",", ":")).encode()
    config = RunConfig(fields=FIELDS)
    assert config.digest == hashlib.sha256(compact).hexdigest()[:12]
    assert config.namespace == f"org_model_{config.digest}"


def test_the_order_of_fields_means_nothing():
    backwards = RunConfig(fields=dict(reversed(FIELDS.items())))
    assert backwards.digest == RunConfig(fields=FIELDS).digest
    assert backwards.fingerprint == RunConfig(fields=FIELDS).fingerprint


@pytest.mark.parametrize("field", list(FIELDS))
def test_c09_every_field_keeps_its_chunks_apart(field):
    """Runs of another dtype, parallelism or model must never meet each other's bytes."""
    changed = RunConfig(fields={**FIELDS, field: "another"})
    assert changed.namespace != RunConfig(fields=FIELDS).namespace
    assert changed.fingerprint != RunConfig(fields=FIELDS).fingerprint


def test_guards_are_part_of_the_fingerprint_and_not_of_the_name():
    plain, seeded = RunConfig(fields=FIELDS), RunConfig(fields=FIELDS, guards={"hash_seed": "1"})
    assert plain.namespace == seeded.namespace
    assert plain.fingerprint != seeded.fingerprint
    assert len(seeded.fingerprint) == 32


def test_a_field_cannot_pose_as_a_guard():
    one = RunConfig(fields={**FIELDS, "seed": 1}, guards={})
    other = RunConfig(fields=FIELDS, guards={"seed": 1})
    assert one.fingerprint != other.fingerprint


def test_configurations_do_not_share_their_default_guards():
    one, other = RunConfig(fields=FIELDS), RunConfig(fields=FIELDS)
    one.guards["hash_seed"] = "1"
    assert other.guards == {}


def test_a_configuration_survives_being_written_down():
    config = RunConfig(fields=FIELDS, guards={"hash_seed": "1"})
    again = msgspec.json.decode(msgspec.json.encode(config), type=RunConfig)
    assert again.fingerprint == config.fingerprint
