"""Which kind of agent serves a set of backends: the one place that decides it."""

from __future__ import annotations

from collections.abc import Sequence

from pdoffload.agent.backends import Backend, UcxBackend, backend_named
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.nixl import NixlAgent
from pdoffload.clock import SYSTEM_CLOCK, Clock


def open_agent(
    name: str, backends: Sequence[Backend], *, clock: Clock = SYSTEM_CLOCK
) -> DrivenAgent:
    """An agent with exactly `backends`; `BackendUnusable` with the reason if one of them cannot be used.

    It belongs to the calling thread, and its name is made unique among all hosts.
    """
    return NixlAgent(name, backends, clock=clock)


def peer_backends(names: Sequence[str], *, ucx_tls: str = "") -> list[Backend]:
    """The backends of these names as agents for peers need them; `ucx_tls` is UCX's alone.

    `ConfigError` for a name that is no backend's.
    """
    return [
        UcxBackend(reach="network", tls=ucx_tls) if name == UcxBackend.name else backend_named(name)
        for name in names
    ]
