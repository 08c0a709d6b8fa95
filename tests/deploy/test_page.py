"""What docs/deploy.md tells people to type."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from pdoffload.p2p.address import Address
from pdoffload.p2p.roles import Roles, roles_of
from pdoffload.p2p.secret import read_cluster_secret

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
COMMANDS = [
    shlex.split(command)
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for command in block.removeprefix("$ ").split("\n$ ")
    if "(" not in command
]


def test_the_two_requests_of_one_prompt_fit_each_other() -> None:
    bodies = [json.loads(command[-1]) for command in COMMANDS if command[0] == "curl"]
    producer, consumer = (roles_of(body["kv_transfer_params"]) for body in bodies)
    assert isinstance(producer, Roles)
    assert isinstance(consumer, Roles)
    assert consumer.source is not None
    assert producer.producer_id == consumer.source.kv_request_id
    assert consumer.source.address == Address("prefill", 5710)
    assert bodies[0]["prompt"] == bodies[1]["prompt"]


def test_paths_and_values_exist() -> None:
    for command in COMMANDS:
        for word in command:
            if word.startswith("deploy/") and not word.endswith("cluster-secret"):
                assert (ROOT / word).exists()
    (helm,) = (command for command in COMMANDS if command[0] == "helm")
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "pdoffload" / "values.yaml").read_text())
    for setting in (
        helm[i + 1].partition("=")[0] for i, word in enumerate(helm) if word == "--set"
    ):
        table, key = setting.split(".")
        assert key in values[table]


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600])
def test_a_secret_as_the_page_makes_it_is_taken_where_kubernetes_mounts_it(
    tmp_path: Path, mode: int
) -> None:
    """Kubernetes mounts a link to a file with the mode asked for; openssl ends it with a newline."""
    file = tmp_path / "data"
    file.write_text("q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=\n")
    file.chmod(mode)
    link = tmp_path / "cluster-secret"
    link.symlink_to(file)
    assert read_cluster_secret(str(link)).server_public
