"""Refusals are counted from events that do not always tell whose they are."""

from __future__ import annotations

import errno
import struct

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pdoffload.p2p.arrivals import QUIET_S, Arrivals, Complaint, read_event, why_refused
from pdoffload.testing.clock import FakeClock

ACCEPTED, SUCCEEDED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


def refused(*events: tuple[int, int]) -> list[str]:
    arrivals = Arrivals()
    return [reason for event in events if (reason := arrivals.take(*event))]


def test_an_event_is_a_number_and_its_value() -> None:
    assert read_event(struct.pack("=HI", ACCEPTED, 17)) == (ACCEPTED, 17)
    assert read_event(struct.pack("=HI", FAILED, MISMATCH)) == (FAILED, MISMATCH)


def test_a_peer_that_was_let_in_and_leaves_is_no_refusal() -> None:
    assert refused((ACCEPTED, 7), (SUCCEEDED, 0), (DISCONNECTED, 7)) == []


def test_a_failure_counts_once_with_its_reason() -> None:
    assert refused((ACCEPTED, 7), (FAILED, MISMATCH), (DISCONNECTED, 7)) == [
        "one side has a cluster secret, the other has none"
    ]


def test_an_end_without_a_word_is_a_refusal_too() -> None:
    assert refused((ACCEPTED, 7), (DISCONNECTED, 7)) == ["what was sent is no ZeroMQ 3 handshake"]


def test_a_descriptor_that_is_used_again_is_another_client() -> None:
    let_in = ((ACCEPTED, 7), (SUCCEEDED, 0))
    assert len(refused(*let_in, (ACCEPTED, 7), (DISCONNECTED, 7))) == 1


@given(fates=st.lists(st.integers(0, 2), max_size=12), data=st.data())
def test_in_the_end_every_client_that_did_not_succeed_was_refused_once(
    fates: list[int], data: st.DataObject
) -> None:
    """Handshakes of one moment, in any order: 0 succeeds, 1 fails loudly, 2 ends without a word."""
    events = [(ACCEPTED, descriptor) for descriptor in range(len(fates))]
    for descriptor in data.draw(st.permutations(range(len(fates)))):
        if fates[descriptor] == 0:
            events.append((SUCCEEDED, 0))
            continue
        if fates[descriptor] == 1:
            events.append((FAILED, MISMATCH))
        events.append((DISCONNECTED, descriptor))
    inside = [descriptor for descriptor, fate in enumerate(fates) if fate == 0]
    events += [(DISCONNECTED, descriptor) for descriptor in data.draw(st.permutations(inside))]
    assert len(refused(*events)) == len(fates) - len(inside)


@pytest.mark.parametrize(
    ("event", "value", "told"),
    [
        (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, "client's key"),
        (FAILED, MISMATCH, "the other has none"),
        (FAILED, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC, "secrets differ"),
        (FAILED, zmq.PROTOCOL_ERROR_ZMTP_UNSPECIFIED, "0x10000000"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EAGAIN, "in time"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE, "Broken pipe"),
    ],
)
def test_every_failure_is_told_in_an_operators_words(event: int, value: int, told: str) -> None:
    assert told in why_refused(int(event), int(value))


def test_a_complaint_is_logged_once_until_it_was_quiet(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    complaint = Complaint(clock)
    for _ in range(3):
        complaint.about("somebody knocks")
        clock.advance(QUIET_S - 1)
    assert (complaint.count, len(caplog.records)) == (3, 1)
    clock.advance(1)
    complaint.about("somebody knocks")
    assert (complaint.count, len(caplog.records)) == (4, 2)
    assert "number 4" in caplog.records[-1].message
