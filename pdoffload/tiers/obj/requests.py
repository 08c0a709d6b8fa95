"""Plain signed requests to a store, for what NIXL does not tell: why a store refuses.

NIXL says NIXL_ERR_BACKEND for a wrong key, an absent bucket and a server that is down alike. These few
requests, of a few bytes each, find out which. Bytes of chunks never go this way. The formulas are those of
"AWS Signature Version 4" and of Azure's "Authorize with Shared Key".
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import http.client
import re
import ssl
import urllib.parse
from typing import Protocol

import msgspec

from pdoffload.clock import Clock
from pdoffload.config import ObjTierConfig, StoreConfig
from pdoffload.config.stores import Endpoint, connection_parts, endpoint_of

_AZURE_VERSION = "2021-08-06"
_MOST_ANSWER_BYTES = 8192
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9]+)\s*</Code>")
Headers = dict[str, str]


class Answer(msgspec.Struct, frozen=True):
    """What a store said: the status, and the word for it in the body or a header, if any."""

    status: int
    code: str


class Signer(Protocol):
    """Makes a request one of ours."""

    signs: bool
    """Whether there are credentials to sign with."""

    def path(self, name: str) -> str:
        """The path of the object `name`, quoted."""
        ...

    def headers(self, method: str, path: str, body: bytes) -> Headers:
        """The headers that carry the signature."""
        ...


class StoreRequests:
    """Requests to the store of one tier, a connection each. Any thread."""

    def __init__(self, config: ObjTierConfig, clock: Clock) -> None:
        self.endpoint = endpoint_of(config)
        self.region_given = bool(config.store_config.region)
        self._ca_bundle = config.store_config.ca_bundle
        self._signer: Signer = (
            _AzureSigner(config.store_config, self.endpoint, clock)
            if config.backend == "AZURE_BLOB"
            else _S3Signer(config.store_config, self.endpoint, clock)
        )

    def __repr__(self) -> str:
        return f"<StoreRequests to {self.endpoint.url}>"

    @property
    def signs(self) -> bool:
        """Whether the answers are those that NIXL gets too."""
        return self._signer.signs

    def get(self, name: str, *, timeout_s: float) -> Answer:
        """Ask for the first bytes of an object. Raises `OSError` and `http.client.HTTPException`."""
        return self._request("GET", name, b"", timeout_s)

    def put(self, name: str, body: bytes, *, timeout_s: float) -> Answer:
        """Write a small object. Raises `OSError` and `http.client.HTTPException`."""
        return self._request("PUT", name, body, timeout_s)

    def _request(self, method: str, name: str, body: bytes, timeout_s: float) -> Answer:
        path = self._signer.path(name)
        headers = self._signer.headers(method, path, body)
        connection = self._connect(timeout_s)
        try:
            connection.request(method, path, body=body or None, headers=headers)
            response = connection.getresponse()
            said = response.read(_MOST_ANSWER_BYTES).decode(errors="replace")
            code = response.headers.get("x-ms-error-code", "")
            found = _CODE.search(said)
            return Answer(response.status, code or (found[1] if found else ""))
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self.endpoint.host.strip("[]"), self.endpoint.port
        if self.endpoint.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        trusted = ssl.create_default_context(cafile=self._ca_bundle or None)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trusted)


class _S3Signer:
    def __init__(self, store: StoreConfig, endpoint: Endpoint, clock: Clock) -> None:
        self.signs = bool(store.access_key)
        self._store = store
        self._endpoint = endpoint
        self._clock = clock

    def path(self, name: str) -> str:
        return (
            f"{self._endpoint.path}/{self._store.bucket}/{urllib.parse.quote(name, safe='/-_.~')}"
        )

    def headers(self, method: str, path: str, body: bytes) -> Headers:
        now = _utc(self._clock)
        stamp = now.strftime("%Y%m%dT%H%M%SZ")
        body_digest = hashlib.sha256(body).hexdigest()
        host = f"{self._endpoint.host}:{self._endpoint.port}"
        headers = {"host": host, "x-amz-content-sha256": body_digest, "x-amz-date": stamp}
        if self._store.session_token:
            headers["x-amz-security-token"] = self._store.session_token
        if not self.signs:
            return {"host": host}
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = "\n".join((method, path, "", lines, names, body_digest))
        region = self._store.region or "us-east-1"
        scope = f"{stamp[:8]}/{region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, digest))
        key = f"AWS4{self._store.secret_key}".encode()
        for step in (*scope.split("/"), to_sign):
            key = hmac.digest(key, step.encode(), "sha256")
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._store.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={key.hex()}"
        )
        return headers


class _AzureSigner:
    def __init__(self, store: StoreConfig, endpoint: Endpoint, clock: Clock) -> None:
        parts = connection_parts(store.connection_string)
        self._account = parts.get("AccountName", "")
        self._key = parts.get("AccountKey", "")
        self.signs = bool(self._account and self._key)
        self._store = store
        self._endpoint = endpoint
        self._clock = clock

    def path(self, name: str) -> str:
        return (
            f"{self._endpoint.path}/{self._store.bucket}/{urllib.parse.quote(name, safe='/-_.~')}"
        )

    def headers(self, method: str, path: str, body: bytes) -> Headers:
        date = _utc(self._clock).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": date, "x-ms-version": _AZURE_VERSION}
        if method == "PUT":
            headers["x-ms-blob-type"] = "BlockBlob"
        if not self.signs:
            return headers
        kind = "application/octet-stream" if body else ""
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        # Method, encoding, language, length, MD5, type, and six more that stay empty.
        fixed = [method, "", "", str(len(body) or ""), "", kind, "", "", "", "", "", ""]
        text = "\n".join(fixed) + f"\n{lines}/{self._account}{path}"
        signature = hmac.digest(_decoded(self._key), text.encode(), "sha256")
        if kind:
            headers["content-type"] = kind
        encoded = base64.b64encode(signature).decode()
        return {**headers, "authorization": f"SharedKey {self._account}:{encoded}"}


def _utc(clock: Clock) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(clock.wall_s(), datetime.UTC)


def _decoded(key: str) -> bytes:
    """The bytes of an account's key; of one that is no base64, bytes that no store accepts."""
    try:
        return base64.b64decode(key)
    except ValueError:
        return b""
