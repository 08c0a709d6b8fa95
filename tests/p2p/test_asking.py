"""Our questions to one peer: what is sent when, and what the engine hears."""

from __future__ import annotations

import itertools

import pytest

from pdoffload.errors import MisuseError
from pdoffload.layout import BlockKey
from pdoffload.p2p.address import Address
from pdoffload.p2p.asking import Asker
from pdoffload.p2p.messages import Fetch, Lookup, LookupResp, Message, TransferDone
from pdoffload.p2p.news import Answered, Pull, PullEnded
from pdoffload.p2p.stats import AskCounts
from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.tier_rig import keys_of

PEER = Address("prefiller", 5710)
DEADLINES = Deadlines(lookup_timeout_s=20.0, load_timeout_s=30.0, abort_timeout_s=10.0)
A, B, C, D = keys_of("a", "b", "c", "d")
AGENT = object()
"""A receiving agent: the asker only tells one from another."""


@pytest.fixture
def asker() -> Asker:
    return Asker(PEER, DEADLINES, 4096, itertools.count(100), AskCounts())


def admitted(asker: Asker, *, whole: bool = False) -> Asker:
    asker.admit(AGENT, whole=whole)
    return asker


def pull(job_id: int, *keys: BlockKey, kv_id: str = "id") -> Pull:
    return Pull(job_id, PEER, kv_id, keys, tuple(range(10 * job_id, 10 * job_id + len(keys))))


def hits_of(asker: Asker) -> list[tuple[set[BlockKey], set[BlockKey]]]:
    """Keys and hits of each `Answered` so far."""
    news = asker.take_news()
    assert all(isinstance(each, Answered) for each in news)
    return [(set(each.keys), set(each.hits)) for each in news if isinstance(each, Answered)]


def fetches(messages: list[Message]) -> list[Fetch]:
    return [message for message in messages if isinstance(message, Fetch)]


# --- before and after the peer knows us ---


def test_nothing_is_sent_before_the_peer_has_admitted_us(asker: Asker) -> None:
    asker.ask("id", [A], 0.0)
    asker.pull(pull(1, B), 0.0)
    assert asker.take_messages() == []
    assert asker.busy
    assert asker.via is None
    admitted(asker)
    kinds = [type(message) for message in asker.take_messages()]
    assert kinds == [Lookup, Fetch]
    assert asker.via is AGENT


def test_while_an_agent_is_replaced_nothing_new_is_sent(asker: Asker) -> None:
    admitted(asker).ask("id", [A], 0.0)
    assert len(asker.take_messages()) == 1
    asker.wait()
    asker.ask("id", [B], 0.0)
    asker.pull(pull(1, C), 0.0)
    assert asker.take_messages() == []
    newer = object()
    asker.admit(newer, whole=False)
    lookup, fetch = asker.take_messages()
    assert isinstance(lookup, Lookup)
    assert lookup.keys == (B,)
    assert isinstance(fetch, Fetch)
    assert asker.under_way(newer) == 1
    assert asker.under_way(AGENT) == 0


# --- lookups ---


def test_answers_come_in_parts_and_each_key_is_told_once(asker: Asker) -> None:
    admitted(asker).ask("id", [A, B, C], 0.0)
    asker.on_lookup_resp(LookupResp("id", (A,), (True,)))
    asker.on_lookup_resp(LookupResp("id", (A, B, C), (False, False, True)))
    assert hits_of(asker) == [({A}, {A}), ({B, C}, {C})]
    assert not asker.busy


def test_answers_that_nobody_waits_for_are_ignored(asker: Asker) -> None:
    admitted(asker).ask("id", [A], 0.0)
    asker.on_lookup_resp(LookupResp("another", (A,), (True,)))
    asker.on_lookup_resp(LookupResp("id", (B,), (True,)))
    assert asker.take_news() == []
    asker.leave("id")
    asker.on_lookup_resp(LookupResp("id", (A,), (True,)))
    assert asker.take_news() == []
    assert not asker.busy


def test_a_question_without_an_answer_is_a_miss_at_its_deadline(asker: Asker) -> None:
    counts = AskCounts()
    asker = admitted(Asker(PEER, DEADLINES, 4096, itertools.count(), counts))
    asker.ask("id", [A, B], 5.0)
    asker.on_lookup_resp(LookupResp("id", (A,), (True,)))
    assert asker.next_deadline_s == 25.0
    asker.tick(24.9)
    assert hits_of(asker) == [({A}, {A})]
    asker.tick(25.0)
    assert hits_of(asker) == [({B}, set())]
    assert counts.expired_lookups == 1
    asker.on_lookup_resp(LookupResp("id", (B,), (True,)))
    assert asker.take_news() == []
    assert asker.next_deadline_s is None


def test_a_question_has_its_deadline_while_the_peer_is_dialled(asker: Asker) -> None:
    asker.ask("id", [A], 0.0)
    asker.tick(20.0)
    assert hits_of(asker) == [({A}, set())]
    assert admitted(asker).take_messages() == []


# --- the end of an id ---


def test_a_left_id_ends_with_an_empty_fetch_if_the_peer_may_hold_something(asker: Asker) -> None:
    admitted(asker).ask("id", [A], 0.0)
    asker.take_messages()
    asker.leave("id")
    asker.leave("never asked")
    (farewell,) = asker.take_messages()
    assert isinstance(farewell, Fetch)
    assert (farewell.kv_request_id, farewell.keys) == ("id", ())
    asker.leave("id")
    assert asker.take_messages() == []


