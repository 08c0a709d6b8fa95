"""What a plugin needs, as data: complete, and what the plugins themselves say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pdoffload.agent.backends import KNOWN_BACKENDS
from pdoffload.agent.needs import NEEDS
from pdoffload.agent.plugins import usability

ROOT = Path(__file__).parents[2]
SEGMENTS = {
    "DRAM_SEG": "DRAM",
    "VRAM_SEG": "VRAM",
    "FILE_SEG": "files",
    "OBJ_SEG": "objects",
    "BLK_SEG": "block devices",
}


@pytest.fixture(scope="module")
def table_backends() -> ModuleType:
    path = ROOT / "scripts/table_backends.py"
    spec = importlib.util.spec_from_file_location("table_backends", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_plugin_has_its_needs_and_no_other() -> None:
    assert tuple(NEEDS) == KNOWN_BACKENDS


def test_the_page_shows_the_data_of_today(table_backends: ModuleType) -> None:
    page = (ROOT / "docs/backends.md").read_text()
    assert table_backends.redrawn(page) == page, "run scripts/table_backends.py"


def test_every_number_of_a_backend_has_a_range(table_backends: ModuleType) -> None:
    for struct in table_backends.STRUCTS:
        fields = set(struct.__struct_fields__)
        numbers = {name for name in fields if struct.__annotations__[name] == "int"}
        assert set(struct.ranges) == numbers, struct.name


def test_no_cell_of_the_page_breaks_its_table() -> None:
    page = (ROOT / "docs/backends.md").read_text().splitlines()
    width = 0
    for line in page:
        if line.startswith("|"):
            width = width or line.count("|")
            assert line.count("|") == width, line
        else:
            width = 0


@pytest.mark.nixl
def test_the_kinds_of_memory_are_those_that_the_plugins_name() -> None:
    import nixl._api as api

    agent = api.nixl_agent("kinds", api.nixl_agent_config(backends=[]))
    asked = 0
    for name in agent.get_plugin_list():
        if name in NEEDS and usability(name).usable:
            said = {SEGMENTS[kind] for kind in agent.get_plugin_mem_types(name)}
            needs = NEEDS[name]
            assert set(needs.memory) == said & {"DRAM", "VRAM"}, name
            far = said - {"DRAM", "VRAM"}
            assert all(kind in needs.far for kind in far) or name == "AZURE_BLOB", name
            asked += 1
    assert asked >= 2, "UCX and POSIX at least"
