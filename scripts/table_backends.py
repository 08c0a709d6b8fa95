"""Write the tables of docs/backends.md from the data in `pdoffload.agent`.

Usage: table_backends.py [--check]
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdoffload.agent.backends import KNOWN_BACKENDS, Backend, PluginBackend
from pdoffload.agent.needs import NEEDS, Needs

PAGE = Path(__file__).parent.parent / "docs" / "backends.md"
STRUCTS = [each for each in typing.get_args(Backend) if each is not PluginBackend]


def plugins() -> Iterator[str]:
    """A row per plugin."""
    yield "| plugin | moves | needs | pdoffload uses it for | run here |"
    yield "|---|---|---|---|---|"
    for name in KNOWN_BACKENDS:
        needs = NEEDS[name]
        moves = f"{' or '.join(needs.memory)} ↔ {needs.far}"
        yield f"| {name} | {moves} | {_needs(needs)} | {needs.use} | {needs.tested} |"


def _needs(needs: Needs) -> str:
    parts = [needs.comes_with, *(f"`{library}`" for library in needs.libraries)]
    parts += [f"{'' if each.needed else 'looks for '}`{each.pattern}`" for each in needs.devices]
    if needs.start is not None:
        parts.append(f"`{needs.start.function}` answers 0")
    return "; ".join(parts)


def devices() -> Iterator[str]:
    """A row per device and the plugins that look for it."""
    yield "| device | plugins | without it |"
    yield "|---|---|---|"
    found: dict[tuple[str, str, bool], list[str]] = {}
    for name in KNOWN_BACKENDS:
        for each in NEEDS[name].devices:
            found.setdefault((each.pattern, each.without, each.needed), []).append(name)
    for (pattern, without, needed), names in found.items():
        outcome = f"{without}; not usable" if needed else without
        yield f"| `{pattern}` | {', '.join(names)} | {outcome} |"


def parameters() -> Iterator[str]:
    """A row per parameter."""
    yield "| plugin | parameter | default | allowed |"
    yield "|---|---|---|---|"
    for struct in STRUCTS:
        hints = typing.get_type_hints(struct)
        for field in msgspec.structs.fields(struct):
            default = "required" if field.required else _shown(field.default)
            allowed = _allowed(hints[field.name], struct.ranges.get(field.name))
            yield f"| {struct.name} | `{field.name}` | {default} | {allowed} |"


def _shown(value: object) -> str:
    return "empty" if value == "" else f"{value}"


def _allowed(hint: typing.Any, limits: tuple[int, int] | None) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(typing.get_args(hint))
    if hint is int:
        assert limits is not None, "a number without a range"
        return f"a whole number, {limits[0]} to {limits[1]}"
    if isinstance(hint, types.UnionType):
        return " or ".join(getattr(each, "__name__", str(each)) for each in typing.get_args(hint))
    return {"str": "a string", "bool": "true or false", "float": "a number"}[hint.__name__]


TABLES = {"plugins": plugins, "devices": devices, "parameters": parameters}


def redrawn(page: str) -> str:
    """`page` with each table as the data gives it now."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        text = begin + "\n".join(rows()) + "\n" + end
        page, count = pattern.subn(lambda _, text=text: text, page)
        assert count == 1, f"{name}: {count} places in the page"
    return page


if __name__ == "__main__":
    before = PAGE.read_text()
    after = redrawn(before)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if before == after else "docs/backends.md is not up to date")
    PAGE.write_text(after)
