"""The sockets of the control channel. One thread owns a link; `wake` alone is for all.

    this process                                 a peer
    ROUTER, bound to host:port  <--------------  its DEALER to us, named by its own host:port
    a DEALER to the peer: a line  ------------>  ROUTER, bound to host:port

The ROUTER never sends and the DEALERs never receive, as in vLLM 0.32's p2p tier. A line is one connection:
dialled once and never again, so that no frame is lost unseen between two. When it ends, `Down` says so.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterator

import msgspec
import zmq

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import ConfigError, MisuseError
from pdoffload.p2p.address import Address, endpoint, literal, resolve, unresolvable
from pdoffload.p2p.line import OVERDUE, Heartbeat, Line, Stage
from pdoffload.p2p.listener import Listener
from pdoffload.p2p.listener import Received as Received
from pdoffload.p2p.names import Names
from pdoffload.p2p.secret import ClusterSecret

DIAL_TIMEOUT_S = 5.0
"""For the host's address, the connection and the handshake together."""
FAREWELL_S = 0.3
"""How long a closed line may still send what was queued, a `disconnect` as a rule."""
VLLM_HEARTBEAT = Heartbeat()
# A line takes three: the DEALER and both ends of its monitor. There are at most 4096 peers.
_MAX_SOCKETS = 3 * 4096 + 16


class Down(msgspec.Struct, frozen=True):
    """The line to `address` has ended and is forgotten; of the frames queued last any may be lost.

    Comes once for a line that this side did not close, unless `Link.look` told it. `reason` is for an
    operator.
    """

    address: Address
    reason: str


