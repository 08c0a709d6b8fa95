"""What runs in an `EngineProcess`: one engine, stepped between commands as long as anything is awaited."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pdoffload.agent import mooncake, nixl
from pdoffload.agent.agent import Agent
from pdoffload.agent.backends import UcxBackend
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.opening import open_agent as open_real_agent
from pdoffload.agent.opening import peer_backends
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import BackendUnusable
from pdoffload.p2p.address import Address
from pdoffload.p2p.link import Down, Link, Received
from pdoffload.p2p.messages import (
    AbortFetch,
    Connect,
    ConnectAck,
    Fetch,
    Lookup,
    LookupResp,
    Message,
    TransferDone,
    decode,
)
from pdoffload.testing.engine_process import (
    Advance,
    Arrive,
    Begin,
    Close,
    Command,
    Finish,
    Flip,
    Forget,
    Halt,
    Look,
    Reserve,
    Stage,
    Tell,
    Want,
)
from pdoffload.testing.peer_engine import HOST, EngineOptions, PeerEngine

_STEP_S = 0.001
_PAUSE_S = 0.0005
_TURNS_S = 2.0
_COMING: dict[type[Message], Stage] = {
    Connect: Stage.CONNECT_COMES,
    ConnectAck: Stage.ACK_COMES,
    Lookup: Stage.LOOKUP_COMES,
    LookupResp: Stage.ANSWER_COMES,
    Fetch: Stage.FETCH_COMES,
    TransferDone: Stage.DONE_COMES,
    AbortFetch: Stage.ABORT_COMES,
}


class _Halts:
    """Stops the process once it reaches the stage it was told. Any thread."""

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.received: Counter[str] = Counter()
        self.turns = 0
        """Of the service's thread so far."""

    def reached(self, stage: Stage | None) -> None:
        if stage is not None and stage is self.stage:
            self.stage = None
            # To this thread, which then does not get any further; another one might take it late.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class _HaltingLink(Link):
    """A link that stops the process at messages. `halts` is set once it is bound."""

    halts: _Halts

    def poll(self, timeout_s: float | None) -> Iterator[Received | Down]:
        self.halts.turns += 1
        for event in super().poll(timeout_s):
            if isinstance(event, Received):
                kind = type(decode(event.frame))
                self.halts.received[kind.__name__] += 1
                self.halts.reached(_COMING.get(kind))
            yield event

    def send(self, address: Address, frame: bytes) -> bool:
        if isinstance(decode(frame), TransferDone):
            self.halts.reached(Stage.WRITE_ENDED)
        return super().send(address, frame)


def _halting(agent: DrivenAgent, halts: _Halts) -> Agent:
    """The same agent; it stops the process at writes."""
    submit = agent.submit

    def halting_submit(*args: Any, **named: Any) -> Transfer:
        halts.reached(Stage.WRITE_BEGINS)
        transfer = submit(*args, **named)
        if transfer.state is TransferState.RUNNING:
            halts.reached(Stage.WRITE_RUNS)
        return transfer

    setattr(agent, "submit", halting_submit)  # noqa: B010
    return agent


class _Log(logging.Handler):
    """Keeps what is logged until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname}: {record.getMessage()}")

    def take(self) -> Sequence[str]:
        lines, self._lines = self._lines, []
        return lines


class _Child:
    def __init__(self, engine: PeerEngine, halts: _Halts, log: _Log) -> None:
        self._engine = engine
        self._halts = halts
        self._log = log

    def run(self, connection: socket.socket) -> None:
        """Obey until the other end is closed."""
        commands = msgspec.json.Decoder(Command)
        buffer = b""
        while True:
            if select.select([connection], [], [], _STEP_S if self._engine.busy else None)[0]:
                received = connection.recv(1 << 20)
                if not received:
                    break
                *lines, buffer = (buffer + received).split(b"\n")
                for line in lines:
                    answer = self._obey(commands.decode(line))
                    connection.sendall(msgspec.json.encode(answer) + b"\n")
            if self._engine.busy:
                self._engine.step()
        self._engine.close()

    def _obey(self, command: Command) -> Any:
        engine = self._engine
        match command:
            case Begin(request_id, params):
                return engine.begin(request_id, params)
            case Reserve(chunks, request_id):
                return engine.reserve(chunks, request_id)
            case Arrive(chunks, success):
                return engine.arrive(chunks, success=success)
            case Want(request_id, params, chunks):
                return engine.want(request_id, params, chunks)
            case Tell(request_id):
                return engine.pulled(request_id)
            case Finish(request_id):
                return engine.finish(request_id)
            case Forget():
                return engine.forget()
            case Flip(chunks):
                return engine.flip(chunks)
            case Halt(stage):
                self._halts.stage = stage
            case Advance(duration_s):
                engine.advance(duration_s)
                self._await_turns()
            case Look():
                return msgspec.structs.replace(
                    engine.look(), log=self._log.take(), received=dict(self._halts.received)
                )
            case Close(timeout_s):
                engine.close(timeout_s)
                return [thread.name for thread in threading.enumerate()]
        return None

    def _await_turns(self) -> None:
        """Let the service's thread see that time has passed: its next deadlines are counted from there."""
        give_up_s = SYSTEM_CLOCK.monotonic_s() + _TURNS_S
        # The one that is under way may have looked at the clock before.
        for _ in range(2):
            before = self._halts.turns
            self._engine.advance(0.0)
            while self._halts.turns == before and SYSTEM_CLOCK.monotonic_s() < give_up_s:
                SYSTEM_CLOCK.sleep(_PAUSE_S)


def prepare() -> None:
    """What is slow the first time and lasts over a fork; nothing where NIXL is missing."""
    with contextlib.suppress(BackendUnusable):
        nixl.NixlAgent("nursery", [UcxBackend(reach="network")]).close()


def main(connection: socket.socket, encoded: bytes) -> None:
    options = msgspec.msgpack.decode(encoded, type=EngineOptions)
    os.environ.update(options.environment)
    if options.agent_name:
        for module in (nixl, mooncake):
            setattr(module, "unique_name", lambda purpose: f"{options.agent_name}-{purpose}")  # noqa: B010
    log, halts = _Log(), _Halts()
    logger = logging.getLogger("pdoffload")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)

    def open_agent(purpose: str, clock: Clock) -> Agent:
        backends = peer_backends(options.backends, ucx_tls=options.ucx_tls, host=HOST)
        return _halting(open_real_agent(purpose, backends, clock=clock), halts)

    class BoundLink(_HaltingLink):
        pass

    BoundLink.halts = halts
    engine = PeerEngine(options, open_agent=open_agent, link_class=BoundLink)
    connection.sendall(msgspec.json.encode(engine.address.port) + b"\n")
    _Child(engine, halts, log).run(connection)
    if options.ends_at_once:
        os._exit(0)
