"""What a process says of itself in a handshake, what it demands of the other side, and its deadlines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdoffload.agent.metadata import backends_in
from pdoffload.config import Verify
from pdoffload.layout import Geometry, RunConfig
from pdoffload.p2p.messages import Connect, fit_for_a_log
from pdoffload.p2p.neighbours import own_mark

LOOKUP_GRACE_S = 5.0
"""How long a producer waits for chunks that are on their way into its pool before it calls them a miss;
vLLM's own producers wait as long."""
REMEMBER_S = 60.0
"""How long the id of a keep that is over is remembered, to answer late fetches at once; vLLM's own figure."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds. What each one bounds is written in docs/peers.md."""

    lookup_timeout_s: float = 30.0
    load_timeout_s: float = 30.0
    store_timeout_s: float = 30.0
    abort_timeout_s: float = 10.0
    unbound_store_timeout_s: float = 60.0


class Target(msgspec.Struct, frozen=True, eq=False):
    """A peer's memory, as one `connect` gave it. Another `connect` makes another target."""

    name: str
    """Of the peer, for logs and errors."""
    metadata: bytes
    base_address: int
    num_slots: int
    chunk_bytes: int


class PeerTerms(msgspec.Struct, frozen=True, kw_only=True):
    """One process's side of every handshake it makes.

    `hash_seed` is asked for at the first handshake: vLLM knows its own only after the tiers are built.
    """

    geometry: Geometry
    base_address: int
    run_config: RunConfig
    hash_seed: Callable[[], str]
    deadlines: Deadlines = Deadlines()
    verify: Verify = Verify.ALWAYS
    backends: tuple[str, ...] = ()
    """Of the agents that write to peers; empty: every peer can be written to, as far as is known."""

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 over the run configuration, as vLLM's p2p tier forms it."""
        return hashlib.sha256(_canonical(self.run_config.fields).encode()).hexdigest()[:16]

    @property
    def guards(self) -> dict[str, str]:
        """Every setting by name, so that a refusal can show both values; stock vLLM sends none."""
        settings = {**self.run_config.fields, **self.run_config.guards}
        # The seed has a field of its own on the wire.
        return {
            name: _canonical(settings[name]) for name in sorted(settings) if name != "hash_seed"
        }

    def introduce(self, peer_id: str, metadata: bytes, incarnation: str) -> Connect:
        """Our `connect`: the memory that may be written, and what the other side must have in common."""
        return Connect(
            peer_id=peer_id,
            agent_metadata=metadata,
            base_addr=self.base_address,
            num_blocks=self.geometry.num_slots,
            block_len=self.geometry.chunk_bytes,
            config_fingerprint=self.fingerprint,
            hash_seed=self.hash_seed(),
            incarnation=incarnation,
            guards=self.guards,
            process=own_mark(),
        )

    def objections(self, theirs: Connect) -> list[str]:
        """Why this peer and we cannot share chunks, each with both values; empty if we can."""
        found = []
        if theirs.block_len != self.geometry.chunk_bytes:
            found.append(f"block_len: {self.geometry.chunk_bytes} here, {theirs.block_len} there")
        if theirs.hash_seed != self.hash_seed():
            found.append(
                f"hash_seed: {self.hash_seed()!r} here, {fit_for_a_log(theirs.hash_seed)!r} there "
                "(PYTHONHASHSEED must be the same on all peers, or unset)"
            )
        found += self._unreachable(theirs.agent_metadata)
        found += _differences(self.guards, theirs.guards)
        # The settings behind it are named above, unless one side does not send them.
        if not found and theirs.config_fingerprint not in ("", self.fingerprint):
            found.append(
                f"config_fingerprint: {self.fingerprint} here, "
                f"{fit_for_a_log(theirs.config_fingerprint)} there "
                "(model, dtype, block size, groups or parallelism differ)"
            )
        return found

    def _unreachable(self, metadata: bytes) -> list[str]:
        """That no agent of ours could write to theirs. What cannot be read is told by the agent itself."""
        theirs = backends_in(metadata)
        if not self.backends or not theirs or set(self.backends) & set(theirs):
            return []
        there = fit_for_a_log(", ".join(theirs))
        return [f"backends: {', '.join(self.backends)} here, {there} there"]


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Of the settings that both sides name: a newer version may name more."""
    return [
        f"{name}: {fit_for_a_log(ours[name])} here, {fit_for_a_log(theirs[name])} there"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
