"""Pulls from one peer: rounds, deadlines, and slots that are in quarantine."""

from __future__ import annotations

import itertools

import pytest

from pdoffload.errors import CorruptChunk, DeadlineExceeded, MisuseError, TransferError
from pdoffload.layout import BlockKey
from pdoffload.p2p import pulling
from pdoffload.p2p.address import Address
from pdoffload.p2p.messages import AbortAck, AbortFetch, Fetch, Message, TransferDone
from pdoffload.p2p.news import News, Pull, PullEnded, PullSettled
from pdoffload.p2p.pulling import ROUND_BYTES, Check, Pulls
from pdoffload.p2p.rounds import Numbers
from pdoffload.p2p.stats import AskCounts
from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.tier_rig import keys_of

PEER = Address("prefiller", 5710)
DEADLINES = Deadlines(load_timeout_s=30.0, abort_timeout_s=10.0)
KEYS = keys_of(*range(6))
CHUNK_BYTES = ROUND_BYTES // 2
"""Two chunks are a round."""
AGENT = "our agent"
SUM = b"s" * 16


class Consumer:
    """Pulls of one session, and everything they have said."""

    def __init__(self, *, whole: bool = False) -> None:
        self.sent: list[Message] = []
        self.told: list[News] = []
        self.counts = AskCounts()
        numbers = Numbers(itertools.count())
        numbers.whole = whole
        self.pulls = Pulls(
            PEER,
            DEADLINES,
            CHUNK_BYTES,
            numbers,
            self.counts,
            self.sent.append,
            self.told.append,
        )

    def pull(self, count: int, *, job_id: int = 1, now_s: float = 0.0) -> list[Fetch]:
        """Pull that many chunks; the fetches sent for them."""
        keys = KEYS[:count]
        self.pulls.add(Pull(job_id, PEER, "id", keys, tuple(range(count))), now_s)
        self.pulls.send_all(AGENT)
        sent, self.sent[:] = [m for m in self.sent if isinstance(m, Fetch)], []
        self.pulls.check()
        return sent

    def done(self, fetch: Fetch, *, success: bool = True, settled: bool = True) -> bool:
        sums = (SUM,) * len(fetch.keys) if success else ()
        message = TransferDone("id", success, fetch.round_seq, checksums=sums, settled=settled)
        known = self.pulls.on_transfer_done(message)
        self.pulls.check()
        return known

    def check_all(self, bad: dict[BlockKey, CorruptChunk] | None = None) -> list[Check]:
        """Carry out the checks that wait: `bad` chunks are wrong."""
        checks = self.pulls.take_checks()
        for check in checks:
            wrong = {key: error for key, error in (bad or {}).items() if key in check.keys}
            verified = len(check.checksums) - len(wrong)
            self.pulls.checked(check.job_id, check.round_seq, wrong, verified)
            self.pulls.check()
        return checks

    def ended(self) -> PullEnded:
        (news,) = self.told
        assert isinstance(news, PullEnded)
        self.told.clear()
        return news


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


# --- rounds ---


def test_a_pull_is_fetched_in_rounds_of_eight_mebibytes(consumer: Consumer) -> None:
    fetches = consumer.pull(5)
    assert [len(fetch.keys) for fetch in fetches] == [2, 2, 1]
    assert tuple(key for fetch in fetches for key in fetch.keys) == KEYS[:5]
    assert [slot for fetch in fetches for slot in fetch.block_indexes] == [0, 1, 2, 3, 4]
    assert len({fetch.round_seq for fetch in fetches}) == 3
    assert consumer.pulls.under_way(AGENT) == 3


def test_a_chunk_larger_than_a_round_is_a_round() -> None:
    consumer = Consumer()
    consumer.pulls._chunk_bytes = 3 * ROUND_BYTES
    assert [len(fetch.keys) for fetch in consumer.pull(2)] == [1, 1]


