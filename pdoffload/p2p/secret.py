"""The cluster secret, and the CURVE keys that every process derives from it.

One file, the same on every host. From it come one key pair for the side that listens and one for the side
that dials, the same everywhere, so nothing has to be handed out. Who has the secret is a peer. Whoever has
not knows neither key: not even the listener's public one, without which CurveZMQ (rfc.zeromq.org/spec/26)
answers nothing. Each connection adds keys of its own, so a recording cannot be replayed.

The derivation is HKDF's (RFC 5869, HMAC-SHA-256). It is fast, so the secret must be random and not a
word: who records a handshake can try guesses.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat

import zmq
from zmq.utils import z85

from pdoffload.errors import ConfigError

SHORTEST_BYTES = 16
LONGEST_BYTES = 4096
_SALT = b"pdoffload peers, version 1"
_KEY = "cluster_secret_file"
_MAKE_ONE = "make one: openssl rand -base64 32"


class ClusterSecret:
    """Both key pairs, in ZeroMQ's text form (Z85, 40 characters). Shown nowhere."""

    __slots__ = ("client_public", "client_secret", "server_public", "server_secret")

    def __init__(self, secret: bytes) -> None:
        root = hmac.digest(_SALT, secret, hashlib.sha256)
        self.server_secret = _derived(root, b"listening")
        self.server_public = zmq.curve_public(self.server_secret)
        self.client_secret = _derived(root, b"dialling")
        self.client_public = zmq.curve_public(self.client_secret)

    def __repr__(self) -> str:
        return "<ClusterSecret>"

    def __reduce__(self) -> str:
        raise TypeError("a cluster secret does not leave its process")


def _derived(root: bytes, purpose: bytes) -> bytes:
    """A Curve25519 secret key: any 32 bytes are one."""
    return z85.encode(hmac.digest(root, purpose + b"\x01", hashlib.sha256))


def read_cluster_secret(path: str) -> ClusterSecret:
    """The secret in the file at `path`, one newline at its end left out.

    `ConfigError` if it is missing, no regular file, open to more than its owner's group, or of a length that
    no secret has. Its group may read it, since that is how Kubernetes mounts secrets (fsGroup).
    """
    shown = f"{_KEY}: got {str(path)!r}"
    try:
        # Not to wait for a writer, should it be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            [f"{shown}, which cannot be read ({error.strerror}); {_MAKE_ONE}"]
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError([f"{shown}, which is no regular file; {_MAKE_ONE}"])
        if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(
                [
                    f"{shown}, which others may open (mode {stat.S_IMODE(status.st_mode):04o}); "
                    f"chmod 600 {path}, or 640 (Kubernetes: defaultMode: 0440)"
                ]
            )
        secret = os.read(descriptor, LONGEST_BYTES + 2).removesuffix(b"\n")
    finally:
        os.close(descriptor)
    if not SHORTEST_BYTES <= len(secret) <= LONGEST_BYTES:
        length = "longer" if len(secret) > LONGEST_BYTES else f"{len(secret)} bytes long"
        raise ConfigError(
            [
                f"{shown}, which is {length}; allowed: {SHORTEST_BYTES} to {LONGEST_BYTES} bytes; {_MAKE_ONE}"
            ]
        )
    return ClusterSecret(secret)
