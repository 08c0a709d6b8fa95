"""A real S3 server for tests: moto's, as a child process on a free loopback port.

    with S3Server(tmp_path) as server:
        server.create_bucket("chunks")
        config = server.tier("chunks", prefix="kv")

Needs `pip install 'moto[server]' boto3`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import ObjTierConfig, StoreConfig
from pdoffload.errors import DeadlineExceeded, PdOffloadError
from pdoffload.testing import processes
from pdoffload.testing.serving import free_port

ACCESS_KEY = "not-a-real-key"
SECRET_KEY = "not-a-real-secret"
"""What clients of a server without users give: anything does."""
START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_POLL_S = 0.02


class ChildServer:
    """A server process on `port`. One thread; its output goes to a file in `folder`."""

    name = "server"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / f"{self.name}-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """What to start."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it listens. Raises `PdOffloadError` with its log if it ends."""
        with self.log.open("ab") as output:
            self._process = processes.start_group(
                self.command(), env=self.environment(), output=output
            )
        deadline_s = SYSTEM_CLOCK.monotonic_s() + START_TIMEOUT_S
        while not listens(self.port):
            if self._process.poll() is not None:
                raise PdOffloadError(f"{self.name} ended: {self.log.read_text()[-2000:]}")
            if SYSTEM_CLOCK.monotonic_s() > deadline_s:
                self.stop()
                raise DeadlineExceeded(f"{self.name} to listen at {self.host}", START_TIMEOUT_S)
            SYSTEM_CLOCK.sleep(_POLL_S)

    def stop(self) -> None:
        """End it; nothing happens if it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        processes.signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            processes.signal_group(process.pid, signal.SIGKILL)
            process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        assert self._process is not None
        processes.signal_group(self._process.pid, number)


class S3Server(ChildServer):
    """moto's server. Its objects are gone when it ends.

    `open_actions`: after so many requests it checks who asks and what they may, as a real store does;
    None: anybody may do anything that is signed.
    """

    name = "s3"

    def __init__(self, folder: Path, *, open_actions: int | None = None) -> None:
        super().__init__(folder)
        self._open_actions = open_actions

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def environment(self) -> dict[str, str]:
        if self._open_actions is None:
            return super().environment()
        count = str(self._open_actions)
        return {**super().environment(), "INITIAL_NO_AUTH_ACTION_COUNT": count}

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def client(self, service: str = "s3") -> Any:
        """A boto3 client: a way to the objects that does not lead through NIXL."""
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def create_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def create_user(self, name: str, *actions: str) -> tuple[str, str]:
        """A user who may do `actions` ("s3:*") with everything: access key and secret. Three requests."""
        iam = self.client("iam")
        iam.create_user(UserName=name)
        allowed = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName=name, PolicyName="may", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return key["AccessKeyId"], key["SecretAccessKey"]

    def names(self, bucket: str) -> list[str]:
        """Every object of a bucket."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [each["Key"] for page in pages for each in page.get("Contents", ())]

    def tier(self, bucket: str, *, prefix: str = "", **settings: Any) -> ObjTierConfig:
        """The table of a tier in `bucket`; `settings` of its store, `io_threads` of the tier."""
        own = {key: settings.pop(key) for key in ("io_threads",) if key in settings}
        store = {
            "bucket": bucket,
            "endpoint_override": self.url,
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
            **settings,
        }
        return ObjTierConfig(prefix=prefix, store_config=StoreConfig(**store), **own)


def listens(port: int) -> bool:
    """Whether somebody accepts connections at this loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
