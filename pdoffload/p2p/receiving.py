"""The agent whose memory peers write into, on a thread of its own.

    opening --> open --retire, once nothing is expected--> closed
       '------> failed

One receiver is one NIXL agent over the whole pool, and one *incarnation* for peers. When bytes of a lost
transfer may still land, the service opens another receiver and retires this one: after it is closed nothing
can land by it any more. Progress is made only while something is expected, because transports without
memory access in hardware need it then, and an idle process should cost nothing.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable

from pdoffload.agent.agent import Agent
from pdoffload.agent.completion import Patience
from pdoffload.clock import Clock
from pdoffload.errors import PdOffloadError, as_ours
from pdoffload.memory.host import HostRegion

logger = logging.getLogger(__name__)

OpenAgent = Callable[[str], Agent]
"""Makes an agent for peers, named for its purpose, on the thread that will own it."""

CLOSE_TIMEOUT_S = 5.0


class Stage(enum.Enum):
    """Where a receiver stands."""

    OPENING = "opening"
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class Receiver:
    """Started by its constructor. `changed` is called on the receiver's thread at each new `stage`.

    `expect` and `retire` are called by the service's thread; `metadata` is set once the stage is OPEN.
    """

    def __init__(
        self,
        incarnation: str,
        open_agent: OpenAgent,
        region: HostRegion,
        changed: Callable[[Receiver], None],
        *,
        clock: Clock,
    ) -> None:
        self.incarnation = incarnation
        self.metadata = b""
        self.open_to_cma = False
        """As the agent's, once the stage is OPEN."""
        self.stage = Stage.OPENING
        self.error: PdOffloadError | None = None
        self._open_agent = open_agent
        self._region = region
        self._changed = changed
        self._clock = clock
        self._condition = threading.Condition()
        self._expected = 0
        self._retired = False
        self._thread = threading.Thread(target=self._run, name="pdoffload-p2p-receive", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Receiver {self.incarnation}: {self.stage.value}, {self._expected} expected>"

    def expect(self, transfers: int) -> None:
        """How many transfers may bring bytes from now on."""
        with self._condition:
            if transfers != self._expected:
                self._expected = transfers
                self._condition.notify()

    def retire(self) -> None:
        """Close the agent; idempotent. Whatever is still expected will not arrive."""
        with self._condition:
            self._retired = True
            self._condition.notify()

    def join(self, timeout_s: float) -> bool:
        """After `retire`: whether the thread has ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        agent = self._open()
        if agent is None:
            self._become(Stage.FAILED)
            return
        self._become(Stage.OPEN)
        try:
            self._receive(agent)
        except BaseException as failure:  # noqa: BLE001 - the agent ends in order; another takes over
            self._fail(failure)
        try:
            agent.close(timeout_s=CLOSE_TIMEOUT_S)
        except BaseException:  # bytes may still land: nobody may hear that this agent is closed
            logger.exception(
                "the agent that receives from peers does not close; its slots are lost"
            )
            self.stage = Stage.FAILED
            return
        self._become(Stage.CLOSED)

    def _open(self) -> Agent | None:
        try:
            agent = self._open_agent("receive")
            try:
                agent.register_memory(self._region.address, self._region.size_bytes)
                self.metadata = agent.metadata()
                self.open_to_cma = agent.open_to_cma
            except BaseException:
                agent.close(timeout_s=CLOSE_TIMEOUT_S)
                raise
        except BaseException as failure:  # noqa: BLE001 - a plugin may raise anything; we are waited for
            self._fail(failure)
            return None
        return agent

    def _receive(self, agent: Agent) -> None:
        """Until it is retired. What peers still write when progress fails ends by deadlines."""
        patience = Patience(self._clock)
        expected = 0
        while not self._retired:
            if not self._expected:
                with self._condition:
                    self._condition.wait_for(lambda: self._retired or self._expected)
            if self._expected != expected:
                expected = self._expected
                patience.reset()
            agent.progress()
            patience.pause()

    def _fail(self, failure: BaseException) -> None:
        self.error = as_ours("receiving from peers", failure)
        if self.error is not failure:
            logger.error("%s", self.error, exc_info=failure)

    def _become(self, stage: Stage) -> None:
        self.stage = stage
        self._changed(self)
