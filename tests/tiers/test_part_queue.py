from __future__ import annotations

import threading

from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.base import Job
from pdoffload.tiers.part_queue import PartQueue
from pdoffload.tiers.parts import NONE_FORCED, Part, cut


def part(job_id: int, *, is_load: bool, chunks: int = 1) -> Part:
    keys = keys_of(*range(chunks))
    return Part(job_id, is_load, keys, tuple(range(chunks)))


def queue_of(
    num_readers: int = 2, max_waiting_stores: int = 100, most_chunks: int = 8, *, help: bool = True
) -> PartQueue:
    queue = PartQueue(
        num_readers=num_readers, max_waiting_stores=max_waiting_stores, most_chunks=most_chunks
    )
    if help:
        queue.take_help(reader=True)
        queue.take_help(reader=False)
    return queue


def ids(parts: list[Part]) -> list[int]:
    return [each.job_id for each in parts]


def test_c25_a_load_is_taken_before_any_number_of_stores() -> None:
    queue = queue_of()
    for number in range(50):
        queue.put([part(number, is_load=False, chunks=8)])
    queue.put([part(99, is_load=True)])
    assert ids(queue.take(reader=True)) == [99]
    assert ids(queue.take(reader=False)) == [0]


def test_each_side_helps_the_other_when_its_own_is_empty() -> None:
    queue = queue_of()
    queue.put([part(1, is_load=True)])
    assert ids(queue.take(reader=False)) == [1]
    queue.put([part(2, is_load=False)])
    assert ids(queue.take(reader=True)) == [2]


def test_nobody_helps_a_side_that_may_still_start_threads_of_its_own() -> None:
    queue = queue_of(help=False)
    queue.put([part(1, is_load=True)])
    taken: list[Part] = []
    writer = threading.Thread(target=lambda: taken.extend(queue.take(reader=False)))
    writer.start()
    queue.put([part(2, is_load=False)])
    writer.join(10)
    assert ids(taken) == [2]
    assert ids(queue.take(reader=True)) == [1]


def test_c25_one_reader_never_stores() -> None:
    queue = queue_of(num_readers=2)
    for number in range(3):
        queue.put([part(number, is_load=False, chunks=8)])
    assert ids(queue.take(reader=True)) == [0]
    taken: list[Part] = []
    second = threading.Thread(target=lambda: taken.extend(queue.take(reader=True)))
    second.start()
    queue.put([part(9, is_load=True)])
    second.join(10)
    assert ids(taken) == [9], "the second reader passed the stores over"
    queue.stored()
    assert ids(queue.take(reader=True)) == [1]


def test_small_parts_are_taken_together_up_to_one_request() -> None:
    queue = queue_of(most_chunks=8)
    for number, chunks in enumerate((3, 3, 2, 1, 8)):
        queue.put([part(number, is_load=True, chunks=chunks)])
    assert ids(queue.take(reader=True)) == [0, 1, 2]
    assert ids(queue.take(reader=True)) == [3]
    assert ids(queue.take(reader=True)) == [4]


def test_loads_and_stores_are_never_taken_together() -> None:
    queue = queue_of()
    queue.put([part(1, is_load=True)])
    queue.put([part(2, is_load=False)])
    assert ids(queue.take(reader=True)) == [1]
    assert ids(queue.take(reader=True)) == [2]


def test_c25_waiting_stores_have_a_bound_and_loads_have_none() -> None:
    queue = queue_of(max_waiting_stores=10)
    assert queue.has_room(1000), "nothing waits: a job of any size gets its turn"
    queue.put([part(1, is_load=False, chunks=8)])
    assert queue.has_room(2)
    assert not queue.has_room(3)
    queue.put([part(n, is_load=True, chunks=8) for n in range(2, 200)])
    queue.take(reader=False)
    assert queue.has_room(3)


def test_a_put_wakes_a_thread_that_may_take_it() -> None:
    queue = queue_of(num_readers=1)
    queue.put([part(0, is_load=False)])
    assert ids(queue.take(reader=True)) == [0], "the only reader helps, and is busy from now on"
    taken = {side: [] for side in (True, False)}  # type: dict[bool, list[Part]]

    def work(reader: bool) -> None:
        taken[reader] += queue.take(reader=reader)

    threads = [threading.Thread(target=work, args=(side,)) for side in (True, False)]
    for thread in threads:
        thread.start()
    queue.put([part(1, is_load=False)])
    threads[1].join(10)
    assert ids(taken[False]) == [1]
    queue.close()
    threads[0].join(10)
    assert taken[True] == []


def test_closing_wakes_everybody_and_the_rest_can_be_drained() -> None:
    queue = queue_of()
    threads = [
        threading.Thread(target=queue.take, kwargs={"reader": number % 2 == 0})
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    queue.put([part(1, is_load=True), part(1, is_load=True)])
    queue.put([part(2, is_load=False)])
    assert ids(queue.drain()) == [1, 1, 2]
    assert len(queue) == 0


def test_a_thread_is_wanted_only_for_work_nobody_is_on_its_way_to() -> None:
    queue = queue_of()
    assert not queue.wants_thread(reader=True)
    queue.put([part(1, is_load=True)])
    assert queue.wants_thread(reader=True)
    assert not queue.wants_thread(reader=False)
    queue.take(reader=True)
    assert not queue.wants_thread(reader=True)


def test_c07_a_job_is_cut_into_equal_parts_that_cover_it() -> None:
    for count in (1, 7, 8, 9, 17, 33):
        keys, slots = keys_of(*range(count)), tuple(range(100, 100 + count))
        parts = cut(Job(1, keys, slots), 8, is_load=True, forced=NONE_FORCED)
        assert tuple(key for each in parts for key in each.keys) == keys
        assert tuple(slot for each in parts for slot in each.slots) == slots
        sizes = [len(each.keys) for each in parts]
        assert max(sizes) <= 8
        assert len(sizes) == -(-count // 8)
    assert cut(Job(1, (), ()), 8, is_load=True, forced=NONE_FORCED) == []


def test_stores_that_wait_can_be_taken_out_all_or_none() -> None:
    queue = queue_of(max_waiting_stores=4, most_chunks=1)
    first, second, third = (part(number, is_load=False, chunks=2) for number in (1, 2, 3))
    queue.put([first, second])
    assert not queue.has_room(1)
    assert not queue.remove_stores([second, third]), "one of them does not wait"
    assert len(queue) == 2
    assert queue.remove_stores([second])
    assert queue.has_room(2)
    assert queue.take(reader=False) == [first]
    assert not queue.remove_stores([first]), "it was taken"
