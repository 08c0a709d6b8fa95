"""Chunks kept for a peer: until it fetches, says so, or does not come in time."""

from __future__ import annotations

import pytest

from pdoffload.p2p.keeping import Keeping, Stage
from pdoffload.p2p.terms import REMEMBER_S, Deadlines
from pdoffload.testing.pool_rig import LendingPool
from pdoffload.testing.tier_rig import keys_of

A, B, C, D = keys_of("a", "b", "c", "d")
TIMEOUT_S = 60.0


class Keeper:
    """A pool and its keeps; `offered` begins a keep and offers chunks in one go, `computed` ends its request
    besides."""

    def __init__(self, num_slots: int = 16) -> None:
        self.pool = LendingPool(num_slots)
        deadlines = Deadlines(unbound_store_timeout_s=TIMEOUT_S)
        self.keeping = Keeping(self.pool.index, self.pool.watches, deadlines)

    def offered(self, *keys: bytes) -> None:
        self.keeping.begin("id", fetched=False)
        self.keeping.offer("id", keys)  # type: ignore[arg-type]

    def computed(self, *keys: bytes, now_s: float = 0.0) -> None:
        self.offered(*keys)
        self.keeping.computed("id", now_s)

    @property
    def num_kept(self) -> int:
        return len(list(self.keeping.borrowed()))


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


def test_chunks_are_kept_as_they_become_ready(keeper: Keeper) -> None:
    keeper.pool.hold([A])
    keeper.pool.fill([B, C])
    keeper.offered(A, B, C)
    assert keeper.num_kept == 1
    keeper.pool.ready([B])
    keeper.pool.index.abandon([C])
    keeper.pool.tell()
    assert keeper.num_kept == 2
    assert keeper.keeping.bind("id", [A, B, C], 1.0, only=True) == {
        A: keeper.pool.slot_of(A),
        B: keeper.pool.slot_of(B),
    }


def test_what_is_offered_twice_is_kept_once(keeper: Keeper) -> None:
    keeper.pool.hold([A])
    keeper.pool.fill([B])
    keeper.offered(A, B, A, B)
    keeper.keeping.offer("id", [A, B])
    keeper.pool.ready([B])
    assert keeper.num_kept == 2
    assert keeper.pool.loans(A) == keeper.pool.loans(B) == 1


def test_chunks_that_nobody_asked_to_keep_are_not_kept(keeper: Keeper) -> None:
    keeper.pool.hold([A])
    keeper.keeping.offer("id", [A])
    keeper.keeping.computed("id", 0.0)
    keeper.keeping.release("id", 0.0)
    assert keeper.keeping.bind("id", [A], 0.0, only=True) == {}
    assert keeper.pool.is_at_rest
    assert keeper.keeping.stage("id") is Stage.UNKNOWN, "its request may still come"


def test_no_more_is_kept_than_the_pool_can_spare() -> None:
    keeper = Keeper(num_slots=4)
    keeper.pool.hold([A, B, C, D])
    keeper.offered(A, B, C, D)
    assert keeper.num_kept == 3
    keeper.keeping.begin("another", fetched=False)
    keeper.keeping.offer("another", [D])
    assert keeper.num_kept == 3


def test_a_kept_chunk_is_not_evicted(keeper: Keeper) -> None:
    keeper.pool.hold([A, B])
    keeper.offered(A)
    keeper.pool.evict([B])
    slot = keeper.pool.slot_of(A)
    assert keeper.keeping.bind("id", [A], 1.0, only=True) == {A: slot}


# --- stages ---


def test_the_stages_of_a_keep(keeper: Keeper) -> None:
    keeping = keeper.keeping
    assert keeping.stage("id") is Stage.UNKNOWN
    keeping.begin("id", fetched=False)
    assert keeping.stage("id") is Stage.COMPUTING
    keeping.computed("id", 5.0)
    assert keeping.stage("id") is Stage.COMPUTED
    keeping.tick(5.0 + TIMEOUT_S)
    assert keeping.stage("id") is Stage.EXPIRED
    keeping.tick(5.0 + TIMEOUT_S + REMEMBER_S)
    assert keeping.stage("id") is Stage.UNKNOWN
    assert len(keeping) == 0


