"""The command line: `pdoffload config`, `pdoffload gc`, `pdoffload demo`, `pdoffload demo-pd`.

Commands import what they need when they run, so that `--help` loads neither torch nor vLLM nor NIXL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import pdoffload
from pdoffload.errors import ConfigError

if TYPE_CHECKING:
    from pdoffload.config.launch import Checked

EXIT_PROBLEMS = 2
_WIDE = 200

# Without rich markup typer prints plain help, which costs no import of rich.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Keep the KV cache of LLM inference beyond device memory, moved by NIXL.",
)
config_app = typer.Typer(no_args_is_help=True, help="Check settings, and list them.")
app.add_typer(config_app, name="config")


def main() -> int:
    """Run the command of `sys.argv` and return its exit status.

    Once NIXL is loaded the process ends here, without exit handlers: where two copies of libnl meet,
    a process that created a UCX agent crashes in its exit handlers, and 139 would hide the status.
    """
    try:
        app(prog_name="pdoffload")
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    else:
        status = 0
    if "nixl" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pdoffload {pdoffload.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@config_app.command("check")
def check_config(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_JSON",
            help="The value of --kv-transfer-config, or its kv_connector_extra_config alone: "
            "JSON, a file that holds it, or - for standard input.",
        ),
    ],
) -> None:
    """Check a configuration in full. Exit status: 0 right, 2 problems, one line each."""
    from pdoffload.config.launch import check_text

    try:
        checked = check_text(_read_source(source))
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(problem, err=True)
        raise typer.Exit(EXIT_PROBLEMS) from error
    _print_resolved(checked)
    for line in checked.warnings:
        typer.echo(f"warning: {line}", err=True)


def _read_source(source: str) -> str:
    if source.lstrip().startswith(("{", "[")):
        return source
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text()
    except OSError as error:
        raise ConfigError([f"{source}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{source}: not UTF-8 text"]) from error


def _print_resolved(checked: Checked) -> None:
    from pdoffload.config import resolved

    for where, config in checked.connectors:
        _print_table(where.rstrip("."), ("key", "value"), resolved(config))


def _print_table(title: str, columns: tuple[str, ...], rows: Iterable[Iterable[str]]) -> None:
    """On a terminal as wide as it is; elsewhere wide, so that a line stays a line for `grep`."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    table = Table(*columns, title=title or None, box=SIMPLE, title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


@config_app.command("keys")
def list_keys(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/configuration.md instead of tables.")
    ] = False,
) -> None:
    """List every key with its default, what is allowed, and what it means."""
    from pdoffload.config import reference
    from pdoffload.config.reading import keys_of

    if markdown:
        typer.echo(reference.markdown(), nl=False)
        return
    for title, table in reference.TABLES:
        rows = [
            (
                reference.key_text(key),
                reference.default_text(key),
                key.allowed,
                key.meaning.replace("`", ""),
            )
            for key in keys_of(table)
        ]
        _print_table(title, ("key", "default", "allowed", "meaning"), rows)


@app.command("gc")
def collect(
    root_dir: Annotated[
        str | None, typer.Argument(help="The root_dir of an fs tier; or give --config.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE_OR_JSON", help="Every tier of this configuration, as for `config check`."
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Keep so much, such as 200GB; the least recently used goes."
        ),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="What was not used for so long goes: 7d.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this one, such as model_0123456789ab_r0."),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove it. Without this nothing is changed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
) -> None:
    """List what tiers keep, and remove what is not needed. A dry run unless --delete is given.

    Of the objects of a bucket, the time they were written counts as their use. Of files, what writers that
    died left behind, and those of a size that no engine loads, go in any case. Safe beside running engines.
    Exit status: 0 done, 2 wrong usage or a problem, one line each.
    """
    from pdoffload.clock import SYSTEM_CLOCK
    from pdoffload.tiers.gc import GcPolicy, collectors, parse_age, parse_size, rows, to_json

    try:
        policy = GcPolicy(
            max_bytes=None if max_bytes is None else parse_size(max_bytes),
            older_than_s=None if older_than is None else parse_age(older_than),
            namespace=namespace,
        )
        written = None if config is None else _read_source(config)
        reports = [
            collector(policy, delete=delete, clock=SYSTEM_CLOCK)
            for collector in collectors(root_dir, written)
        ]
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(problem, err=True)
        raise typer.Exit(EXIT_PROBLEMS) from error
    if as_json:
        typer.echo(to_json(reports))
    for report in reports:
        if not as_json:
            columns, cells = rows(report, SYSTEM_CLOCK.wall_s())
            _print_table(f"{report.store} {report.root}", columns, cells)
        for problem in (*report.skipped, *report.problems):
            typer.echo(problem, err=True)
    if not delete and not as_json:
        typer.echo("A dry run: nothing was changed. --delete removes what is to go.")
    if any(report.problems for report in reports):
        raise typer.Exit(EXIT_PROBLEMS)


_ModelDir = Annotated[Path, typer.Argument(help="A model checkpoint that vLLM can serve.")]
_WorkDir = Annotated[
    Path | None, typer.Option(help="Where chunks and logs go; a temporary directory by default.")
]
_Keep = Annotated[bool, typer.Option("--keep", help="Keep chunks and logs afterwards.")]


@app.command()
def demo(model_dir: _ModelDir, work_dir: _WorkDir = None, keep: _Keep = False) -> None:
    """Show a model's KV cache come back from memory and disk."""
    from pdoffload.demo import run

    raise typer.Exit(run(model_dir, work_dir, keep))


@app.command("demo-pd")
def demo_pair(model_dir: _ModelDir, work_dir: _WorkDir = None, keep: _Keep = False) -> None:
    """Show a decoder take its KV cache from a prefiller."""
    from pdoffload.demo import run_pair

    raise typer.Exit(run_pair(model_dir, work_dir, keep))


if __name__ == "__main__":
    sys.exit(main())