def test_for_stock_vllm_a_pull_is_one_round() -> None:
    assert [len(fetch.keys) for fetch in Consumer(whole=True).pull(5)] == [5]


def test_one_round_is_checked_while_the_next_is_under_way(consumer: Consumer) -> None:
    first, second = consumer.pull(3)
    consumer.done(first)
    (check,) = consumer.check_all()
    assert (check.keys, check.slots, check.checksums) == (KEYS[:2], (0, 1), (SUM, SUM))
    assert consumer.told == []
    assert consumer.pulls.under_way(AGENT) == 1
    consumer.done(second)
    consumer.check_all()
    ended = consumer.ended()
    assert (ended.failed, ended.settled, ended.verified) == ((), True, 3)
    assert ended.moved_bytes == 3 * CHUNK_BYTES
    assert len(consumer.pulls) == 0


def test_a_round_that_fails_costs_its_own_chunks_only(consumer: Consumer) -> None:
    first, second = consumer.pull(4)
    consumer.done(second, success=False)
    consumer.done(first)
    consumer.check_all()
    ended = consumer.ended()
    assert [key for key, _ in ended.failed] == list(second.keys)
    assert ended.settled
    assert ended.moved_bytes == 2 * CHUNK_BYTES


def test_a_wrong_chunk_is_named_and_does_not_count_as_moved(consumer: Consumer) -> None:
    (fetch,) = consumer.pull(2)
    consumer.done(fetch)
    error = CorruptChunk("b", "wrong")
    consumer.check_all({KEYS[1]: error})
    ended = consumer.ended()
    assert ended.failed == ((KEYS[1], error),)
    assert (ended.verified, ended.moved_bytes) == (1, CHUNK_BYTES)


def test_a_producer_with_too_few_checksums_has_sent_nothing(consumer: Consumer) -> None:
    (fetch,) = consumer.pull(2)
    assert consumer.pulls.on_transfer_done(
        TransferDone("id", True, fetch.round_seq, checksums=(SUM,))
    )
    ended = consumer.ended()
    assert "1 checksums for 2 keys" in str(ended.failed[0][1])
    assert ended.settled


def test_c19_an_end_that_is_told_twice_or_of_nothing_is_ignored(consumer: Consumer) -> None:
    first, second = consumer.pull(4)
    assert consumer.done(first)
    assert not consumer.done(first)
    assert not consumer.done(first, success=False)
    assert not consumer.pulls.on_transfer_done(TransferDone("another", True, second.round_seq))
    assert not consumer.pulls.on_abort_ack(AbortAck("id", second.round_seq))
    assert len(consumer.check_all()) == 1
    assert consumer.told == []


def test_a_check_that_was_not_asked_for_is_misuse(consumer: Consumer) -> None:
    first, second = consumer.pull(4)
    consumer.done(first)
    for job_id, round_seq in ((1, second.round_seq), (1, 77), (2, first.round_seq)):
        with pytest.raises(MisuseError, match="was not being checked"):
            consumer.pulls.checked(job_id, round_seq, {}, 0)
    consumer.check_all()
    with pytest.raises(MisuseError, match="was not being checked"):
        consumer.pulls.checked(1, first.round_seq, {}, 0)


# --- deadlines ---


def test_a_pull_that_is_never_sent_ends_at_its_deadline(consumer: Consumer) -> None:
    consumer.pulls.add(Pull(1, PEER, "id", KEYS[:3], (0, 1, 2)), 5.0)
    assert consumer.pulls.next_deadline_s == 35.0
    consumer.pulls.tick(34.9)
    assert consumer.told == []
    consumer.pulls.tick(35.0)
    ended = consumer.ended()
    assert ended.settled
    assert "handshake" in str(ended.failed[0][1])
    assert isinstance(ended.failed[0][1], DeadlineExceeded)
    assert consumer.sent == []
    assert consumer.counts.expired_loads == 1


