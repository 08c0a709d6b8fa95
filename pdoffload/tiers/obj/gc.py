"""Collecting what need not be kept of a bucket, by age and by total size.

NIXL deletes nothing, so the store's own client does; its package is an optional extra.
Only what has the form of a chunk's name inside the tier's own namespaces under its prefix is ever listed as
ours; whatever else lies in the bucket is not looked at twice. `config.json` and `.probe` stay.
A store does not tell when an object was last read: the time of last use is the time it was written.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from pdoffload.clock import Clock
from pdoffload.config import ObjTierConfig
from pdoffload.config.reading import suggestion
from pdoffload.config.stores import endpoint_of
from pdoffload.errors import ConfigError, StorageError
from pdoffload.tiers.gc import Amount, GcPolicy, GcReport, NamespaceReport

_CHUNK = re.compile(
    r"(?P<namespace>[^/]+_[0-9a-f]{12}_r[0-9]+)/(?P<a>[0-9a-f]{3})/(?P<b>[0-9a-f]{2})_g[0-9]+/"
    r"(?P<hash>[0-9a-f]+)\.bin"
)
_DELETED_AT_ONCE = 1000


class StoredObject(NamedTuple):
    """One chunk in the store; sorts by the time it was written."""

    written_s: float
    name: str
    size_bytes: int
    namespace: str


class Listing(Protocol):
    """The store's own client, as far as it is needed here."""

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime.datetime]]:
        """Name, size and last change of everything under `prefix`; raises `StorageError`."""
        ...

    def delete(self, names: Sequence[str]) -> dict[str, str]:
        """Delete up to `_DELETED_AT_ONCE`; those that are still there, and why."""
        ...


class ObjCollector:
    """The collector of one tier's prefix in its bucket."""

    def __init__(self, config: ObjTierConfig, listing: Listing | None = None) -> None:
        self._config = config
        self._listing = listing
        self._start = f"{config.prefix}/" if config.prefix else ""
        self._root = f"{config.store_config.bucket}/{self._start}".rstrip("/")

    def __repr__(self) -> str:
        return f"<ObjCollector {self._root}>"

    def __call__(self, policy: GcPolicy, *, delete: bool, clock: Clock) -> GcReport:
        """See `Collector`. Takes about 400 bytes of memory for each object."""
        listing = self._listing or open_listing(self._config)
        problems: list[str] = []
        found: list[StoredObject] = []
        try:
            found = sorted(self._chunks(listing, policy.namespace or ""))
        except StorageError as error:
            problems.append(str(error))
        reports = _reports(found)
        if policy.namespace is not None and not problems:
            self._require(policy.namespace, reports)
            reports = {policy.namespace: reports[policy.namespace]}
            found = [each for each in found if each.namespace == policy.namespace]
        chosen = _choose(found, policy, clock.wall_s(), reports)
        if delete and not problems:
            _delete(listing, chosen, reports, problems)
        return GcReport(
            store="obj",
            root=self._root,
            deleted=delete,
            namespaces=[reports[name] for name in sorted(reports)],
            skipped=[],
            problems=problems,
        )

    def _chunks(self, listing: Listing, namespace: str) -> Iterator[StoredObject]:
        for name, size_bytes, changed in listing.objects(self._start + namespace):
            told = _CHUNK.fullmatch(name[len(self._start) :])
            if told is not None and told["hash"].startswith(told["a"] + told["b"]):
                yield StoredObject(changed.timestamp(), name, size_bytes, told["namespace"])

    def _require(self, namespace: str, known: dict[str, NamespaceReport]) -> None:
        if namespace not in known:
            raise ConfigError(
                [
                    f"--namespace: {namespace!r} is not under {self._root!r}; "
                    f"{suggestion(namespace, sorted(known))}"
                ]
            )


def _reports(found: Sequence[StoredObject]) -> dict[str, NamespaceReport]:
    """What was found, by namespace. `found` is sorted."""
    reports: dict[str, NamespaceReport] = {}
    for each in found:
        report = reports.get(each.namespace)
        if report is None:
            report = reports[each.namespace] = NamespaceReport(
                name=each.namespace,
                chunks=Amount(),
                oldest_use_s=each.written_s,
                unverified=Amount(),
                wrong_size=Amount(),
                unfinished=Amount(),
                being_written=Amount(),
                to_go={},
                removed=Amount(),
            )
        report.chunks.add(each.size_bytes)
        report.newest_use_s = each.written_s
    return reports


def _choose(
    oldest_first: Sequence[StoredObject],
    policy: GcPolicy,
    now_s: float,
    reports: dict[str, NamespaceReport],
) -> list[StoredObject]:
    """What has to go; the reports say why."""
    left_bytes = sum(each.size_bytes for each in oldest_first)
    chosen = []
    for each in oldest_first:
        age_s = now_s - each.written_s
        if policy.older_than_s is not None and age_s > policy.older_than_s:
            why = "older_than"
        elif policy.max_bytes is not None and left_bytes > policy.max_bytes:
            why = "max_bytes"
        else:
            break
        chosen.append(each)
        left_bytes -= each.size_bytes
        reports[each.namespace].to_go.setdefault(why, Amount()).add(each.size_bytes)
    return chosen


def _delete(
    listing: Listing,
    chosen: Sequence[StoredObject],
    reports: dict[str, NamespaceReport],
    problems: list[str],
) -> None:
    reasons: dict[str, int] = {}
    for at in range(0, len(chosen), _DELETED_AT_ONCE):
        batch = chosen[at : at + _DELETED_AT_ONCE]
        refused = listing.delete([each.name for each in batch])
        for each in batch:
            if each.name not in refused:
                reports[each.namespace].removed.add(each.size_bytes)
        for reason in refused.values():
            reasons[reason] = reasons.get(reason, 0) + 1
    problems += [f"{count} objects were not deleted: {why}" for why, count in reasons.items()]


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

    def delete(self, names: Sequence[str]) -> dict[str, str]:
        from botocore.exceptions import BotoCoreError, ClientError

        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            answer = self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
        except (BotoCoreError, ClientError) as error:
            return dict.fromkeys(names, str(error))
        return {
            each["Key"]: f"{each['Code']}: {each['Message']}" for each in answer.get("Errors", ())
        }


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

    def delete(self, names: Sequence[str]) -> dict[str, str]:
        from azure.core.exceptions import AzureError, ResourceNotFoundError

        refused = {}
        for name in names:
            try:
                self._client.delete_blob(name)
            except ResourceNotFoundError:
                continue  # somebody else was faster
            except AzureError as error:
                refused[name] = str(error)
        return refused


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
