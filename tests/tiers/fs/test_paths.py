from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from pdoffload.errors import ConfigError
from pdoffload.layout import RunConfig, make_key
from pdoffload.tiers.fs.paths import Namespace, dir_mode, open_namespace

FIELDS = {
    "model_name": "org/model",
    "dtype": "bfloat16",
    "tp_size": 2,
    "groups": [{"layers": ["a"]}],
}
RUN = RunConfig(fields=FIELDS, guards={"hash_seed": "0", "hash": "sha256"})


def opened(root: Path, run: RunConfig = RUN, rank: int = 0, mode: int = 0o600) -> Namespace:
    return open_namespace(str(root), run, rank, mode)


def problem(root: Path, run: RunConfig = RUN) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(root, run)
    (text,) = caught.value.problems
    return text


def config_of(root: Path) -> Path:
    (path,) = root.glob("*/config.json")
    return path


def test_a_chunk_lies_where_the_documentation_says(tmp_path: Path) -> None:
    space = opened(tmp_path, rank=3)
    key = make_key(bytes.fromhex("abcdef" + "00" * 29), 12)
    name = "abcdef" + "00" * 29
    base = f"{tmp_path}/org_model_{RUN.digest}_r3"
    assert space.path(key) == f"{base}/abc/de_g12/{name}.bin"


def test_the_stored_configuration_lists_every_field_and_the_guards(tmp_path: Path) -> None:
    opened(tmp_path)
    stored = json.loads(config_of(tmp_path).read_text())
    own = stored.pop("pdoffload")
    assert stored == FIELDS
    assert own["guards"] == {"hash_seed": "0", "hash": "sha256"}


def test_c09_every_field_separates_namespaces(tmp_path: Path) -> None:
    changes = [{}, {"dtype": "fp8"}, {"tp_size": 4}, {"model_name": "org/other"}, {"identity": "x"}]
    spaces = [opened(tmp_path, RunConfig(fields={**FIELDS, **change})) for change in changes]
    assert len({space.base for space in spaces}) == len(changes)
    opened(tmp_path), "the first one again is no conflict"
    assert len(list(tmp_path.glob("*/config.json"))) == len(changes)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("bfloat16", "float8"),
        lambda text: text.replace('"dtype"', '"d_type"'),
    ],
    ids=["cut", "empty", "no object", "edited", "renamed"],
)
def test_c09_a_config_file_that_disagrees_with_its_folder_stops_the_tier(
    tmp_path: Path, spoil: object
) -> None:
    opened(tmp_path)
    path = config_of(tmp_path)
    assert callable(spoil)
    path.write_text(spoil(path.read_text()))
    kept = path.read_text()
    told = problem(tmp_path)
    assert str(path) in told
    assert "remove" in told, "a remedy"
    assert path.read_text() == kept, "nobody's file is overwritten"


def test_c09_an_edited_field_is_told_with_both_values(tmp_path: Path) -> None:
    opened(tmp_path)
    path = config_of(tmp_path)
    path.write_text(path.read_text().replace("bfloat16", "float8"))
    told = problem(tmp_path)
    assert "does not match its folder" in told
    assert "dtype is 'float8' there and 'bfloat16' here" in told


def test_c15_a_different_hash_seed_is_told_with_both_values(tmp_path: Path) -> None:
    opened(tmp_path)
    told = problem(tmp_path, RunConfig(fields=FIELDS, guards={"hash_seed": "7", "hash": "sha256"}))
    assert "hash_seed" in told
    assert "'0'" in told
    assert "'7'" in told


def test_c15_a_different_hash_function_is_told_with_both_values(tmp_path: Path) -> None:
    opened(tmp_path)
    told = problem(tmp_path, RunConfig(fields=FIELDS, guards={"hash_seed": "0", "hash": "xxhash"}))
    assert "hash:" in told
    assert "'sha256'" in told
    assert "'xxhash'" in told


def test_c15_equal_guards_share(tmp_path: Path) -> None:
    assert opened(tmp_path).base == opened(tmp_path).base


def test_a_config_of_stock_vllm_is_accepted_and_gets_our_guards(tmp_path: Path) -> None:
    folder = tmp_path / RUN.namespace
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FIELDS, indent=2, sort_keys=True))
    opened(tmp_path)
    stored = json.loads(config_of(tmp_path).read_text())
    assert stored.pop("pdoffload")["guards"] == RUN.guards
    assert stored == FIELDS
    assert "hash_seed" in problem(tmp_path, RunConfig(fields=FIELDS, guards={"hash_seed": "9"}))


def test_a_guard_that_only_one_side_has_is_no_conflict(tmp_path: Path) -> None:
    opened(tmp_path, RunConfig(fields=FIELDS, guards={"hash_seed": "0"}))
    opened(tmp_path, RunConfig(fields=FIELDS, guards={"hash": "sha256"}))


def test_nothing_temporary_stays_beside_the_configuration(tmp_path: Path) -> None:
    opened(tmp_path)
    opened(tmp_path)
    assert os.listdir(tmp_path / RUN.namespace) == ["config.json"]


@pytest.mark.parametrize(
    ("file_mode", "wanted"),
    [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755), (0o660, 0o770), (0o664, 0o775)],
)
def test_directories_get_the_matching_search_bits(
    tmp_path: Path, file_mode: int, wanted: int
) -> None:
    assert dir_mode(file_mode) == wanted
    root = tmp_path / "root"
    space = opened(root, mode=file_mode)
    space.make_parents(space.path(make_key(bytes(32), 0)))
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {wanted}
    assert stat.S_IMODE(config_of(root).stat().st_mode) == file_mode


def test_a_missing_root_is_made_but_not_the_folder_above_it(tmp_path: Path) -> None:
    opened(tmp_path / "new")
    assert (tmp_path / "new").is_dir()
    told = problem(tmp_path / "absent" / "new")
    assert "absent/new" in told
    assert "root_dir" in told
    assert not (tmp_path / "absent").exists()


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = problem(tmp_path / "file")
    assert "root_dir" in told
    assert "is not a folder" in told
    assert (tmp_path / "file").read_text() == ""


def test_folders_that_were_removed_meanwhile_are_made_again(tmp_path: Path) -> None:
    space = opened(tmp_path)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    path = space.path(make_key(bytes(32), 0))
    space.make_parents(path)
    assert os.path.isdir(os.path.dirname(path))
