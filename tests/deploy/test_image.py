"""The image that compose file and chart run, and what holds for every file that deploys it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import pdoffload

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
CHART = DEPLOY / "helm" / "pdoffload"
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix]


def instructions() -> list[str]:
    """One per line: comments gone, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run(
        [str(program), "--no-color", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_hadolint_finds_nothing() -> None:
    done = hadolint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_finds_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM vllm/vllm-openai\nRUN pip install nixl\n")
    assert "DL3006" in hadolint(wrong).stdout


def test_every_copied_path_exists() -> None:
    copied = [
        source
        for line in instructions()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    assert copied
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {project["project"]["readme"], "LICENSE", "pdoffload"} <= set(copied)
    assert "nixl" in project["project"]["optional-dependencies"]


def test_the_base_is_a_version_of_vllm_that_is_supported() -> None:
    (base,) = re.findall(r"^ARG VLLM_VERSION=v(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (vllm,) = project["optional-dependencies"]["vllm"]
    low, high = re.findall(r"\d+\.\d+", vllm)
    assert low <= base < high
    assert f"VLLM_VERSION:-v{base}" in (DEPLOY / "compose" / "compose.yaml").read_text()


def test_every_file_names_the_version_of_this_package() -> None:
    version = pdoffload.__version__
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == values["image"]["tag"] == version
    for path in (DOCKERFILE, DEPLOY / "compose" / "compose.yaml"):
        assert set(re.findall(r"pdoffload-vllm:(\S+)", path.read_text())) == {version}


@pytest.mark.parametrize("path", [DOCKERFILE, *FILES], ids=lambda path: path.name)
def test_every_file_says_at_its_top_that_it_has_not_been_run(path: Path) -> None:
    head = "\n".join(path.read_text().splitlines()[:12])
    assert re.search(r"NOT RUN|not been run", head)
