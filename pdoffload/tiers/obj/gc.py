"""Emptying a bucket of a tier's chunks, by age and by total size.

NIXL deletes nothing, so the store's own client does; its package is an optional extra.
Only what has the form of a chunk's name inside the tier's own namespaces under its prefix is ever listed as
ours; whatever else lies in the bucket is not looked at twice. `config.json` and `.probe` stay.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.config import ObjTierConfig
from pdoffload.config.stores import endpoint_of
from pdoffload.errors import ConfigError, StorageError

_CHUNK = re.compile(
    r"(?P<namespace>[^/]+_[0-9a-f]{12})_r[0-9]+/(?P<a>[0-9a-f]{3})/(?P<b>[0-9a-f]{2})_g[0-9]+/"
    r"(?P<hash>[0-9a-f]+)\.bin"
)
_DELETED_AT_ONCE = 1000


class StoredObject(msgspec.Struct, frozen=True):
    """One chunk in the store."""

    name: str
    size_bytes: int
    age_s: float


class GcReport(msgspec.Struct, frozen=True):
    """What was found, and what was, or with a dry run would be, deleted."""

    dry_run: bool
    found: int
    found_bytes: int
    chosen: int
    chosen_bytes: int
    deleted: int
    """0 after a dry run; fewer than `chosen` where the store refused some."""
    failed: tuple[str, ...] = ()
    """Why some were not deleted, each reason once."""


class Listing(Protocol):
    """The store's own client, as far as it is needed here."""

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime.datetime]]:
        """Name, size and last change of everything under `prefix`."""
        ...

    def delete(self, names: Sequence[str]) -> list[str]:
        """Delete up to `_DELETED_AT_ONCE`; a reason for each that is still there."""
        ...


def collect(
    config: ObjTierConfig,
    *,
    older_than_s: float | None = None,
    keep_bytes: int | None = None,
    namespace: str | None = None,
    dry_run: bool = True,
    clock: Clock = SYSTEM_CLOCK,
    listing: Listing | None = None,
) -> GcReport:
    """Delete chunks last written longer than `older_than_s` ago, then the oldest until `keep_bytes` are left.

    `namespace` (`<model>_<digest>`) narrows it to one run configuration. With neither bound nothing is
    chosen. Raises `ConfigError` where the client's package is missing, `StorageError` where the store
    refuses to list.
    """
    listing = listing or open_listing(config)
    start = f"{config.prefix}/" if config.prefix else ""
    found = sorted(
        _chunks(listing, start, namespace, clock.wall_s()),
        key=lambda each: each.age_s,
        reverse=True,
    )
    chosen = _choose(found, older_than_s, keep_bytes)
    deleted, failed = (0, ()) if dry_run else _delete(listing, chosen)
    return GcReport(
        dry_run=dry_run,
        found=len(found),
        found_bytes=sum(each.size_bytes for each in found),
        chosen=len(chosen),
        chosen_bytes=sum(each.size_bytes for each in chosen),
        deleted=deleted,
        failed=failed,
    )


def _chunks(
    listing: Listing, start: str, namespace: str | None, now_s: float
) -> Iterator[StoredObject]:
    for name, size_bytes, changed in listing.objects(f"{start}{namespace or ''}"):
        told = _CHUNK.fullmatch(name.removeprefix(start)) if name.startswith(start) else None
        if told is None or not told["hash"].startswith(told["a"] + told["b"]):
            continue
        if namespace is None or told["namespace"] == namespace:
            yield StoredObject(name, size_bytes, now_s - changed.timestamp())


def _choose(
    oldest_first: list[StoredObject], older_than_s: float | None, keep_bytes: int | None
) -> list[StoredObject]:
    left_bytes = sum(each.size_bytes for each in oldest_first)
    chosen = []
    for each in oldest_first:
        too_old = older_than_s is not None and each.age_s > older_than_s
        too_much = keep_bytes is not None and left_bytes > keep_bytes
        if not (too_old or too_much):
            break
        chosen.append(each)
        left_bytes -= each.size_bytes
    return chosen


def _delete(listing: Listing, chosen: list[StoredObject]) -> tuple[int, tuple[str, ...]]:
    deleted, reasons = 0, []
    for at in range(0, len(chosen), _DELETED_AT_ONCE):
        names = [each.name for each in chosen[at : at + _DELETED_AT_ONCE]]
        refused = listing.delete(names)
        deleted += len(names) - len(refused)
        reasons += refused
    return deleted, tuple(dict.fromkeys(reasons))


def open_listing(config: ObjTierConfig) -> Listing:
    """The client of the tier's store. Raises `ConfigError` with the remedy where its package is missing."""
    return _AzureListing(config) if config.backend == "AZURE_BLOB" else _S3Listing(config)


class _S3Listing:
    def __init__(self, config: ObjTierConfig) -> None:
        try:
            import boto3
        except ImportError as error:
            raise _missing("boto3", "s3") from error
        store = config.store_config
        self._bucket = store.bucket
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint_of(config).url if store.endpoint_override else None,
            region_name=store.region or None,
            aws_access_key_id=store.access_key or None,
            aws_secret_access_key=store.secret_key or None,
            aws_session_token=store.session_token or None,
            verify=store.ca_bundle or None,
        )

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime.datetime]]:
        from botocore.exceptions import BotoCoreError, ClientError

        pages = self._client.get_paginator("list_objects_v2")
        try:
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                for each in page.get("Contents", ()):
                    yield each["Key"], each["Size"], each["LastModified"]
        except (BotoCoreError, ClientError) as error:
            raise StorageError(f"{self._bucket}/{prefix}", f"cannot be listed: {error}") from error

    def delete(self, names: Sequence[str]) -> list[str]:
        from botocore.exceptions import BotoCoreError, ClientError

        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            answer = self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
        except (BotoCoreError, ClientError) as error:
            return [str(error)] * len(names)
        return [f"{each['Code']}: {each['Message']}" for each in answer.get("Errors", ())]


class _AzureListing:
    def __init__(self, config: ObjTierConfig) -> None:
        try:
            from azure.storage.blob import ContainerClient
        except ImportError as error:
            raise _missing("azure-storage-blob", "azure") from error
        store = config.store_config
        self._name = store.bucket
        self._client: Any
        if store.connection_string:
            self._client = ContainerClient.from_connection_string(
                store.connection_string, store.bucket
            )
        else:
            self._client = ContainerClient(
                store.endpoint_override, store.bucket, credential=_azure_chain()
            )

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime.datetime]]:
        from azure.core.exceptions import AzureError

        try:
            for each in self._client.list_blobs(name_starts_with=prefix):
                yield each.name, each.size, each.last_modified
        except AzureError as error:
            raise StorageError(f"{self._name}/{prefix}", f"cannot be listed: {error}") from error

    def delete(self, names: Sequence[str]) -> list[str]:
        from azure.core.exceptions import AzureError, ResourceNotFoundError

        reasons = []
        for name in names:
            try:
                self._client.delete_blob(name)
            except ResourceNotFoundError:
                continue  # somebody else was faster
            except AzureError as error:
                reasons.append(str(error))
        return reasons


def _azure_chain() -> Any:
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        raise _missing("azure-identity", "azure") from error
    return DefaultAzureCredential()


def _missing(package: str, extra: str) -> ConfigError:
    return ConfigError(
        [f"backend: deleting needs {package}; get it by: pip install 'pdoffload[{extra}]'"]
    )
