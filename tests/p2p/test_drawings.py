"""The drawings in docs/peers.md are those that the tables give now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pdoffload.errors import MisuseError
from pdoffload.p2p.messages import AbortFetch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def draw_peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_peers", ROOT / "scripts/draw_peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_tables_of_today(draw_peers: ModuleType) -> None:
    page = (ROOT / "docs/peers.md").read_text()
    assert draw_peers.redrawn(page) == page, "run scripts/draw_peers.py"


def test_a_story_that_the_tables_do_not_have_cannot_be_drawn(draw_peers: ModuleType) -> None:
    with pytest.raises(MisuseError, match="AbortFetch may not be sent"):
        list(draw_peers.sequence([("C", AbortFetch("id", 0))]))