class Link:
    """The listening socket and the lines. Made by `bind`, on any thread; then one thread owns it.

    Nothing happens between polls, except that libzmq's own thread reads ahead and answers heartbeats.
    """

    def __init__(
        self,
        secret: ClusterSecret | None,
        heartbeat: Heartbeat,
        dial_timeout_s: float,
        clock: Clock,
    ) -> None:
        """Everything but the listening socket; see `bind`."""
        self._secret = secret
        self._heartbeat = heartbeat
        self._dial_timeout_s = dial_timeout_s
        self._clock = clock
        self._lines: dict[Address, Line] = {}
        self._by_monitor: dict[zmq.Socket[bytes], Line] = {}
        self._rising: set[Line] = set()
        """Lines that are not up yet, or have ended while they were dialled."""
        self._unresolved: dict[str, list[Line]] = {}
        """By host; closed ones too, if they have something to send."""
        self._closed = False
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._names = Names(self.wake)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._listener = Listener(self._context, secret, heartbeat, dial_timeout_s, clock)
        self._poller = zmq.Poller()
        for each in (*self._listener.sockets, self._wake_fd):
            self._poller.register(each, zmq.POLLIN)
        self._address = Address("", 0)

    @classmethod
    def bind(
        cls,
        address: Address,
        *,
        secret: ClusterSecret | None = None,
        heartbeat: Heartbeat = VLLM_HEARTBEAT,
        dial_timeout_s: float = DIAL_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Link:
        """Listen at `address`; at any free port if its port is 0.

        `ConfigError` if that cannot be: it names the tier's key, and nothing is left open. A port
        that is taken is known at once; a name takes as long as its resolver.
        """
        try:
            numeric = resolve(address.host)[0]
        except OSError as error:
            raise ConfigError([unresolvable("host", address.host, error)]) from error
        link = cls(secret, heartbeat, dial_timeout_s, clock)
        try:
            port = link._listener.bind(numeric, address.port)
            link._address = Address(address.host, port)
        except zmq.ZMQError as error:
            raise ConfigError([_unbindable(address, error)]) from error
        finally:
            if not link._address.port:
                link.close()
        return link

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._lines)} lines"
        return f"<Link {self._address}: {state}>"

    @property
    def address(self) -> Address:
        """Where this process is reached and what peers know it by; with the real port."""
        return self._address

    @property
    def refused_handshakes(self) -> int:
        """Clients that were not let in, so far."""
        return self._listener.refusals.count

    @property
    def dropped_messages(self) -> int:
        """Messages of peers without a right identity, or of more than one frame, so far."""
        return self._listener.drops.count

    def wake(self) -> None:
        """Let the current `poll`, or the next one, return at once. Any thread, at any time."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def connect(self, address: Address) -> None:
        """Open a line, nothing if there is one. Returns at once; a failure comes as `Down`."""
        self._check_open()
        if address in self._lines:
            return
        line = Line(address, self._clock.monotonic_s() + self._dial_timeout_s)
        self._lines[address] = line
        self._rising.add(line)
        numeric = literal(address.host)
        if numeric is not None:
            self._dial(line, numeric)
            return
        self._unresolved.setdefault(address.host, []).append(line)
        self._names.ask(address.host)

    def send(self, address: Address, frame: bytes) -> bool:
        """Queue `frame`, at once, also on a line that is not up yet.

        False if it was not queued: there is no line, or the peer does not read what it is sent.
        """
        self._check_open()
        line = self._lines.get(address)
        return line is not None and line.send(frame)

    def look(self, address: Address) -> str:
        """Why the line to `address` has ended, if it has by now; else empty. Never waits.

        It is forgotten then, and no `Down` tells of it. For the caller that is about to answer a frame: that
        may have been sent, and read, after our own line ended, and before `poll` came to say so.
        """
        self._check_open()
        line = self._lines.get(address)
        down = None if line is None else self._look(line)
        return "" if down is None else down.reason

    def close_line(self, address: Address) -> None:
        """End a line, if there is one. What was queued may still go out for `FAREWELL_S`."""
        self._check_open()
        line = self._lines.get(address)
        if line is None:
            return
        self._forget(line)
        # A farewell to a name that is being resolved goes out when it is.
        if not line.has_waiting:
            line.close(FAREWELL_S)

    def poll(self, timeout_s: float | None) -> Iterator[Received | Down]:
        """What has happened; waits up to `timeout_s` for something to happen, None: for ever.

        Each event is taken from its socket when it is asked for, so that lines which the caller closes and
        opens between two events are what they seem. A wake-up ends the wait and is no event.
        """
        self._check_open()
        ready = dict(self._poller.poll(self._wait_ms(timeout_s)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        yield from self._listener.serve(ready)
        if self._closed:
            return
        self._dial_resolved()
        looked_at = [self._by_monitor[each] for each in ready if each in self._by_monitor]
        for line in (*looked_at, *self._rising):
            down = self._look(line)
            if down is not None:
                yield down

    def close(self) -> None:
        """End all lines and stop listening. Waits up to `FAREWELL_S` for what was queued. Idempotent."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_fd)
        for line in self._lines.values():
            line.close(FAREWELL_S)
        self._lines.clear()
        self._by_monitor.clear()
        self._rising.clear()
        self._unresolved.clear()
        self._listener.close()
        self._context.destroy(linger=0)

    def _check_open(self) -> None:
        if self._closed:
            raise MisuseError(f"{self!r} is closed")

    def _dial(self, line: Line, numeric: str) -> None:
        line.dial(
            self._context,
            endpoint(numeric, line.address.port),
            self._address.identity,
            self._secret,
            self._heartbeat,
            self._dial_timeout_s,
        )
        if line.monitor is not None:
            self._by_monitor[line.monitor] = line
            self._poller.register(line.monitor, zmq.POLLIN)

    def _dial_resolved(self) -> None:
        for host, answer in self._names.take():
            for line in self._unresolved.pop(host, ()):
                current = self._lines.get(line.address)
                if isinstance(answer, OSError):
                    line.ended = unresolvable("its host", host, answer)
                elif current is line:
                    self._dial(line, answer)
                elif current is None and line.has_waiting and not self._overdue(line):
                    self._dial(line, answer)
                    self._forget(line)
                    line.close(FAREWELL_S)

    def _wait_ms(self, timeout_s: float | None) -> int:
        waits_s = [] if timeout_s is None else [timeout_s]
        if self._rising:
            now_s = self._clock.monotonic_s()
            waits_s += [0.0 if line.ended else line.due_s - now_s for line in self._rising]
        return max(0, math.ceil(min(waits_s) * 1000)) if waits_s else -1

    def _look(self, line: Line) -> Down | None:
        """`Down` if `line` has ended. It may have been closed by the owner since it was seen ready."""
        if line.stage is Stage.ENDED:
            return None
        line.look()
        if line.stage is Stage.UP:
            self._rising.discard(line)
        elif not line.ended and self._overdue(line):
            line.ended = f"{OVERDUE[line.stage]} within {self._dial_timeout_s:g} s"
        if not line.ended:
            return None
        self._forget(line)
        line.close()
        return Down(line.address, line.ended)

    def _overdue(self, line: Line) -> bool:
        return self._clock.monotonic_s() >= line.due_s

    def _forget(self, line: Line) -> None:
        if self._lines.get(line.address) is line:
            del self._lines[line.address]
        self._rising.discard(line)
        if line.monitor is not None and self._by_monitor.pop(line.monitor, None) is not None:
            self._poller.unregister(line.monitor)


def _unbindable(address: Address, error: zmq.ZMQError) -> str:
    """Why nothing can listen at `address`, as `ConfigError` takes it."""
    if error.errno == errno.EADDRINUSE:
        return f"port: {address} is taken by another process; give another one, or 0 for any"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host: {address} cannot be bound: this host has no such address; give one it has"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port: {address} may not be bound by this user; give a port from 1024 on"
    return f"host: {address} cannot be bound ({error.strerror})"
