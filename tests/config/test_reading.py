"""Reading a table of settings, and putting values into words."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from pdoffload.config.reading import Unit, about, keys_of, name_text, read, shown, size_text, text


class Oven(msgspec.Struct, frozen=True, kw_only=True):
    shelves: Annotated[int, Meta(ge=1, le=4), about("How many shelves.")]
    door_open: Annotated[bool, about("Whether heat escapes.", own=True)] = False
    size_bytes: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 20)] | None, about("Of the firmware.", unit=Unit.BYTES)
    ] = None


def test_a_key_says_what_its_field_says() -> None:
    shelves, door, size = keys_of(Oven)
    assert (shelves.name, shelves.required, shelves.meaning) == (
        "shelves",
        True,
        "How many shelves.",
    )
    assert shelves.allowed == "a whole number, 1 to 4"
    assert (door.default, door.own, door.allowed) == (False, True, "true or false")
    assert size.allowed == "a whole number, 0 to 1048576 (1 MiB), or null"


def test_right_values_are_read_beside_wrong_ones() -> None:
    problems: list[str] = []
    values = read(Oven, {"door_open": True, "size_bytes": -1, "shelfs": 2}, "oven.", problems)
    assert values == {"door_open": True}
    assert problems == [
        "oven.size_bytes: got -1; allowed: a whole number, 0 to 1048576 (1 MiB), or null",
        "oven.shelfs: unknown key; nearest: shelves",
        "oven.shelves: required and missing; allowed: a whole number, 1 to 4",
    ]


def test_a_key_that_is_no_string_is_unknown_and_no_crash() -> None:
    problems: list[str] = []
    table: dict[Any, Any] = {"shelves": 1, 3: 4, None: 5}
    assert read(Oven, table, "", problems) == {"shelves": 1}
    assert [line.split(":")[0] for line in problems] == ["3", "null"]


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [
        (0, "0"),
        (1023, "1023"),
        (1024, "1024 (1 KiB)"),
        (1536, "1536 (1.5 KiB)"),
        (10 * 2**30, "10737418240 (10 GiB)"),
        (10**9, "1000000000 (about 953.67 MiB)"),
        (2**60, "1152921504606846976 (1 EiB)"),
    ],
)
def test_sizes_keep_their_digits(size_bytes: int, said: str) -> None:
    assert size_text(size_bytes) == said


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (None, Unit.PLAIN, "none"),
        (True, Unit.PLAIN, "true"),
        (0.1, Unit.PLAIN, "0.1"),
        (0o640, Unit.MODE, "0640"),
        ("naïve", Unit.PLAIN, "naïve"),
        ("two\nlines", Unit.PLAIN, '"two\\nlines"'),
    ],
)
def test_values_in_words(value: object, unit: Unit, said: str) -> None:
    assert text(value, unit) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("é\n", '"é\\n"'),
        ("é", '"é"'),
        ("\ud800", '"\\ud800"'),
        ("\x9b2J", '"\\u009b2J"'),
        (float("nan"), "NaN"),
        (object(), "a value of type object"),
        ([10**5000], "a value of type list"),
    ],
)
def test_a_wrong_value_is_shown_on_one_line(value: object, said: str) -> None:
    assert shown(value) == said


def test_a_long_value_is_cut() -> None:
    assert len(shown("x" * 10_000)) == 80
    assert len(name_text("x" * 10_000)) == 80
