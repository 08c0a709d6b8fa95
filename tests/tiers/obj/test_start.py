"""C24 at start: what is in the way is told apart, by name and in time; nothing secret is told."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import ObjTierConfig
from pdoffload.errors import ConfigError
from pdoffload.layout import RunConfig
from pdoffload.testing.azurite_server import KEY, AzuriteServer
from pdoffload.testing.obj_rig import FakeAgents, fake_config, open_obj
from pdoffload.testing.s3_server import SECRET_KEY, S3Server
from pdoffload.testing.serving import free_port
from pdoffload.testing.store_server import Reply, StoreServer
from pdoffload.testing.tier_rig import context_of, filled_region, keys_of
from pdoffload.tiers.base import Lookup
from pdoffload.tiers.obj.diagnosis import of_answer
from pdoffload.tiers.obj.requests import Answer, StoreRequests
from pdoffload.tiers.obj.tier import ObjTier

HIT, MISS = Lookup.HIT, Lookup.MISS
real = [pytest.mark.nixl, pytest.mark.s3]


def refusal(config: ObjTierConfig, **context: Any) -> str:
    """The one problem that opening a tier is refused with."""
    region = filled_region(2)
    try:
        with pytest.raises(ConfigError) as caught:
            ObjTier(config, context_of(region, **context))
    finally:
        region.close()
    (problem,) = caught.value.problems
    assert SECRET_KEY not in str(caught.value)
    assert KEY not in str(caught.value)
    return problem


def changed(config: ObjTierConfig, **store: Any) -> ObjTierConfig:
    new = msgspec.structs.replace(config.store_config, **store)
    return msgspec.structs.replace(config, store_config=new)


# --- what a store says by its status ---


@pytest.mark.parametrize(
    ("status", "code", "kind", "key"),
    [
        (404, "NoSuchBucket", "absent bucket", "bucket"),
        (403, "AccessDenied", "forbidden", "bucket"),
        (403, "", "forbidden", "bucket"),
        (403, "InvalidAccessKeyId", "credentials", "access_key, secret_key"),
        (403, "SignatureDoesNotMatch", "credentials", "access_key, secret_key"),
        (400, "InvalidRequest", "other", "endpoint_override"),
        (500, "InternalError", "failing", "endpoint_override"),
        (503, "SlowDown", "failing", "endpoint_override"),
    ],
)
def test_c24_a_store_that_refuses_is_told_by_kind(
    status: int, code: str, kind: str, key: str
) -> None:
    with StoreServer(lambda *_: Reply(status, code)) as server:
        problem = refusal(server.tier())
        assert problem.startswith(f"store_config.{key}: bucket 'chunks' at {server.url} ")
        assert f"({kind})" in problem
        assert f"{status} {code}".strip() in problem


def test_c24_a_bucket_of_another_region_is_told_where_a_region_was_given() -> None:
    with StoreServer(lambda *_: Reply(301, "PermanentRedirect")) as server:
        problem = refusal(server.tier(region="eu-west-1"))
        assert problem.startswith("store_config.region: bucket 'chunks' at ")
        requests = StoreRequests(server.tier(), SYSTEM_CLOCK)
        assert of_answer(Answer(301, "PermanentRedirect"), requests) is None


def test_c24_a_store_that_may_be_written_and_not_read_is_refused() -> None:
    script = {"GET": Reply(403, "AccessDenied")}
    with StoreServer(lambda method, _: script.get(method)) as server:
        assert "(forbidden)" in refusal(server.tier())


def test_c24_nobody_home() -> None:
    port = free_port()
    with StoreServer() as server:
        config = changed(server.tier(), endpoint_override=f"127.0.0.1:{port}")
    problem = refusal(config)
    assert problem.startswith("store_config.endpoint_override: bucket 'chunks' at ")
    assert f"(refused): nobody listens at 127.0.0.1:{port}" in problem


def test_c24_a_host_that_does_not_exist() -> None:
    with StoreServer() as server:
        config = changed(server.tier(), endpoint_override="no-such-host.invalid:80")
    assert "(unknown host): no-such-host.invalid is not known" in refusal(config)


def test_c24_a_store_that_is_slow_is_given_up_in_time() -> None:
    never = threading.Event()
    with StoreServer(lambda *_: Reply(wait=never)) as server:
        started_s = SYSTEM_CLOCK.monotonic_s()
        problem = refusal(server.tier())
        assert SYSTEM_CLOCK.monotonic_s() - started_s < 60, "the limit is 10 s; machines are slow"
        assert "(slow): no answer in time" in problem


def test_c24_https_to_a_port_that_speaks_http() -> None:
    with StoreServer() as server:
        problem = refusal(changed(server.tier(), scheme="https", endpoint_override=server.url[7:]))
        assert problem.startswith("store_config.scheme: ")
        assert "(scheme): it does not speak https" in problem


class TlsPort:
    """Listens, and answers whatever is not TLS as TLS servers do: by a fatal alert."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    context.wrap_socket(connection, server_side=True)
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def test_c24_http_to_a_port_that_speaks_https() -> None:
    port = TlsPort()
    try:
        with StoreServer() as server:
            config = changed(server.tier(), endpoint_override=f"127.0.0.1:{port.port}")
        problem = refusal(config)
        assert problem.startswith("store_config.scheme: ")
        assert "(scheme)" in problem
    finally:
        port.close()


