"""The committed reference is the one that the structs give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from pdoffload.config.launch import check_text
from pdoffload.config.reference import TABLES, markdown
from pdoffload.p2p.roles import Roles, roles_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), (
        "run: pdoffload config keys --markdown > docs/configuration.md"
    )


@pytest.mark.parametrize("table", [table for _, table in TABLES])
def test_every_key_stands_in_the_page(table: type[msgspec.Struct]) -> None:
    page = markdown()
    for key in table.__struct_fields__:
        assert f"`{'...' if key == 'options' else key}` |" in page


def test_the_examples_are_right() -> None:
    """A JSON block is one configuration, or the params of one request per line."""
    blocks = re.findall(r"```json\n(.*?)```", markdown(), re.DOTALL)
    requests = [block for block in blocks if block.startswith('{"remote_')]
    configurations = [block for block in blocks if block not in requests]
    assert len(requests) > 1
    assert len(configurations) > 1
    for line in "".join(requests).splitlines():
        assert isinstance(roles_of(json.loads(line)), Roles)
    for block in configurations:
        assert check_text(block).warnings == ()


def test_no_cell_breaks_its_table() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("|")]
    assert len(rows) > 30
    assert all(row.count("|") == 5 for row in rows)
