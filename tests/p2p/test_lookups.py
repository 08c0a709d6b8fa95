"""A peer's lookups over a real index: answers, grace, reservations."""

from __future__ import annotations

import pytest

from pdoffload.layout import BlockKey
from pdoffload.p2p import lookups as module
from pdoffload.p2p.lookups import Lookups
from pdoffload.p2p.messages import Lookup, LookupResp, Message
from pdoffload.p2p.stats import ServeCounts
from pdoffload.p2p.terms import LOOKUP_GRACE_S, REMEMBER_S, Deadlines
from pdoffload.testing.pool_rig import LendingPool
from pdoffload.testing.tier_rig import keys_of

A, B, C, D = keys_of("a", "b", "c", "d")
TIMEOUT_S = 30.0


class Producer:
    """A pool, the lookups of one peer, and every answer."""

    def __init__(self, num_slots: int = 16) -> None:
        self.pool = LendingPool(num_slots)
        self.counts = ServeCounts()
        self.sent: list[Message] = []
        deadlines = Deadlines(store_timeout_s=TIMEOUT_S)
        self.lookups = Lookups(
            deadlines, self.pool.index, self.pool.watches, self.counts, self.sent.append
        )

    def asked(self, *keys: BlockKey, now_s: float = 0.0, round_seq: int = 0) -> None:
        self.lookups.on_lookup(Lookup("id", keys, round_seq), now_s)

    def answers(self) -> list[tuple[bool, ...]]:
        """Hits of every answer since the last call."""
        found = [message.hits for message in self.sent if isinstance(message, LookupResp)]
        assert len(found) == len(self.sent)
        self.sent.clear()
        return found

    def take(self, *keys: BlockKey, closes: int | None = None) -> tuple[set[BlockKey], bool]:
        found, looked_up = self.lookups.take("id", keys, closes=closes)
        self.pool.index.give_back(found.values())
        return set(found), looked_up

    @property
    def num_held(self) -> int:
        return len(list(self.lookups.borrowed()))


@pytest.fixture
def producer() -> Producer:
    return Producer()


def test_what_is_here_is_a_hit_and_reserved(producer: Producer) -> None:
    producer.pool.hold([A, B])
    producer.asked(A, C, B)
    assert producer.answers() == [(True, False, True)]
    assert producer.num_held == 2
    assert (producer.counts.lookups, producer.counts.hits) == (3, 2)
    assert producer.take(A, B, C) == ({A, B}, True)
    assert producer.pool.is_at_rest


