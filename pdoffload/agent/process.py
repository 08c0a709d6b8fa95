"""What the libraries under NIXL ask of a whole process: settings at its start, a wait at its end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Iterator

_log = logging.getLogger(__name__)

_EXIT_WAIT_S = 25.0
"""More than a store's client takes to give a request up, see `bound_retries`."""


def bound_retries() -> None:
    """Have the AWS SDK give a request up after seconds. An operator's own settings stand.

    Its own default is eleven attempts: 25 s while a store answers 503, a minute while it is silent. With
    these it is 4 s and 17 s; two failures in a row are still ridden out.
    """
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "4")


class _Waiting:
    """Threads inside a call of NIXL that waits for a store.

    One that comes back when the interpreter is gone is unwound through C++, which aborts the process: so
    its end is put off until they are back.
    """

    def __init__(self) -> None:
        self._back = threading.Condition()
        self._inside = 0
        self._registered = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        with self._back:
            self._inside += 1
            if not self._registered:
                self._registered = True
                atexit.register(self._wait)
        try:
            yield
        finally:
            with self._back:
                self._inside -= 1
                self._back.notify_all()

    def _wait(self) -> None:
        with self._back:
            if self._inside:
                _log.warning("waiting for %d requests to a store before the end", self._inside)
            self._back.wait_for(lambda: not self._inside, timeout=_EXIT_WAIT_S)


_waiting = _Waiting()


def waits_for_a_store() -> contextlib.AbstractContextManager[None]:
    """Around a call of NIXL that waits for a store: the process does not end inside it."""
    return _waiting.call()
