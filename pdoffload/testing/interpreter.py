"""Which Python a child process of a test runs in: this one, or that of another environment.

NIXL's plugins do not all fit one installation. A test that needs another one starts its children in it; they
run the same source tree, which comes by `PYTHONPATH`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

import pdoffload

_TREE = str(Path(pdoffload.__file__).parents[1])


class Interpreter(msgspec.Struct, frozen=True):
    """A Python, and variables that every process of it needs besides this process's own."""

    python: str
    environment: Mapping[str, str]

    def environ(self, **more: str) -> dict[str, str]:
        """The whole environment of a child, `more` included."""
        return {**os.environ, **self.environment, **more}


def this_one(**environment: str) -> Interpreter:
    """The one that runs the test, with all it can import."""
    return Interpreter(sys.executable, {"PYTHONPATH": os.pathsep.join(sys.path), **environment})


def of_environment(python: Path, **environment: str) -> Interpreter:
    """Of a virtual environment that holds what pdoffload needs, but not pdoffload."""
    return Interpreter(str(python), {"PYTHONPATH": _TREE, **environment})