def test_a_key_that_is_named_twice_is_lent_once(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.asked(A, A)
    assert producer.answers() == [(True, True)]
    assert producer.num_held == 1


def test_chunks_on_their_way_are_waited_for(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.pool.fill([B, C])
    producer.asked(A, B, C, D)
    assert producer.answers() == []
    producer.pool.ready([B])
    assert producer.answers() == []
    producer.pool.index.abandon([C])
    producer.pool.tell()
    assert producer.answers() == [(True, True, False, False)]
    assert producer.num_held == 2
    assert len(producer.pool.watches) == 0


def test_the_wait_for_them_is_short(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.pool.fill([B])
    producer.asked(A, B, now_s=10.0)
    assert producer.lookups.next_deadline_s == 10.0 + LOOKUP_GRACE_S
    producer.lookups.tick(10.0 + LOOKUP_GRACE_S - 0.1)
    assert producer.answers() == []
    producer.lookups.tick(10.0 + LOOKUP_GRACE_S)
    assert producer.answers() == [(True, False)]
    producer.pool.ready([B])
    assert producer.answers() == []
    assert producer.num_held == 1


def test_a_question_takes_no_more_than_the_pool_can_spare() -> None:
    producer = Producer(num_slots=4)
    producer.pool.hold([A, B, C, D])
    producer.asked(A, B, C, D)
    assert producer.answers() == [(True, True, True, False)]
    producer.asked(D, round_seq=1)
    assert producer.answers() == [(False,)]
    assert producer.num_held == 3


def test_what_is_asked_again_is_reserved_once(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.asked(A)
    producer.asked(A, now_s=10.0)
    assert producer.answers() == [(True,), (True,)]
    assert producer.pool.loans(A) == 1
    producer.lookups.tick(TIMEOUT_S)
    assert producer.num_held == 1, "the younger question counts"
    producer.lookups.tick(10.0 + TIMEOUT_S)
    assert producer.num_held == 0


def test_an_older_question_answered_late_does_not_shorten_the_reservation(
    producer: Producer,
) -> None:
    producer.pool.fill([A])
    producer.pool.hold([B])
    producer.asked(A, now_s=0.0)
    producer.asked(B, now_s=4.0)
    producer.lookups.tick(LOOKUP_GRACE_S)
    producer.lookups.tick(TIMEOUT_S)
    assert producer.take(B) == ({B}, True)


def test_a_reservation_ends_and_its_id_is_remembered(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.asked(A)
    producer.lookups.tick(TIMEOUT_S)
    assert producer.pool.is_at_rest
    assert producer.take(A) == (set(), True), "it was looked up: a fetch that comes now is too late"
    producer.lookups.tick(TIMEOUT_S + REMEMBER_S)
    assert producer.take(A) == (set(), False)
    assert len(producer.lookups) == 0
    assert producer.lookups.next_deadline_s is None


def test_a_remembered_id_that_is_asked_again_is_held_as_long_as_any(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.asked(A)
    producer.lookups.tick(TIMEOUT_S)
    producer.asked(A, now_s=TIMEOUT_S + 1)
    assert producer.num_held == 1
    producer.lookups.tick(2 * TIMEOUT_S + 1)
    assert producer.num_held == 0


def test_a_reserved_chunk_is_not_evicted(producer: Producer) -> None:
    producer.pool.hold([A, B])
    producer.asked(A)
    producer.pool.evict([B])
    assert producer.take(A) == ({A}, True)


def test_a_round_is_closed_by_its_fetch_and_others_are_not(producer: Producer) -> None:
    producer.pool.hold([A, B, C])
    producer.asked(A, B, round_seq=0)
    producer.asked(C, round_seq=1)
    assert producer.take(A, closes=0) == ({A}, True)
    assert producer.num_held == 1
    assert producer.take(C, closes=1) == ({C}, True)
    assert len(producer.lookups) == 0


def test_without_a_round_to_close_the_rest_stays_for_other_fetches(producer: Producer) -> None:
    producer.pool.hold([A, B])
    producer.asked(A, B)
    assert producer.take(A) == ({A}, True)
    assert producer.take(B) == ({B}, True)
    assert producer.take(A) == (set(), True)


def test_whoever_was_not_asked_reserves_nothing(producer: Producer) -> None:
    assert producer.take(A, closes=0) == (set(), False)


def test_the_end_of_an_id_lets_go_of_questions_and_reservations(producer: Producer) -> None:
    producer.pool.hold([A, B])
    producer.pool.fill([C])
    producer.asked(A)
    producer.asked(B, C)
    producer.answers()
    producer.lookups.drop("id")
    assert producer.pool.is_at_rest
    producer.pool.ready([C])
    assert producer.answers() == []
    assert len(producer.lookups) == 0


def test_closing_answers_nobody(producer: Producer) -> None:
    producer.pool.hold([A, B])
    producer.pool.fill([C])
    producer.asked(A)
    producer.asked(B, C)
    producer.answers()
    producer.lookups.close()
    assert producer.answers() == []
    assert producer.pool.is_at_rest


def test_an_answer_too_long_for_a_frame_comes_in_parts(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEYS_PER_ANSWER", 2)
    producer.pool.hold([A, C])
    producer.asked(A, B, C)
    first, second = producer.sent
    assert isinstance(first, LookupResp)
    assert isinstance(second, LookupResp)
    assert (first.keys, first.hits) == ((A, B), (True, False))
    assert (second.keys, second.hits) == ((C,), (True,))


def test_a_question_for_nothing_has_no_answer(producer: Producer) -> None:
    producer.asked()
    assert producer.answers() == []
