"""Why a store refuses, in words and apart: absent, forbidden, wrong credentials, refused, slow, failing."""

from __future__ import annotations

import enum
import errno
import http.client
import socket
import ssl

import msgspec

from pdoffload.clock import Clock
from pdoffload.errors import StorageError
from pdoffload.layout import PAGE_BYTES
from pdoffload.tiers.obj.requests import Answer, StoreRequests

PROBE_BYTES = b"pdoffload was here\n".ljust(PAGE_BYTES, b"\0")
"""What the probe's object holds, whoever writes it."""
_LOOK_S = 3.0
"""For one plain request during service."""
_KNOWN_S = 1.0
"""A finding stands for so long, so that many failures at once make one request."""
_CREDENTIAL_CODES = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
)


_REGION_CODES = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)


class Trouble(enum.Enum):
    """What stands between us and an object. The values are what an error carries as `errno`."""

    ABSENT_OBJECT = errno.ENOENT
    ABSENT_BUCKET = errno.ENODEV
    FORBIDDEN = errno.EACCES
    CREDENTIALS = errno.EPERM
    REFUSED = errno.ECONNREFUSED
    UNKNOWN_HOST = errno.EHOSTUNREACH
    SLOW = errno.ETIMEDOUT
    SCHEME = errno.EPROTO
    REGION = errno.EXDEV
    FAILING = errno.EAGAIN
    OTHER = errno.EIO


class Finding(msgspec.Struct, frozen=True):
    """A trouble and what the store, or the system, says of it."""

    trouble: Trouble
    said: str

    def error(self, path: str) -> StorageError:
        return StorageError(path, self.said, self.trouble.value)


class Why:
    """Says why the store refused; this one, for stores that cannot be asked, never knows."""

    def of_read(self, name: str) -> Finding | None:
        """Why the object `name` could not be read; None where it can, or where nothing can be told."""
        return None

    def of_write(self) -> Finding | None:
        """Why nothing could be written; None where it can, or where nothing can be told."""
        return None


class Diagnosis(Why):
    """Looks at a store by plain requests after NIXL has failed. Any thread; one look takes `_LOOK_S`."""

    def __init__(self, requests: StoreRequests, probe_key: str, clock: Clock) -> None:
        self._requests = requests
        self._probe_key = probe_key
        self._clock = clock
        self._known: dict[bool, tuple[float, Finding]] = {}

    def of_read(self, name: str) -> Finding | None:
        return self._look(False, name)

    def of_write(self) -> Finding | None:
        return self._look(True, self._probe_key)

    def _look(self, writes: bool, name: str) -> Finding | None:
        known = self._known.get(writes)
        if known is not None and self._clock.monotonic_s() - known[0] < _KNOWN_S:
            return known[1]
        requests = self._requests
        try:
            if writes:
                answer = requests.put(name, PROBE_BYTES, timeout_s=_LOOK_S)
            else:
                answer = requests.get(name, timeout_s=_LOOK_S)
        except (OSError, http.client.HTTPException) as error:
            finding: Finding | None = of_error(error, requests)
        else:
            finding = of_answer(answer, requests)
        if finding is not None and finding.trouble is not Trouble.ABSENT_OBJECT:
            self._known[writes] = (self._clock.monotonic_s(), finding)
        return finding


def of_answer(answer: Answer, requests: StoreRequests) -> Finding | None:
    """What an answer tells; None if it is a good one, or one to a request that could not be signed."""
    status, code = answer.status, answer.code
    said = f"the store answers {status}{f' {code}' if code else ''}"
    if status < 300:
        return None
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return Finding(Trouble.ABSENT_BUCKET, said)
    if code in _REGION_CODES:
        # Without a region in the settings NIXL's client may know one that we do not.
        other = Finding(Trouble.REGION, f"{said}: the bucket is of another region")
        return other if requests.region_given else None
    if code == "" and status == 400 and requests.endpoint.scheme == "http":
        return Finding(Trouble.SCHEME, f"{said} to plain HTTP; it may want https")
    if status == 404:
        return Finding(Trouble.ABSENT_OBJECT, said) if requests.signs else None
    if status >= 500:
        return Finding(Trouble.FAILING, said)
    if not requests.signs:
        return None
    if code in _CREDENTIAL_CODES:
        return Finding(Trouble.CREDENTIALS, said)
    return Finding(Trouble.FORBIDDEN if status in (401, 403) else Trouble.OTHER, said)


def of_error(error: OSError | http.client.HTTPException, requests: StoreRequests) -> Finding:
    """What it tells that there was no answer at all."""
    endpoint = requests.endpoint
    if isinstance(error, TimeoutError):
        return Finding(Trouble.SLOW, "no answer in time")
    if isinstance(error, ssl.SSLCertVerificationError):
        return Finding(Trouble.SCHEME, f"its certificate is not trusted ({error.verify_message})")
    if isinstance(error, ssl.SSLError):
        return Finding(Trouble.SCHEME, f"it does not speak https ({error.reason or 'no TLS'})")
    if isinstance(error, ConnectionRefusedError):
        return Finding(Trouble.REFUSED, f"nobody listens at {endpoint.host}:{endpoint.port}")
    if isinstance(error, socket.gaierror):
        return Finding(Trouble.UNKNOWN_HOST, f"{endpoint.host} is not known ({error.strerror})")
    if isinstance(error, http.client.BadStatusLine | ConnectionResetError):
        return Finding(Trouble.SCHEME, f"it does not answer in HTTP; is it {endpoint.scheme}?")
    return Finding(Trouble.OTHER, f"{type(error).__name__}: {error}")
