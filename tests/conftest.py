"""What every test shares: markers that name a needed package, and the sources of a second vLLM."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from pdoffload.agent.needs import GPU_DEVICES
from pdoffload.testing import verbs
from pdoffload.testing.azurite_server import AzuriteServer, why_no_azurite
from pdoffload.testing.cufile import MARK, build, environment, library_folder
from pdoffload.testing.interpreter import Interpreter, of_environment
from pdoffload.testing.s3_server import S3Server

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"

# A marker, the module it stands for, and the way to get it.
NEEDED_MODULES = {
    "mooncake": ("mooncake", "pip install 'pdoffload[mooncake]'"),
    "nixl": ("nixl", "pip install 'pdoffload[nixl]'"),
    "vllm": ("vllm", "make setup"),
    "s3": ("moto", "pip install 'moto[server]' boto3 azure-storage-blob"),
}


def _miss(reason: str) -> NoReturn:
    """Skip a test that cannot run here; in CI, where everything has to be there, fail it."""
    if any(os.environ.get(name, "") not in ("", "0", "false") for name in ("CI", "PDOFFLOAD_CI")):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (module, remedy) in NEEDED_MODULES.items():
        if item.get_closest_marker(marker) and importlib.util.find_spec(module) is None:
            _miss(f"{module} is not installed: {remedy}")
    if item.get_closest_marker("gpu") and not glob.glob(GPU_DEVICES):
        pytest.skip(f"no GPU here ({GPU_DEVICES}); on a machine with one: scripts/gpu_check.sh")
    if item.get_closest_marker("mooncake"):
        verbs.provide()


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where things live that are made once and kept: models, sources. Ignored by git."""
    CACHE.mkdir(exist_ok=True)
    return CACHE


@pytest.fixture(scope="session")
def vllm_033_sources(cache_dir: Path) -> Path:
    """A folder that holds vLLM 0.33.0's package `vllm`, its .py files only."""
    folder = cache_dir / "vllm-0.33.0"
    if not (folder / "vllm" / "__init__.py").is_file():
        _miss("vLLM 0.33.0's sources are missing: python scripts/fetch_vllm_033.py")
    return folder


@pytest.fixture(scope="session")
def smollm2_dir(cache_dir: Path) -> Path:
    """The checkpoint of the demo's model."""
    folder = cache_dir / "models" / "smollm2-135m-instruct"
    if not (folder / "model.safetensors").is_file():
        _miss("the demo's model is missing: make model")
    return folder


def _wheel_folder(package: str, library: str) -> Path:
    """Where a wheel of NVIDIA's has `library`."""
    folder = library_folder(package, library)
    if folder is None:
        _miss(f"{package} is not installed: make setup")
    return folder


@pytest.fixture(scope="session")
def cufile_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which NIXL's GDS plugins run over the cuFile for tests."""
    cudart = _wheel_folder("nvidia-cuda-runtime-cu12", "libcudart.so.12")
    folder = tmp_path_factory.mktemp("cufile")
    build(Path(__file__).parent / "agent" / "cufile_for_tests.c", folder)
    return {**environment(folder, cudart), MARK: "1"}


@pytest.fixture(scope="session")
def real_cufile_env() -> dict[str, str]:
    """The environment of a process that has NVIDIA's own cuFile."""
    cudart = _wheel_folder("nvidia-cuda-runtime-cu12", "libcudart.so.12")
    return environment(_wheel_folder("nvidia-cufile-cu12", "libcufile.so.0"), cudart)


@pytest.fixture(scope="session")
def run_suite(cufile_env: dict[str, str]) -> Callable[[Path, str], None]:
    """Runs a file of tests for one backend in a process over the cuFile for tests: all must pass."""

    def run(suite: Path, backend: str) -> None:
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(suite)],
            env={**cufile_env, "PDOFFLOAD_TEST_BACKEND": backend},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "skipped" not in done.stdout.splitlines()[-1], said

    return run


@pytest.fixture(scope="session")
def fabric() -> Interpreter:
    """A Python whose NIXL has a LIBFABRIC that works: libfabric over TCP, on the loopback alone."""
    folder = ROOT / ".venv-fabric"
    if not (folder / ".stamp").is_file():
        _miss("there is no environment with NIXL's LIBFABRIC: make fabric")
    libraries = folder / "lib" / "fabric"
    return of_environment(
        folder / "bin" / "python",
        LD_LIBRARY_PATH=str(libraries),
        LD_PRELOAD=str(libraries / "loopback.so"),
        FI_PROVIDER="tcp",
        FI_TCP_IFACE="lo",
    )


@pytest.fixture(scope="session")
def ucxx_python() -> Path:
    """The Python of the environment that holds UCX alone."""
    python = ROOT / ".venv-ucxx" / "bin" / "python"
    if not python.exists():
        _miss("ucxx is missing: make ucxx")
    return python


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with a bucket `chunks`; who signs may do anything."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket("chunks")
        yield server


@pytest.fixture(scope="session")
def azurite_server(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path
) -> Iterator[AzuriteServer]:
    """Azurite with a container `chunks`."""
    if shutil.which("node") is None:
        pytest.skip(
            "no Node.js here, on which Azurite runs: install npm, then scripts/get_azurite.sh"
        )
    reason = why_no_azurite(cache_dir)
    if reason:
        _miss(reason)
    with AzuriteServer(tmp_path_factory.mktemp("azurite"), cache_dir) as server:
        server.create_container("chunks")
        yield server
