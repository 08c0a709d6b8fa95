"""The threads that move and check bytes for the peer service: `num_threads` writers.

Each writer owns a NIXL agent, opened at its first write and never shared; a peer is served by one writer, so
that it connects to this process once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from pdoffload.agent.completion import Patience
from pdoffload.clock import Clock
from pdoffload.config import Verify
from pdoffload.errors import TransferError, as_ours
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.checking import Checked, compare
from pdoffload.p2p.hashing import Hashing
from pdoffload.p2p.outbound import Outbound, WriteSettled, Written
from pdoffload.p2p.pulling import Check
from pdoffload.p2p.receiving import OpenAgent
from pdoffload.p2p.serving import Write
from pdoffload.p2p.terms import Target

logger = logging.getLogger(__name__)

Outcome = Written | WriteSettled | Checked
Report = Callable[[Outcome], None]


class Writers:
    """The pool. Called by the service's thread; `report` is called on the writers' threads."""

    def __init__(
        self,
        num_threads: int,
        open_agent: OpenAgent,
        region: HostRegion,
        report: Report,
        *,
        verify: Verify,
        clock: Clock,
    ) -> None:
        self._region = region
        self._clock = clock
        self._writers = [
            _Writer(number, open_agent, region, report, verify=verify, clock=clock)
            for number in range(num_threads)
        ]
        self._of_target: dict[Target, _Writer] = {}
        self._next = 0

    def __repr__(self) -> str:
        return f"<Writers {len(self._writers)} threads, {len(self._of_target)} peers>"

    def write(self, write: Write, timeout_s: float) -> None:
        """Queue a write; it is reported as `Written` within its deadline and the tear-down of an agent.

        While this peer's writer has its turn, another one computes the checksums, if it has time.
        """
        target = write.serve.target
        writer = self._of_target.get(target)
        if writer is None:
            writer = min(self._writers, key=lambda each: each.num_targets)
            writer.num_targets += 1
            self._of_target[target] = writer
        hashing = Hashing(self._region, write)
        writer.put(_Post(write, self._clock.monotonic_s() + timeout_s, hashing))
        other = self._any_writer()
        if other is not writer:
            other.put(hashing)

    def check(self, check: Check, owner: object) -> None:
        """Queue a comparison; it is reported as `Checked` with the same `owner`."""
        self._any_writer().put(_Compare(check, owner))

    def _any_writer(self) -> _Writer:
        self._next = (self._next + 1) % len(self._writers)
        return self._writers[self._next]

    def forget(self, target: Target) -> None:
        """The peer is gone; its connection is closed when no write to it is under way."""
        writer = self._of_target.pop(target, None)
        if writer is not None:
            writer.num_targets -= 1
            writer.put(_Forget(target))

    def close(self, timeout_s: float) -> bool:
        """End what is queued as failed, wait a little for what is under way, stop the threads.

        Whether all have stopped, within `timeout_s` together. To be called once, and last.
        """
        deadline_s = self._clock.monotonic_s() + timeout_s
        for writer in self._writers:
            writer.put(None)
        ended = [
            writer.join(max(0.0, deadline_s - self._clock.monotonic_s()))
            for writer in self._writers
        ]
        return all(ended)


class _Post(msgspec.Struct, frozen=True):
    write: Write
    deadline_s: float
    hashing: Hashing


class _Compare(msgspec.Struct, frozen=True):
    check: Check
    owner: object


class _Forget(msgspec.Struct, frozen=True):
    target: Target


_Order = _Post | _Compare | _Forget | Hashing | None
"""None: stop."""


class _Writer:
    """One thread. Everything below `_run` runs on it."""

    def __init__(
        self,
        number: int,
        open_agent: OpenAgent,
        region: HostRegion,
        report: Report,
        *,
        verify: Verify,
        clock: Clock,
    ) -> None:
        self.num_targets = 0
        self._region = region
        self._report = report
        self._verify = verify
        self._clock = clock
        self._outbound = Outbound(f"write-{number}", open_agent, region, report, clock=clock)
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._backlog: deque[_Post | _Forget] = deque()
        """In the order they came: a worn agent makes them wait."""
        self._thread = threading.Thread(
            target=self._run, name=f"pdoffload-p2p-writer-{number}", daemon=True
        )
        self._started = False

    def put(self, order: _Order) -> None:
        """By the service's thread."""
        if not self._started:
            if order is None or isinstance(order, _Forget):
                return
            self._started = True
            self._thread.start()
        self._orders.put(order)

    def join(self, timeout_s: float) -> bool:
        if not self._started:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        patience = Patience(self._clock)
        while True:
            try:
                order = self._orders.get(block=not self._backlog and not self._outbound.busy)
            except queue.Empty:
                has_new = False
            else:
                has_new = True
                if order is None:
                    break
                self._take(order)
            has_begun = self._begin_first()
            self._outbound.poll()
            if has_new or has_begun:
                patience.reset()
            else:
                patience.pause()
        self._stop()

    def _take(self, order: _Post | _Compare | _Forget | Hashing) -> None:
        if isinstance(order, _Compare):
            self._compare(order)
        elif isinstance(order, Hashing):
            order.go_ahead()
        else:
            self._backlog.append(order)

    def _begin_first(self) -> bool:
        """Carry out what has waited longest; whether that could be done."""
        if not self._backlog:
            return False
        first = self._backlog[0]
        if isinstance(first, _Post):
            is_done = self._outbound.post(first.write, first.deadline_s, first.hashing)
        else:
            is_done = self._outbound.forget(first.target)
        if is_done:
            self._backlog.popleft()
        return is_done

    def _stop(self) -> None:
        error = TransferError("the peer service is closing")
        for order in self._backlog:
            if isinstance(order, _Post):
                order.hashing.stop()
                self._report(Written(order.write, error, True, {}))
        self._backlog.clear()
        self._outbound.close()

    def _compare(self, order: _Compare) -> None:
        check, owner = order.check, order.owner
        try:
            checked = compare(check, owner, self._region, self._verify)
        except BaseException as failure:  # whatever it was, the check ends with it
            logger.exception("a check of %d chunks ended unexpectedly", len(check.keys))
            bad = dict.fromkeys(check.keys, as_ours("a check", failure))
            checked = Checked(check, owner, bad, 0)
        self._report(checked)
