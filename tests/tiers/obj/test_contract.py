"""The obj tier keeps the contract: over a fake agent, a real S3 server, and Azurite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.layout import BlockKey
from pdoffload.testing.agents import FakeAgent, FakeDriver, FakeStore
from pdoffload.testing.azurite_server import AzuriteServer
from pdoffload.testing.obj_rig import fake_config
from pdoffload.testing.s3_server import S3Server
from pdoffload.testing.tier_contract import TierContract
from pdoffload.tiers.base import Tier, TierContext
from pdoffload.tiers.obj.tier import ObjTier


def flipped(content: bytes) -> bytes:
    middle = len(content) // 3
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


class TestOverAFakeAgent(TierContract):
    @pytest.fixture(autouse=True)
    def store(self) -> FakeStore:
        self._store = FakeStore()
        return self._store

    def open(self, context: TierContext, folder: Path) -> Tier:
        def make_agent(name: str) -> FakeAgent:
            return FakeAgent(name, driver=FakeDriver(store=self._store))

        return ObjTier(fake_config(), context, make_agent=make_agent)

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, ObjTier)
        self._store.objects[tier.key(key)] = flipped(self._store.objects[tier.key(key)])

    def remove(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, ObjTier)
        del self._store.objects[tier.key(key)]


@pytest.mark.nixl
@pytest.mark.s3
class TestOverS3(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> Iterator[None]:
        self._s3 = s3_server
        self._client = s3_server.client()
        yield
        self._client.close()

    def open(self, context: TierContext, folder: Path) -> Tier:
        return ObjTier(self._s3.tier("chunks", prefix=f"c/{uuid.uuid4().hex}"), context)

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, ObjTier)
        content = self._client.get_object(Bucket="chunks", Key=tier.key(key))["Body"].read()
        self._client.put_object(Bucket="chunks", Key=tier.key(key), Body=flipped(content))

    def remove(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, ObjTier)
        self._client.delete_object(Bucket="chunks", Key=tier.key(key))


@pytest.mark.nixl
@pytest.mark.s3
class TestOverAzurite(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, azurite_server: AzuriteServer) -> Iterator[None]:
        self._azurite = azurite_server
        service = azurite_server.client()
        self._container = service.get_container_client("chunks")
        yield
        self._container.close()
        service.close()

    def open(self, context: TierContext, folder: Path) -> Tier:
        return ObjTier(self._azurite.tier("chunks", prefix=f"c/{uuid.uuid4().hex}"), context)

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, ObjTier)
        blob = self._container.get_blob_client(tier.key(key))
        blob.upload_blob(flipped(blob.download_blob().readall()), overwrite=True)

    def remove(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, ObjTier)
        self._container.delete_blob(tier.key(key))
