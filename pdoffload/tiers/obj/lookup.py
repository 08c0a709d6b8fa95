"""Which chunks stand in the store: the lookup of the obj tier, by NIXL's `query_memory`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing

from pdoffload.agent.agent import Agent
from pdoffload.errors import PdOffloadError
from pdoffload.layout import BlockKey
from pdoffload.tiers.health import StoreHealth
from pdoffload.tiers.lookup import ChunkLookup
from pdoffload.tiers.obj.lane import Terms

_log = logging.getLogger(__name__)

MOST_KEYS = 16
"""Asked for at once: the store's client makes a request for each, `start.ASKING_THREADS` at a time."""
SPARE_THREADS = 4
"""Lookup threads that may be left hanging in a store that is silent."""


class LookupFaults:
    """What went wrong with lookups, told by the threads that ask. Any thread."""

    def __init__(self, terms: Terms) -> None:
        self._lock = threading.Lock()
        self._terms = terms
        self._health = StoreHealth()
        self.failed = 0
        """Chunks asked for of which the store said nothing; it may have been asked for no more of them."""

    @property
    def refusing(self) -> str:
        """Why the store is not asked at present, or empty."""
        return self._health.refusing

    def admits(self) -> bool:
        with self._lock:
            return self._health.admits(self._terms.clock.monotonic_s())

    def note(self, keys: int, error: PdOffloadError) -> None:
        """The store did not answer for `keys` chunks."""
        with self._lock:
            self.failed += keys
            if self._health.failed(error, self._terms.clock.monotonic_s()):
                _log.warning("lookups in %s stop; %s", self._terms.keys.base, self._health.refusing)

    def skipped(self, keys: int) -> None:
        with self._lock:
            self.failed += keys

    def answered(self) -> None:
        with self._lock:
            if self._health.succeeded():
                _log.info("lookups in %s go on", self._terms.keys.base)


class _Asker:
    """Asks the store, with an agent of its own. One lookup thread."""

    def __init__(self, terms: Terms, faults: LookupFaults) -> None:
        self._terms = terms
        self._faults = faults
        self._agent: Agent | None = None

    def __call__(self, keys: Sequence[BlockKey]) -> list[bool]:
        if not self._faults.admits():
            self._faults.skipped(len(keys))
            return [False] * len(keys)
        names = [self._terms.keys.key(key) for key in keys]
        try:
            if self._agent is None:
                self._agent = self._terms.make_asking_agent("pdoffload-obj-lookup")
            # A key may be asked for anew while its first question is still on the way.
            there = dict(
                zip(
                    dict.fromkeys(names),
                    self._agent.query_objects(list(dict.fromkeys(names))),
                    strict=True,
                )
            )
        except PdOffloadError as error:
            finding = self._terms.why.of_read(names[0])
            told = error if finding is None else finding.error(names[0])
            self._faults.note(len(keys), told)
            return [False] * len(keys)
        self._faults.answered()
        return [there[name] for name in names]

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close(timeout_s=0.0)


def object_lookup(terms: Terms, faults: LookupFaults) -> ChunkLookup:
    """Chunks are there as objects. A question that gets no answer is a miss, and counted by `faults`."""
    return ChunkLookup(
        lambda: closing(_Asker(terms, faults)),
        medium="the store",
        thread_name="pdoffload-obj-lookup",
        timeout_s=terms.timeout_s,
        clock=terms.clock,
        most_keys=MOST_KEYS,
        spare_threads=SPARE_THREADS,
    )
