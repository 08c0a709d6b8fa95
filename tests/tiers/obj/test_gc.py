"""Emptying a bucket: dry by default, oldest first, and nothing but chunks of its own prefix."""

from __future__ import annotations

import datetime
import sys
import uuid
from collections.abc import Iterator, Sequence

import pytest

from pdoffload.errors import ConfigError, StorageError
from pdoffload.testing.azurite_server import AzuriteServer
from pdoffload.testing.clock import FakeClock
from pdoffload.testing.obj_rig import fake_config, open_obj
from pdoffload.testing.s3_server import S3Server
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.obj.gc import collect

HASH = "0123456789abcdef"
SPACE = "org_model_0123456789ab"


def chunk(number: int, space: str = SPACE, prefix: str = "kv/") -> str:
    digits = f"{number:03x}{HASH}"
    return f"{prefix}{space}_r0/{digits[:3]}/{digits[3:5]}_g0/{digits}.bin"


class Listed:
    """A store that is a list: chunk `n` is `n` hours old and has 10 bytes."""

    def __init__(self, clock: FakeClock, names: Sequence[str]) -> None:
        self.names = list(names)
        self._now_s = clock.wall_s()
        self.refuses: set[str] = set()
        self.asked: list[str] = []

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime.datetime]]:
        self.asked.append(prefix)
        for number, name in enumerate(self.names):
            if name.startswith(prefix):
                changed = datetime.datetime.fromtimestamp(self._now_s - 3600 * number, datetime.UTC)
                yield name, 10, changed

    def delete(self, names: Sequence[str]) -> list[str]:
        self.names = [name for name in self.names if name not in names or name in self.refuses]
        return ["AccessDenied" for name in names if name in self.refuses]


def test_nothing_is_deleted_unless_it_is_asked_for() -> None:
    clock = FakeClock()
    store = Listed(clock, [chunk(n) for n in range(5)])
    report = collect(fake_config("kv"), older_than_s=1.5 * 3600, clock=clock, listing=store)
    assert (report.dry_run, report.found, report.chosen, report.chosen_bytes) == (True, 5, 3, 30)
    assert (report.deleted, len(store.names)) == (0, 5)
    report = collect(fake_config("kv"), dry_run=False, clock=clock, listing=store)
    assert (report.chosen, len(store.names)) == (0, 5), "no bound was given"


def test_the_oldest_go_first_until_the_rest_fits() -> None:
    clock = FakeClock()
    store = Listed(clock, [chunk(n) for n in range(5)])
    report = collect(fake_config("kv"), keep_bytes=25, dry_run=False, clock=clock, listing=store)
    assert (report.deleted, report.failed) == (3, ())
    assert store.names == [chunk(0), chunk(1)]


def test_only_chunks_under_the_prefix_are_touched() -> None:
    clock = FakeClock()
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
    store = Listed(clock, [*foreign, chunk(1)])
    report = collect(fake_config("kv"), keep_bytes=0, dry_run=False, clock=clock, listing=store)
    assert (report.found, report.deleted) == (1, 1)
    assert store.names == foreign
    assert store.asked == ["kv/"]


def test_one_namespace_alone() -> None:
    clock = FakeClock()
    longer = f"{SPACE}_0123456789ab"
    store = Listed(clock, [chunk(1), chunk(1, longer)])
    report = collect(
        fake_config("kv"),
        keep_bytes=0,
        namespace=SPACE,
        dry_run=False,
        clock=clock,
        listing=store,
    )
    assert report.deleted == 1
    assert store.names == [chunk(1, longer)]


def test_what_the_store_refuses_to_delete_is_told() -> None:
    clock = FakeClock()
    store = Listed(clock, [chunk(n) for n in range(3)])
    store.refuses = {chunk(1)}
    report = collect(fake_config("kv"), keep_bytes=0, dry_run=False, clock=clock, listing=store)
    assert (report.chosen, report.deleted, report.failed) == (3, 2, ("AccessDenied",))


@pytest.mark.parametrize(("module", "extra"), [("boto3", "s3"), ("azure.storage.blob", "azure")])
def test_a_client_that_is_missing_is_named_with_its_extra(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    backend = "OBJ" if extra == "s3" else "AZURE_BLOB"
    with pytest.raises(ConfigError, match=rf"pip install 'pdoffload\[{extra}\]'"):
        collect(fake_config(backend=backend))


@pytest.mark.nixl
@pytest.mark.s3
class TestRealServers:
    def test_chunks_of_a_tier_in_s3(self, s3_server: S3Server) -> None:
        config = s3_server.tier("chunks", prefix=f"gc/{uuid.uuid4().hex}")
        keys = keys_of(*range(5))
        with open_obj(config) as rig:
            rig.store(keys, range(5))
            names = {rig.tier.key(key) for key in keys}
            assert collect(config, keep_bytes=0).chosen == 5
            assert names <= set(s3_server.names("chunks"))
            report = collect(config, keep_bytes=0, dry_run=False)
            assert (report.deleted, report.failed) == (5, ())
            assert not names & set(s3_server.names("chunks"))
            assert len([n for n in s3_server.names("chunks") if n.startswith(config.prefix)]) == 2
            loaded = rig.load(keys, range(10, 15))
            assert loaded.succeeded == ()
            assert rig.tier.stats().vanished_chunks == 5
        with pytest.raises(StorageError, match="cannot be listed"):
            collect(s3_server.tier("no-such-bucket"), keep_bytes=0)

    def test_chunks_of_a_tier_in_azure(self, azurite_server: AzuriteServer) -> None:
        config = azurite_server.tier("chunks", prefix=f"gc/{uuid.uuid4().hex}")
        with open_obj(config) as rig:
            rig.store(keys_of(*range(5)), range(5))
            report = collect(config, older_than_s=-60, dry_run=False)
            assert (report.found, report.deleted, report.failed) == (5, 5, ())
            assert collect(config, older_than_s=-60).found == 0
        with pytest.raises(StorageError, match="cannot be listed"):
            collect(azurite_server.tier("no-such-container"), keep_bytes=0)