def test_two_requests_under_one_id_have_both_to_end(keeper: Keeper) -> None:
    keeper.keeping.begin("id", fetched=False)
    keeper.keeping.begin("id", fetched=False)
    keeper.keeping.computed("id", 0.0)
    assert keeper.keeping.stage("id") is Stage.COMPUTING
    keeper.keeping.computed("id", 0.0)
    keeper.keeping.computed("id", 0.0)
    assert keeper.keeping.stage("id") is Stage.COMPUTED


def test_an_expired_id_may_be_used_again(keeper: Keeper) -> None:
    keeper.computed(A)
    keeper.keeping.tick(TIMEOUT_S)
    assert keeper.keeping.stage("id") is Stage.EXPIRED
    keeper.keeping.begin("id", fetched=False)
    assert keeper.keeping.stage("id") is Stage.COMPUTING


# --- deadlines ---


def test_c18_chunks_nobody_fetches_are_let_go_of_and_counted(keeper: Keeper) -> None:
    keeper.pool.hold([A])
    keeper.pool.fill([B])
    keeper.computed(A, B, now_s=1.0)
    assert keeper.keeping.next_deadline_s == 1.0 + TIMEOUT_S
    assert keeper.keeping.tick(1.0 + TIMEOUT_S - 0.1) == []
    assert keeper.keeping.tick(1.0 + TIMEOUT_S) == ["id"], "though a chunk was still on its way"
    assert keeper.pool.is_at_rest
    assert keeper.keeping.expired_keeps == 1
    assert keeper.keeping.next_deadline_s is None


def test_a_request_that_computes_slowly_loses_nothing(keeper: Keeper) -> None:
    """Its second chunk takes longer than the timeout."""
    keeper.pool.hold([A, B])
    keeper.offered(A)
    assert keeper.keeping.next_deadline_s is None
    assert keeper.keeping.tick(10 * TIMEOUT_S) == []
    keeper.keeping.offer("id", [B])
    keeper.keeping.computed("id", 10 * TIMEOUT_S)
    assert keeper.num_kept == 2
    assert keeper.keeping.tick(11 * TIMEOUT_S - 0.1) == []
    assert keeper.keeping.tick(11 * TIMEOUT_S) == ["id"]
    assert keeper.pool.is_at_rest


def test_the_last_of_two_requests_under_one_id_counts(keeper: Keeper) -> None:
    keeper.pool.hold([A])
    keeper.computed(A, now_s=0.0)
    keeper.keeping.begin("id", fetched=False)
    assert keeper.keeping.next_deadline_s is None
    keeper.keeping.computed("id", 50.0)
    assert keeper.keeping.tick(TIMEOUT_S) == []
    assert keeper.keeping.tick(50.0 + TIMEOUT_S) == ["id"]


def test_a_request_that_waits_for_its_turn_has_no_deadline(keeper: Keeper) -> None:
    keeper.keeping.begin("id", fetched=False)
    assert keeper.keeping.next_deadline_s is None
    keeper.keeping.tick(1000 * TIMEOUT_S)
    keeper.pool.hold([A])
    keeper.keeping.offer("id", [A])
    assert keeper.num_kept == 1


def test_a_keep_of_nothing_ends_without_being_counted(keeper: Keeper) -> None:
    keeper.keeping.begin("id", fetched=False)
    keeper.keeping.computed("id", 0.0)
    assert keeper.keeping.tick(TIMEOUT_S) == []
    assert keeper.keeping.expired_keeps == 0
    assert keeper.keeping.stage("id") is Stage.EXPIRED, "a fetch need not wait for what never comes"


# --- the fetch ---


def test_the_only_fetch_of_an_id_lets_go_of_what_it_does_not_name(keeper: Keeper) -> None:
    keeper.pool.hold([A, B])
    keeper.pool.fill([C])
    keeper.offered(A, B, C)
    assert set(keeper.keeping.bind("id", [A], 1.0, only=True)) == {A}
    assert keeper.num_kept == 0
    assert len(keeper.pool.watches) == 0
    assert keeper.pool.loans(A) == 1, "it went over to the fetch"


def test_other_fetches_of_an_id_find_what_the_first_left(keeper: Keeper) -> None:
    keeper.pool.hold([A, B])
    keeper.pool.fill([C])
    keeper.offered(A, B, C)
    assert set(keeper.keeping.bind("id", [A], 1.0, only=False)) == {A}
    keeper.pool.ready([C])
    assert set(keeper.keeping.bind("id", [B, C], 2.0, only=False)) == {B, C}
    assert keeper.num_kept == 0


