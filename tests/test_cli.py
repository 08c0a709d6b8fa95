"""The command line, run as its users run it: a process, its output, its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdoffload import __version__
from pdoffload.cli import app

GOOD = '{"cpu_bytes_to_use": 1073741824}'
HEAVY = ("torch", "vllm", "nixl", "nixl_cu12", "numpy")


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


def run_command(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, input=stdin)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("what", ["import pdoffload", "from pdoffload.cli import main; main()"])
def test_importing_and_help_load_nothing_heavy(what: str) -> None:
    code = f"{what}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    ran = run_python(code, "--help")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_version_is_printed() -> None:
    assert run_command("--version") == (0, f"pdoffload {__version__}\n", "")


def test_a_right_configuration_prints_every_setting() -> None:
    status, out, err = run_command("config", "check", GOOD)
    assert (status, err) == (0, "")
    assert "1073741824 (1 GiB)" in out
    assert "transfer_timeout_s" in out


def test_each_problem_is_a_line_and_the_status_is_two() -> None:
    status, out, err = run_command("config", "check", '{"cpu_bytes_to_use": "1G", "verfy": "off"}')
    assert (status, out) == (2, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["cpu_bytes_to_use", "verfy"]


def test_warnings_go_to_stderr_and_the_status_stays_zero() -> None:
    written = json.dumps({**json.loads(GOOD), "verify": "off"})
    status, out, err = run_command("config", "check", written)
    assert status == 0
    assert err.startswith("warning: verify: off")
    assert "warning" not in out


def test_a_file_and_standard_input_are_read_too(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    file.write_text(GOOD)
    by_text = run_command("config", "check", GOOD)
    assert run_command("config", "check", str(file)) == by_text
    assert run_command("config", "check", "-", stdin=GOOD) == by_text


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    status, _, err = run_command("config", "check", str(missing))
    assert (status, err) == (2, f"{missing}: No such file or directory\n")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    status, _, err = run_command("config", "check", str(binary))
    assert (status, err) == (2, f"{binary}: not UTF-8 text\n")


def test_markup_in_a_value_is_shown_as_it_is() -> None:
    tier = {"type": "fs", "root_dir": "/kv/[bold]x[/bold]"}
    written = {
        "cpu_bytes_to_use": 1,
        "spec_name": "NixlTieringOffloadingSpec",
        "secondary_tiers": [tier],
    }
    status, out, _ = run_command("config", "check", json.dumps(written))
    assert status == 0
    assert "/kv/[bold]x[/bold]" in out


def test_the_keys_are_listed_with_their_defaults() -> None:
    status, out, _ = run_command("config", "keys")
    assert status == 0
    (line,) = (line for line in out.splitlines() if line.split()[:1] == ["max_tracker_size"])
    assert line.split()[1] == "64000"


def test_the_markdown_is_the_page() -> None:
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert run_command("config", "keys", "--markdown") == (0, page.read_text(), "")


@pytest.mark.parametrize(
    ("arguments", "status"), [(["config", "check", GOOD], 0), (["config", "check", "{}"], 2)]
)
def test_the_status_survives_a_crash_at_exit(arguments: list[str], status: int) -> None:
    """Two copies of libnl crash a process in its exit handlers after NIXL was used in it."""
    code = (
        "import atexit, os, signal, sys, types\n"
        "from pdoffload.cli import main\n"
        "sys.modules['nixl'] = types.ModuleType('nixl')\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGSEGV)\n"
        "sys.exit(main())\n"
    )
    ran = run_python(code, *arguments)
    assert ran.returncode == status
    assert ("(1 GiB)" if status == 0 else "required and missing") in ran.stdout + ran.stderr


def test_without_nixl_the_exit_handlers_run() -> None:
    code = (
        "import atexit, sys\n"
        "from pdoffload.cli import main\n"
        "atexit.register(print, 'handlers ran')\n"
        "sys.exit(main())\n"
    )
    ran = run_python(code, "config", "check", "{}")
    assert (ran.returncode, ran.stdout) == (2, "handlers ran\n")


def test_a_wrong_command_is_a_usage_error() -> None:
    ran = run_python("import sys; from pdoffload.cli import main; sys.exit(main())", "bogus")
    assert ran.returncode == 2
    assert "No such command 'bogus'" in ran.stderr


def made_namespace(root: Path) -> Path:
    """A chunk file of some configuration under `root`, a week old."""
    (root / "m_0123456789ab").mkdir()
    (root / "m_0123456789ab" / "config.json").write_text("{}")
    chunk = root / "m_0123456789ab_r0" / "abc" / "de_g0" / f"abcde0{'0' * 58}.bin"
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(bytes(4096))
    os.utime(chunk, (1, 1))
    return chunk


def test_gc_is_a_dry_run_unless_it_is_told_to_delete(tmp_path: Path) -> None:
    chunk = made_namespace(tmp_path)
    status, out, err = run_command("gc", str(tmp_path), "--older-than", "7d")
    assert (status, err) == (0, "")
    assert "m_0123456789ab_r0" in out
    assert "older_than 1" in out
    assert "dry run" in out
    assert chunk.exists()
    status, out, err = run_command("gc", str(tmp_path), "--max-bytes", "1KB", "--delete")
    assert (status, err) == (0, "")
    assert "1 (4 KiB)" in out
    assert not chunk.exists()


def test_gc_takes_its_roots_from_a_configuration_and_speaks_json(tmp_path: Path) -> None:
    made_namespace(tmp_path)
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    extra = {
        "spec_name": "NixlTieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [tier],
    }
    file = tmp_path / "kv.json"
    file.write_text(json.dumps(extra))
    status, out, err = run_command("gc", "--config", str(file), "--json")
    assert (status, err) == (0, "")
    (report,) = json.loads(out)
    assert (report["store"], report["root"], report["deleted"]) == ("fs", str(tmp_path), False)
    assert report["namespaces"][0]["chunks"] == {"files": 1, "size_bytes": 4096}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of the two"),
        (("/nowhere/at/all",), "/nowhere/at/all"),
        (("/", "--max-bytes", "many"), "--max-bytes"),
        (("/", "--older-than", "7"), "--older-than"),
        (("/", "--namespace", "x"), "--namespace"),
        (("/", "--config", "{}"), "one of the two"),
        (("--config", "/nowhere.json"), "/nowhere.json"),
        (("--config", '{"cpu_bytes_to_use": 1073741824}'), "secondary_tiers"),
    ],
)
def test_gc_names_what_is_wrong_and_the_status_is_two(
    arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = run_command("gc", *arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_gc_loads_neither_nixl_nor_torch(tmp_path: Path) -> None:
    made_namespace(tmp_path)
    code = (
        "import sys\nfrom pdoffload.cli import app\n"
        f"app(['gc', {str(tmp_path)!r}], standalone_mode=False)\n"
        "print([name for name in ('torch', 'vllm', 'nixl', 'nixl_cu12') if name in sys.modules])"
    )
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"