def test_a_late_round_is_aborted_and_its_acknowledgement_settles_it(consumer: Consumer) -> None:
    first, second = consumer.pull(4)
    consumer.done(first)
    consumer.check_all()
    consumer.pulls.tick(30.0)
    assert consumer.sent == [AbortFetch("id", second.round_seq)]
    assert consumer.pulls.next_deadline_s == 40.0
    assert consumer.pulls.on_abort_ack(AbortAck("id", second.round_seq))
    ended = consumer.ended()
    assert [key for key, _ in ended.failed] == list(second.keys)
    assert ended.settled
    assert isinstance(ended.failed[0][1], DeadlineExceeded)
    assert (consumer.counts.expired_loads, consumer.counts.expired_aborts) == (1, 0)


def test_what_arrives_although_it_was_aborted_counts(consumer: Consumer) -> None:
    (fetch,) = consumer.pull(1)
    consumer.pulls.tick(30.0)
    consumer.done(fetch)
    consumer.check_all()
    assert consumer.ended().failed == ()
    assert not consumer.pulls.on_abort_ack(AbortAck("id", fetch.round_seq))


def test_an_abort_without_an_answer_leaves_the_slots_in_quarantine(consumer: Consumer) -> None:
    (fetch,) = consumer.pull(1)
    consumer.pulls.tick(30.0)
    consumer.pulls.tick(39.9)
    assert consumer.told == []
    consumer.pulls.tick(40.0)
    ended = consumer.ended()
    assert not ended.settled
    assert consumer.pulls.unsettled(AGENT)
    assert consumer.pulls.num_lost == 1
    assert consumer.counts.expired_aborts == 1
    # Nothing that comes now ends it again.
    assert not consumer.done(fetch)
    assert not consumer.pulls.on_abort_ack(AbortAck("id", fetch.round_seq))
    consumer.pulls.settle("another agent", open_to_cma=False)
    assert consumer.told == []
    consumer.pulls.settle(AGENT, open_to_cma=False)
    assert consumer.told == [PullSettled(1)]
    assert consumer.pulls.num_lost == 0


def test_rounds_that_are_being_checked_have_no_deadline(consumer: Consumer) -> None:
    (fetch,) = consumer.pull(1)
    consumer.done(fetch)
    for now_s in (30.0, 40.0, 50.0):
        consumer.pulls.tick(now_s)
    assert consumer.told == []
    assert consumer.sent == []
    consumer.check_all()
    assert consumer.ended().failed == ()


def test_bytes_that_may_still_land_are_told_by_the_producer(consumer: Consumer) -> None:
    first, second = consumer.pull(4)
    consumer.done(first, success=False, settled=False)
    assert consumer.pulls.unsettled(AGENT), "the agent is replaced before the pull has ended"
    consumer.done(second)
    consumer.check_all()
    assert not consumer.ended().settled
    assert consumer.pulls.num_lost == 1


def test_an_unsettled_abort_is_told_by_the_producer(consumer: Consumer) -> None:
    (fetch,) = consumer.pull(1)
    consumer.pulls.tick(30.0)
    consumer.pulls.on_abort_ack(AbortAck("id", fetch.round_seq, settled=False))
    assert not consumer.ended().settled


@pytest.mark.parametrize("by_abort", [False, True])
def test_a_failure_at_stock_vllm_is_never_settled(by_abort: bool) -> None:
    consumer = Consumer(whole=True)
    (fetch,) = consumer.pull(2)
    if by_abort:
        consumer.pulls.tick(30.0)
        assert consumer.pulls.on_abort_ack(AbortAck("id", fetch.round_seq))
    else:
        assert consumer.done(fetch, success=False)
    assert not consumer.ended().settled
    consumer.pulls.settle(AGENT, open_to_cma=False)
    assert consumer.told == [PullSettled(1)]


# --- a lost peer, a closed agent ---