def test_the_empty_fetch_waits_for_what_is_being_pulled(asker: Asker) -> None:
    admitted(asker).pull(pull(1, A), 0.0)
    (fetch,) = fetches(asker.take_messages())
    asker.leave("id")
    assert asker.take_messages() == []
    asker.on_transfer_done(TransferDone("id", False, fetch.round_seq))
    (farewell,) = fetches(asker.take_messages())
    assert farewell.keys == ()
    assert farewell.round_seq != fetch.round_seq


def test_the_empty_fetch_waits_for_the_next_agent_too(asker: Asker) -> None:
    admitted(asker).ask("id", [A], 0.0)
    asker.take_messages()
    asker.wait()
    asker.leave("id")
    assert asker.take_messages() == []
    admitted(asker)
    assert len(fetches(asker.take_messages())) == 1


def test_an_id_that_is_used_again_is_not_left(asker: Asker) -> None:
    admitted(asker).pull(pull(1, A), 0.0)
    (fetch,) = fetches(asker.take_messages())
    asker.leave("id")
    asker.ask("id", [B], 1.0)
    asker.on_transfer_done(TransferDone("id", False, fetch.round_seq))
    assert [type(message) for message in asker.take_messages()] == [Lookup]


# --- a peer that is lost ---


def test_a_lost_peer_answers_no_and_has_sent_nothing(asker: Asker) -> None:
    admitted(asker).ask("id", [A, B], 0.0)
    asker.pull(pull(1, C), 0.0)
    asker.lose("its line broke")
    answered, ended = asker.take_news()
    assert isinstance(answered, Answered)
    assert (set(answered.keys), set(answered.hits)) == ({A, B}, set())
    assert isinstance(ended, PullEnded)
    assert "its line broke" in str(ended.failed[0][1])
    assert not asker.busy
    assert asker.via is None


def test_without_a_receiving_agent_only_what_is_under_way_goes_on(asker: Asker) -> None:
    admitted(asker).pull(pull(1, A), 0.0)
    asker.take_messages()
    asker.wait()
    asker.pull(pull(2, B), 0.0)
    asker.ask("id", [C], 0.0)
    asker.give_up("no agent opens")
    answered, ended = asker.take_news()
    assert isinstance(answered, Answered)
    assert isinstance(ended, PullEnded)
    assert (ended.job_id, ended.settled) == (2, True)
    assert "no agent opens" in str(ended.failed[0][1])
    assert asker.under_way(AGENT) == 1


def test_nothing_is_asked_by_an_agent_that_is_closed(asker: Asker) -> None:
    admitted(asker).settle(object(), open_to_cma=False)
    assert asker.via is AGENT
    asker.settle(AGENT, open_to_cma=False)
    asker.ask("id", [A], 0.0)
    assert asker.take_messages() == []
    assert asker.via is None


def test_a_live_job_cannot_be_pulled_again(asker: Asker) -> None:
    asker.pull(pull(1, A), 0.0)
    with pytest.raises(MisuseError, match="pull 1 is live"):
        asker.pull(pull(1, B), 0.0)


# --- stock vLLM ---


def test_at_stock_vllm_a_hit_that_a_fetch_has_let_go_of_fails_at_once(asker: Asker) -> None:
    admitted(asker, whole=True).ask("id", [A, B, C], 0.0)
    asker.on_lookup_resp(LookupResp("id", (A, B, C), (True, True, True)))
    asker.pull(pull(1, A), 0.0)
    asker.pull(pull(2, B, C), 0.0)
    lookup, fetch = asker.take_messages()
    assert isinstance(lookup, Lookup)
    assert isinstance(fetch, Fetch)
    assert (fetch.keys, fetch.round_seq) == ((A,), lookup.round_seq)
    *_, ended = asker.take_news()
    assert isinstance(ended, PullEnded)
    assert (ended.job_id, ended.settled, len(ended.failed)) == (2, True, 2)
    assert "closed its round" in str(ended.failed[0][1])


def test_at_stock_vllm_an_answer_after_the_fetch_is_a_miss(asker: Asker) -> None:
    admitted(asker, whole=True).ask("id", [A], 0.0)
    asker.on_lookup_resp(LookupResp("id", (A,), (True,)))
    asker.ask("id", [B], 0.0)
    asker.pull(pull(1, A), 0.0)
    asker.on_lookup_resp(LookupResp("id", (B,), (True,)))
    assert hits_of(asker) == [({A}, {A}), ({B}, set())]
    asker.ask("id", [B], 1.0)
    asker.on_lookup_resp(LookupResp("id", (B,), (True,)))
    assert hits_of(asker) == [({B}, {B})]


def test_at_stock_vllm_the_last_fetch_of_an_id_says_nothing_more(asker: Asker) -> None:
    admitted(asker, whole=True).ask("id", [A], 0.0)
    asker.on_lookup_resp(LookupResp("id", (A,), (True,)))
    asker.pull(pull(1, A), 0.0)
    fetch = fetches(asker.take_messages())[-1]
    asker.on_transfer_done(TransferDone("id", False, fetch.round_seq))
    asker.leave("id")
    assert asker.take_messages() == []


def test_at_stock_vllm_what_was_asked_and_not_fetched_is_let_go_in_a_round_of_its_own(
    asker: Asker,
) -> None:
    admitted(asker, whole=True).pull(pull(1, A), 0.0)
    asker.ask("id", [B], 0.0)
    (fetch,) = fetches(asker.take_messages())
    asker.leave("id")
    asker.on_transfer_done(TransferDone("id", False, fetch.round_seq))
    (farewell,) = fetches(asker.take_messages())
    assert farewell.keys == ()
    assert farewell.round_seq == fetch.round_seq + 1
