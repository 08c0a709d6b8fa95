"""The order of the rooms, read from every import in the package.

A room may import what stands left of it, never what stands beside or right of it:

    foundation < policy memory agent < p2p < tiers < tiering < vllm bench doctor testing < demo < cli
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "pdoffload"

# The foundation is rooms of values and rules: each may import those before it.
FOUNDATION = (
    "errors",
    "clock",
    "layout",
    "config",
)
LEVELS: tuple[tuple[str, ...], ...] = (
    *((name,) for name in FOUNDATION),
    ("policy", "memory", "agent"),
    ("p2p",),
    ("tiers",),
    ("tiering",),
    ("vllm", "bench", "doctor", "testing"),
    ("demo",),
    ("cli",),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# Foreign packages that stop at one seam: where each may be imported.
SEAMS = {
    "mooncake": ("agent/mooncake_engine.py",),
    "nixl": ("agent/nixl.py",),
    "nixl_cu12": ("agent/nixl.py",),
    "nixl_cu13": ("agent/nixl.py",),
    "torch": ("memory/device.py", "vllm/"),
    "vllm": ("vllm/",),
    "zmq": ("p2p/", "testing/raw_peer.py"),
    # Benchmarks and the demo measure real processes, whose time no fake clock can move; servers are others.
    "time": ("clock.py", "bench/", "demo.py", "testing/server_site/"),
}

LONGEST_FILE_LINES = 400
LONGER_FOR_A_REASON = {
    "tiering/plan.py": "one state machine: what each event does to a block is read side by side",
}


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, at any depth, by statement or by literal name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def violations(path: str, source: str) -> list[str]:
    """What `source`, standing at `path` inside the package, imports and must not."""
    own_room = path.split("/")[0].removesuffix(".py")
    found = []
    for line, name in imports_of(source):
        top, _, rest = name.partition(".")
        reason = ""
        if name.startswith("."):
            reason = "relative import"
        elif top in SEAMS and not any(path.startswith(seam) for seam in SEAMS[top]):
            reason = f"{top} stops at {', '.join(SEAMS[top])}"
        elif top == PACKAGE:
            reason = _order_broken(own_room, rest.split(".")[0])
        if reason:
            found.append(f"{PACKAGE}/{path}:{line}: imports {name}: {reason}")
    return found


def _order_broken(own_room: str, room: str) -> str:
    if own_room == "__init__":
        return "importing the package must import none of its rooms" if room in LEVEL_OF else ""
    if room in (own_room, "", "__version__"):
        return ""
    if room not in LEVEL_OF or own_room not in LEVEL_OF:
        return "a room that has no place in the order yet: give it one here"
    if LEVEL_OF[room] < LEVEL_OF[own_room]:
        return ""
    return f"{room} does not stand below {own_room}"


def package_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def test_every_import_points_down() -> None:
    found = [
        line
        for file in package_files()
        for line in violations(file.relative_to(ROOT / PACKAGE).as_posix(), file.read_text())
    ]
    assert not found, "\n".join(found)


def test_no_file_grows_without_a_reason() -> None:
    lengths = {
        file.relative_to(ROOT / PACKAGE).as_posix(): len(file.read_text().splitlines())
        for file in package_files()
    }
    too_long = {
        path: lines
        for path, lines in lengths.items()
        if lines > LONGEST_FILE_LINES and not LONGER_FOR_A_REASON.get(path)
    }
    assert not too_long
    stale = [path for path in LONGER_FOR_A_REASON if lengths.get(path, 0) <= LONGEST_FILE_LINES]
    assert not stale, "listed as long, and not long any more"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("policy/lru.py", "from pdoffload.memory.pool import SlotPool"),
        ("policy/lru.py", "import pdoffload.tiers.base"),
        ("config/launch.py", "from pdoffload.policy.base import Policy"),
        ("errors.py", "from pdoffload.config import parse"),
        ("tiers/fs.py", "from pdoffload.tiering.index import Index"),
        ("testing/contract.py", "from pdoffload.vllm import spec"),
        ("vllm/spec.py", "from pdoffload.testing import FakeClock"),
        ("tiers/fs.py", "from pdoffload.cli import main"),
        ("tiers/fs.py", "from .base import Tier"),
        ("tiers/fs.py", "def late():\n    import torch"),
        ("tiers/fs.py", "import importlib\nimportlib.import_module('nixl._api')"),
        ("agent/agent.py", "from nixl._api import nixl_agent"),
        ("tiering/plan.py", "if TYPE_CHECKING:\n    from vllm.config import VllmConfig"),
        ("tiers/fs.py", "import time"),
        ("tiers/fs.py", "from time import monotonic"),
        ("attic/x.py", "from pdoffload.errors import PdOffloadError"),
        ("__init__.py", "from pdoffload.errors import PdOffloadError"),
    ],
)
def test_a_broken_order_is_seen(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "tiers/fs.py",
            "from pdoffload.agent.agent import Agent\nfrom pdoffload.tiers import base",
        ),
        ("config/__init__.py", "from pdoffload.config.options import OffloadConfig"),
        ("testing/contract.py", "from pdoffload.tiering.index import Index"),
        ("demo.py", "import time\nfrom pdoffload.testing.serving import VllmServer"),
        ("cli.py", "import pdoffload\nfrom pdoffload.demo import run"),
        ("memory/device.py", "import torch"),
        ("vllm/spec.py", "import torch, vllm\nfrom pdoffload.vllm import compat"),
        ("agent/nixl.py", "from nixl._api import nixl_agent"),
        ("clock.py", "import time"),
    ],
)
def test_what_the_order_allows_is_left_alone(path: str, source: str) -> None:
    assert not violations(path, source)
