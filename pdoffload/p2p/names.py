"""Host names, resolved off the threads that must not wait.

A resolver may take many seconds, and libzmq would ask it on its one I/O thread, where the heartbeats of
every peer are. So a name is resolved on a thread of its own, which ends with the answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pdoffload.p2p.address import resolve


class Names:
    """One owner thread asks and takes; `wake` is called on another thread when there is something to take."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._asked: set[str] = set()
        self._answers: queue.SimpleQueue[tuple[str, str | OSError]] = queue.SimpleQueue()

    def ask(self, host: str) -> None:
        """Resolve `host`. A name that is being resolved already is not asked for twice."""
        if host in self._asked:
            return
        self._asked.add(host)
        # A daemon: a resolver that hangs must not keep the process from ending.
        threading.Thread(
            target=self._resolve, args=(host,), name="pdoffload-p2p-names", daemon=True
        ).start()

    def take(self) -> list[tuple[str, str | OSError]]:
        """Names and their numeric addresses, or why there is none, since the last call."""
        answers = []
        while not self._answers.empty():
            host, answer = self._answers.get_nowait()
            self._asked.discard(host)
            answers.append((host, answer))
        return answers

    def _resolve(self, host: str) -> None:
        answer: str | OSError
        try:
            answer = resolve(host)[0]
        except OSError as error:
            answer = error
        except UnicodeError as error:  # of Python's own encoding of names, before anyone is asked
            answer = OSError(str(error))
        self._answers.put((host, answer))
        self._wake()
