"""Which plugin the fs tier takes, with and without cuFile, and the tier over NIXL's GDS plugins."""

from __future__ import annotations

import glob
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdoffload.agent.backends import GdsBackend, GdsMtBackend
from pdoffload.agent.needs import GPU_DEVICES
from pdoffload.agent.plugins import Usability
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.errors import ConfigError
from pdoffload.testing.cufile import OPEN_ERROR
from pdoffload.tiers.base import Verify
from pdoffload.tiers.fs import gds
from pdoffload.tiers.fs.gds import Use, choose

MIB = 1 << 20
without_gpu = pytest.mark.skipif(bool(glob.glob(GPU_DEVICES)), reason="this machine has a GPU")


@pytest.mark.timeout(300)
@pytest.mark.nixl
@pytest.mark.parametrize("name", ["GDS_MT", "GDS"])
def test_the_tier_over_the_plugin(run_suite: Callable[[Path, str], None], name: str) -> None:
    run_suite(Path(__file__).parent / "gds_suite.py", name)


# --- whole starts, each in a process with its own libraries ---

START = """
import json, logging, sys, time
if "no-nixl" in sys.argv:
    sys.modules["nixl"] = None
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append([record.levelname, record.getMessage()])
logging.getLogger("pdoffload").addHandler(Lines())
logging.getLogger("pdoffload").setLevel(logging.INFO)
from pathlib import Path
from pdoffload.errors import ConfigError
from pdoffload.testing.fs_rig import open_fs
from pdoffload.testing.tier_rig import keys_of
import pdoffload.agent.nixl
began, problem, stored = time.monotonic(), "", 0
try:
    with open_fs(Path(sys.argv[2]), backend=sys.argv[1]) as rig:
        stored = len(rig.store(keys_of(1, 2), (0, 1)).succeeded)
except ConfigError as error:
    (problem,) = error.problems
took_s = time.monotonic() - began
print(json.dumps({"lines": lines, "problem": problem, "stored": stored, "took_s": took_s}))
"""


def start(name: str, folder: Path, env: dict[str, str], *more: str) -> dict[str, Any]:
    """What a tier with `backend: name` says when it starts, and stores two chunks if it does."""
    (folder / "root").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", START, name, str(folder / "root"), *more],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["chosen"] = [text for _, text in found["lines"] if "moves bytes by NIXL" in text]
    found["warnings"] = [text for level, text in found["lines"] if level != "INFO"]
    return found


@pytest.mark.nixl
def test_auto_is_gds_mt_where_a_page_gets_through_it(
    cufile_env: dict[str, str], tmp_path: Path
) -> None:
    found = start("auto", tmp_path, cufile_env)
    assert found["stored"] == 2
    (line,) = found["chosen"]
    assert line.startswith("the fs tier moves bytes by NIXL GDS_MT, ")
    # It says that it is not what a person with a GPU would take it for.
    assert any("compat mode" in line for line in found["warnings"])


