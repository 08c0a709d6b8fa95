"""Which kind of agent serves a set of backends: the one place that decides it."""

from __future__ import annotations

from collections.abc import Sequence

from pdoffload.agent import nixl
from pdoffload.agent.backends import Backend, LibfabricBackend, UcxBackend, backend_named
from pdoffload.agent.bounded import BoundedDriver
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.ucx import opens_to_cma
from pdoffload.clock import SYSTEM_CLOCK, Clock


def open_agent(
    name: str, backends: Sequence[Backend], *, clock: Clock = SYSTEM_CLOCK
) -> DrivenAgent:
    """An agent with exactly `backends`; `BackendUnusable` with the reason if one of them cannot be used.

    It belongs to the calling thread, and its name is made unique among all hosts.
    """
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


def peer_backends(names: Sequence[str], *, ucx_tls: str = "") -> list[Backend]:
    """The backends of these names as agents for peers need them; `ucx_tls` is UCX's alone.

    `ConfigError` for a name that is no backend's.
    """
    return [
        UcxBackend(reach="network", tls=ucx_tls) if name == UcxBackend.name else backend_named(name)
        for name in names
    ]
