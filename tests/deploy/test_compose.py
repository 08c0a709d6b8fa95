"""The compose file, read as Docker Compose would read it. Nothing of it runs: no Docker is here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdoffload.config import P2pTierConfig, resolve_p2p_address
from pdoffload.config.hosts import Reach, reach_of
from pdoffload.config.launch import Checked, check_text

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose" / "compose.yaml"
ENGINES = ("prefill", "decode")
_VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")


def with_defaults(value: Any) -> Any:
    """`value` with each ${NAME:-default} as it is where nothing is set."""
    if isinstance(value, dict):
        return {key: with_defaults(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_defaults(one) for one in value]
    return _VARIABLE.sub(r"\2", value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return read


@pytest.fixture(scope="module")
def compose(written: dict[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = with_defaults(written)
    assert "$" not in json.dumps(filled), "a variable without a default"
    return filled


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, compose: dict[str, Any]) -> dict[str, Any]:
    return {"name": request.param, **compose["services"][request.param]}


def checked(engine: dict[str, Any]) -> Checked:
    command = engine["command"]
    return check_text(command[command.index("--kv-transfer-config") + 1])


def tier_of(engine: dict[str, Any]) -> P2pTierConfig:
    ((_, config),) = checked(engine).connectors
    (tier,) = config.secondary_tiers
    assert isinstance(tier, P2pTierConfig)
    return tier


def environment_of(engine: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in engine["environment"].items() if value is not None}


def schema_check(path: Path) -> subprocess.CompletedProcess[str]:
    """By the schema of the Compose Specification, which check-jsonschema carries."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            str(path),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_file_passes_the_schema_of_compose_files() -> None:
    done = schema_check(COMPOSE)
    assert done.returncode == 0, done.stdout


def test_a_file_with_a_mistake_does_not_pass(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("shm_size:", "shm_sise:"))
    assert schema_check(wrong).returncode == 1


def test_there_is_a_prefiller_and_a_decoder(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == set(ENGINES)


def test_every_engine_starts_with_a_configuration_that_warns_of_nothing(
    engine: dict[str, Any],
) -> None:
    assert checked(engine).warnings == ()


def test_every_engine_serves_the_same_with_the_same_settings(compose: dict[str, Any]) -> None:
    prefill, decode = (compose["services"][name] for name in ENGINES)
    assert prefill["command"] == decode["command"]
    assert prefill["image"] == decode["image"]


def test_an_engine_binds_the_name_that_the_network_knows_it_by(engine: dict[str, Any]) -> None:
    tier = tier_of(engine)
    assert resolve_p2p_address(tier, environment_of(engine), 0) == (engine["name"], 5710)
    assert reach_of(engine["name"]) is Reach.UNRESOLVED
    assert tier.cluster_secret_file is not None
    assert engine["networks"] == ["peers"]


def test_the_pool_fits_into_shared_memory(engine: dict[str, Any]) -> None:
    ((_, config),) = checked(engine).connectors
    size, unit = int(engine["shm_size"][:-2]), engine["shm_size"][-2:]
    assert unit == "gb"
    assert config.cpu_bytes_to_use < size << 30


def test_the_secret_is_a_file_of_the_operator(
    engine: dict[str, Any], compose: dict[str, Any]
) -> None:
    (name,) = engine["secrets"]
    assert tier_of(engine).cluster_secret_file == f"/run/secrets/{name}"
    file = COMPOSE.parent / compose["secrets"][name]["file"]
    assert file.name in (COMPOSE.parent / ".gitignore").read_text().splitlines()
    tracked = subprocess.run(
        ["git", "ls-files", "--error-unmatch", str(file)],
        cwd=COMPOSE.parent,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert tracked.returncode != 0, "a secret is part of the repository"


def test_each_engine_has_a_gpu_of_its_own(compose: dict[str, Any]) -> None:
    devices = [
        compose["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        for name in ENGINES
    ]
    assert all(len(each) == 1 and each[0]["capabilities"] == ["gpu"] for each in devices)
    assert devices[0][0]["device_ids"] != devices[1][0]["device_ids"]


def test_only_http_is_published_and_only_on_this_host(compose: dict[str, Any]) -> None:
    published = [port for name in ENGINES for port in compose["services"][name]["ports"]]
    assert published == ["127.0.0.1:8100:8000", "127.0.0.1:8200:8000"]
    for name in ENGINES:
        assert "--port=8000" in compose["services"][name]["command"]
        assert "127.0.0.1:8000/health" in compose["services"][name]["healthcheck"]["test"][-1]


def test_the_head_names_every_setting(written: dict[str, Any]) -> None:
    text = COMPOSE.read_text()
    head = text[: text.index("\nname:")]
    used = {name for name, _ in _VARIABLE.findall(text[len(head) :])}
    for engine in written["services"].values():
        used |= {name for name, value in engine["environment"].items() if value is None}
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", head[head.index("# Settings") :]))
    assert used <= named
    assert named - used <= {"KV"}


def test_the_image_is_built_from_this_repository(engine: dict[str, Any]) -> None:
    context = (COMPOSE.parent / engine["build"]["context"]).resolve()
    assert (context / "pyproject.toml").is_file()
    assert (context / engine["build"]["dockerfile"]).is_file()
