"""A driver whose calls about peers return in time, over one whose calls may not.

NIXL's LIBFABRIC greets a peer when it is added, and spins until the connection is there: for ever, if the
peer is stopped or has just died. Its first post to a peer waits up to 60 s for the peer's own greeting. So
all calls are made on a thread of their own, which also creates the driver. Those that peers can hold up
are waited for so long and no longer; those that take what they take (to pin the memory of a large pool) to
their end.

    open --a call does not return in time--> lost --it returns after all--> closed
      '----------------------------------------------------close---------------^

A lost driver takes no call any more. What it had begun may go on, so it cannot be said to be closed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors, MemoryKind, Rows
from pdoffload.agent.driver import Driver, Verdict
from pdoffload.errors import NixlError

CALL_TIMEOUT_S = 5.0
"""A greeting takes milliseconds while the peer makes progress."""

_T = TypeVar("_T")


class BoundedDriver:
    """See `Driver`. Called by one thread; a call that is late raises `NixlError`, and so do all after it."""

    def __init__(
        self, name: str, open_driver: Callable[[], Driver], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        """Raises whatever `open_driver` raises; it is called on the thread that makes all calls."""
        self._timeout_s = timeout_s
        self._orders: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._driver: Driver | None = None
        self._late = ""
        self._thread = threading.Thread(target=self._run, name=f"pdoffload-{name}", daemon=True)
        self._thread.start()

        def open_it() -> None:
            self._driver = open_driver()

        try:
            self._ask("nixl_agent", open_it, ends=True)
        except BaseException:
            self._over.set()
            self._orders.put(lambda: None)
            raise

    @property
    def lost(self) -> bool:
        """Whether a call has not returned in time."""
        return bool(self._late)

    def _run(self) -> None:
        while not self._over.is_set():
            order = self._orders.get()
            answer: tuple[Any, BaseException | None]
            try:
                answer = order(), None
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                answer = None, error
            self._answers.put(answer)
        # Nobody waits for what was late; what it has left ends here.
        driver, self._driver = self._driver, None
        if self._late and driver is not None:
            driver.close(abandon=False)

    def _ask(self, call: str, order: Callable[[], _T], *, ends: bool = False) -> _T:
        """`ends`: no peer has a part in it."""
        if self._late:
            raise NixlError(call, f"the agent is lost: {self._late} has not returned")
        self._orders.put(order)
        try:
            answer, error = self._answers.get(timeout=None if ends else self._timeout_s)
        except queue.Empty:
            self._late = call
            self._over.set()
            reason = f"it has not returned within {self._timeout_s:g} s: the peer does not answer"
            raise NixlError(call, reason) from None
        if error is not None:
            raise error
        return cast("_T", answer)

    @property
    def _there(self) -> Driver:
        assert self._driver is not None, "a lost driver is not asked"
        return self._driver

    # --- the driver's calls ---

    def register(self, kind: MemoryKind, rows: Rows, names: Sequence[str] = ()) -> Any:
        return self._ask(
            "register_memory", lambda: self._there.register(kind, rows, names), ends=True
        )

    def query(self, names: Sequence[str]) -> list[bool]:
        return self._ask("query_memory", lambda: self._there.query(names))

    def deregister(self, handle: Any) -> None:
        self._ask("deregister_memory", lambda: self._there.deregister(handle), ends=True)

    def metadata(self) -> bytes:
        return self._ask("get_agent_metadata", lambda: self._there.metadata())

    def name_in(self, metadata: bytes) -> str:
        return self._ask("name_in", lambda: self._there.name_in(metadata))

    def add_peer(self, metadata: bytes) -> None:
        self._ask("add_remote_agent", lambda: self._there.add_peer(metadata))

    def remove_peer(self, name: str) -> None:
        self._ask("remove_remote_agent", lambda: self._there.remove_peer(name))

    def transport_of(self, name: str) -> str:
        return self._ask("transport_of", lambda: self._there.transport_of(name))

    def progress(self) -> int:
        return self._ask("get_new_notifs", lambda: self._there.progress())

    def make(self, op: Op, local: Descriptors, remote: Descriptors, peer: str | None) -> Any:
        return self._ask("initialize_xfer", lambda: self._there.make(op, local, remote, peer))

    def start(self, handle: Any) -> Verdict:
        return self._ask("transfer", lambda: self._there.start(handle))

    def check(self, handle: Any) -> Verdict:
        return self._ask("check_xfer_state", lambda: self._there.check(handle))

    def release(self, handle: Any) -> None:
        self._ask("release_xfer_handle", lambda: self._there.release(handle))

    def close(self, *, abandon: bool) -> None:
        """Raises `NixlError` if the driver is lost: bytes may move until its call returns, if ever."""
        self._ask("close", lambda: self._close(abandon), ends=True)

    def _close(self, abandon: bool) -> None:
        self._over.set()
        driver, self._driver = self._there, None
        driver.close(abandon=abandon)
