"""Every benchmark runs at tiny sizes and writes a report that can be read back.

Nothing is said about how fast anything is: a test that measures time fails on a busy machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pdoffload.config

ROOT = Path(__file__).parents[1]

# Importing vLLM alone takes a minute where others have the processor.
pytestmark = pytest.mark.timeout(300)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def common() -> ModuleType:
    return _load("common")


def _smoke(
    name: str, tmp_path: Path, *arguments: str, only: str = "", timeout_s: float = 280
) -> dict[str, Any]:
    """Run `benchmarks/NAME.py --smoke` in a process of its own; the report it wrote.

    `only` is a part of it; `arguments` are options whose values are paths.
    """
    report = tmp_path / "report.json"
    words = [
        sys.executable,
        str(ROOT / "benchmarks" / f"{name}.py"),
        "--smoke",
        "--json",
        str(report),
        *(["--only", only] if only else []),
    ]
    done = subprocess.run(
        [*words, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(report.read_bytes())
    assert found["benchmark"] == name
    command = f"python benchmarks/{name}.py --smoke" + (f" --only {only}" if only else "")
    assert found["command"] == command, "a path of this machine got in"
    assert found["rows"]
    for row in found["rows"]:
        for figure, spread in row["figures"].items():
            assert spread["minimum"] <= spread["median"] <= spread["maximum"], figure
        for budget in row["budgets"]:
            assert budget["figure"] in row["figures"]
    return found


@pytest.mark.nixl
@pytest.mark.vllm
def test_device_copy_smoke(tmp_path: Path) -> None:
    rows = _smoke("device_copy", tmp_path)["rows"]
    assert {(row["case"]["direction"], row["case"]["order"]) for row in rows} == {
        (direction, order) for direction in ("store", "load") for order in ("random", "contiguous")
    }


@pytest.mark.nixl
@pytest.mark.vllm
def test_fs_tier_smoke(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    rows = _smoke("fs_tier", tmp_path, "--dir", str(disk))["rows"]
    assert [row["case"]["direction"] for row in rows] == ["store", "load"]
    assert not list(disk.iterdir()), "chunk files were left behind"


@pytest.mark.nixl
def test_eviction_smoke(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    rows = _smoke("eviction", tmp_path, "--dir", str(disk))["rows"]
    each = ["start", "before", "during"]
    assert [row["case"]["what"] for row in rows] == [*each, *each, "shared lock"]
    assert not list(disk.iterdir()), "files were left behind"


@pytest.mark.nixl
@pytest.mark.vllm
def test_direct_smoke(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    rows = _smoke("direct", tmp_path, "--dir", str(disk))["rows"]
    assert [row["case"]["direction"] for row in rows] == ["store", "load"]
    assert not list(disk.iterdir()), "chunk files were left behind"


@pytest.mark.nixl
@pytest.mark.vllm
def test_scheduler_smoke(tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    before = {entry.name for entry in shared_memory.iterdir()}
    rows = _smoke("scheduler", tmp_path)["rows"]
    assert {row["case"]["what"].partition(" of a ")[0] for row in rows} == {
        "step",
        "memory per chunk",
        "start",
    }
    left = {entry.name for entry in shared_memory.iterdir()} - before
    assert not {name for name in left if "bench" in name or "scheduler" in name}


@pytest.mark.nixl
@pytest.mark.vllm
def test_peers_smoke(tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    before = {entry.name for entry in shared_memory.iterdir()}
    rows = _smoke("peers", tmp_path)["rows"]
    kinds = ["pull"] * 2 + ["lookup"] * 5 + ["idle", "4 pulls", "start"]
    for row, kind in zip(rows, kinds, strict=True):
        assert row["case"]["what"].startswith(kind)
    left = {entry.name for entry in shared_memory.iterdir()} - before
    assert not {name for name in left if "peer-" in name}


@pytest.mark.nixl
@pytest.mark.usefixtures("ucxx_python")
def test_raw_ucx_smoke(tmp_path: Path) -> None:
    """The same bytes by NIXL and by UCX alone, over the transport UCX picks and over TCP."""
    found = _smoke("raw_ucx", tmp_path)
    asked = [row["case"]["UCX_TLS"] for row in found["rows"]]
    assert asked == ["UCX's choice", "tcp"]
    for row in found["rows"]:
        assert {"nixl_over_ucx_put", "nixl_over_ucx_tag"} <= row["figures"].keys()
        assert row["case"]["transports"] not in ("", "unknown"), "UCX did not say how it writes"
    assert all(
        name.startswith("tcp/") for name in found["rows"][1]["case"]["transports"].split("+")
    )


@pytest.mark.nixl
@pytest.mark.vllm
def test_backends_fs_smoke(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    rows = _smoke("backends", tmp_path, "--dir", str(disk), only="fs")["rows"]
    who = {(row["case"]["direction"], row["case"]["who"]) for row in rows}
    for direction in ("store", "load"):
        assert {(direction, each) for each in ("POSIX uring", "POSIX aio", "vLLM")} <= who
    assert not list(disk.iterdir()), "chunk files were left behind"


@pytest.mark.nixl
@pytest.mark.usefixtures("ucxx_python")
def test_backends_peers_smoke(tmp_path: Path) -> None:
    """Every backend that is there, and the yardsticks; what is not there is named."""
    found = _smoke("backends", tmp_path, only="peers")
    transport_of = {row["case"]["who"]: row["case"]["transport"] for row in found["rows"]}
    assert {"UCX", "UCX tcp", "bare NIXL", "bare NIXL tcp", "UCX alone", "UCX alone tcp"} <= set(
        transport_of
    )
    assert not {"", "unknown"} & set(transport_of.values()), transport_of
    for name in ("LIBFABRIC tcp", "MOONCAKE tcp"):
        named = any(remark.startswith(f"{name}: ") for remark in found["remarks"])
        assert named != (name in transport_of)


@pytest.mark.nixl
@pytest.mark.vllm
@pytest.mark.s3
def test_backends_obj_smoke(tmp_path: Path) -> None:
    pytest.importorskip("pdoffload.tiers.obj", reason="this version has no obj tier")
    pytest.importorskip("moto")
    rows = _smoke("backends", tmp_path, only="obj")["rows"]
    assert {(row["case"]["who"], row["case"]["in_flight"]) for row in rows} == {
        (who, count) for who in ("ours", "vLLM") for count in (1, 2)
    }


@pytest.mark.nixl
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_backends_direct_smoke(tmp_path: Path, smollm2_dir: Path) -> None:
    if "NixlDirectOffloadingSpec" not in pdoffload.config.SPECS:
        pytest.skip("this version has no NixlDirectOffloadingSpec")
    words = ("--model", str(smollm2_dir))
    rows = _smoke("backends", tmp_path, *words, only="direct", timeout_s=580)["rows"]
    assert [row["case"]["what"] for row in rows] == ["cold, stored", "disk hit"]


@pytest.mark.usefixtures("ucxx_python")
@pytest.mark.parametrize("dies", [0, 1], ids=["receiver", "writer"])
def test_a_ucx_process_that_dies_is_told_and_none_is_left(dies: int) -> None:
    from raw_ucx import RawUcx
    from ucx_child import Operation

    with RawUcx(Operation.PUT, chunk_bytes=4096, num_chunks=2, environment={}) as raw:
        processes = [child.process for child in raw.children]
        processes[dies].kill()
        with pytest.raises(AssertionError, match="ended with -9"):
            raw.write()
    assert None not in [process.returncode for process in processes]


@pytest.mark.nixl
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ttft_smoke(tmp_path: Path, smollm2_dir: Path) -> None:
    found = _smoke("ttft", tmp_path, "--model", str(smollm2_dir), timeout_s=580)
    assert [row["case"]["what"] for row in found["rows"]] == [
        "host hit",
        "disk hit",
        "cold TTFT",
        "batch",
    ]


def test_contenders_take_turns_and_change_places(common: ModuleType) -> None:
    order: list[str] = []

    def contender(name: str) -> Any:
        def work() -> Any:
            order.append(name)
            return common.Cost(float(len(order)), 0.0)

        return work

    costs = common.alternate({"a": contender("a"), "b": contender("b")}, 3, warm_up=1)
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"
    assert [cost.wall_s for cost in costs["a"]] == [3.0, 6.0, 7.0], "the warm-up must not count"
    assert [cost.wall_s for cost in costs["b"]] == [4.0, 5.0, 8.0]


def test_a_budget_inside_the_middle_half_is_unclear(common: ModuleType) -> None:
    spread = common.Spread.of([0.8, 0.9, 1.0, 1.1, 1.2])
    judge = {
        limit: common.Budget("f", limit, True).judge(spread).name for limit in (0.85, 1.0, 1.15)
    }
    assert judge == {0.85: "KEPT", 1.0: "UNCLEAR", 1.15: "MISSED"}
    assert common.Budget("f", 1.15, False).judge(spread).name == "KEPT"


def test_ratios_are_taken_within_each_round(common: ModuleType) -> None:
    """A machine that is twice as slow in one round changes no ratio."""
    assert common.ratios([2.0, 4.0], [1.0, 2.0]) == [2.0, 2.0]
    with pytest.raises(ValueError):
        common.ratios([1.0], [1.0, 2.0])


def test_results_in_the_repository_say_what_they_are(common: ModuleType) -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    for path in results:
        report = json.loads(path.read_bytes())
        assert report["schema_version"] == common.SCHEMA_VERSION
        assert report["benchmark"] == path.stem
        assert "--smoke" not in report["command"]
