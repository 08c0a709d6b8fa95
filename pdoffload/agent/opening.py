"""Which kind of agent serves a set of backends: the one place that decides it."""

from __future__ import annotations

from collections.abc import Sequence

from pdoffload.agent.backends import Backend
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
