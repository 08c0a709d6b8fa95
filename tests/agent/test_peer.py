"""The table of peers: one of a name, and only those of this agent."""

from __future__ import annotations

import pytest

from pdoffload.agent.peer import Peer, PeerTable
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.errors import MisuseError


def peer(name: str) -> Peer:
    return Peer(name, lambda _: None)


def test_a_peer_is_known_from_add_to_remove() -> None:
    table, one = PeerTable(), peer("one")
    table.add(one)
    table.require(one)
    assert (len(table), list(table), "one" in table) == (1, [one], True)
    table.remove(one)
    assert one.removed
    assert (len(table), "one" in table) == (0, False)
    with pytest.raises(MisuseError, match="removed"):
        table.require(one)


def test_a_stranger_of_the_same_name_is_refused() -> None:
    table = PeerTable()
    table.add(peer("one"))
    with pytest.raises(MisuseError, match="another agent"):
        table.require(peer("one"))


def test_a_peer_counts_its_transfers_until_they_are_settled() -> None:
    one = peer("one")
    first, second = (
        Transfer("write", size_bytes=1, timeout_s=1, deadline_s=1, peer=one) for _ in range(2)
    )
    assert (one.unsettled, repr(one)) == (2, "<Peer 'one': 2 unsettled transfers>")
    first.end(TransferState.DONE)
    second.end(TransferState.UNKNOWN, MisuseError("late"))
    assert one.unsettled == 1
    second.settle(TransferState.FAILED)
    assert one.unsettled == 0
