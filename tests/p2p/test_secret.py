"""The secret's file is private, its keys are the same everywhere, and nothing shows it."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from rich.pretty import pretty_repr

from pdoffload.errors import ConfigError
from pdoffload.p2p.secret import LONGEST_BYTES, SHORTEST_BYTES, ClusterSecret, read_cluster_secret

SECRET = b"correct horse battery staple"


def read(path: Path) -> ClusterSecret:
    return read_cluster_secret(str(path))


def written(folder: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def keys(secret: ClusterSecret) -> tuple[bytes, ...]:
    return (
        secret.server_public,
        secret.server_secret,
        secret.client_public,
        secret.client_secret,
    )


def test_two_processes_derive_the_same_keys(tmp_path: Path) -> None:
    path = written(tmp_path)
    script = (
        "import sys; from pdoffload.p2p.secret import read_cluster_secret as read;"
        "s = read(sys.argv[1]); print(s.server_public.decode(), s.client_public.decode())"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=True, timeout=60
    )
    here = read(path)
    assert told.stdout.split() == [here.server_public.decode(), here.client_public.decode()]


def test_all_four_keys_differ_and_so_do_those_of_another_secret() -> None:
    assert len({*keys(ClusterSecret(SECRET)), *keys(ClusterSecret(SECRET + b"!"))}) == 8
    assert keys(ClusterSecret(SECRET)) == keys(ClusterSecret(SECRET))


def test_the_public_keys_belong_to_the_secret_ones() -> None:
    secret = ClusterSecret(SECRET)
    assert zmq.curve_public(secret.server_secret) == secret.server_public
    assert zmq.curve_public(secret.client_secret) == secret.client_public


def test_one_newline_at_the_end_is_not_part_of_the_secret(tmp_path: Path) -> None:
    assert keys(read(written(tmp_path, SECRET + b"\n"))) == keys(ClusterSecret(SECRET))
    assert keys(read(written(tmp_path, SECRET + b"\n\n"))) != keys(ClusterSecret(SECRET))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640, 0o700, 0o750])
def test_the_owner_and_his_group_may_read_it(tmp_path: Path, mode: int) -> None:
    assert read(written(tmp_path, mode=mode))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o601, 0o620, 0o660, 0o666, 0o777])
def test_a_file_that_others_may_open_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, mode=mode)
    with pytest.raises(ConfigError) as caught:
        read(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"cluster_secret_file: got '{path}'")
    assert f"mode {mode:04o}" in problem
    assert f"chmod 600 {path}" in problem


@pytest.mark.parametrize("length", [0, 1, SHORTEST_BYTES - 1, LONGEST_BYTES + 1, 2**20])
def test_a_length_no_secret_has_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError, match="allowed: 16 to 4096 bytes"):
        read(written(tmp_path, b"x" * length + b"\n"))


@pytest.mark.parametrize("length", [SHORTEST_BYTES, LONGEST_BYTES])
def test_the_shortest_and_the_longest_are_right(tmp_path: Path, length: int) -> None:
    assert read(written(tmp_path, b"x" * length + b"\n"))


def test_what_is_not_there_or_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        read(tmp_path / "pipe")


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """Kubernetes mounts every secret as a link."""
    (tmp_path / "link").symlink_to(written(tmp_path))
    assert keys(read(tmp_path / "link")) == keys(ClusterSecret(SECRET))


def test_nothing_shows_it(tmp_path: Path) -> None:
    secret = ClusterSecret(SECRET)
    hidden = [SECRET, *keys(secret)]
    told = [repr(secret), str(secret), f"{secret}", pretty_repr(secret)]
    with pytest.raises(ConfigError) as caught:
        read(written(tmp_path, SECRET, 0o644))
    told.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        read(written(tmp_path, b"too short"))
    told.append(str(caught.value))
    assert not [text for text in told for each in hidden if each.decode() in text]
    assert "too short" not in told[-1].replace("bytes long", "")


@pytest.mark.parametrize("travel", [copy.copy, pickle.dumps])
def test_it_does_not_leave_its_process(travel) -> None:
    with pytest.raises(TypeError, match="does not leave"):
        travel(ClusterSecret(SECRET))
