"""Numbers of fetches: never the same among ourselves, counted by id for stock vLLM."""

from __future__ import annotations

import itertools

from pdoffload.p2p.rounds import Numbers
from pdoffload.testing.tier_rig import keys_of

A, B = keys_of("a", "b")


def stock() -> Numbers:
    numbers = Numbers(itertools.count())
    numbers.whole = True
    return numbers


def test_among_ourselves_no_number_comes_twice_in_a_process() -> None:
    serials = itertools.count()
    sessions = [Numbers(serials), Numbers(serials)]
    given = [numbers.for_fetch(kv_id) for numbers in sessions for kv_id in ("x", "y", "x")]
    for numbers in sessions:
        numbers.leave("x")
        numbers.clear()
        given.append(numbers.for_fetch("x"))
    assert len(set(given)) == len(given)


def test_among_ourselves_a_hit_stays_one_and_everything_may_be_fetched() -> None:
    numbers = Numbers(itertools.count())
    assert numbers.for_lookup("x") == numbers.for_lookup("y")
    numbers.for_fetch("x")
    assert numbers.note_hit("x", A, 0)
    assert numbers.may_fetch("x", B)


def test_stock_vllm_counts_the_fetches_of_each_id() -> None:
    numbers = stock()
    assert [numbers.for_fetch("x"), numbers.for_fetch("x"), numbers.for_fetch("y")] == [0, 1, 0]
    assert numbers.for_lookup("x") == 2
    assert numbers.leave("x") == 2
    assert numbers.for_fetch("x") == 0
    assert numbers.leave("never heard of") == 0


def test_at_stock_vllm_a_fetch_lets_go_of_hits_it_does_not_name() -> None:
    numbers = stock()
    round_seq = numbers.for_lookup("x")
    assert numbers.note_hit("x", A, round_seq)
    assert numbers.may_fetch("x", A)
    assert not numbers.may_fetch("x", B)
    numbers.for_fetch("x")
    assert not numbers.may_fetch("x", A)


def test_at_stock_vllm_an_answer_to_a_round_that_is_over_is_no_hit() -> None:
    numbers = stock()
    round_seq = numbers.for_lookup("x")
    numbers.for_fetch("x")
    assert not numbers.note_hit("x", A, round_seq)
    assert not numbers.may_fetch("x", A)
    assert not numbers.note_hit("y", A, 0)


def test_at_stock_vllm_whoever_did_not_ask_fetches_as_often_as_it_likes() -> None:
    numbers = stock()
    assert numbers.may_fetch("x", A)
    numbers.for_fetch("x")
    assert numbers.may_fetch("x", B)