# --- with NIXL and real servers ---


class TestRealServers:
    pytestmark = real

    def test_c24_a_failing_store_that_comes_back_at_once_is_taken(self) -> None:
        asked = iter(range(100))
        script = lambda *_: Reply(503) if next(asked) < 2 else None  # noqa: E731
        with StoreServer(script) as server, open_obj(server.tier()) as rig:
            assert rig.lookup(*keys_of("a")) == [MISS]

    def test_c24_an_absent_bucket(self, s3_server: S3Server) -> None:
        problem = refusal(s3_server.tier("no-such-bucket"))
        assert problem == (
            f"store_config.bucket: bucket 'no-such-bucket' at {s3_server.url} cannot be used (absent "
            "bucket): the store answers 404 NoSuchBucket; create it, or name another one"
        )

    def test_c24_wrong_and_missing_credentials(self, tmp_path: Path) -> None:
        with S3Server(tmp_path, open_actions=7) as server:
            server.create_bucket("chunks")
            access, secret = server.create_user("good", "s3:*")
            reader_access, reader_secret = server.create_user("reader", "s3:GetObject")
            problem = refusal(server.tier("chunks"))
            assert problem.startswith("store_config.access_key, secret_key: bucket 'chunks' at ")
            assert "InvalidAccessKeyId" in problem
            problem = refusal(server.tier("chunks", access_key=access, secret_key=secret[::-1]))
            assert "SignatureDoesNotMatch" in problem
            assert secret[::-1] not in problem
            reader = server.tier("chunks", access_key=reader_access, secret_key=reader_secret)
            assert "(forbidden): the store answers 403 AccessDenied" in refusal(reader)
            good = server.tier("chunks", access_key=access, secret_key=secret)
            with open_obj(good) as rig:
                assert rig.store(keys_of("a"), (0,)).moved_bytes > 0
                assert rig.lookup(*keys_of("a", "b")) == [HIT, MISS]

    def test_c24_empty_credentials_fall_back_to_the_chain_of_the_sdk(
        self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "also-not-a-real-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "also-not-a-real-secret")
        config = s3_server.tier("chunks", prefix="chain", access_key="", secret_key="")
        with open_obj(config) as rig:
            rig.store(keys_of("a"), (0,))
            assert rig.lookup(*keys_of("a")) == [HIT]

    def test_c24_without_credentials_an_absent_bucket_is_told_all_the_same(
        self, s3_server: S3Server
    ) -> None:
        config = s3_server.tier("no-such-bucket", access_key="", secret_key="")
        assert "(absent bucket)" in refusal(config)

    def test_the_endpoint_may_carry_its_scheme_or_not(self, s3_server: S3Server) -> None:
        for endpoint in (s3_server.host, f"http://{s3_server.host}", f"{s3_server.url}/"):
            config = s3_server.tier("chunks", prefix="ends", endpoint_override=endpoint)
            with open_obj(config) as rig:
                assert rig.lookup(*keys_of("a")) == [MISS]

    def test_c24_azure_tells_an_absent_container_and_a_wrong_key(
        self, azurite_server: AzuriteServer
    ) -> None:
        assert "(absent bucket): the store answers 404 ContainerNotFound" in refusal(
            azurite_server.tier("no-such-container")
        )
        text = azurite_server.connection_string.replace(KEY, "b2J2aW91c2x5IGZha2U=")
        problem = refusal(azurite_server.tier("chunks", connection_string=text))
        assert "(forbidden): the store answers 403 AuthorizationFailure" in problem

    def test_no_output_of_a_start_holds_a_credential(
        self, s3_server: S3Server, capfd: pytest.CaptureFixture[str], caplog: Any
    ) -> None:
        secrets = ("fake-id-to-grep-for", "fake-secret-to-grep-for", "fake-token-to-grep-for")
        keys = dict(zip(("access_key", "secret_key", "session_token"), secrets, strict=True))
        with caplog.at_level(logging.DEBUG):
            with open_obj(s3_server.tier("chunks", prefix=uuid.uuid4().hex, **keys)) as rig:
                rig.store(keys_of("a"), (0,))
                rig.load(keys_of("a", "absent"), (1, 2))
                s3_server.client().delete_object(Bucket="chunks", Key=rig.tier.key(keys_of("a")[0]))
                rig.load(keys_of("a"), (1,))
                said = repr(rig.tier)
            with pytest.raises(ConfigError) as caught, open_obj(s3_server.tier("absent", **keys)):
                pass
        printed = capfd.readouterr()
        everything = [said, str(caught.value), caplog.text, printed.out, printed.err]
        for secret in secrets:
            assert not [text for text in everything if secret in text]


# --- names and config.json ---


@pytest.fixture
def agents() -> FakeAgents:
    return FakeAgents(SYSTEM_CLOCK)


def test_objects_lie_where_files_would(agents: FakeAgents) -> None:
    (key,) = keys_of("a")
    with open_obj(fake_config("pre/fix"), make_agent=agents) as rig:
        rig.store((key,), (5,))
        space = context_of(rig.region).run_config.namespace
        digits = key[:-4].hex()
        assert sorted(agents.store.objects) == sorted(
            [
                f"pre/fix/{space}/.probe",
                f"pre/fix/{space}/config.json",
                f"pre/fix/{space}_r0/{digits[:3]}/{digits[3:5]}_g0/{digits}.bin",
            ]
        )


def test_c09_another_configuration_misses_everything(agents: FakeAgents) -> None:
    (key,) = keys_of("a")
    fields = {"model_name": "org/model", "dtype": "float8"}
    with open_obj(fake_config(), make_agent=agents) as rig:
        rig.store((key,), (0,))
    other = {"run_config": RunConfig(fields=fields)}
    with open_obj(fake_config(), make_agent=agents, context=other) as rig:
        assert rig.lookup(key) == [MISS]
    with open_obj(fake_config(), make_agent=agents, rank=1) as rig:
        assert rig.lookup(key) == [MISS]
    with open_obj(fake_config(), make_agent=agents) as rig:
        assert rig.lookup(key) == [HIT]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "is not JSON"),
        (b"[]", "holds no object"),
        (b'{"dtype": "float8", "model_name": "org/model"}', "dtype is 'float8' there"),
        (
            json.dumps(
                {
                    "dtype": "bfloat16",
                    "model_name": "org/model",
                    "pdoffload": {"guards": {"hash_seed": "1"}},
                }
            ).encode(),
            "hash_seed: the chunks under fake/",
        ),
    ],
)
def test_c15_a_config_that_is_not_ours_stops_the_tier(
    agents: FakeAgents, text: bytes, said: str
) -> None:
    fields = {"model_name": "org/model", "dtype": "bfloat16"}
    run_config = RunConfig(fields=fields, guards={"hash_seed": "0"})
    name = f"{run_config.namespace}/config.json"
    agents.store.objects[name] = text
    region = filled_region(2)
    with pytest.raises(ConfigError, match="prefix") as caught:
        ObjTier(fake_config(), context_of(region, run_config=run_config), make_agent=agents)
    assert said in str(caught.value)
    assert agents.store.objects[name] == text, "nothing is overwritten"


