"""Azurite's blob service for tests, as a child process on a free loopback port.

It is an npm package; `scripts/get_azurite.sh` puts it into `.cache/azurite`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pdoffload.config import ObjTierConfig, StoreConfig
from pdoffload.testing.s3_server import ChildServer

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, printed in its documentation: everybody's."""


def why_no_azurite(cache_dir: Path) -> str:
    """What is missing, and how to get it; empty if Azurite can be started."""
    if shutil.which("node") is None:
        return "node is not installed"
    return "" if _script(cache_dir).is_file() else "Azurite is missing: scripts/get_azurite.sh"


def _script(cache_dir: Path) -> Path:
    return cache_dir / "azurite/node_modules/azurite/dist/src/blob/main.js"


class AzuriteServer(ChildServer):
    """Azurite with its files in `folder`."""

    name = "azurite"

    def __init__(self, folder: Path, cache_dir: Path) -> None:
        super().__init__(folder)
        self._folder = folder / f"azurite-{self.port}"
        self._script = _script(cache_dir)

    def command(self) -> list[str]:
        return [
            "node",
            str(self._script),
            *("--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
            *("--location", str(self._folder)),
            # It wants to know a service version before Azure's SDKs may use it.
            *("--silent", "--skipApiVersionCheck", "--disableTelemetry"),
        ]

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://{self.host}/{ACCOUNT};"
        )

    def client(self) -> Any:
        """A client of Azure's own package: a way to the blobs that does not lead through NIXL."""
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self.connection_string)

    def create_container(self, name: str) -> None:
        self.client().create_container(name)

    def tier(self, container: str, *, prefix: str = "", **settings: Any) -> ObjTierConfig:
        """The table of a tier in `container`."""
        store = {"bucket": container, "connection_string": self.connection_string, **settings}
        return ObjTierConfig(prefix=prefix, backend="AZURE_BLOB", store_config=StoreConfig(**store))
