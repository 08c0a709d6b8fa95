"""What every test shares: markers that name a needed package, and the sources of a second vLLM."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from pdoffload.testing.azurite_server import AzuriteServer, why_no_azurite
from pdoffload.testing.s3_server import S3Server

CACHE = Path(__file__).parents[1] / ".cache"

# A marker, the module it stands for, and the way to get it.
NEEDED_MODULES = {
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
    reason = why_no_azurite(cache_dir)
    if reason:
        _miss(reason)
    with AzuriteServer(tmp_path_factory.mktemp("azurite"), cache_dir) as server:
        server.create_container("chunks")
        yield server
