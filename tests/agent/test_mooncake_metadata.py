"""What an agent over a Transfer Engine tells its peers: whole, or refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pdoffload.agent.mooncake_metadata import EngineMetadata, Garbled, decode

TOLD = EngineMetadata.of("peer-1", "10.0.0.7", 15001, 16002, [(8192, 4096), (100, 50)])
MAGIC = b"pdoffload-mooncake|"


def rows(*pieces: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([(address, size, 0) for address, size in pieces], dtype=np.uint64)


def test_what_is_told_is_what_was_meant() -> None:
    assert decode(TOLD.encode()) == TOLD
    assert TOLD.regions == ((100, 50), (8192, 4096))


@pytest.mark.parametrize(
    ("piece", "inside"),
    [
        ((8192, 4096), True),
        ((8192, 1), True),
        ((12287, 1), True),
        ((100, 50), True),
        ((12287, 2), False),
        ((12288, 1), False),
        ((8191, 2), False),
        ((99, 1), False),
        ((150, 1), False),
        ((8192, 2**64 - 1), False),
        ((2**64 - 1, 1), False),
        ((2**64 - 100, 200), False),
        ((0, 1), False),
    ],
)
def test_rows_lie_within_one_region_or_outside(piece: tuple[int, int], inside: bool) -> None:
    assert TOLD.holds(rows(piece)) is inside
    assert TOLD.holds(rows((8192, 16), piece)) is inside


def test_memory_of_a_device_and_memory_of_nobody_are_outside() -> None:
    of_device = rows((8192, 16))
    of_device[0, 2] = 1
    assert not TOLD.holds(of_device)
    nothing = EngineMetadata.of("peer-1", "10.0.0.7", 15001, 16002, [])
    assert not nothing.holds(rows((8192, 16)))


def test_cut_or_foreign_bytes_are_refused() -> None:
    good = TOLD.encode()
    bad = [good[:cut] for cut in range(len(good))]
    for each in [*bad, good + b"x", b"nixlSerDes|", MAGIC + b"\xc1", MAGIC + good]:
        with pytest.raises(Garbled):
            decode(each)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((2, "n", "h", 1, 1, []), "version 2"),
        ((1, "", "h", 1, 1, []), "length >= 1"),
        ((1, "n" * 513, "h", 1, 1, []), "length <= 512"),
        ((1, "a\nb", "h", 1, 1, []), "printable"),
        ((1, "n", "", 1, 1, []), "regex"),
        ((1, "n", "host:9", 1, 1, []), "regex"),
        ((1, "n", "/h", 1, 1, []), "regex"),
        ((1, "n", "h\n", 1, 1, []), "regex"),
        ((1, "n", "h", 0, 1, []), ">= 1"),
        ((1, "n", "h", 1, 65536, []), "<= 65535"),
        ((1, "n", "h", 1.5, 1, []), "int"),
        ((1, "n", "h", 1, 1, [(0, 1)]), ">= 1"),
        ((1, "n", "h", 1, 1, [(1, 0)]), ">= 1"),
        ((1, "n", "h", 1, 1, [(1, 2**63)]), "region of"),
        ((1, "n", "h", 1, 1, [(2**64 - 1, 2)]), "region of"),
        ((1, "n", "h", 1, 1, [(100, 50), (149, 1)]), "region of 1 bytes"),
        ((1, "n", "h", 1, 1, [(100, 50), (1, 1)]), "region of 1 bytes"),
        ((1, "n", "h", 1, 1), "length"),
        ((1, "n", "h", 1, 1, [], 0), "length"),
        ({"version": 1}, "array"),
    ],
)
def test_values_out_of_range_are_refused(fields: Any, reason: str) -> None:
    with pytest.raises(Garbled, match=reason):
        decode(MAGIC + msgspec.msgpack.encode(fields))
