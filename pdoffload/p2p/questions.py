"""Lookups that we have asked of one peer, until each key is answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdoffload.layout import BlockKey


class Question:
    """Keys that the engine asked for together. `round_seq` is that of the `lookup`; None: not sent yet."""

    __slots__ = ("deadline_s", "keys", "kv_request_id", "round_seq")

    def __init__(self, kv_request_id: str, keys: Iterable[BlockKey], deadline_s: float) -> None:
        self.kv_request_id = kv_request_id
        self.keys = dict.fromkeys(keys)
        """Without an answer, in the order they were asked in."""
        self.deadline_s = deadline_s
        self.round_seq: int | None = None


class Questions:
    """Those without an answer. They are asked in the order of their deadlines. One thread."""

    def __init__(self) -> None:
        self._live: dict[Question, None] = {}
        self._by_key: dict[tuple[str, BlockKey], Question] = {}

    def __len__(self) -> int:
        """Keys without an answer."""
        return len(self._by_key)

    @property
    def next_deadline_s(self) -> float | None:
        first = next(iter(self._live), None)
        return None if first is None else first.deadline_s

    def add(self, kv_request_id: str, keys: Sequence[BlockKey], deadline_s: float) -> None:
        """Ask. Keys that wait for an answer under this id already are not asked a second time."""
        new = [key for key in keys if (kv_request_id, key) not in self._by_key]
        if new:
            question = Question(kv_request_id, new, deadline_s)
            self._live[question] = None
            self._by_key.update(((kv_request_id, key), question) for key in new)

    def unsent(self) -> list[Question]:
        return [question for question in self._live if question.round_seq is None]

    def take(self, kv_request_id: str, key: BlockKey) -> Question | None:
        """`key` is answered: the question it belonged to, or None if nobody waits for it."""
        question = self._by_key.pop((kv_request_id, key), None)
        if question is not None:
            del question.keys[key]
            if not question.keys:
                del self._live[question]
        return question

    def late(self, now_s: float) -> list[Question]:
        """Forget those whose deadline has passed."""
        return self._forget([each for each in self._live if now_s >= each.deadline_s])

    def drop(self, kv_request_id: str) -> None:
        """Nobody waits for answers under this id any more."""
        self._forget([each for each in self._live if each.kv_request_id == kv_request_id])

    def clear(self) -> list[Question]:
        """Forget all of them."""
        return self._forget(list(self._live))

    def _forget(self, questions: list[Question]) -> list[Question]:
        for question in questions:
            del self._live[question]
            for key in question.keys:
                del self._by_key[(question.kv_request_id, key)]
        return questions

    def check(self) -> None:
        """Prove that both books agree; for tests."""
        keys = [(each.kv_request_id, key) for each in self._live for key in each.keys]
        assert len(keys) == len(self._by_key)
        assert all(self._by_key[key] in self._live for key in keys)
        assert all(each.keys for each in self._live), "an answered question is kept"
        instants = [each.deadline_s for each in self._live]
        assert instants == sorted(instants), "deadlines are not in the order of the questions"
