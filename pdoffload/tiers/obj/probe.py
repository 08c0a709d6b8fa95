"""The store tried out at start: reached, let in, written to and read from, within `LIMIT_S`.

    plain requests (why not, apart)  -->  the same through NIXL  -->  config.json compared or written

NIXL's client takes its time with a store that refuses and does not say why, so plain requests go first. On
a thread of its own, which is left behind if the store is silent.
"""

from __future__ import annotations

import ctypes
import http.client
import logging
import mmap
import threading

import numpy as np

from pdoffload.agent.agent import Agent, Op
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.agent.transfer import TransferState
from pdoffload.clock import Clock
from pdoffload.config import ObjTierConfig
from pdoffload.errors import ConfigError, PdOffloadError
from pdoffload.layout import PAGE_BYTES, RunConfig
from pdoffload.tiers.obj.diagnosis import PROBE_BYTES, Finding, Trouble, of_answer, of_error
from pdoffload.tiers.obj.keys import ObjectKeys
from pdoffload.tiers.obj.lane import MakeAgent
from pdoffload.tiers.obj.requests import StoreRequests
from pdoffload.tiers.run_config import compare_config, config_text

_log = logging.getLogger(__name__)

LIMIT_S = 10.0
_REQUEST_S = 4.0
"""For one plain request."""
_RETRIES_S = (0.1, 0.3)
"""Pauses before a request that a failing store is asked again."""
_MOST_CONFIG_BYTES = 64 << 10

_KEYS = {
    Trouble.ABSENT_BUCKET: "bucket",
    Trouble.FORBIDDEN: "bucket",
    Trouble.CREDENTIALS: "access_key, secret_key",
    Trouble.SCHEME: "scheme",
    Trouble.REGION: "region",
}
"""Which setting a trouble is about; `endpoint_override` for the others."""
_REMEDIES = {
    Trouble.ABSENT_BUCKET: "create it, or name another one",
    Trouble.FORBIDDEN: "allow these credentials to list the bucket and to get and put its objects",
    Trouble.CREDENTIALS: "give those of the store, or none for the SDK's own chain",
    Trouble.REFUSED: "start the store, or name where it listens",
    Trouble.UNKNOWN_HOST: "name a host that resolves",
    Trouble.SLOW: "name a store that answers from here",
    Trouble.SCHEME: "set scheme to what the store speaks, and ca_bundle if its authority is your own",
    Trouble.REGION: "set region to the bucket's own",
    Trouble.FAILING: "look into the store's own log",
    Trouble.OTHER: "look into the store's own log",
}


