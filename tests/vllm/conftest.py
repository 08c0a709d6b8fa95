"""Tiny models, and servers of them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from offloading import ask
from peering import PROMPTS, STEPS

from pdoffload.testing.serving import ServeOptions, VllmServer

Serve = Callable[..., VllmServer]


def _tiny_model(cache_dir: Path, kind: str) -> Path:
    """The tiny model of this `kind`; made anew when the program that makes it has changed."""
    program = Path(__file__).with_name("models.py")
    version = hashlib.sha256(program.read_bytes()).hexdigest()[:8]
    folder = cache_dir / "models" / f"tiny-{kind}-{version}"
    if not folder.is_dir():
        subprocess.run([sys.executable, str(program), kind, str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(cache_dir: Path) -> Path:
    """A checkpoint of random weights with one KV-cache group."""
    return _tiny_model(cache_dir, "llama")


@pytest.fixture(scope="session")
def tiny_hybrid(cache_dir: Path) -> Path:
    """A checkpoint of random weights with sliding and full layers: several KV-cache groups."""
    return _tiny_model(cache_dir, "hybrid")


@pytest.fixture(scope="session")
def right(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """The tokens that a single vLLM, without any connector, gives for each prompt of `peering`."""
    options = ServeOptions(model_dir=tiny_llama, dtype="float32", extra_args=STEPS)
    with VllmServer(options, tmp_path_factory.mktemp("single")) as single:
        answers = {name: ask(single, tokens)[0].token_ids for name, tokens in PROMPTS.items()}
    assert len(set(answers.values())) == len(PROMPTS), "the model answers everything alike"
    return answers


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server; it is stopped when the test ends.

    `serve(model_dir, kv_transfer_config, name=..., **options)` with the fields of `ServeOptions`.
    Weights are served as float32, where two ways to cut a prompt into steps give the same tokens.
    """
    with ExitStack() as servers:

        def start(
            model_dir: Path,
            kv_transfer_config: dict[str, Any] | None = None,
            *,
            name: str = "server",
            **options: Any,
        ) -> VllmServer:
            wanted = ServeOptions(
                model_dir=model_dir,
                kv_transfer_config=kv_transfer_config,
                **{"dtype": "float32", **options},
            )
            return servers.enter_context(VllmServer(wanted, tmp_path, name=name))

        yield start