def test_guards_are_added_to_a_config_that_has_none(agents: FakeAgents) -> None:
    fields = {"model_name": "org/model", "dtype": "bfloat16"}
    run_config = RunConfig(fields=fields, guards={"hash_seed": "0"})
    name = f"{run_config.namespace}/config.json"
    agents.store.objects[name] = json.dumps(fields).encode()
    with open_obj(fake_config(), make_agent=agents, context={"run_config": run_config}):
        pass
    assert json.loads(agents.store.objects[name])["pdoffload"]["guards"] == {"hash_seed": "0"}


def test_names_that_would_be_too_long_are_refused(agents: FakeAgents) -> None:
    run_config = RunConfig(fields={"model_name": "m" * 600})
    with (
        pytest.raises(ConfigError, match="stores take 1024"),
        open_obj(fake_config("p" * 300), make_agent=agents, context={"run_config": run_config}),
    ):
        pass


@pytest.mark.nixl
@pytest.mark.s3
@pytest.mark.parametrize("model", ["org/../../x", "модель", "my model", "m" * 300, "a//b", "a%2Fb"])
def test_the_name_of_a_model_stays_under_the_prefix(s3_server: S3Server, model: str) -> None:
    prefix = f"names/{uuid.uuid4().hex}"
    before = set(s3_server.names("chunks"))
    run_config = RunConfig(fields={"model_name": model, "dtype": "bfloat16"})
    (key,) = keys_of("a")
    with open_obj(
        s3_server.tier("chunks", prefix=prefix), context={"run_config": run_config}
    ) as rig:
        rig.store((key,), (3,))
        assert rig.load((key,), (4,)).succeeded == (key,)
        assert rig.bytes_of(4) == rig.bytes_of(3)
        assert rig.lookup(key) == [HIT]
        assert rig.tier.key(key) in s3_server.names("chunks"), "stored under another name"
    new = set(s3_server.names("chunks")) - before
    assert len(new) == 3
    assert all(name.startswith(f"{prefix}/") for name in new)