class StoreProbe:
    """One try, by `run`. `requests` is None for a store that only NIXL reaches (a fake)."""

    def __init__(
        self,
        config: ObjTierConfig,
        keys: ObjectKeys,
        run_config: RunConfig,
        make_agent: MakeAgent,
        requests: StoreRequests | None,
        clock: Clock,
    ) -> None:
        self._config = config
        self._keys = keys
        self._run_config = run_config
        self._make_agent = make_agent
        self._requests = requests
        self._clock = clock
        self._problems: tuple[str, ...] = ()
        self._deadline_s = clock.monotonic_s() + LIMIT_S

    def run(self) -> None:
        """Raises `ConfigError` with what is in the way."""
        if self._requests is not None:
            self._look(self._requests)
        thread = threading.Thread(target=self._work, name="pdoffload-obj-probe", daemon=True)
        thread.start()
        thread.join(max(0.0, self._left_s()))
        if thread.is_alive():
            slow = Finding(Trouble.SLOW, f"no answer through NIXL within {LIMIT_S:g} s")
            raise ConfigError([self._problem(slow)])
        if self._problems:
            raise ConfigError(self._problems)

    def _left_s(self) -> float:
        return self._deadline_s - self._clock.monotonic_s()

    # --- plain requests ---

    def _look(self, requests: StoreRequests) -> None:
        pauses_s = list(_RETRIES_S)
        for verb in ("put", "get") if requests.signs else ("get",):
            finding = self._ask(requests, verb)
            while finding is not None and finding.trouble is Trouble.FAILING and pauses_s:
                self._clock.sleep(pauses_s.pop(0))
                finding = self._ask(requests, verb)
            if finding is not None:
                raise ConfigError([self._problem(finding)])

    def _ask(self, requests: StoreRequests, verb: str) -> Finding | None:
        timeout_s = min(_REQUEST_S, max(0.1, self._left_s()))
        try:
            if verb == "put":
                answer = requests.put(self._keys.probe, PROBE_BYTES, timeout_s=timeout_s)
            else:
                answer = requests.get(self._keys.probe, timeout_s=timeout_s)
        except (OSError, http.client.HTTPException) as error:
            return of_error(error, requests)
        return of_answer(answer, requests)

    def _problem(self, finding: Finding) -> str:
        store, backend = self._config.store_config, self._config.backend
        key = _KEYS.get(finding.trouble, "endpoint_override")
        if backend == "AZURE_BLOB" and finding.trouble is Trouble.CREDENTIALS:
            key = "connection_string"
        where = self._requests.endpoint.url if self._requests else "the store"
        kind = finding.trouble.name.lower().replace("_", " ")
        remedy = _REMEDIES.get(finding.trouble, "look into the store's own log")
        return (
            f"store_config.{key}: bucket {store.bucket!r} at {where} cannot be used ({kind}): "
            f"{finding.said}; {remedy}"
        )

    # --- through NIXL ---

    def _work(self) -> None:
        try:
            agent = self._make_agent("pdoffload-obj-probe")
            try:
                self._through(agent)
            finally:
                agent.close(timeout_s=0.1)
        except ConfigError as error:
            self._problems = error.problems
        except PdOffloadError as error:
            self._problems = (self._problem(Finding(Trouble.OTHER, f"{error}")),)
        except Exception as error:  # noqa: BLE001 - the starting thread tells it
            _log.error("the probe of the store ended unexpectedly", exc_info=error)
            self._problems = (self._problem(Finding(Trouble.OTHER, type(error).__name__)),)

    def _through(self, agent: Agent) -> None:
        store = _SmallObjects(agent, max(0.1, self._left_s()))
        store.write(self._keys.probe, PROBE_BYTES)
        if store.read(self._keys.probe, len(PROBE_BYTES)) != PROBE_BYTES:
            said = f"{self._keys.probe} was written, and other bytes came back"
            raise ConfigError([self._problem(Finding(Trouble.OTHER, said))])
        text = config_text(self._run_config).encode()
        if not store.has(self._keys.config):
            # Of two first starters one finds the other's file, and compares it below.
            store.write(self._keys.config, text)
        stored = store.read(self._keys.config, _MOST_CONFIG_BYTES)
        where = f"{self._config.store_config.bucket}/{self._keys.config}"
        if not compare_config("prefix", where, stored, self._run_config):
            store.write(self._keys.config, text)


class _SmallObjects:
    """Whole small objects through an agent. Raises the error of a request that did not end well."""

    def __init__(self, agent: Agent, timeout_s: float) -> None:
        self._agent = agent
        self._timeout_s = timeout_s
        self._memory = mmap.mmap(-1, _MOST_CONFIG_BYTES)
        self._address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        agent.register_memory(self._address, len(self._memory))

    def has(self, name: str) -> bool:
        (there,) = self._agent.query_objects([name])
        return there

    def write(self, name: str, content: bytes) -> None:
        ctypes.memmove(self._address, content, len(content))
        self._move(Op.WRITE, name, len(content))

    def read(self, name: str, size_bytes: int) -> bytes:
        """At most `size_bytes`; zeros at the end, which text has not, are left out unless all were read."""
        ctypes.memset(self._address, 0, size_bytes)
        self._move(Op.READ, name, size_bytes)
        content = self._memory[:size_bytes]
        return content if size_bytes <= PAGE_BYTES else content.rstrip(b"\0")

    def _move(self, op: Op, name: str, size_bytes: int) -> None:
        region = self._agent.register_objects([name], [size_bytes])
        transfer = self._agent.submit(
            op,
            pieces(MemoryKind.DRAM, [self._address], size_bytes),
            pieces(MemoryKind.OBJECT, [0], size_bytes, int(region.rows[0, 2])),
            timeout_s=self._timeout_s,
            what=f"{'write' if op is Op.WRITE else 'read'} of {name}",
        )
        self._agent.wait(transfer)
        if transfer.state is not TransferState.DONE:
            raise transfer.error or PdOffloadError(transfer.what)
        region.release()
