"""A transfer ends once, and is over once."""

from __future__ import annotations

import numpy as np
import pytest

from pdoffload.agent.descriptors import MemoryKind
from pdoffload.agent.region import Region
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.errors import DeadlineExceeded, MisuseError, TransferError

RUNNING, DONE = TransferState.RUNNING, TransferState.DONE
FAILED, UNKNOWN = TransferState.FAILED, TransferState.UNKNOWN


@pytest.fixture
def region() -> Region:
    return Region(MemoryKind.DRAM, np.array([[1, 8, 0]], dtype=np.uint64), 1, lambda each: None)


def running(region: Region) -> Transfer:
    return Transfer("load of 3 chunks", size_bytes=8, timeout_s=1, deadline_s=5, regions=(region,))


def test_it_uses_its_regions_until_it_is_settled(region: Region) -> None:
    transfer = running(region)
    assert (transfer.state, transfer.settled, region.unsettled) == (RUNNING, False, 1)
    transfer.end(DONE)
    assert (transfer.settled_state, transfer.error, region.unsettled) == (DONE, None, 0)


@pytest.mark.parametrize("after_all", [DONE, FAILED])
def test_unknown_uses_its_regions_until_the_truth_is_told(
    region: Region, after_all: TransferState
) -> None:
    transfer = running(region)
    error = DeadlineExceeded("load of 3 chunks", 1)
    transfer.end(UNKNOWN, error)
    assert (transfer.settled, region.unsettled) == (False, 1)
    transfer.settle(after_all)
    assert (transfer.state, transfer.settled_state) == (UNKNOWN, after_all)
    assert (transfer.error, region.unsettled) == (error, 0)


@pytest.mark.parametrize("first", [DONE, FAILED, UNKNOWN])
@pytest.mark.parametrize("second", [RUNNING, DONE, FAILED, UNKNOWN])
def test_it_ends_once(region: Region, first: TransferState, second: TransferState) -> None:
    transfer = running(region)
    transfer.end(first, None if first is DONE else TransferError("x"))
    with pytest.raises(MisuseError):
        transfer.end(second, None if second is DONE else TransferError("x"))
    assert transfer.state is first


@pytest.mark.parametrize("state", [RUNNING, DONE, FAILED])
def test_only_unknown_settles_later(region: Region, state: TransferState) -> None:
    transfer = running(region)
    if state is not RUNNING:
        transfer.end(state, None if state is DONE else TransferError("x"))
    with pytest.raises(MisuseError):
        transfer.settle(DONE)
    assert region.unsettled == (state is RUNNING)


def test_it_settles_once_and_as_an_end(region: Region) -> None:
    transfer = running(region)
    transfer.end(UNKNOWN, TransferError("x"))
    for state in (RUNNING, UNKNOWN):
        with pytest.raises(MisuseError):
            transfer.settle(state)
    transfer.settle(FAILED)
    with pytest.raises(MisuseError):
        transfer.settle(DONE)
    assert region.unsettled == 0


def test_a_failure_has_a_reason_and_a_success_has_none(region: Region) -> None:
    transfer = running(region)
    for state, error in ((DONE, TransferError("x")), (FAILED, None), (UNKNOWN, None)):
        with pytest.raises(MisuseError):
            transfer.end(state, error)
    assert transfer.state is RUNNING


def test_its_text_names_the_work_and_where_it_stands(region: Region) -> None:
    transfer = running(region)
    assert "load of 3 chunks" in repr(transfer)
    assert "running" in repr(transfer)
    transfer.end(UNKNOWN, TransferError("x"))
    assert "unknown, open" in repr(transfer)
    transfer.settle(DONE)
    assert "settled done" in repr(transfer)
