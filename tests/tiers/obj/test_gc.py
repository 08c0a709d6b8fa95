"""Emptying a bucket: dry by default, oldest first, and nothing but chunks of its own prefix."""

from __future__ import annotations

import datetime
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.errors import ConfigError
from pdoffload.testing.azurite_server import AzuriteServer
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.obj_rig import fake_config, open_obj
from pdoffload.testing.s3_server import S3Server
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.gc import Amount, GcPolicy, GcReport
from pdoffload.tiers.obj.gc import ObjCollector

HASH = "0123456789abcdef"
SPACE = "org_model_0123456789ab"
NOW_S = 1_800_000_000.0
CLOCK = FakeClock(wall_s=NOW_S)


def chunk(number: int, space: str = SPACE, prefix: str = "kv/") -> str:
    digits = f"{number:03x}{HASH}"
    return f"{prefix}{space}_r0/{digits[:3]}/{digits[3:5]}_g0/{digits}.bin"


class Listed:
    """A store that is a list: chunk `n` is `n` hours old and has 10 bytes."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.refuses: set[str] = set()
        self.asked: list[str] = []

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime.datetime]]:
        self.asked.append(prefix)
        for number, name in enumerate(self.names):
            if name.startswith(prefix):
                changed = datetime.datetime.fromtimestamp(NOW_S - 3600 * number, datetime.UTC)
                yield name, 10, changed

    def delete(self, names: Sequence[str]) -> dict[str, str]:
        self.names = [name for name in self.names if name not in names or name in self.refuses]
        return {name: "AccessDenied" for name in names if name in self.refuses}


def collect(store: Listed, *, delete: bool = False, **bounds: Any) -> GcReport:
    collector = ObjCollector(fake_config("kv"), store)
    return collector(GcPolicy(**bounds), delete=delete, clock=CLOCK)


def figures(report: GcReport) -> tuple[int, int, int]:
    """Chunks found, to go, and removed."""
    spaces = report.namespaces
    return (
        sum(each.chunks.files for each in spaces),
        sum(each.due().files for each in spaces),
        sum(each.removed.files for each in spaces),
    )


def test_nothing_is_deleted_unless_it_is_asked_for() -> None:
    store = Listed([chunk(n) for n in range(5)])
    report = collect(store, older_than_s=1.5 * 3600)
    assert (report.deleted, figures(report)) == (False, (5, 3, 0))
    (space,) = report.namespaces
    assert space.name == f"{SPACE}_r0"
    assert space.to_go == {"older_than": Amount(files=3, size_bytes=30)}
    assert (space.newest_use_s, space.oldest_use_s) == (NOW_S, NOW_S - 4 * 3600)
    assert len(store.names) == 5
    report = collect(store, delete=True)
    assert figures(report) == (5, 0, 0), "no bound was given"
    assert len(store.names) == 5


def test_the_oldest_go_first_until_the_rest_fits() -> None:
    store = Listed([chunk(n) for n in range(5)])
    report = collect(store, max_bytes=25, delete=True)
    assert (figures(report), report.problems) == ((5, 3, 3), [])
    assert store.names == [chunk(0), chunk(1)]


def test_what_is_too_old_goes_before_what_is_too_much() -> None:
    store = Listed([chunk(n) for n in range(5)])
    (space,) = collect(store, older_than_s=3.5 * 3600, max_bytes=25).namespaces
    assert {why: amount.files for why, amount in space.to_go.items()} == {
        "older_than": 1,
        "max_bytes": 2,
    }


def test_only_chunks_under_the_prefix_are_touched() -> None:
    foreign = [
        f"kv/{SPACE}/config.json",
        f"kv/{SPACE}/.probe",
        "kv/photo.bin",
        f"kv/other/{chunk(1, prefix='')}",
        chunk(1, prefix="kv2/"),
        chunk(1, prefix=""),
        chunk(1).replace(f"{HASH}.bin", f"{HASH}.tmp"),
        f"kv/{SPACE}_r0/fff/00_g0/{HASH}.bin",
    ]
    store = Listed([*foreign, chunk(1)])
    report = collect(store, max_bytes=0, delete=True)
    assert figures(report) == (1, 1, 1)
    assert store.names == foreign
    assert store.asked == ["kv/"]


def test_one_namespace_alone() -> None:
    longer = f"{SPACE}_r0_0123456789ab"
    store = Listed([chunk(1), chunk(1, longer)])
    report = collect(store, max_bytes=0, namespace=f"{SPACE}_r0", delete=True)
    assert figures(report) == (1, 1, 1)
    assert store.names == [chunk(1, longer)]


def test_a_namespace_that_is_not_there_is_named_with_the_nearest() -> None:
    store = Listed([chunk(1)])
    with pytest.raises(ConfigError, match=f"--namespace: '{SPACE}' is not under .*{SPACE}_r0"):
        collect(store, namespace=SPACE)


def test_what_the_store_refuses_to_delete_is_told() -> None:
    store = Listed([chunk(n) for n in range(3)])
    store.refuses = {chunk(1)}
    report = collect(store, max_bytes=0, delete=True)
    assert figures(report) == (3, 3, 2)
    assert report.problems == ["1 objects were not deleted: AccessDenied"]


@pytest.mark.parametrize(("module", "extra"), [("boto3", "s3"), ("azure.storage.blob", "azure")])
def test_a_client_that_is_missing_is_named_with_its_extra(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    backend = "OBJ" if extra == "s3" else "AZURE_BLOB"
    with pytest.raises(ConfigError, match=rf"pip install 'pdoffload\[{extra}\]'"):
        ObjCollector(fake_config(backend=backend))(GcPolicy(), delete=False, clock=CLOCK)


@pytest.mark.nixl
@pytest.mark.s3
class TestRealServers:
    def test_chunks_of_a_tier_in_s3(self, s3_server: S3Server) -> None:
        config = s3_server.tier("chunks", prefix=f"gc/{uuid.uuid4().hex}")
        keys = keys_of(*range(5))
        all_of_it = GcPolicy(max_bytes=0)
        with open_obj(config) as rig:
            rig.store(keys, range(5))
            names = {rig.tier.key(key) for key in keys}
            collector = ObjCollector(config)
            assert figures(collector(all_of_it, delete=False, clock=SYSTEM_CLOCK)) == (5, 5, 0)
            assert names <= set(s3_server.names("chunks"))
            report = collector(all_of_it, delete=True, clock=SYSTEM_CLOCK)
            assert (figures(report), report.problems) == ((5, 5, 5), [])
            assert not names & set(s3_server.names("chunks"))
            assert len([n for n in s3_server.names("chunks") if n.startswith(config.prefix)]) == 2
            loaded = rig.load(keys, range(10, 15))
            assert loaded.succeeded == ()
            assert rig.tier.stats().vanished_chunks == 5
        nowhere = ObjCollector(s3_server.tier("no-such-bucket"))
        (problem,) = nowhere(all_of_it, delete=True, clock=SYSTEM_CLOCK).problems
        assert "cannot be listed" in problem

    def test_chunks_of_a_tier_in_azure(self, azurite_server: AzuriteServer) -> None:
        config = azurite_server.tier("chunks", prefix=f"gc/{uuid.uuid4().hex}")
        old = GcPolicy(older_than_s=-60)
        with open_obj(config) as rig:
            rig.store(keys_of(*range(5)), range(5))
            collector = ObjCollector(config)
            report = collector(old, delete=True, clock=SYSTEM_CLOCK)
            assert (figures(report), report.problems) == ((5, 5, 5), [])
            assert figures(collector(old, delete=False, clock=SYSTEM_CLOCK)) == (0, 0, 0)
        nowhere = ObjCollector(azurite_server.tier("no-such-container"))
        (problem,) = nowhere(old, delete=True, clock=SYSTEM_CLOCK).problems
        assert "cannot be listed" in problem
