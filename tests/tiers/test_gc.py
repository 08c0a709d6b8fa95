from __future__ import annotations

import json

import pytest

from pdoffload.errors import ConfigError
from pdoffload.tiers.fs.gc import FsCollector
from pdoffload.tiers.gc import (
    Amount,
    GcReport,
    NamespaceReport,
    collectors,
    parse_age,
    parse_size,
    rows,
    short_size,
    to_json,
)

FS = {"type": "fs", "root_dir": "/cache/one"}
P2P = {"type": "p2p", "host": "127.0.0.1"}
OBJ = {"type": "obj", "prefix": "kv", "store_config": {"bucket": "chunks"}}


def config(*tiers: object) -> str:
    return json.dumps(
        {
            "spec_name": "NixlTieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": list(tiers),
        }
    )


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("200GB", 200 * 10**9),
        ("200 gb", 200 * 10**9),
        ("1.5TiB", 3 << 39),
        ("4k", 4000),
        ("4KiB", 4096),
        ("7b", 7),
    ],
)
def test_sizes(written: str, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize("written", ["", "GB", "-1", "1e9", "10 apples", "1ib", "nan", "2000 EB"])
def test_c12_what_is_no_size_is_named_with_what_is_allowed(written: str) -> None:
    with pytest.raises(ConfigError, match="--max-bytes") as caught:
        parse_size(written)
    assert repr(written) in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("written", "age_s"),
    [("7d", 604_800), ("12h", 43_200), ("1.5m", 90), ("9 s", 9), ("2W", 1209600)],
)
def test_ages(written: str, age_s: float) -> None:
    assert parse_age(written) == age_s


@pytest.mark.parametrize("written", ["", "7", "d", "-7d", "7 days", "inf d"])
def test_c12_what_is_no_age_is_named_with_what_is_allowed(written: str) -> None:
    with pytest.raises(ConfigError, match="--older-than"):
        parse_age(written)


def test_a_directory_or_a_configuration_and_not_both() -> None:
    for given in ((None, None), ("/a", config(FS))):
        with pytest.raises(ConfigError, match="one of the two"):
            collectors(*given)
    assert [repr(each) for each in collectors("/a/../b", None)] == [repr(FsCollector("/b"))]


def test_every_tier_that_stores_is_collected() -> None:
    found = collectors(None, config(FS, {**FS, "root_dir": "/cache/two"}, P2P, OBJ))
    assert [repr(each) for each in found] == [
        "<FsCollector /cache/one>",
        "<FsCollector /cache/two>",
        "<ObjCollector chunks/kv>",
    ]
    with pytest.raises(ConfigError, match="none of them"):
        collectors(None, config(P2P))
    with pytest.raises(ConfigError, match="root_dir"):
        collectors(None, config({"type": "fs"}))


def report(**changes: object) -> GcReport:
    each = NamespaceReport(
        name="m_0123456789ab_r0",
        chunks=Amount(files=3, size_bytes=3 << 20),
        oldest_use_s=0.0,
        newest_use_s=900_000.0,
        unverified=Amount(),
        wrong_size=Amount(files=1, size_bytes=5),
        unfinished=Amount(),
        being_written=Amount(),
        to_go={"wrong_size": Amount(files=1, size_bytes=5), "max_bytes": Amount(files=1)},
        removed=Amount(files=1, size_bytes=5),
        kept_in_use=1,
    )
    return GcReport(
        **{
            "store": "fs",
            "root": "/r",
            "deleted": False,
            "namespaces": [each],
            "skipped": [],
            "problems": [],
            **changes,
        }
    )


def test_the_table_says_what_and_how_much() -> None:
    columns, (line, total) = rows(report(), now_s=1_000_000.0)
    assert dict(zip(columns, line, strict=True)) == {
        "namespace": "m_0123456789ab_r0",
        "files": "3",
        "size": "3 MiB",
        "last used": "28h ago to 12d ago",
        "unfinished": "0",
        "wrong size": "1 (5 B)",
        "to go": "2 (5 B)",
        "why": "wrong_size 1, max_bytes 1, kept, in use 1",
    }
    assert total[:3] == ("all", "3", "3 MiB")
    columns, (line, _) = rows(report(deleted=True), now_s=1_000_000.0)
    assert dict(zip(columns, line, strict=True))["removed"] == "1 (5 B)"


def test_json_is_a_list_of_reports() -> None:
    (read,) = json.loads(to_json([report()]))
    assert read["schema_version"] == 1
    assert read["namespaces"][0]["to_go"]["wrong_size"] == {"files": 1, "size_bytes": 5}


def test_sizes_are_short() -> None:
    assert [short_size(size) for size in (0, 999, 1000, 1 << 20, 3 << 39)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "1 MiB",
        "1.5 TiB",
    ]
