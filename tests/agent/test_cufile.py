"""NIXL's GDS plugins, each over the cuFile for tests, and over NVIDIA's own where there is no GPU."""

from __future__ import annotations

import glob
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pdoffload.agent.needs import GPU_DEVICES
from pdoffload.testing.cufile import OPEN_ERROR

pytestmark = pytest.mark.nixl
NAMES = pytest.mark.parametrize("name", ["GDS_MT", "GDS"])


@pytest.mark.timeout(300)
@NAMES
def test_the_plugin_keeps_the_contract_and_fails_as_it_is_written_down(
    run_suite: Callable[[Path, str], None], name: str
) -> None:
    run_suite(Path(__file__).parent / "cufile_suite.py", name)


def answer(program: str, name: str, env: dict[str, str], cwd: Path) -> dict[str, str]:
    """What `program` prints, a JSON object."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), name],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # NVIDIA's library writes to standard output as well.
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


ASK = """
import json, sys
from pdoffload.agent.plugins import usability
found = usability(sys.argv[1])
print(json.dumps({"reason": found.reason, "remedy": found.remedy, "nixl": "nixl" in sys.modules}))
"""
PROBE = """
import json, sys
from pdoffload.agent.backends import backend_named
from pdoffload.agent.nixl import probe
print(json.dumps({"reason": probe(backend_named(sys.argv[1]))}))
"""


@NAMES
def test_it_is_usable_where_cufile_starts(
    cufile_env: dict[str, str], tmp_path: Path, name: str
) -> None:
    assert answer(ASK, name, cufile_env, tmp_path) == {"reason": "", "remedy": "", "nixl": False}


@NAMES
def test_a_cufile_that_does_not_start_is_told_before_nixl_is_loaded(
    cufile_env: dict[str, str], tmp_path: Path, name: str
) -> None:
    found = answer(ASK, name, {**cufile_env, OPEN_ERROR: "5007"}, tmp_path)
    assert found["reason"].startswith("it loads, and libcufile.so.0 refuses to start (error 5007)")
    assert "NVIDIA's driver" in found["remedy"]
    assert not found["nixl"]


@pytest.mark.skipif(bool(glob.glob(GPU_DEVICES)), reason="this machine has a GPU")
@NAMES
def test_nvidias_own_cufile_without_a_gpu_is_told_with_the_missing_device(
    real_cufile_env: dict[str, str], tmp_path: Path, name: str
) -> None:
    found = answer(ASK, name, real_cufile_env, tmp_path)
    assert "refuses to start (error 5033)" in found["reason"]
    assert "/dev/nvidia[0-9]* is not there" in found["reason"]
    assert not list(tmp_path.iterdir()), "cuFile's log is not left where the engine was started"
    said = answer(PROBE, name, real_cufile_env, tmp_path)["reason"]
    assert said.startswith(f"{name} cannot be used: {found['reason']}")
