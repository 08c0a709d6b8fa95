"""What runs in a `Peer`'s process: an engine's scheduler thread, without an engine."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash
from peer_process import (
    Command,
    Fill,
    Forget,
    Forward,
    PeerOptions,
    Pull,
    Pulled,
    Read,
    Ready,
    Request,
    Seen,
    SetForward,
    Stop,
)
from peer_sides import Side, open_side
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

_IDLE_STEP_S = 0.001  # vLLM's engine sleeps as long between steps that computed nothing
_KEPT_WARNINGS = 100


def run(connection: Connection, options: PeerOptions) -> None:
    """Build the side, then obey until told to stop or the other end is gone."""
    log = _Log()
    for name in ("pdoffload", "vllm"):
        logging.getLogger(name).addHandler(log)
    started_s = time.perf_counter()
    side = open_side(options)
    connection.send(Ready(time.perf_counter() - started_s))
    engine = Engine(side, log)
    try:
        while True:
            if connection.poll(engine.patience_s):
                command: Command = connection.recv()
                if isinstance(command, Stop):
                    return
                engine.obey(command)
            engine.step()
            for answer in engine.take_answers():
                connection.send(answer)
    except EOFError:
        return  # nobody is left to answer to
    finally:
        side.close()


class Engine:
    """Steps one manager. Commands are taken between steps, as requests are."""

    def __init__(self, side: Side, log: _Log) -> None:
        self._side = side
        self._log = log
        self._forward = SetForward(Forward.IDLE)
        self._batches: list[_Batch] = []
        self._answers: list[Any] = []
        self._longest_step_s = 0.0

    @property
    def patience_s(self) -> float | None:
        """How long to wait for a command before the next step; None: there is nothing to step for."""
        if self._forward.forward is not Forward.IDLE:
            return 0.0
        if self._batches or self._side.manager.has_pending_work():
            return _IDLE_STEP_S
        return None

    def step(self) -> None:
        """One step of the scheduler, then the forward pass."""
        manager, started_s = self._side.manager, time.perf_counter()
        loaded = [one for batch in self._batches for one in batch.step(manager)]
        manager.on_schedule_end(ScheduleEndContext([each.context.req_id for each in loaded], ()))
        for each in loaded:
            manager.on_request_finished(each.context)
        list(manager.take_events())
        manager.get_stats()
        self._longest_step_s = max(self._longest_step_s, time.perf_counter() - started_s)
        self._answers += [each.result() for each in self._batches if each.ended]
        self._batches = [each for each in self._batches if not each.ended]
        self._compute()

    def take_answers(self) -> list[Any]:
        answers, self._answers = self._answers, []
        return answers

    def obey(self, command: Command) -> None:
        """Carry `command` out; what it is answered with waits in `take_answers`."""
        match command:
            case Pull():
                self._batches.append(_Batch(command, self._side.manager))
            case Fill():
                self._answers.append(self._fill(command))
            case Read():
                self._answers.append(self._read(command.keys))
            case SetForward():
                self._forward = command
                self._answers.append(None)
            case Forget():
                self._side.manager.reset_cache()
                self._answers.append(None)
            case _:
                self._answers.append(self._look())

    def _compute(self) -> None:
        if self._forward.forward is Forward.SLEEP:
            time.sleep(self._forward.step_s)
        elif self._forward.forward is Forward.SPIN:
            until_s = time.perf_counter() + self._forward.step_s
            while time.perf_counter() < until_s:
                pass

    def _fill(self, fill: Fill) -> list[bytes]:
        manager, context, keys = self._side.manager, _context(fill.request), _keys(fill.request)
        manager.on_new_request(context)
        prepared = manager.prepare_store(keys, context)
        assert prepared is not None, "the pool has no room"
        assert prepared.keys_to_store == keys, "some chunks were there before"
        assert isinstance(prepared.store_spec, CPULoadStoreSpec)
        slots = prepared.store_spec.chunk_ids.tolist()
        random, pool = np.random.default_rng(fill.seed), self._side.pool()
        for slot in slots:
            pool[slot] = np.frombuffer(random.bytes(pool.shape[1]), np.uint8)
        digests = [xxhash.xxh3_128_digest(pool[slot]) for slot in slots]
        self._side.arrived(slots)
        manager.complete_store(keys, context)
        manager.on_request_finished(context)
        return digests

    def _read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        manager, context = self._side.manager, ReqContext("read")
        manager.on_new_request(context)
        digests: list[bytes | None] = []
        for key in map(OffloadKey, keys):
            if manager.lookup(key, context) is not LookupResult.HIT:
                digests.append(None)
                continue
            spec = manager.prepare_load([key], context)
            assert isinstance(spec, CPULoadStoreSpec)
            digests.append(xxhash.xxh3_128_digest(self._side.pool()[spec.chunk_ids[0]]))
            manager.complete_load([key], context)
        manager.on_request_finished(context)
        return digests

    def _look(self) -> Seen:
        self._side.check()
        seen = Seen(self._longest_step_s, self._log.take())
        self._longest_step_s = 0.0
        return seen


class _Batch:
    """The requests of one `Pull`, and how each ended."""

    def __init__(self, pull: Pull, manager: OffloadingManager) -> None:
        until_s = time.perf_counter() + pull.deadline_s
        self._lookups = [_Lookup(request, until_s) for request in pull.requests]
        for each in self._lookups:
            manager.on_new_request(each.context)

    @property
    def ended(self) -> bool:
        return all(each.pulled is not None for each in self._lookups)

    def step(self, manager: OffloadingManager) -> list[_Lookup]:
        """Ask again for all that are still on their way; those that have ended now."""
        waiting = [each for each in self._lookups if each.pulled is None]
        return [each for each in waiting if each.ask(manager)]

    def result(self) -> list[Pulled | None]:
        return [each.pulled for each in self._lookups]


class _Lookup:
    """One request that waits for chunks, asked about as vLLM's scheduler asks: as long as a prefix hits."""

    def __init__(self, request: Request, until_s: float) -> None:
        self.context = _context(request)
        self.pulled: Pulled | None = None
        self._keys = _keys(request)
        self._until_s = until_s
        self._started_s: float | None = None

    def ask(self, manager: OffloadingManager) -> bool:
        """Look all keys up once; True when the request has ended."""
        if self._started_s is None:
            self._started_s = time.perf_counter()
        num_hits, pending = 0, False
        for key in self._keys:
            found = manager.lookup(key, self.context)
            if found is LookupResult.MISS:
                break
            pending = pending or found is not LookupResult.HIT
            num_hits += not pending
        now_s = time.perf_counter()
        if pending and now_s < self._until_s:
            return False
        hits = self._keys[:num_hits]
        # The scheduler would load them to the device now.
        manager.prepare_load(hits, self.context)
        manager.complete_load(hits, self.context)
        self.pulled = Pulled(num_hits, now_s - self._started_s, not pending)
        return True


class _Log(logging.Handler):
    """Keeps the latest warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines = list(self._lines)
        self._lines.clear()
        return lines


def _context(request: Request) -> ReqContext:
    params = None if request.params is None else dict(request.params)
    return ReqContext(request.request_id, params)


def _keys(request: Request) -> list[OffloadKey]:
    return [OffloadKey(bytes(key)) for key in request.keys]
