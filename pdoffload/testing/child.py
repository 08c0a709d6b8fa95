"""The parent's end of a child process that reads a command a line and answers with a JSON object a line."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Self

_END_TIMEOUT_S = 30.0


class LineChild:
    """Starts `command`. One thread; the child ends by itself when its input is closed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            bufsize=1,
            env=env,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end by itself, or kill it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")

    def answer(self) -> dict[str, Any]:
        """The next answer. `AssertionError` if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(_END_TIMEOUT_S)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        self.send(command)
        return self.answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
