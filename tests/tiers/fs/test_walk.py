from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import RunConfig, make_key
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.fs.paths import Namespace, open_namespace
from pdoffload.tiers.fs.walk import Found, empty_folders, files_in, prefixes

(KEY,) = keys_of("a")


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)


def walked(space: Namespace) -> list[Found]:
    return [found for name in prefixes(space.base) for found in files_in(space.base, name)]


def test_a_file_is_found_under_the_key_it_was_stored_under(space: Namespace) -> None:
    keys = [KEY, make_key(KEY[:-4], 17), make_key(KEY[:-4], 2**32 - 1)]
    for number, key in enumerate(keys):
        space.make_parents(space.path(key))
        Path(space.path(key)).write_bytes(bytes(number))
        os.utime(space.path(key), (9, number))
    assert sorted(walked(space)) == sorted(
        Found(key, space.path(key), number, number, 9) for number, key in enumerate(keys)
    )


def test_nothing_else_is_found(space: Namespace, tmp_path: Path) -> None:
    name = KEY.hex()[:64]
    outside = tmp_path / "outside"
    (outside / f"{name[3:5]}_g0").mkdir(parents=True)
    (outside / f"{name[3:5]}_g0" / f"{name}.bin").write_bytes(b"x")
    places = [
        f"{name[:3]}/{name[3:5]}_g0/{name}.tmp",
        f"{name[:3]}/{name[3:5]}_g0/{name.upper()}.bin",
        f"{name[:3]}/{name[3:5]}_g0/{name}0.bin",
        f"{name[:3]}/{name[3:5]}_g00/{name}.bin",
        f"{name[:3]}/{name[3:5]}_g4294967296/{name}.bin",
        f"{name[:3]}/{name[3:5]}/{name}.bin",
        f"{name[:2]}/{name[3:5]}_g0/{name}.bin",
        f"000/00_g0/{name}.bin",
        f".tmp/{name[3:5]}_g0/{name}.bin",
    ]
    for place in places:
        path = Path(space.base, place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    Path(space.base, "abc").symlink_to(outside)
    Path(space.base, name[:3], f"{name[3:5]}_g1").symlink_to(outside / f"{name[3:5]}_g0")
    Path(space.base, name[:3], f"{name[3:5]}_g0", f"{name}.bin").symlink_to("/etc/passwd")
    Path(space.base, "fff").write_bytes(b"not a folder")
    assert walked(space) == []


def test_folders_are_empty_if_they_hold_nothing_and_have_been_quiet(space: Namespace) -> None:
    space.make_parents(space.path(KEY))
    folder, name = os.path.dirname(space.path(KEY)), KEY.hex()[:3]
    now_s = SYSTEM_CLOCK.wall_s()
    assert list(empty_folders(space.base, name, before_s=now_s - 60)) == []
    assert list(empty_folders(space.base, name, before_s=now_s + 60)) == [folder]
    Path(space.path(KEY)).touch()
    assert list(empty_folders(space.base, name, before_s=now_s + 60)) == []


def test_a_namespace_that_is_gone_is_an_error_and_a_folder_that_is_gone_is_not(
    space: Namespace,
) -> None:
    assert list(files_in(space.base, "abc")) == []
    with pytest.raises(FileNotFoundError):
        prefixes(f"{space.base}/nowhere")
