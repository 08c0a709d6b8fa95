"""A producer and a consumer of one side, and one measured pull between them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import msgspec
from common import Cost
from peer_process import (
    Forward,
    Peer,
    Request,
    SetForward,
    Who,
    for_decoder,
    from_prefiller,
    from_source,
    keys_of,
)

_LONG_PAUSE_S = 3.0  # well below the heartbeats of either side (10 s)
_MEETING_DEADLINE_S = 60.0


class PullCost(msgspec.Struct, frozen=True):
    """What one pull took: from the first lookup until all is loaded, and CPU on either side."""

    wall_s: float
    producer_cpu_s: float
    consumer_cpu_s: float

    @property
    def cost(self) -> Cost:
        return Cost(self.wall_s, self.producer_cpu_s + self.consumer_cpu_s)


class Mode(msgspec.Struct, frozen=True):
    """What the two engines do meanwhile."""

    name: str
    producer: Forward
    consumer: Forward


class Pair:
    """Two processes of one side. Outside a turn both are stopped, so that they take nothing from others.

    vLLM's p2p tier burns cores by just being there (NIXL's progress thread); a stopped one does not. A pair
    that was stopped for long may have given each other up; it finds together again, uncounted, first.
    """

    def __init__(
        self, who: Who, *, chunk_bytes: int, num_slots: int, environment: Mapping[str, str] | None
    ) -> None:
        self._producer, self._consumer = (
            Peer(who, chunk_bytes=chunk_bytes, num_slots=num_slots, environment=environment or {})
            for _ in range(2)
        )
        self._who = who
        self._step_s = 0.0
        self._serial = itertools.count()
        self._random = random.Random(11)
        self._paused_at_s = 0.0

    def __enter__(self) -> Self:
        assert self._producer.start_s >= 0 <= self._consumer.start_s
        self._pause()
        return self

    def __exit__(self, *_: object) -> None:
        # Both first: vLLM's tier does not end any more once a peer has gone while it was stopped.
        self._producer.resume()
        self._consumer.close()
        self._producer.close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While inside, the two run."""
        for peer in (self._producer, self._consumer):
            peer.resume()
        try:
            if time.monotonic() > self._paused_at_s + _LONG_PAUSE_S:
                self._meet()
            yield
        finally:
            self._pause()

    def set_mode(self, mode: Mode, step_s: float) -> None:
        self._step_s = step_s
        with self.turn():
            self._producer.ask(SetForward(mode.producer, step_s))
            self._consumer.ask(SetForward(mode.consumer, step_s))

    def pull(self, num_chunks: int, *, asks: bool) -> PullCost:
        """New chunks are stored at the producer and pulled by the consumer; the bytes are compared.

        `asks`: by a lookup round (`remote_kv_source`), else as a decoder that knows (`remote_prefiller`).
        """
        with self.turn():
            return self._pull(num_chunks, asks=asks)

    def idle_cores(self, watch_s: float) -> float:
        """Cores that each of the two uses, on average, while nobody wants anything."""
        with self.turn():
            began_s, cpu_s = time.perf_counter(), self._cpu_s()
            time.sleep(watch_s)
            cores = [
                (after - before) / (time.perf_counter() - began_s)
                for before, after in zip(cpu_s, self._cpu_s(), strict=True)
            ]
        return sum(cores) / len(cores)

    def warnings(self) -> list[str]:
        """What either logged since it was last asked; also proves our own books."""
        with self.turn():
            return self._looks()

    def _meet(self) -> None:
        """Pull a chunk, again and again, until the two are connected and it arrives."""
        deadline_s = time.monotonic() + _MEETING_DEADLINE_S
        while True:
            name = f"{self._who.value} meets {next(self._serial)}"
            keys = keys_of(name, 1)
            self._producer.fill(Request(f"store {name}", keys), seed=0)
            (pulled,) = self._consumer.pull(Request(name, keys, from_source(self._producer, name)))
            if pulled.num_loaded:
                return
            assert time.monotonic() < deadline_s, f"{self._who.value}: {self._looks()}"

    def _pull(self, num_chunks: int, *, asks: bool) -> PullCost:
        name = f"{self._who.value} {next(self._serial)}"
        keys = keys_of(name, num_chunks)
        params: dict[str, Any] | None = None if asks else for_decoder(name)
        stored = self._producer.fill(Request(f"store {name}", keys, params), seed=hash(name) % 997)
        # Where in its step the producer is when it is asked is left to chance.
        time.sleep(self._random.random() * self._step_s)
        role: Callable[[Peer, str], dict[str, Any]] = from_source if asks else from_prefiller
        before_s = self._cpu_s()
        (pulled,) = self._consumer.pull(Request(name, keys, role(self._producer, name)))
        after_s = self._cpu_s()
        assert pulled.num_loaded == num_chunks, f"{self._who.value}: {pulled} {self._looks()}"
        assert self._consumer.read(keys) == stored, f"{self._who.value} brought other bytes"
        return PullCost(pulled.took_s, after_s[0] - before_s[0], after_s[1] - before_s[1])

    def _looks(self) -> list[str]:
        return [*self._producer.look().warnings, *self._consumer.look().warnings]

    def _cpu_s(self) -> tuple[float, float]:
        return self._producer.cpu_s(), self._consumer.cpu_s()

    def _pause(self) -> None:
        for peer in (self._producer, self._consumer):
            peer.pause()
        self._paused_at_s = time.monotonic()
