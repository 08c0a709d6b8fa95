"""Lookups until each key is answered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdoffload.p2p.questions import Questions
from pdoffload.testing.tier_rig import keys_of

A, B, C = keys_of("a", "b", "c")


def test_keys_asked_together_are_answered_one_by_one() -> None:
    questions = Questions()
    questions.add("id", [A, B], 10.0)
    (question,) = questions.unsent()
    assert list(question.keys) == [A, B]
    assert len(questions) == 2
    assert questions.take("id", B) is question
    assert questions.take("id", B) is None
    assert list(question.keys) == [A]
    assert questions.take("id", A) is question
    assert len(questions) == 0
    assert questions.next_deadline_s is None
    questions.check()


def test_a_key_that_waits_for_its_answer_is_not_asked_twice() -> None:
    questions = Questions()
    questions.add("id", [A], 10.0)
    questions.add("id", [A, B], 20.0)
    questions.add("id", [A], 30.0)
    questions.add("another", [A], 40.0)
    assert [list(each.keys) for each in questions.unsent()] == [[A], [B], [A]]
    questions.check()


def test_what_was_sent_is_not_sent_again() -> None:
    questions = Questions()
    questions.add("id", [A], 10.0)
    questions.unsent()[0].round_seq = 0
    questions.add("id", [B], 20.0)
    assert [list(each.keys) for each in questions.unsent()] == [[B]]


def test_late_questions_are_forgotten_with_the_keys_that_are_left() -> None:
    questions = Questions()
    questions.add("id", [A, B], 10.0)
    questions.add("id", [C], 20.0)
    questions.take("id", A)
    assert questions.next_deadline_s == 10.0
    assert questions.late(9.9) == []
    assert [list(each.keys) for each in questions.late(10.0)] == [[B]]
    assert questions.take("id", B) is None
    assert questions.next_deadline_s == 20.0
    questions.check()


def test_an_id_is_dropped_without_the_others() -> None:
    questions = Questions()
    questions.add("id", [A, B], 10.0)
    questions.add("another", [A], 10.0)
    questions.drop("id")
    questions.drop("nobody's")
    assert [each.kv_request_id for each in questions.unsent()] == ["another"]
    assert [each.kv_request_id for each in questions.clear()] == ["another"]
    assert len(questions) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "take", "late", "drop"]),
            st.sampled_from(["x", "y"]),
            st.lists(st.sampled_from([A, B, C]), unique=True, max_size=3),
        )
    )
)
def test_books_agree_whatever_is_done(steps: list[tuple[str, str, list[bytes]]]) -> None:
    questions = Questions()
    for now_s, (what, kv_id, keys) in enumerate(steps):
        if what == "add":
            questions.add(kv_id, keys, now_s + 3.0)  # type: ignore[arg-type]
        elif what == "take":
            for key in keys:
                questions.take(kv_id, key)  # type: ignore[arg-type]
        elif what == "late":
            assert all(now_s >= each.deadline_s for each in questions.late(now_s))
        else:
            questions.drop(kv_id)
        questions.check()
