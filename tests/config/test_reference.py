"""The committed reference is the one that the structs give."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdoffload.config.reference import TABLES, markdown

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


def test_no_cell_breaks_its_table() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("|")]
    assert len(rows) > 30
    assert all(row.count("|") == 5 for row in rows)
