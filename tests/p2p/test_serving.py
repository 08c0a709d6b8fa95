"""A peer's fetches over a real index: where chunks come from, what goes wrong, what is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdoffload.errors import MisuseError, ProtocolError
from pdoffload.layout import BlockKey
from pdoffload.p2p.address import Address
from pdoffload.p2p.keeping import Keeping
from pdoffload.p2p.messages import (
    AbortAck,
    AbortFetch,
    Fetch,
    Lookup,
    LookupResp,
    Message,
    TransferDone,
)
from pdoffload.p2p.serving import Server, Write
from pdoffload.p2p.stats import ServeCounts
from pdoffload.p2p.terms import Deadlines, Target
from pdoffload.testing.pool_rig import LendingPool
from pdoffload.testing.tier_rig import keys_of

PEER = Address("decoder", 5710)
A, B, C, D = keys_of("a", "b", "c", "d")
DEADLINES = Deadlines(store_timeout_s=30.0, unbound_store_timeout_s=60.0)


def target(name: str = "decoder", num_slots: int = 100) -> Target:
    return Target(name, b"metadata", 0x1000, num_slots, 4096)


class Producer:
    """A pool, its keeps, and the server of one peer. Checks the books at every step."""

    def __init__(self, *, leaves: bool = True) -> None:
        self.pool = LendingPool()
        self.counts = ServeCounts()
        self.keeping = Keeping(self.pool.index, self.pool.watches, DEADLINES)
        self.server = Server(
            PEER, DEADLINES, self.pool.index, self.pool.watches, self.keeping, self.counts
        )
        self.target = target()
        self.leaves = leaves
        self.server.greet(self.target, leaves=leaves)

    def look_up(self, *keys: BlockKey, now_s: float = 0.0) -> list[bool]:
        self.server.on_lookup(Lookup("id", keys, 0), now_s)
        (answer,) = self.messages()
        assert isinstance(answer, LookupResp)
        return list(answer.hits)

    def fetch(
        self, keys: Sequence[BlockKey], round_seq: int = 0, *, now_s: float = 0.0, first: int = 0
    ) -> None:
        indexes = tuple(range(first, first + len(keys)))
        self.server.on_fetch(Fetch("id", tuple(keys), indexes, round_seq), now_s)
        self.server.check()

    def messages(self) -> list[Message]:
        self.server.check()
        return self.server.take_messages()

    def writes(self) -> list[Write]:
        taken = self.server.take_writes()
        self.server.check()
        return taken

    def written(self, write: Write, *, failed: bool = False, settled: bool = True) -> None:
        sums = {} if failed else {key: key[:16] for key in write.keys}
        if settled:
            self.pool.index.give_back(write.slots)
        self.server.written(write, sums, failed=failed, settled=settled)
        self.server.check()

    def write_all(self) -> None:
        for write in self.writes():
            self.written(write)

    @property
    def done(self) -> TransferDone:
        """The one message that is told now."""
        (message,) = self.messages()
        assert isinstance(message, TransferDone)
        return message


@pytest.fixture
def producer() -> Producer:
    return Producer()


# --- where chunks come from ---


def test_what_a_lookup_found_is_written_and_told_with_checksums(producer: Producer) -> None:
    producer.pool.hold([A, B])
    assert producer.look_up(A, B) == [True, True]
    producer.fetch([B, A], 7, first=5)
    (write,) = producer.writes()
    assert (write.keys, write.indexes) == ((B, A), (5, 6))
    assert write.slots == (producer.pool.slot_of(B), producer.pool.slot_of(A))
    assert write.serve.target is producer.target
    assert producer.messages() == []
    producer.written(write)
    assert producer.done == TransferDone("id", True, 7, checksums=(B[:16], A[:16]))
    assert producer.pool.index.num_lent == 0
    assert producer.counts.chunks == 2


def test_what_nobody_looked_up_is_borrowed_from_the_pool(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.fetch([A])
    producer.write_all()
    assert producer.done.success


def test_kept_chunks_go_over_to_the_fetch(producer: Producer) -> None:
    producer.pool.hold([A, B])
    producer.keeping.begin("id", fetched=False)
    producer.keeping.offer("id", [A, B])
    producer.keeping.computed("id", 0.0)
    producer.pool.evict([C])
    producer.fetch([A])
    producer.fetch([B], 1, first=1)
    for write in producer.writes():
        producer.written(write)
    assert [m.success for m in producer.messages() if isinstance(m, TransferDone)] == [True, True]
    assert producer.pool.is_at_rest


def test_a_chunk_both_reserved_and_kept_is_lent_once(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.keeping.begin("id", fetched=False)
    producer.keeping.offer("id", [A])
    producer.look_up(A)
    assert producer.pool.loans(A) == 2
    producer.fetch([A])
    assert producer.pool.loans(A) == 1
    producer.write_all()
    assert producer.pool.is_at_rest


@pytest.mark.parametrize("leaves", [True, False], ids=["ours", "stock vLLM"])
def test_what_is_there_is_written_while_the_rest_is_on_its_way(leaves: bool) -> None:
    producer = Producer(leaves=leaves)
    producer.pool.hold([A])
    producer.pool.fill([B, C])
    producer.fetch([A, B, C])
    (first,) = producer.writes()
    assert first.keys == (A,)
    producer.pool.ready([B, C])
    (second,) = producer.writes()
    assert (second.keys, second.indexes) == ((B, C), (1, 2)), "what comes in one turn is one write"
    producer.written(second)
    assert producer.messages() == []
    assert producer.pool.index.num_lent == 1, "a chunk is lent until it is written, no longer"
    producer.written(first)
    assert producer.done.success
    assert producer.pool.is_at_rest


def test_demand_may_come_before_the_request_and_its_chunks(producer: Producer) -> None:
    producer.fetch([A, B])
    producer.keeping.begin("id", fetched=producer.server.serves("id"))
    for key in (A, B):
        producer.pool.fill([key])
        producer.keeping.offer("id", [key])
        producer.pool.ready([key])
        producer.write_all()
    assert producer.done.success
    producer.keeping.computed("id", 2.0)
    assert producer.pool.is_at_rest
    assert producer.keeping.tick(100.0) == []


# --- chunks that do not come ---


def test_a_fetch_of_what_was_looked_up_and_is_gone_fails_at_once(producer: Producer) -> None:
    producer.pool.hold([A])
    assert producer.look_up(A, B) == [True, False]
    producer.fetch([A, B])
    assert producer.writes() == []
    assert producer.done == TransferDone("id", False, 0)
    assert producer.pool.is_at_rest
    assert producer.counts.refused_fetches == 1


def test_a_late_fetch_after_its_reservation_has_ended_fails_at_once(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.look_up(A)
    producer.server.tick(30.0)
    producer.pool.evict([A])
    producer.fetch([A], now_s=31.0)
    assert not producer.done.success


def test_a_late_fetch_after_its_keep_has_expired_is_refused_at_once(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.keeping.begin("id", fetched=False)
    producer.keeping.offer("id", [A])
    producer.keeping.computed("id", 0.0)
    producer.keeping.tick(60.0)
    producer.fetch([A], now_s=61.0)
    assert producer.writes() == []
    assert producer.done == TransferDone("id", False, 0)
    assert producer.counts.refused_fetches == 1


def test_a_late_fetch_after_its_keep_was_released_gets_what_is_there_or_fails_at_once(
    producer: Producer,
) -> None:
    producer.pool.hold([A, B])
    producer.keeping.begin("id", fetched=False)
    producer.keeping.offer("id", [A, B])
    producer.keeping.computed("id", 0.0)
    producer.fetch([])
    producer.fetch([A], 1)
    producer.write_all()
    assert producer.done.success
    producer.pool.evict([B])
    producer.fetch([B], 2)
    assert producer.done == TransferDone("id", False, 2)
    assert producer.counts.refused_fetches == 1
    assert producer.pool.is_at_rest


def test_a_producer_that_gives_up_ends_the_fetch_at_once(producer: Producer) -> None:
    producer.keeping.begin("id", fetched=False)
    producer.pool.hold([A])
    producer.fetch([A, B])
    (write,) = producer.writes()
    producer.keeping.computed("id", 1.0)
    producer.server.on_computed("id")
    assert producer.messages() == [], "a write is under way"
    producer.written(write)
    assert not producer.done.success
    assert producer.pool.is_at_rest


def test_a_producer_that_has_ended_waits_for_chunks_on_their_way(producer: Producer) -> None:
    producer.keeping.begin("id", fetched=False)
    producer.pool.fill([A])
    producer.keeping.computed("id", 1.0)
    producer.fetch([A])
    producer.server.on_computed("id")
    assert producer.messages() == []
    producer.pool.ready([A])
    producer.write_all()
    assert producer.done.success


def test_a_fetch_after_its_request_has_ended_does_not_wait_for_what_is_not_there(
    producer: Producer,
) -> None:
    producer.keeping.begin("id", fetched=False)
    producer.keeping.computed("id", 0.0)
    producer.fetch([A])
    assert not producer.done.success


def test_a_store_that_fails_ends_the_fetch(producer: Producer) -> None:
    producer.pool.fill([A, B])
    producer.fetch([A, B])
    producer.pool.ready([A])
    producer.pool.index.abandon([B])
    producer.pool.tell()
    assert producer.writes() == [], "what was ready goes back"
    assert not producer.done.success
    assert producer.pool.is_at_rest


def test_what_does_not_come_in_time_ends_the_fetch(producer: Producer) -> None:
    producer.fetch([A], now_s=5.0)
    assert producer.server.next_deadline_s == 35.0
    producer.server.tick(34.9)
    assert producer.messages() == []
    producer.server.tick(35.0)
    assert not producer.done.success
    assert producer.counts.expired_stores == 1
    assert producer.pool.is_at_rest
    assert producer.server.next_deadline_s is None


def test_what_is_being_written_has_the_writers_deadline(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.fetch([A])
    (write,) = producer.writes()
    assert producer.server.next_deadline_s is None
    producer.server.tick(1000.0)
    assert producer.messages() == []
    producer.written(write)
    assert producer.done.success


# --- writes that go wrong ---


def test_a_failed_write_fails_the_fetch_when_the_others_have_ended(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.pool.fill([B, C])
    producer.fetch([A, B, C])
    (first,) = producer.writes()
    producer.pool.ready([B])
    (second,) = producer.writes()
    producer.written(first, failed=True)
    assert producer.messages() == []
    producer.pool.ready([C])
    assert producer.writes() == [], "nothing more is written for it"
    producer.written(second)
    assert producer.done == TransferDone("id", False, 0)
    assert producer.pool.is_at_rest
    assert producer.counts.refused_fetches == 0, "bytes were moved"


def test_a_write_whose_end_nobody_knows_is_told_as_not_settled(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.fetch([A])
    (write,) = producer.writes()
    producer.written(write, failed=True, settled=False)
    assert producer.done == TransferDone("id", False, 0, settled=False)
    assert producer.pool.loans(A) == 1, "it is being read still"
    producer.pool.index.give_back(write.slots)


# --- aborts ---


def test_an_abort_is_acknowledged_at_once_if_nothing_is_under_way(producer: Producer) -> None:
    producer.pool.hold([A])
    producer.fetch([A, B])
    producer.server.on_abort_fetch(AbortFetch("id", 0))
    assert producer.messages() == [AbortAck("id", 0)]
    assert producer.writes() == []
    assert producer.pool.is_at_rest


@pytest.mark.parametrize("settled", [True, False])
def test_an_abort_waits_for_the_write_under_way(producer: Producer, settled: bool) -> None:
    producer.pool.hold([A])
    producer.fetch([A])
    (write,) = producer.writes()
    producer.server.on_abort_fetch(AbortFetch("id", 0))
    producer.server.on_abort_fetch(AbortFetch("id", 0))
    assert producer.messages() == []
    producer.written(write, failed=not settled, settled=settled)
    assert producer.messages() == [AbortAck("id", 0, settled=settled)]


def test_an_abort_of_what_has_ended_or_never_was_is_acknowledged(producer: Producer) -> None:
    producer.server.on_abort_fetch(AbortFetch("id", 3))
    assert producer.messages() == [AbortAck("id", 3)]


def test_an_abort_ends_one_round_only(producer: Producer) -> None:
    producer.pool.hold([A, B])
    producer.fetch([A], 0)
    producer.fetch([B], 1, first=1)
    producer.server.on_abort_fetch(AbortFetch("id", 0))
    producer.write_all()
    ack, done = producer.messages()
    assert ack == AbortAck("id", 0)
    assert isinstance(done, TransferDone)
    assert (done.round_seq, done.success) == (1, True)


# --- unfair fetches ---


def test_a_round_is_fetched_once(producer: Producer) -> None:
    producer.fetch([A])
    with pytest.raises(ProtocolError, match="second fetch for round 0 of 'id'"):
        producer.fetch([B], first=1)


def test_slots_outside_of_the_peers_pool_are_refused(producer: Producer) -> None:
    with pytest.raises(ProtocolError, match="slot 100 of 100"):
        producer.fetch([A, B], first=99)
    producer.fetch([A], first=99)


def test_two_live_fetches_do_not_fill_one_slot(producer: Producer) -> None:
    producer.fetch([A], 0)
    with pytest.raises(ProtocolError, match="another fetch is filling"):
        producer.fetch([B, C], 1)
    producer.server.on_abort_fetch(AbortFetch("id", 0))
    producer.fetch([B, C], 2)


def test_a_key_is_fetched_once_per_fetch(producer: Producer) -> None:
    with pytest.raises(ProtocolError, match="names a key twice"):
        producer.fetch([A, A])
    assert producer.pool.is_at_rest


def test_a_slot_may_be_filled_again_through_the_peers_next_agent(producer: Producer) -> None:
    """The consumer has closed the agent before: what is still under way there lands nowhere."""
    producer.pool.hold([A, B])
    producer.fetch([A], 0)
    (old,) = producer.writes()
    newer = target()
    producer.server.greet(newer, leaves=True)
    assert producer.server.writes_into(producer.target)
    producer.fetch([B], 1)
    (new,) = producer.writes()
    assert (old.serve.target, new.serve.target) == (producer.target, newer)
    producer.written(old, failed=True)
    assert not producer.server.writes_into(producer.target)
    producer.written(new)
    assert [m.success for m in producer.messages() if isinstance(m, TransferDone)] == [False, True]


def test_nothing_is_served_before_the_peer_has_introduced_itself() -> None:
    pool = LendingPool()
    keeping = Keeping(pool.index, pool.watches, DEADLINES)
    server = Server(PEER, DEADLINES, pool.index, pool.watches, keeping, ServeCounts())
    with pytest.raises(MisuseError, match="not introduced itself"):
        server.on_fetch(Fetch("id", (A,), (0,), 0), 0.0)


# --- the end of an id, and of the peer ---


def test_an_empty_fetch_lets_go_of_reservations_and_keeps_but_not_of_what_is_served(
    producer: Producer,
) -> None:
    producer.pool.hold([A, B, C])
    producer.look_up(A, B)
    producer.keeping.begin("id", fetched=False)
    producer.keeping.offer("id", [C])
    producer.fetch([A])
    producer.fetch([], 9)
    assert producer.pool.index.num_lent == 1
    producer.write_all()
    assert producer.done.success
    assert producer.pool.is_at_rest


def test_stock_vllm_fetches_a_round_once_and_says_nothing_at_the_end() -> None:
    producer = Producer(leaves=False)
    producer.pool.hold([A, B, C])
    assert producer.look_up(A, B) == [True, True]
    producer.keeping.begin("id", fetched=False)
    producer.keeping.offer("id", [C])
    producer.fetch([A])
    assert producer.pool.index.num_lent == 1
    producer.write_all()
    assert producer.done.success
    assert producer.pool.is_at_rest
    assert not producer.server.busy


def test_a_lost_peer_holds_nothing_but_what_is_being_written(producer: Producer) -> None:
    producer.pool.hold([A, B, C])
    producer.pool.fill([D])
    producer.look_up(A)
    producer.fetch([B], 0, first=1)
    (write,) = producer.writes()
    producer.fetch([C, D], 1, first=2)
    producer.server.close()
    producer.server.check()
    assert producer.pool.index.num_lent == 1
    assert len(producer.pool.watches) == 0
    assert producer.server.take_writes() == []
    producer.written(write)
    assert producer.messages() == []
    assert producer.pool.is_at_rest
    assert not producer.server.busy
    producer.pool.ready([D])
    assert producer.pool.is_at_rest