def test_a_lost_peer_costs_what_it_has_not_sent(consumer: Consumer) -> None:
    first, _ = consumer.pull(4)
    consumer.pulls.add(Pull(2, PEER, "id", KEYS[4:5], (9,)), 0.0)
    consumer.done(first)
    consumer.pulls.lose(TransferError("gone"), settled=False)
    unsent = consumer.ended()
    assert (unsent.job_id, unsent.settled) == (2, True)
    consumer.check_all()
    ended = consumer.ended()
    assert [key for key, _ in ended.failed] == list(KEYS[2:4])
    assert (ended.settled, ended.verified) == (False, 2)


def test_a_peer_that_is_lost_with_our_agent_leaves_nothing_behind(consumer: Consumer) -> None:
    consumer.pull(1)
    consumer.pulls.lose(TransferError("gone"), settled=True)
    assert consumer.ended().settled
    assert consumer.pulls.num_lost == 0


def test_a_closed_agent_ends_what_was_to_come_by_it(consumer: Consumer) -> None:
    first, second = consumer.pull(4)
    consumer.pulls.on_transfer_done(TransferDone("id", False, first.round_seq, settled=False))
    consumer.pulls.settle(AGENT, open_to_cma=False)
    ended = consumer.ended()
    assert ended.settled, "also for the round that was not, before"
    assert len(ended.failed) == 4
    assert not consumer.done(second)
    assert consumer.pulls.under_way(AGENT) == 0


def test_an_agent_that_is_closed_ends_no_pull_by_another(consumer: Consumer) -> None:
    consumer.pull(1)
    consumer.pulls.settle("the agent before", open_to_cma=False)
    assert consumer.pulls.under_way(AGENT) == 1


def test_slots_of_a_job_are_not_taken_again_while_they_are_in_quarantine(
    consumer: Consumer,
) -> None:
    consumer.pull(1)
    consumer.pulls.lose(TransferError("gone"), settled=False)
    with pytest.raises(MisuseError, match="pull 1 is live"):
        consumer.pull(1)


# --- neighbours, which may write behind a closed agent's back ---


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Marks of processes that have not ended."""
    marks = {"mark"}
    monkeypatch.setattr(pulling, "may_still_write", marks.__contains__)
    return marks


def lost_by_a_neighbour(consumer: Consumer) -> None:
    consumer.pulls.know_writer("mark")
    consumer.pull(1)
    consumer.pulls.lose(TransferError("gone"), settled=False)
    assert not consumer.ended().settled
    consumer.pulls.settle(AGENT, open_to_cma=True)


def test_a_neighbour_may_write_until_its_process_has_ended(
    consumer: Consumer, living: set[str]
) -> None:
    lost_by_a_neighbour(consumer)
    assert consumer.told == []
    assert consumer.pulls.waits_for_writer
    due_s = consumer.pulls.next_deadline_s
    assert due_s is not None
    consumer.pulls.tick(due_s)
    assert consumer.told == []
    living.clear()
    due_s = consumer.pulls.next_deadline_s
    assert due_s is not None
    consumer.pulls.tick(due_s)
    assert consumer.told == [PullSettled(1)]
    assert not consumer.pulls.waits_for_writer


def test_a_neighbour_may_write_until_it_says_that_it_has_ended(
    consumer: Consumer, living: set[str]
) -> None:
    lost_by_a_neighbour(consumer)
    consumer.pulls.on_rest("another process")
    assert consumer.told == []
    consumer.pulls.on_rest("mark")
    assert consumer.told == [PullSettled(1)]


def test_without_cma_a_neighbour_is_like_everybody(consumer: Consumer, living: set[str]) -> None:
    consumer.pulls.know_writer("mark")
    consumer.pull(1)
    consumer.pulls.lose(TransferError("gone"), settled=False)
    consumer.told.clear()
    consumer.pulls.settle(AGENT, open_to_cma=False)
    assert consumer.told == [PullSettled(1)]