@pytest.mark.nixl
@without_gpu
def test_c13_auto_without_a_gpu_is_posix_said_in_one_line_with_the_reason(
    real_cufile_env: dict[str, str], tmp_path: Path
) -> None:
    found = start("auto", tmp_path, {**real_cufile_env, "CUDA_VISIBLE_DEVICES": ""})
    assert found["stored"] == 2
    (line,) = found["chosen"]
    assert line.startswith("the fs tier moves bytes by NIXL POSIX, ")
    assert "GDS_MT is not usable here: it loads, and libcufile.so.0 refuses to start" in line
    assert "error 5033" in line
    assert found["warnings"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["root"], "no log of cuFile's"


@pytest.mark.nixl
@without_gpu
@pytest.mark.parametrize("name", ["GDS_MT", "GDS"])
def test_c13_a_named_one_without_a_gpu_is_an_error_with_reason_and_remedy(
    real_cufile_env: dict[str, str], tmp_path: Path, name: str
) -> None:
    found = start(name, tmp_path, {**real_cufile_env, "CUDA_VISIBLE_DEVICES": ""})
    assert found["problem"].startswith(f"backend: '{name}' is not usable here: it loads, and ")
    for words in ("error 5033", "there is no NVIDIA GPU", "use backend POSIX"):
        assert words in found["problem"]
    assert found["took_s"] < 5


@pytest.mark.nixl
def test_c13_a_cufile_that_is_broken_is_told_by_its_number(
    cufile_env: dict[str, str], tmp_path: Path
) -> None:
    env = {**cufile_env, OPEN_ERROR: "5030"}
    assert "error 5030" in start("GDS_MT", tmp_path, env)["problem"]
    (line,) = start("auto", tmp_path, env)["chosen"]
    assert "POSIX" in line
    assert "error 5030" in line


@pytest.mark.nixl
def test_c13_an_empty_plugin_folder_is_named(cufile_env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    env = {**cufile_env, "NIXL_PLUGIN_DIR": str(tmp_path / "plugins")}
    missing = f"this NIXL has no such plugin (looked in {tmp_path / 'plugins'})"
    assert missing in start("GDS_MT", tmp_path, env)["problem"]
    found = start("auto", tmp_path, env)
    assert found["problem"].startswith("io: 'auto' is not usable here: ")
    assert "No plugins available" in found["problem"]


@pytest.mark.nixl
@pytest.mark.parametrize("name", ["auto", "POSIX", "GDS_MT", "GDS"])
def test_c13_without_nixl_every_choice_says_how_to_get_it(
    cufile_env: dict[str, str], tmp_path: Path, name: str
) -> None:
    found = start(name, tmp_path, cufile_env, "no-nixl")
    assert "pip install pdoffload[nixl]" in found["problem"]
    assert found["took_s"] < 5


# --- the choice alone ---


def use(**changes: object) -> Use:
    terms: dict[str, object] = {
        "chunk_bytes": 2 * MIB,
        "most_chunks": 16,
        "verify": Verify.ALWAYS,
        "shows_holes": True,
        "open_flags": 0,
        "file_mode": 0o600,
        **changes,
    }
    return Use(**terms)  # type: ignore[arg-type]


@pytest.fixture
def all_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds, "usability", lambda name: Usability(name))
    monkeypatch.setattr(gds, "_trial", lambda *_: "")


@pytest.mark.usefixtures("all_works")
def test_a_thread_of_the_tier_has_few_of_the_plugins() -> None:
    for name in ("auto", "GDS_MT"):
        assert choose(name, use(), "", SYSTEM_CLOCK) == GdsMtBackend(num_threads=4)  # type: ignore[arg-type]


@pytest.mark.usefixtures("all_works")
@pytest.mark.parametrize(
    ("chunk_bytes", "most_chunks", "cut_bytes"),
    [
        (8192, 32, 16 * MIB),
        (2 * MIB, 16, 16 * MIB),
        (32 * MIB, 32, 16 * MIB),
        (1 << 30, 1, 16 * MIB),
        (4 << 30, 1, 64 * MIB),
        (100 << 30, 1, 1 << 30),
    ],
)
def test_a_request_of_gds_is_one_batch(chunk_bytes: int, most_chunks: int, cut_bytes: int) -> None:
    backend = choose("GDS", use(chunk_bytes=chunk_bytes, most_chunks=most_chunks), "", SYSTEM_CLOCK)
    assert backend == GdsBackend(max_batches=1, batch_pieces=128, max_piece_bytes=cut_bytes)
    pieces = most_chunks * (-(-chunk_bytes // cut_bytes) + 1)
    assert pieces <= 128


@pytest.mark.usefixtures("all_works")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verify": Verify.OFF}, "needs `verify` to be always, not off; use GDS_MT"),
        ({"verify": Verify.IF_PRESENT}, "not if_present; use GDS_MT"),
        ({"shows_holes": False}, "does not show what was never written; use GDS_MT or POSIX"),
        ({"chunk_bytes": 200 << 30}, "cannot move chunks of 214748364800 bytes"),
    ],
)
def test_gds_is_refused_where_it_could_lose_bytes_unseen(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match="backend: 'GDS' ") as caught:
        choose("GDS", use(**changes), "", SYSTEM_CLOCK)
    assert words in str(caught.value)
    assert isinstance(choose("GDS_MT", use(**changes), "", SYSTEM_CLOCK), GdsMtBackend)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_machine_with_a_gpu_is_warned_that_auto_is_posix(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_gpu: bool
) -> None:
    monkeypatch.setattr(gds, "usability", lambda name: Usability(name, "it is broken", "mend it"))
    monkeypatch.setattr(glob, "glob", lambda _: ["/dev/nvidia0"] if has_gpu else [])
    with caplog.at_level(logging.INFO):
        said = choose("auto", use(), "", SYSTEM_CLOCK)
    assert said == "GDS_MT is not usable here: it is broken; mend it"
    warned = [record.getMessage() for record in caplog.records]
    expected = "the fs tier cannot use NIXL GDS_MT: it is broken; mend it"
    assert warned == ([expected] if has_gpu else [])
