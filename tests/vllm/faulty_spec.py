"""Our specs with copies that fail on purpose; imported by a server as `spec_module_path`.

PDOFFLOAD_TEST_FAULTS holds a JSON list of faults, used up in order by the copies of their direction:
{"op": "READ" | "WRITE", "kind": "refuse" | "raise" | "stuck" | "none"}. READ goes to the device.
"""

from __future__ import annotations

import json
import os
from typing import Any

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.driver import RUNNING, Verdict
from pdoffload.agent.nixl import NixlDriver
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import NixlError
from pdoffload.vllm.spec import NixlCPUOffloadingSpec, NixlTieringOffloadingSpec

FAULTS = json.loads(os.environ.get("PDOFFLOAD_TEST_FAULTS", "[]"))


class FaultyDriver(NixlDriver):
    """The real driver; a request that has drawn a fault is never posted."""

    def make(self, op: Op, local: Any, remote: Any, peer: str | None) -> Any:
        request = super().make(op, local, remote, peer)
        drawn = next((fault for fault in FAULTS if fault["op"] == op.name), None)
        if drawn is not None:
            FAULTS.remove(drawn)
        self.faults[id(request)] = drawn["kind"] if drawn else "none"
        return request

    @property
    def faults(self) -> dict[int, str]:
        return self.__dict__.setdefault("_faults", {})

    def start(self, handle: Any) -> Verdict:
        kind = self.faults[id(handle)]
        if kind == "refuse":
            return Verdict(TransferState.FAILED, NixlError("postXferReq", "refused by the test"))
        if kind == "raise":
            raise ZeroDivisionError("an error nobody thought of")
        return RUNNING if kind == "stuck" else super().start(handle)

    def check(self, handle: Any) -> Verdict:
        return RUNNING if self.faults[id(handle)] == "stuck" else super().check(handle)


def faulty_agent(name: str) -> Agent:
    return DrivenAgent(name, FaultyDriver(name, [UcxBackend()]))


class FaultyCPUSpec(NixlCPUOffloadingSpec):
    def make_agent(self, name: str) -> Agent:
        return faulty_agent(name)


class FaultyTieringSpec(NixlTieringOffloadingSpec):
    def make_agent(self, name: str) -> Agent:
        return faulty_agent(name)
