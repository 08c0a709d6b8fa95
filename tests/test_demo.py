"""The demo: its judgement on made-up figures, its output, and the whole of it on real servers."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from pdoffload import demo
from pdoffload.config.launch import check_text
from pdoffload.demo.pair import p2p_table
from pdoffload.demo.report import Report
from pdoffload.demo.scenario import ChunkFiles, kv_transfer_config
from pdoffload.demo.verdict import Pair, Restart, Step
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.openai_api import Completion, Metrics

ANSWER = Completion(text=" three", token_ids=(7, 8), prompt_tokens=2371, ttft_s=2.0, total_s=3.0)


def step(name: str, **changes: object) -> Step:
    values: dict[str, object] = {
        "name": name,
        "completion": ANSWER,
        "device_tokens": 0,
        "restored_tokens": 2368,
        "computed_tokens": 3,
        "host_bytes": 50_000_000,
        "tier": "",
        "tier_bytes": 0,
        "tier_chunks": 0,
        "verified_chunks": 0,
        "corrupt_chunks": 0,
        "physical_bytes": 0,
    }
    return Step(**{**values, **changes})


COLD = {"restored_tokens": 0, "computed_tokens": 2371, "host_bytes": 0}
FROM_TIER = {"tier_bytes": 50_300_000, "tier_chunks": 74, "verified_chunks": 74}


@pytest.fixture
def restart() -> Restart:
    return Restart(
        cold=step("cold", **COLD),
        host=step("host"),
        disk=step("disk", tier="fs", **FROM_TIER),
        files=74,
        file_bytes=50_300_000,
    )


@pytest.fixture
def pair() -> Pair:
    return Pair(
        cold=step("cold", **COLD),
        pulled=step("pulled", tier="p2p", **FROM_TIER),
        prefix=step("prefix", tier="p2p", **FROM_TIER),
        again=step("again", **COLD),
        prefill_s=1.5,
        transports=("cma",),
        served_bytes=100_600_000,
    )


@pytest.mark.parametrize("which", ["restart", "pair"])
def test_a_demo_that_kept_its_promises_has_no_problem(
    which: str, request: pytest.FixtureRequest
) -> None:
    assert request.getfixturevalue(which).problems() == []


NOTHING_FROM_TIER = {"tier": "", "tier_chunks": 0, "verified_chunks": 0}


@pytest.mark.parametrize(
    ("which", "changes", "sentence"),
    [
        ("host", {"restored_tokens": 0}, "from: host memory; it was: computed"),
        ("host", {"tier": "fs", **FROM_TIER}, "from: host memory; it was: disk"),
        ("disk", NOTHING_FROM_TIER, "from: disk; it was: host memory"),
        ("disk", {"restored_tokens": 1000}, "reused 1000 of 2371 prompt tokens"),
        ("disk", {"verified_chunks": 73}, "verified 73 of 74 chunks"),
        ("disk", {"corrupt_chunks": 1}, "met 1 corrupt chunks"),
        ("cold", {"restored_tokens": 64}, "from: computed; it was: host memory"),
        ("host", {"device_tokens": 32}, "32 tokens in device memory"),
    ],
)
def test_a_promise_that_was_not_kept_is_named(
    restart: Restart, which: str, changes: dict[str, object], sentence: str
) -> None:
    broken = msgspec.structs.replace(getattr(restart, which), **changes)
    problems = msgspec.structs.replace(restart, **{which: broken}).problems()
    assert any(sentence in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("which", "changes", "sentence"),
    [
        ("pulled", {"computed_tokens": 64}, "computed 64 tokens, more than what is left"),
        ("pulled", NOTHING_FROM_TIER, "from: peer; it was: host memory"),
        ("prefix", {"tier": "fs"}, "from: peer; it was: disk"),
        ("prefix", {"tier": "fs+p2p"}, "from: peer; it was: fs+p2p"),
        ("prefix", {"verified_chunks": 0}, "verified 0 of 74 chunks"),
        ("prefix", {"tier_bytes": 1}, "written 100600000 bytes, the decoder has got 50300001"),
        ("again", {"restored_tokens": 2368}, "from: computed; it was: host memory"),
    ],
)
def test_a_promise_of_the_pair_that_was_not_kept_is_named(
    pair: Pair, which: str, changes: dict[str, object], sentence: str
) -> None:
    broken = msgspec.structs.replace(getattr(pair, which), **changes)
    problems = msgspec.structs.replace(pair, **{which: broken}).problems()
    assert any(sentence in problem for problem in problems), problems


def test_a_prefiller_that_names_no_transport_is_a_problem(pair: Pair) -> None:
    (problem,) = msgspec.structs.replace(pair, transports=()).problems()
    assert "transport" in problem


def test_a_different_completion_is_shown_beside_the_cold_one(restart: Restart) -> None:
    other = msgspec.structs.replace(ANSWER, text=" four", token_ids=(7, 9))
    broken = msgspec.structs.replace(restart.disk, completion=other)
    (problem,) = msgspec.structs.replace(restart, disk=broken).problems()
    assert "' three'" in problem
    assert "' four'" in problem


def test_no_file_on_disk_is_a_problem(restart: Restart) -> None:
    (problem,) = msgspec.structs.replace(restart, files=0).problems()
    assert "No chunk file" in problem


def test_a_step_takes_its_figures_from_the_growth_of_the_metrics() -> None:
    grown = Metrics(
        {
            ("vllm:prefix_cache_hits_total", (("engine", "0"),)): 1.0,
            ("vllm:external_prefix_cache_hits_total", (("engine", "0"),)): 64.0,
            ("vllm:prompt_tokens_by_source_total", (("source", "local_compute"),)): 7.0,
            ("vllm:kv_offload_load_bytes_total", (("engine", "0"),)): 4096.0,
            ("vllm:pdoffload_tier_bytes_read_total", (("tier", "fs"),)): 8192.0,
            ("vllm:pdoffload_tier_loaded_chunks_total", (("tier", "fs"),)): 2.0,
            ("vllm:pdoffload_tier_verified_chunks_total", (("tier", "fs"),)): 2.0,
        }
    )
    assert Step.between("x", ANSWER, grown, 5) == Step(
        name="x",
        completion=ANSWER,
        device_tokens=1,
        restored_tokens=64,
        computed_tokens=7,
        host_bytes=4096,
        tier="fs",
        tier_bytes=8192,
        tier_chunks=2,
        verified_chunks=2,
        corrupt_chunks=0,
        physical_bytes=5,
    )


def test_the_configurations_shown_are_ones_that_the_checker_passes(tmp_path: Path) -> None:
    for tier in ({"type": "fs", "root_dir": str(tmp_path)}, p2p_table(5710, tmp_path / "secret")):
        checked = check_text(msgspec.json.encode(kv_transfer_config(tier)).decode())
        assert checked.connectors
        assert not checked.warnings


def test_chunk_files_are_counted_without_the_tier(tmp_path: Path) -> None:
    folder = tmp_path / "model_r0" / "abc" / "de_g0"
    folder.mkdir(parents=True)
    (folder / "one.bin").write_bytes(b"x" * 5000)
    (folder / "one.bin.tmp").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    found = ChunkFiles.under(tmp_path)
    assert (len(found.paths), found.size_bytes) == (1, 5000)
    found.leave_page_cache()
    assert (folder / "one.bin").read_bytes() == b"x" * 5000


def test_where_nobody_looks_the_output_is_plain_lines_and_a_table(restart: Restart) -> None:
    text = io.StringIO()
    report = Report(Console(file=text, highlight=False))
    with report.progress():
        report.phase("starting [server]")
        report.detail("loading weights")
    report.table(restart)
    report.passed(restart, None)
    shown = text.getvalue()
    assert "\x1b" not in shown
    assert "- starting [server]\n" in shown
    assert "loading weights" not in shown
    assert "from disk" in shown
    assert "2,368 / 2,371" in shown
    assert "74 / 74" in shown
    assert "All three completions are identical: three" in shown
    assert "74 chunk files, 50.3 MB" in shown


def test_the_pairs_table_names_peers_and_its_sentences_the_transport(pair: Pair) -> None:
    text = io.StringIO()
    report = Report(Console(file=text, highlight=False))
    report.table(pair)
    report.passed(pair, Path("kept-here"))
    shown = text.getvalue()
    assert "from peer" in shown
    assert "1.0x" in shown
    assert "All four completions are identical: three" in shown
    assert "computed the prompt in 1,500 ms" in shown
    assert "100.6 MB to the decoder by NIXL, over cma" in " ".join(shown.split())
    assert "kept-here" in shown


def test_on_a_terminal_finished_phases_stay_with_their_seconds() -> None:
    clock = FakeClock()
    text = io.StringIO()
    report = Report(Console(file=text, force_terminal=True, width=80), clock=clock)
    with report.progress():
        report.phase("first")
        clock.advance(3)
        report.phase("second")
        clock.advance(4)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert "✓ first 3 s" in shown
    assert "✓ second 4 s" in shown


@pytest.mark.parametrize("run", [demo.run, demo.run_pair])
def test_a_folder_that_is_no_checkpoint_fails_with_a_sentence(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "nothing", tmp_path / "work", keep=False) == demo.EXIT_FAILED
    assert "is not a model checkpoint" in capsys.readouterr().out


@pytest.mark.vllm
@pytest.mark.nixl
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("command", "number"), [("demo", "three"), ("demo-pd", "four")])
def test_the_demo_holds_on_a_real_model_and_leaves_no_file(
    command: str, number: str, smollm2_dir: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pdoffload.cli", command),
            *(str(smollm2_dir), "--work-dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"All {number} completions are identical" in done.stdout
    assert os.listdir(tmp_path) == []
