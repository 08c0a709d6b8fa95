"""What a person sees of the demo: progress on a terminal, plain lines elsewhere, and one table.

On a terminal the present phase spins, with the server's last log line beside it, and a finished one
stays with a tick and its seconds. Elsewhere a phase is one plain line when it begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.demo.verdict import Outcome, Step, ms_text, size_text

_PLAIN_WIDTH = 110
_NUMBERS = {3: "three", 4: "four"}


class Report:
    """Writes to `console`; by default standard output, `_PLAIN_WIDTH` wide where no terminal is."""

    def __init__(self, console: Console | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._began_s = 0.0
        self.console = console or Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = _PLAIN_WIDTH
        self._status: Status | None = None
        self._phase = ""

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show a spinner with the present phase, if there is somebody to look at it."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status("") as self._status:
            yield
            self._tick_off()
        self._status = None

    def phase(self, text: str) -> None:
        self._tick_off()
        self._phase, self._began_s = text, self._clock.monotonic_s()
        if self._status is None:
            self.console.print(f"- {text}", markup=False)
        else:
            self._status.update(f"[bold]{escape(text)}[/]")

    def _tick_off(self) -> None:
        if self._status is not None and self._phase:
            took_s = self._clock.monotonic_s() - self._began_s
            self.console.print(f"[green]✓[/] {escape(self._phase)} [dim]{took_s:.0f} s[/]")

    def detail(self, text: str) -> None:
        if self._status is not None:
            room = max(20, self.console.width - len(self._phase) - 8)
            self._status.update(f"[bold]{escape(self._phase)}[/]  [dim]{escape(text[:room])}[/]")

    def table(self, outcome: Outcome) -> None:
        """The steps side by side."""
        table = Table(box=SIMPLE_HEAD, title=outcome.title, title_style="bold")
        table.add_column("step")
        table.add_column("prefix from", style="cyan")
        figures = (
            "TTFT",
            "speed-up",
            "tokens reused",
            "to device",
            outcome.tier_column,
            "verified",
        )
        for column in figures:
            table.add_column(column, justify="right")
        for step in outcome.steps:
            table.add_row(*_row(step, outcome.steps[0]))
        self.console.print()
        self.console.print(table)

    def passed(self, outcome: Outcome, kept: Path | None) -> None:
        """The closing sentences of a demo that held."""
        text = " ".join(outcome.steps[0].completion.text.split())
        write = self.console.print
        number = _NUMBERS[len(outcome.steps)]
        write(f"[green]All {number} completions are identical:[/] [italic]{escape(text)}[/]")
        for sentence in outcome.sentences():
            write(escape(sentence))
        if kept is not None:
            write(f"Chunks and logs are kept in {escape(str(kept))}", soft_wrap=True)

    def failed(self, problems: list[str], folder: Path) -> None:
        """Why the demo failed, and where the logs are."""
        for problem in problems:
            self.console.print(f"[red]FAILED[/] {escape(problem)}", soft_wrap=True)
        self.console.print(f"Logs and chunks: {escape(str(folder))}", soft_wrap=True)


def _row(step: Step, cold: Step) -> tuple[str, ...]:
    speed_up = ""
    if step.restored_tokens:
        times = cold.completion.ttft_s / step.completion.ttft_s
        speed_up = f"[bold green]{times:.1f}x[/]"
    return (
        step.name,
        step.source,
        ms_text(step.completion.ttft_s),
        speed_up,
        f"{step.restored_tokens:,} / {step.completion.prompt_tokens:,}",
        size_text(step.host_bytes),
        size_text(step.tier_bytes),
        f"{step.verified_chunks} / {step.tier_chunks}" if step.tier_chunks else "-",
    )
