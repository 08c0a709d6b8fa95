from __future__ import annotations

from pathlib import Path

import pytest

from pdoffload.layout import RunConfig
from pdoffload.tiers.fs import mounts
from pdoffload.tiers.fs.ledger_file import ledger_path
from pdoffload.tiers.fs.paths import Namespace


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("ext4", False),
        ("xfs", False),
        ("tmpfs", False),
        ("overlay", False),
        ("", False),
        ("nfs4", True),
        ("lustre", True),
        ("fuse.sshfs", True),
        ("fuse", True),
        ("virtiofs", True),
    ],
)
def test_what_other_hosts_can_mount_counts_as_network(
    monkeypatch: pytest.MonkeyPatch, kind: str, shared: bool
) -> None:
    monkeypatch.setattr(mounts, "_type_of", lambda _: kind)
    assert mounts.network_type("/anywhere") == (kind if shared else "")


def test_the_type_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert mounts._type_of("/proc") == "proc"
    assert mounts._type_of(str(tmp_path / "absent")) == ""


def test_each_host_has_a_ledger_of_its_own_on_a_network_file_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    space = Namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)
    assert ledger_path(space) == f"{space.base}/.ledger-v1.sqlite"
    monkeypatch.setattr(mounts, "_type_of", lambda _: "nfs4")
    assert ledger_path(space) == f"{space.base}/.ledger-v1-{mounts.host_name()}.sqlite"
