"""What objects are called: the file scheme, under a prefix.

    <prefix>/<model>_<digest>/config.json                     the run configuration, written once
    <prefix>/<model>_<digest>/.probe                          written at every start, to try the store
    <prefix>/<model>_<digest>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin

Nothing of a name comes from a request but digits of a hash, and the prefix was checked where it was read:
no key leaves its prefix.
"""

from __future__ import annotations

from pdoffload.errors import ConfigError
from pdoffload.layout import BlockKey, RunConfig, block_hash, group_index

LONGEST_KEY_BYTES = 1024
"""What S3 and Azure take."""
_LONGEST_TAIL = len("/123/12_g4294967295/") + len(".bin")
_HASH_DIGITS = 128
"""Of the longest hash an engine has; SHA-256 has half of them."""


class ObjectKeys:
    """Names of one run configuration and rank. Immutable; any thread."""

    __slots__ = ("base", "config", "namespace", "probe")

    def __init__(self, prefix: str, run_config: RunConfig, rank: int) -> None:
        """Raises `ConfigError` if names would be longer than stores take."""
        self.namespace = f"{prefix}/{run_config.namespace}" if prefix else run_config.namespace
        self.base = f"{self.namespace}_r{rank}"
        self.config = f"{self.namespace}/config.json"
        self.probe = f"{self.namespace}/.probe"
        longest = len(self.base.encode()) + _LONGEST_TAIL + _HASH_DIGITS
        if longest > LONGEST_KEY_BYTES:
            raise ConfigError(
                [
                    f"prefix: keys under it would have up to {longest} bytes, and stores take "
                    f"{LONGEST_KEY_BYTES}; shorten prefix, or the name the model is served under"
                ]
            )

    def __repr__(self) -> str:
        return f"<ObjectKeys {self.base}>"

    def key(self, block: BlockKey) -> str:
        """The name of the chunk `block`."""
        name = block_hash(block).hex()
        return f"{self.base}/{name[:3]}/{name[3:5]}_g{group_index(block)}/{name}.bin"
