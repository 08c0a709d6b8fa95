"""Which kind of agent serves a set of backends: the one place that decides it.

NIXL, for everything that it has a plugin for. Its wheels have none for MOONCAKE: there, the Transfer Engine's
own package stands in for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pdoffload.agent import mooncake, nixl
from pdoffload.agent.backends import (
    Backend,
    LibfabricBackend,
    MooncakeBackend,
    UcxBackend,
    backend_named,
)
from pdoffload.agent.bounded import BoundedDriver
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.mooncake_engine import warn_of_open_ports
from pdoffload.agent.plugins import usability
from pdoffload.agent.ucx import opens_to_cma
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import BackendUnusable


def open_agent(
    name: str, backends: Sequence[Backend], *, clock: Clock = SYSTEM_CLOCK
) -> DrivenAgent:
    """An agent with exactly `backends`; `BackendUnusable` with the reason if one of them cannot be used.

    It belongs to the calling thread, and its name is made unique among all hosts.
    """
    for each in backends:
        if isinstance(each, MooncakeBackend):
            if _has_mooncake_plugin():
                # It heeds no host, and binds all interfaces.
                warn_of_open_ports("this host")
                continue
            if len(backends) > 1:
                names = ", ".join(other.name for other in backends)
                reason = f"{names}: NIXL has no plugin for MOONCAKE here, so it goes with no other"
                raise BackendUnusable("create_backend", reason)
            return mooncake.MooncakeAgent(name, each.host, clock=clock)
    if any(isinstance(backend, LibfabricBackend) for backend in backends):
        return _BoundedAgent(name, backends, clock)
    return nixl.NixlAgent(name, backends, clock=clock)


class _BoundedAgent(DrivenAgent):
    """A NIXL agent whose plugins may wait for a peer without end; see `pdoffload.agent.bounded`."""

    def __init__(self, name: str, backends: Sequence[Backend], clock: Clock) -> None:
        unique = nixl.unique_name(name)
        self._bounded = BoundedDriver(unique, lambda: nixl.NixlDriver(unique, backends))
        super().__init__(unique, self._bounded, clock=clock)
        self.open_to_cma = opens_to_cma(backends)

    @property
    def lost(self) -> bool:
        return self._bounded.lost


@functools.cache
def _has_mooncake_plugin() -> bool:
    return not usability(MooncakeBackend.name).why


def peer_backends(
    names: Sequence[str], *, ucx_tls: str = "", host: str = "localhost"
) -> list[Backend]:
    """The backends of these names as agents for peers need them. `ConfigError` for one that is none's.

    `ucx_tls` is UCX's alone; `host`, where peers reach this process, is MOONCAKE's.
    """
    special: dict[str, Backend] = {
        UcxBackend.name: UcxBackend(reach="network", tls=ucx_tls),
        MooncakeBackend.name: MooncakeBackend(host=host),
    }
    return [special.get(name) or backend_named(name) for name in names]
