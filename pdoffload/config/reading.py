"""Tables of settings: from a parsed JSON object to typed values, and its reference.

The struct is the one place where a key is written down: its type and bounds, its default, and in
`about(...)` its meaning. What is read, what an error allows and what the documentation says all
come from there. This file knows no key by name; `pdoffload.config` holds the keys.
"""

from __future__ import annotations

import difflib
import enum
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import inspect

_LONGEST_VALUE = 80
_OCTAL = re.compile(r"(0o?)?[0-7]{3}")


class Unit(enum.Enum):
    """What a number means, where its plain digits are not how people read it."""

    PLAIN = "plain"
    BYTES = "bytes"
    MODE = "mode"
    """Permission bits of a file: shown and written in octal, as chmod takes them."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a table, as its struct declares it."""

    name: str
    annotation: Any
    required: bool
    default: Any
    meaning: str
    allowed: str
    unit: Unit
    own: bool
    """Added by pdoffload; the others mean what they mean in vLLM."""
    secret: bool
    """Its value is never shown."""


def about(
    meaning: str,
    *,
    unit: Unit = Unit.PLAIN,
    allowed: str = "",
    own: bool = False,
    secret: bool = False,
) -> msgspec.Meta:
    """The annotation of a field: its meaning, and `allowed` where the type does not say it all."""
    extra = {"unit": unit, "allowed": allowed, "own": own, "secret": secret}
    return msgspec.Meta(description=meaning, extra=extra)


@functools.cache
def keys_of(table: type[msgspec.Struct]) -> tuple[Key, ...]:
    """The keys of `table` in the order of its fields. Every field carries an `about(...)`."""
    described = inspect.type_info(table)
    assert isinstance(described, inspect.StructType)
    pairs = zip(described.fields, msgspec.structs.fields(table), strict=True)
    return tuple(_key(field, plain.type) for field, plain in pairs)


def _key(field: inspect.Field, annotation: Any) -> Key:
    described = field.type
    assert isinstance(described, inspect.Metadata), f"{field.name} carries no about(...)"
    extra, schema = described.extra or {}, described.extra_json_schema or {}
    return Key(
        name=field.name,
        annotation=annotation,
        required=field.required,
        default=_default(field),
        meaning=schema["description"],
        allowed=extra["allowed"] or _allowed(described.type, extra["unit"]),
        unit=extra["unit"],
        own=extra["own"],
        secret=extra["secret"],
    )


def _default(field: inspect.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.required else field.default


def _allowed(kind: inspect.Type, unit: Unit) -> str:
    """What a value of type `kind` may be, in words."""
    match kind:
        case inspect.UnionType(types=types):
            words = [_allowed(one, unit) for one in types if not isinstance(one, inspect.NoneType)]
            return ", or ".join((*words, "null"))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=low, le=high):
            return f"a whole number, {text(low, unit)} to {text(high, unit)}"
        case inspect.FloatType(ge=low, le=high):
            return f"a number, {text(low, unit)} to {text(high, unit)}"
        case inspect.StrType(min_length=shortest, max_length=longest):
            bound = f" of at most {longest} characters" if longest else ""
            return f"a {'non-empty ' if shortest else ''}string{bound}"
        case inspect.LiteralType(values=values):
            return ", ".join(map(str, values))
        case inspect.EnumType(cls=members):
            return ", ".join(str(member.value) for member in members)
    raise AssertionError(f"a setting of type {kind} has no wording")


def read(
    table: type[msgspec.Struct], given: Mapping[str, Any], where: str, problems: list[str]
) -> dict[str, Any]:
    """Typed values of the keys in `given` that are right; each other is a line in `problems`.

    `where` stands before each key in a problem ("secondary_tiers[0]."). Keys that are not given are
    not in the answer. Numbers are not read out of strings, nor booleans out of anything; a number
    without a fraction counts as whole, because vLLM's own --kv-offloading-size arrives as a float.
    """
    keys = {key.name: key for key in keys_of(table)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        key = keys.get(name)
        if key is None:
            problems.append(f"{where}{name_text(name)}: unknown key; {suggestion(str(name), keys)}")
            continue
        try:
            values[name] = msgspec.convert(_normal(value, key.unit), key.annotation)
        except (msgspec.ValidationError, UnicodeEncodeError):
            got = hidden(value) if key.secret else shown(value)
            problems.append(f"{where}{name}: got {got}; allowed: {key.allowed}")
    problems.extend(
        f"{where}{key.name}: required and missing; allowed: {key.allowed}"
        for key in keys.values()
        if key.required and key.name not in given
    )
    return values


def _normal(value: Any, unit: Unit) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if unit is Unit.MODE and isinstance(value, str) and _OCTAL.fullmatch(value):
        return int(value, 8)
    if isinstance(value, str):
        value.encode()  # JSON can spell half a surrogate pair; no path and no log takes it
    return value


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to say to someone who wrote `name` where one of `known` was wanted."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if near:
        return f"nearest: {by_lower[near[0]]}"
    return f"known: {', '.join(by_lower.values())}"


def shown(value: Any) -> str:
    """`value` as its JSON on one line, cut where it is long; of what has no JSON, the type."""
    try:
        written = json.dumps(value, ensure_ascii=False)
        if not written.isprintable():
            written = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        written = f"a value of type {type(value).__name__}"
    return written if len(written) <= _LONGEST_VALUE else f"{written[: _LONGEST_VALUE - 3]}..."


def hidden(value: Any) -> str:
    """What is said of a secret in place of its value."""
    return f"a value of type {type(value).__name__}, not shown"


def name_text(name: Any) -> str:
    """The name of a key that somebody else chose, fit for one line of a problem."""
    plain = isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_VALUE
    return name if plain else shown(name)


def text(value: Any, unit: Unit = Unit.PLAIN) -> str:
    """A value of a setting as people read it: `10737418240 (10 GiB)`, `0640`, `true`, `none`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if unit is Unit.MODE:
        return f"0{value:03o}"
    if unit is Unit.BYTES:
        return size_text(value)
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) and value.isprintable() else shown(value)


def size_text(size_bytes: int) -> str:
    """`size_bytes` in digits, with a round name beside it from 1 KiB on."""
    for power, name in (
        (60, "EiB"),
        (50, "PiB"),
        (40, "TiB"),
        (30, "GiB"),
        (20, "MiB"),
        (10, "KiB"),
    ):
        if size_bytes >= 1 << power:
            scaled = size_bytes / (1 << power)
            near = f"{scaled:g}" if scaled == round(scaled, 2) else f"about {scaled:.2f}"
            return f"{size_bytes} ({near} {name})"
    return str(size_bytes)
