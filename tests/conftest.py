"""What every test shares: markers that name a needed package, and the sources of a second vLLM."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path(__file__).parents[1] / ".cache"

# A marker, the module it stands for, and the way to get it.
NEEDED_MODULES = {
    "nixl": ("nixl", "pip install 'pdoffload[nixl]'"),
    "vllm": ("vllm", "make setup"),
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
def ucxx_python() -> Path:
    """The Python of the environment that holds UCX alone."""
    python = Path(__file__).parents[1] / ".venv-ucxx" / "bin" / "python"
    if not python.exists():
        _miss("ucxx is missing: make ucxx")
    return python
