"""The Helm chart, rendered by Helm's own engine and read as Kubernetes would read it.

Nothing of it runs: no cluster is here. What can be known without one is checked: that objects are valid,
that they fit together, and that the engines start with a configuration that this package takes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pdoffload.config import P2pTierConfig, resolve_p2p_address
from pdoffload.config.hosts import host_problem
from pdoffload.config.launch import check_text
from pdoffload.p2p.roles import Roles, roles_of

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "pdoffload"
GIB = 1 << 30
ROLES = ("prefill", "decode")
KUBERNETES = ("1.28", "1.31", "1.37")

LEAST = {
    "image": {"repository": "registry.example/pdoffload-vllm"},
    "clusterSecret": {"existingSecret": "kv-cluster"},
}
MOST = {
    **LEAST,
    "clusterSecret": {"value": "a secret of some length", "key": "other-key"},
    "imagePullSecrets": [{"name": "pull"}],
    "model": {"name": "org/model", "extraArgs": ["--max-model-len=32768"], "cacheClaim": "models"},
    "engine": {"gpus": 4, "gpuResource": "amd.com/gpu", "memoryGiB": 100, "shmGiB": 8},
    "kvCache": {"hostMemoryGiB": 600, "verify": "if_present"},
    "p2p": {"port": 6001, "address": "ip", "numThreads": 64, "unboundStoreTimeoutSeconds": 0.5},
    "prefill": {
        "replicas": 3,
        "nodeSelector": {"pool": "prefill"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "pdoffload"}},
                    }
                ]
            }
        },
    },
    "decode": {"replicas": 0},
    "rdma": {"resource": "rdma/ib", "count": 2},
    "networkPolicy": {"enabled": False},
    "clusterDomain": "example.org",
    "extraEnv": [{"name": "UCX_TLS", "value": "rc,cuda"}],
}
RIGHT = {
    "least": ("demo", LEAST),
    "most": ("pdoffload", MOST),
    "long": ("r" * 53, LEAST),
    "number": ("123", LEAST),
}
# values -> what is said of them
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "image.repository: required"),
    "no secret": ({"image": LEAST["image"]}, "clusterSecret: required"),
    "both": (
        {**LEAST, "clusterSecret": {"existingSecret": "a", "value": "b" * 16}},
        "existingSecret and value are both set",
    ),
    "short": ({**LEAST, "clusterSecret": {"value": "b" * 15}}, "at least 16 characters"),
    "unknown": ({**LEAST, "p2p": {"prot": 1}}, "additional properties 'prot' not allowed"),
    "text": ({**LEAST, "p2p": {"port": "5710"}}, "at '/p2p/port': got string, want integer"),
    "http port": ({**LEAST, "p2p": {"port": 8000}}, "at '/p2p/port'"),
    "range": ({**LEAST, "p2p": {"port": 70000}}, "at '/p2p/port'"),
    "word": ({**LEAST, "kvCache": {"verify": "Always"}}, "at '/kvCache/verify'"),
    "nothing to keep": ({**LEAST, "kvCache": {"hostMemoryGiB": 0}}, "at '/kvCache/hostMemoryGiB'"),
}


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    releases = [
        *({"name": name, "namespace": "ns", "values": values} for name, values in RIGHT.values()),
        *({"name": "demo", "namespace": "ns", "values": values} for values, _ in WRONG.values()),
    ]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("render_chart.py"))],
        input=json.dumps({"chart": str(CHART), "releases": releases}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["releases"] = dict(zip((*RIGHT, *WRONG), found["releases"], strict=True))
    return found


class Release:
    """What one set of values becomes."""

    def __init__(self, files: dict[str, str]) -> None:
        self.notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
        self.objects: list[dict[str, Any]] = [
            each
            for name, text in files.items()
            if name.endswith(".yaml")
            for each in yaml.safe_load_all(text)
            if each
        ]

    def of(self, kind: str, name_end: str = "") -> dict[str, Any]:
        (found,) = (
            each
            for each in self.objects
            if each["kind"] == kind and each["metadata"]["name"].endswith(name_end)
        )
        return found

    def pod(self, role: str) -> dict[str, Any]:
        spec: dict[str, Any] = self.of("StatefulSet", f"-{role}")["spec"]["template"]["spec"]
        return spec

    def container(self, role: str) -> dict[str, Any]:
        (container,) = self.pod(role)["containers"]
        return dict(container)

    def transfer_config(self, role: str) -> str:
        args = self.container(role)["args"]
        return str(args[args.index("--kv-transfer-config") + 1])

    def tier(self, role: str) -> P2pTierConfig:
        ((_, config),) = check_text(self.transfer_config(role)).connectors
        (tier,) = config.secondary_tiers
        assert isinstance(tier, P2pTierConfig)
        return tier


@pytest.fixture(params=RIGHT)
def release(request: pytest.FixtureRequest, answer: dict[str, Any]) -> Release:
    rendered = answer["releases"][request.param]
    assert "files" in rendered, rendered
    return Release(rendered["files"])


@pytest.fixture
def least(answer: dict[str, Any]) -> Release:
    return Release(answer["releases"]["least"]["files"])


@pytest.fixture
def most(answer: dict[str, Any]) -> Release:
    return Release(answer["releases"]["most"]["files"])


def gib(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


def test_helm_s_own_linter_finds_nothing(answer: dict[str, Any]) -> None:
    assert answer["lint"] == []
    assert answer["metadata"]["name"] == "pdoffload"


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_with_the_reason(case: str, answer: dict[str, Any]) -> None:
    assert WRONG[case][1] in answer["releases"][case].get("error", "")


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_passes_the_schemas_of_kubernetes(release: Release, version: str) -> None:
    assert len(release.objects) >= 5
    for each in release.objects:
        assert kubernetes_validate.validate(each, version, strict=True) == version


def test_an_object_with_a_mistake_does_not_pass(least: Release) -> None:
    wrong = least.of("StatefulSet", "-prefill")
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_every_engine_starts_with_a_configuration_that_warns_of_nothing(release: Release) -> None:
    assert release.transfer_config("prefill") == release.transfer_config("decode")
    checked = check_text(release.transfer_config("prefill"))
    assert checked.warnings == ()
    assert len(checked.connectors) == 1


def test_values_reach_the_configuration(most: Release) -> None:
    ((_, config),) = check_text(most.transfer_config("prefill")).connectors
    assert config.cpu_bytes_to_use == 600 * GIB
    assert config.verify.value == "if_present"
    tier = most.tier("prefill")
    assert (tier.port, tier.num_threads, tier.unbound_store_timeout_s) == (6001, 64, 0.5)


def test_values_reach_the_pods(most: Release) -> None:
    pod, container = most.pod("prefill"), most.container("prefill")
    assert "--tensor-parallel-size=4" in container["args"]
    assert container["args"][-1] == "--max-model-len=32768"
    assert container["resources"]["limits"]["amd.com/gpu"] == 4
    assert container["resources"]["limits"]["rdma/ib"] == 2
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert {"name": "UCX_TLS", "value": "rc,cuda"} in container["env"]
    assert pod["nodeSelector"] == {"pool": "prefill"}
    assert "nodeSelector" not in most.pod("decode")
    assert most.of("StatefulSet", "-prefill")["spec"]["replicas"] == 3
    assert most.of("StatefulSet", "-decode")["spec"]["replicas"] == 0
    assert not [each for each in most.objects if each["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("role", ROLES)
def test_the_pool_fits_into_shared_memory_and_that_into_the_pod(
    release: Release, role: str
) -> None:
    ((_, config),) = check_text(release.transfer_config(role)).connectors
    volumes = {volume["name"]: volume for volume in release.pod(role)["volumes"]}
    mounts = {
        mount["mountPath"]: mount["name"] for mount in release.container(role)["volumeMounts"]
    }
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    resources = release.container(role)["resources"]
    assert shm["medium"] == "Memory"
    assert config.cpu_bytes_to_use < gib(shm["sizeLimit"]) * GIB
    assert gib(shm["sizeLimit"]) < gib(resources["limits"]["memory"])
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


@pytest.mark.parametrize("role", ROLES)
def test_the_secret_is_mounted_where_the_engine_reads_it(release: Release, role: str) -> None:
    (mount,) = (
        mount
        for mount in release.container(role)["volumeMounts"]
        if mount["name"] == "cluster-secret"
    )
    (volume,) = (
        volume for volume in release.pod(role)["volumes"] if volume["name"] == "cluster-secret"
    )
    (item,) = volume["secret"]["items"]
    assert f"{mount['mountPath']}/{item['path']}" == release.tier(role).cluster_secret_file
    # Not readable by others, which the engine would refuse.
    assert volume["secret"]["defaultMode"] & 0o077 == 0
    for own in (each for each in release.objects if each["kind"] == "Secret"):
        assert own["metadata"]["name"] == volume["secret"]["secretName"]
        assert list(own["data"]) == [item["key"]]


def test_the_chart_makes_a_secret_only_from_a_given_value(least: Release, most: Release) -> None:
    assert not [each for each in least.objects if each["kind"] == "Secret"]
    assert most.of("Secret")["data"] == {"other-key": "YSBzZWNyZXQgb2Ygc29tZSBsZW5ndGg="}
    assert least.pod("prefill")["volumes"][1]["secret"]["secretName"] == "kv-cluster"


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_is_called_by_the_name_that_its_service_gives_it(
    release: Release, role: str, answer: dict[str, Any]
) -> None:
    stateful, service = release.of("StatefulSet", f"-{role}"), release.of("Service", f"-{role}")
    pod_labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod_labels.items()
    assert stateful["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    pod_name = f"{stateful['metadata']['name']}-0"
    # The label with a revision's hash, which StatefulSets add, is the longest of a pod.
    assert all(len(each) <= 63 for each in (f"{stateful['metadata']['name']}-0123456789", pod_name))
    environment = {one["name"]: one for one in release.container(role)["env"]}
    host = environment["VLLM_P2P_SIDE_CHANNEL_HOST"]
    if "value" not in host:
        assert host["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        return
    # Kubernetes expands names of variables that stand before.
    assert list(environment).index("POD_NAME") < list(environment).index(host["name"])
    address = host["value"].replace("$(POD_NAME)", pod_name)
    assert address == f"{pod_name}.{service['metadata']['name']}.ns.svc.cluster.local"
    assert host_problem(address) == ""
    tier = release.tier(role)
    assert resolve_p2p_address(tier, {host["name"]: address}, 0) == (address, tier.port)


@pytest.mark.parametrize("role", ROLES)
def test_ports_of_pods_services_and_probes_agree(release: Release, role: str) -> None:
    container = release.container(role)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"--port={ports['http']}" in container["args"]
    assert ports["p2p"] == release.tier(role).port
    for port in release.of("Service", f"-{role}")["spec"]["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_only_pods_of_the_release_reach_the_control_channel(least: Release) -> None:
    policy = least.of("NetworkPolicy")["spec"]
    peers, clients = policy["ingress"]
    labels = policy["podSelector"]["matchLabels"]
    assert peers == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert [port["port"] for port in clients["ports"]] == ["http"]
    for role in ROLES:
        template = least.of("StatefulSet", f"-{role}")["spec"]["template"]
        assert labels.items() <= template["metadata"]["labels"].items()


def test_the_notes_name_an_address_that_a_request_can_use(release: Release) -> None:
    written = re.findall(r'"kv_transfer_params": (\{.*?\}\})', release.notes, re.DOTALL)
    decoder, prefiller = (roles_of(json.loads(each)) for each in written)
    assert isinstance(decoder, Roles)
    assert isinstance(prefiller, Roles)
    assert prefiller.source is not None
    assert decoder.producer_id == prefiller.source.kv_request_id
    assert prefiller.source.address.port == release.tier("prefill").port
