"""The tables of the protocol: what they have is taken, what they do not have is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pdoffload.errors import MisuseError, ProtocolError
from pdoffload.layout import make_key
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
)
from pdoffload.p2p.session import (
    ANSWERING_STEPS,
    ASKING_STEPS,
    PULL_STEPS,
    RECEIVED,
    SENT,
    SERVE_STEPS,
    Answering,
    Asking,
    Direction,
    PullEvent,
    PullState,
    ServeEvent,
    ServeState,
    SessionState,
)

KEY = make_key(bytes(32), 0)
CONNECT = Connect(
    peer_id="decoder:5710",
    agent_metadata=b"metadata",
    base_addr=0,
    num_blocks=1,
    block_len=1,
    config_fingerprint="",
    hash_seed="",
)
MESSAGES: tuple[Message, ...] = (
    CONNECT,
    ConnectAck("prefiller:5710"),
    Lookup("id", (KEY,), 0),
    LookupResp("id", (KEY,), (True,)),
    Fetch("id", (KEY,), (0,), 0),
    TransferDone("id", True, 0),
    AbortFetch("id", 0),
    AbortAck("id", 0),
)


def state_of(asking: Asking, answering: Answering) -> SessionState:
    state = SessionState()
    state.asking, state.answering = asking, answering
    return state


def take(state: SessionState, direction: Direction, message: Message) -> None:
    (state.sent if direction is SENT else state.received)(message)


EVERY_STEP = list(itertools.product(Direction, MESSAGES, Asking, Answering))


@pytest.mark.parametrize(("direction", "message", "asking", "answering"), EVERY_STEP)
def test_every_message_in_every_state(
    direction: Direction, message: Message, asking: Asking, answering: Answering
) -> None:
    state = state_of(asking, answering)
    ours = ASKING_STEPS.get((direction, type(message), asking))
    theirs = ANSWERING_STEPS.get((direction, type(message), answering))
    assert ours is None or theirs is None, "a message belongs to one conversation"
    if ours is not None:
        take(state, direction, message)
        assert (state.asking, state.answering) == (ours, answering)
    elif theirs is not None:
        take(state, direction, message)
        assert (state.asking, state.answering) == (asking, theirs)
    else:
        error = MisuseError if direction is SENT else ProtocolError
        with pytest.raises(error, match=f"{type(message).__name__} may not .*{asking.value}"):
            take(state, direction, message)
        assert (state.asking, state.answering) == (asking, answering)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("asking", "answering"), list(itertools.product(Asking, Answering)))
def test_a_disconnect_ends_both_conversations_whatever_their_state(
    direction: Direction, asking: Asking, answering: Answering
) -> None:
    state = state_of(asking, answering)
    take(state, direction, Disconnect("over"))
    assert state.closed
    for message in (*MESSAGES, Disconnect("again")):
        with pytest.raises(MisuseError, match="closed"):
            state.sent(message)
        with pytest.raises(ProtocolError, match="closed"):
            state.received(message)


def test_what_a_consumer_may_send_its_producer_may_take_and_answer() -> None:
    """Both ends of one session, joined by a wire that is at rest between two messages."""
    answers = {Connect: 1, Lookup: 3, Fetch: 5, AbortFetch: 7}
    todo = [(Asking.SILENT, Answering.STRANGER)]
    seen = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for question in MESSAGES:
            consumer = state_of(name[0], Answering.STRANGER)
            producer = state_of(Asking.SILENT, name[1])
            if type(question) not in answers or (SENT, type(question), name[0]) not in ASKING_STEPS:
                continue
            consumer.sent(question)
            producer.received(question)
            answer = MESSAGES[answers[type(question)]]
            producer.sent(answer)
            consumer.received(answer)
            todo.append((consumer.asking, producer.answering))
    assert seen == {(Asking.SILENT, Answering.STRANGER), (Asking.ADMITTED, Answering.GUEST)}


@pytest.mark.parametrize(
    ("steps", "states", "events", "first"),
    [
        (PULL_STEPS, PullState, PullEvent, PullState.WAITING),
        (SERVE_STEPS, ServeState, ServeEvent, ServeState.GATHERING),
    ],
)
def test_every_state_of_a_fetch_is_reached_and_every_event_is_used(
    steps: dict[Any, Any], states: Any, events: Any, first: Any
) -> None:
    reached = {first}
    while more := {to for (start, _), to in steps.items() if start in reached} - reached:
        reached |= more
    assert reached == set(states)
    assert {event for _, event in steps} == set(events)


def test_every_fetch_ends_by_deadlines_alone() -> None:
    """Whatever else happens or does not happen."""
    for state in (PullState.WAITING, PullState.FETCHING):
        for _ in range(2):
            state = PULL_STEPS.get((state, PullEvent.DEADLINE), state)
        assert state in (PullState.ENDED, PullState.LOST)
    # What is served waits for its writes, which have deadlines of their own.
    stopping = SERVE_STEPS[(ServeState.GATHERING, ServeEvent.DEADLINE)]
    assert SERVE_STEPS[(stopping, ServeEvent.IDLE)] is ServeState.ENDED
    assert SERVE_STEPS[(ServeState.WRITING, ServeEvent.IDLE)] is ServeState.ENDED


@pytest.mark.parametrize("state", [PullState.ENDED, PullState.LOST])
def test_what_has_ended_does_not_begin_again(state: PullState) -> None:
    assert not [event for event in PullEvent if (state, event) in PULL_STEPS]


def test_a_fetch_is_lost_only_if_the_producer_was_told_of_it() -> None:
    to_lost = {start for (start, _), end in PULL_STEPS.items() if end is PullState.LOST}
    assert to_lost == {PullState.FETCHING, PullState.ABORTING}


def test_a_late_answer_to_a_connect_that_was_given_up_is_no_fault() -> None:
    state = state_of(Asking.ADMITTED, Answering.STRANGER)
    state.received(ConnectAck("prefiller:5710"))
    assert state.asking is Asking.ADMITTED
    assert (RECEIVED, ConnectAck, Asking.SILENT) not in ASKING_STEPS