def test_a_chunk_that_the_fetch_waits_for_is_not_waited_for_twice(keeper: Keeper) -> None:
    keeper.pool.fill([A])
    keeper.offered(A)
    assert keeper.keeping.bind("id", [A], 1.0, only=False) == {}
    assert len(keeper.pool.watches) == 0
    keeper.pool.ready([A])
    assert keeper.num_kept == 0


def test_after_the_fetch_nothing_more_is_kept(keeper: Keeper) -> None:
    keeper.offered()
    keeper.keeping.bind("id", [A], 1.0, only=False)
    keeper.pool.hold([B])
    keeper.keeping.offer("id", [B])
    assert keeper.num_kept == 0


def test_what_the_peer_releases_is_let_go_of_at_once_and_its_id_remembered(keeper: Keeper) -> None:
    keeper.pool.hold([A])
    keeper.computed(A)
    keeper.keeping.release("id", 2.0)
    assert keeper.pool.is_at_rest
    assert len(keeper.keeping) == 0
    assert keeper.keeping.next_deadline_s is None
    keeper.keeping.tick(2.0 + REMEMBER_S - 0.1)
    assert keeper.keeping.stage("id") is Stage.COMPUTED, "nothing more comes under it"
    keeper.keeping.tick(2.0 + REMEMBER_S)
    assert keeper.keeping.stage("id") is Stage.UNKNOWN


def test_an_id_that_was_released_may_be_used_again(keeper: Keeper) -> None:
    keeper.computed()
    keeper.keeping.release("id", 1.0)
    keeper.keeping.begin("id", fetched=False)
    assert keeper.keeping.stage("id") is Stage.COMPUTING
    keeper.keeping.computed("id", 2.0)
    keeper.keeping.release("id", 3.0)
    keeper.keeping.tick(1.0 + REMEMBER_S)
    assert keeper.keeping.stage("id") is Stage.COMPUTED, "it counts from the last time"


def test_ids_are_forgotten_in_the_order_in_which_they_were_over(keeper: Keeper) -> None:
    for number in range(3):
        keeper.keeping.begin(str(number), fetched=False)
        keeper.keeping.computed(str(number), 0.0)
        keeper.keeping.release(str(number), float(number))
    keeper.keeping.tick(1.0 + REMEMBER_S)
    stages = [keeper.keeping.stage(str(number)) for number in range(3)]
    assert stages == [Stage.UNKNOWN, Stage.UNKNOWN, Stage.COMPUTED]


def test_what_is_released_while_its_request_runs_is_forgotten_with_it(keeper: Keeper) -> None:
    keeper.pool.hold([A, B])
    keeper.offered(A)
    keeper.keeping.release("id", 0.0)
    keeper.keeping.offer("id", [B])
    assert keeper.pool.is_at_rest
    assert keeper.keeping.stage("id") is Stage.COMPUTING
    keeper.keeping.computed("id", 2.0)
    assert len(keeper.keeping) == 0
    assert keeper.keeping.stage("id") is Stage.COMPUTED


def test_a_fetch_that_came_first_waits_by_itself(keeper: Keeper) -> None:
    keeper.pool.hold([A])
    keeper.keeping.begin("id", fetched=True)
    keeper.keeping.offer("id", [A])
    assert keeper.num_kept == 0
    keeper.keeping.computed("id", 1.0)
    keeper.keeping.tick(1.0 + TIMEOUT_S)
    assert keeper.keeping.stage("id") is Stage.UNKNOWN, "it was fetched: it has not expired"


def test_a_fetched_keep_lives_as_long_as_its_request(keeper: Keeper) -> None:
    keeper.pool.hold([A, B])
    keeper.offered(A, B)
    keeper.keeping.bind("id", [A], 0.0, only=False)
    keeper.keeping.tick(TIMEOUT_S)
    assert keeper.num_kept == 0, "nobody holds a slot for ever"
    assert keeper.keeping.stage("id") is Stage.COMPUTING, "more may be computed, and fetched"
    keeper.keeping.computed("id", 200.0)
    keeper.keeping.tick(200.0 + TIMEOUT_S)
    assert len(keeper.keeping) == 0


def test_closing_lets_go_of_everything(keeper: Keeper) -> None:
    keeper.pool.hold([A])
    keeper.pool.fill([B])
    keeper.offered(A, B)
    keeper.keeping.close()
    assert keeper.pool.is_at_rest
    assert len(keeper.keeping) == 0
