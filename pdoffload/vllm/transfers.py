"""Copies between device and host pool, on threads of their own.

    engine's worker thread        copy thread k (k = 0 .. n-1), each with its own NIXL agent
    submit(copy) ── part k ─────> wait for the device, post to NIXL, wait for the end
    finished() <── last part ────

A copy is cut into as many parts as there are threads, because one NIXL agent copies on one core. Its end
is reported once, when the last part has ended. When the outcome of a part is UNKNOWN its agent is closed,
which is NIXL's word that no byte of it moves any more, and a new agent takes its place: so a finished copy,
good or bad, never writes later.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection

import msgspec

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import DeadlineExceeded, PdOffloadError, as_ours

logger = logging.getLogger(__name__)

TEARDOWN_S = 5.0
"""How long a closing agent waits for copies that may still end by themselves."""

AgentFactory = Callable[[str], Agent]
"""Makes an agent that can copy between device and host; the argument names it."""


class Memory(msgspec.Struct, frozen=True):
    """A piece of memory that every agent registers."""

    address: int
    size_bytes: int
    kind: MemoryKind = MemoryKind.DRAM
    device_id: int = 0


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """One copy: `op` WRITE goes from the device to the host. `ready` waits for the device's own work."""

    copy_id: int
    op: Op
    describe: Callable[[], tuple[Descriptors, Descriptors]]
    """(device side, host side); called on a copy thread, because the arithmetic takes a while."""
    ready: Callable[[], None]
    what: str


class CopyResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a copy ended. After an error the destination's bytes are undefined, and nothing moves."""

    copy_id: int
    error: PdOffloadError | None
    size_bytes: int
    elapsed_s: float


class _Running(msgspec.Struct):
    copy: Copy
    parts_left: int
    describe_lock: threading.Lock
    sides: tuple[Descriptors, Descriptors] | None = None
    started_s: float | None = None
    size_bytes: int = 0
    error: PdOffloadError | None = None


