from __future__ import annotations

import numpy as np
import pytest

from pdoffload.agent.backends import GdsBackend, GdsMtBackend, PosixBackend, UcxBackend
from pdoffload.agent.descriptors import Rows
from pdoffload.agent.limits import FileLimits


def files(count: int, length: int = 4096) -> Rows:
    rows = np.zeros((count, 3), dtype=np.uint64)
    rows[:, 1] = length
    return rows


def test_the_pieces_of_posix_are_counted_until_they_are_given_back() -> None:
    limits = FileLimits([UcxBackend(), PosixBackend(max_ios=64)])
    assert limits.refusal(files(64)) == ""
    limits.take(60)
    assert limits.refusal(files(4)) == ""
    assert limits.refusal(files(5)) == "60 pieces in flight, 5 more exceed max_ios 64"
    limits.give_back(60)
    assert limits.refusal(files(64)) == ""


def test_the_requests_of_gds_are_counted_and_their_pieces_are_cut() -> None:
    limits = FileLimits([GdsBackend(max_batches=2, batch_pieces=8, max_piece_bytes=8192)])
    assert limits.refusal(files(8, 8192)) == ""
    assert "batch_pieces 8" in limits.refusal(files(8, 8193))
    assert limits.refusal(files(4, 2 * 8192)) == ""
    assert limits.refusal(files(1, 2**40)).startswith("134217728 pieces")
    limits.take(8)
    limits.take(1)
    assert limits.refusal(files(1)) == "2 requests in flight, which is max_batches"
    limits.give_back(8)
    assert limits.refusal(files(1)) == ""


@pytest.mark.parametrize("backend", [GdsMtBackend(), UcxBackend()])
def test_others_take_whatever_comes(backend: GdsMtBackend | UcxBackend) -> None:
    limits = FileLimits([backend])
    limits.take(1 << 20)
    assert limits.refusal(files(1000)) == ""