class CopyThreads:
    """`num_threads` copy threads over the same registered memory.

    `submit`, `finished`, `wait` and `close` belong to one thread, the engine's worker.
    """

    def __init__(
        self,
        agent_factory: AgentFactory,
        memory: Collection[Memory],
        *,
        num_threads: int,
        timeout_s: float,
        retries: int = 0,
        enter_thread: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`enter_thread` is called first on every copy thread: a GPU's context belongs to a thread."""
        self.retries = retries
        self._enter_thread = enter_thread
        self._agent_factory = agent_factory
        self._memory = tuple(memory)
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[int, _Running] = {}
        self._finished: list[CopyResult] = []
        self._changed = threading.Condition(self._lock)
        self._queues: list[queue.SimpleQueue[_Running | None]] = [
            queue.SimpleQueue() for _ in range(num_threads)
        ]
        self._start_errors: list[PdOffloadError] = []
        started = threading.Barrier(num_threads + 1)
        self._threads = [
            threading.Thread(
                target=self._run, args=(part, started), name=f"pdoffload-copy-{part}", daemon=True
            )
            for part in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        started.wait()
        if self._start_errors:
            self.close(timeout_s=timeout_s)
            raise self._start_errors[0]

    def __repr__(self) -> str:
        return f"<CopyThreads {len(self._threads)} threads, {len(self._running)} copies running>"

    def submit(self, copy: Copy) -> None:
        """Queue a copy; returns at once."""
        running = _Running(copy, len(self._queues), threading.Lock())
        with self._lock:
            self._running[copy.copy_id] = running
        for part in self._queues:
            part.put(running)

    def finished(self) -> list[CopyResult]:
        """The copies that have ended since the last call, each exactly once."""
        with self._lock:
            results, self._finished = self._finished, []
        return results

    def wait(self, copy_ids: Collection[int]) -> None:
        """Until none of these copies runs. Bounded: every copy before them ends by its deadline."""
        wanted = set(copy_ids)
        with self._changed:
            each_s = self._timeout_s * (self.retries + 1) + TEARDOWN_S
            bound_s = (len(self._running) + 1) * each_s
            if not self._changed.wait_for(
                lambda: not (wanted & self._running.keys()), timeout=bound_s
            ):
                raise DeadlineExceeded(f"copies {sorted(wanted & self._running.keys())}", bound_s)

    def close(self, *, timeout_s: float) -> None:
        """Finish what is queued and stop the threads; idempotent."""
        queues, self._queues = self._queues, []
        for part in queues:
            part.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                logger.error("%s did not stop within %g s; left behind", thread.name, timeout_s)

    # --- on a copy thread ---

    def _run(self, part: int, started: threading.Barrier) -> None:
        work, num_parts = self._queues[part], len(self._queues)
        agent: Agent | None = None
        try:
            self._enter_thread()
            agent = self._open_agent(part)
        except Exception as failure:  # noqa: BLE001 - the creator waits for word, whatever it is
            self._start_errors.append(as_ours("opening a NIXL agent", failure))
        started.wait()
        while (running := work.get()) is not None:
            error: PdOffloadError | None
            try:
                if agent is None:
                    agent = self._open_agent(part)
                agent, error = self._copy_part(agent, running, part, num_parts)
            except Exception as failure:  # whatever it was, the copy ends with it
                error = as_ours(running.copy.what, failure)
                logger.exception("%s failed", running.copy.what)
                if agent is not None:
                    agent.close(timeout_s=TEARDOWN_S)
                    agent = None
            self._part_ended(running, error)
        if agent is not None:
            agent.close(timeout_s=TEARDOWN_S)

    def _open_agent(self, part: int) -> Agent:
        agent = self._agent_factory(f"copy-{part}")
        for memory in self._memory:
            agent.register_memory(
                memory.address, memory.size_bytes, kind=memory.kind, device_id=memory.device_id
            )
        return agent

    def _copy_part(
        self, agent: Agent, running: _Running, part: int, num_parts: int
    ) -> tuple[Agent | None, PdOffloadError | None]:
        """The agent to go on with (None: closed), and the error if the part failed."""
        running.copy.ready()
        device, host = self._part_of(running, part, num_parts)
        if device is None or host is None:
            return agent, None
        for attempt in range(self.retries + 1):
            transfer = agent.wait(
                agent.submit(
                    running.copy.op, device, host, timeout_s=self._timeout_s, what=running.copy.what
                )
            )
            if transfer.state is TransferState.DONE:
                return agent, None
            if transfer.state is TransferState.UNKNOWN:
                logger.error(
                    "%s: %s; closing the NIXL agent so that no late byte lands, and opening a new one",
                    running.copy.what,
                    transfer.error,
                )
                agent.close(timeout_s=TEARDOWN_S)
                return None, transfer.error
            logger.warning(
                "%s failed (attempt %d of %d): %s",
                running.copy.what,
                attempt + 1,
                self.retries + 1,
                transfer.error,
            )
        return agent, transfer.error

    def _part_of(
        self, running: _Running, part: int, num_parts: int
    ) -> tuple[Descriptors | None, Descriptors | None]:
        with running.describe_lock:
            if running.started_s is None:
                running.started_s = self._clock.monotonic_s()
            if running.sides is None:
                running.sides = running.copy.describe()
                running.size_bytes = running.sides[0].size_bytes
            device, host = running.sides
        low = len(device) * part // num_parts
        high = len(device) * (part + 1) // num_parts
        if low == high:
            return None, None
        return (
            Descriptors(device.kind, device.rows[low:high]),
            Descriptors(host.kind, host.rows[low:high]),
        )

    def _part_ended(self, running: _Running, error: PdOffloadError | None) -> None:
        with self._changed:
            running.error = running.error or error
            running.parts_left -= 1
            if running.parts_left:
                return
            del self._running[running.copy.copy_id]
            now_s = self._clock.monotonic_s()
            self._finished.append(
                CopyResult(
                    copy_id=running.copy.copy_id,
                    error=running.error,
                    size_bytes=running.size_bytes,
                    elapsed_s=now_s - (running.started_s or now_s),
                )
            )
            self._changed.notify_all()
