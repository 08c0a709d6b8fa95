"""Part `peers` of `backends.py`: chunks from a prefiller over every network backend of NIXL.

Our p2p tier on both ends, each in a process of its own, without vLLM (`peers.py` compares with vLLM's tier).
As yardsticks the same bytes by a bare NIXL write, and by UCX alone, over the transports that UCX picks and
over TCP. Every byte that arrives is compared outside the measurement.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from bare_write import BareWrite
from common import MIB, Cost, Row, Run, alternate
from raw_ucx import RawUcx
from raw_ucx import missing as ucx_missing
from tier_figures import figures_of
from ucx_child import Operation

from pdoffload.testing.engine_process import CHILD, PULL, EngineProcess
from pdoffload.testing.nursery import Nursery
from pdoffload.testing.peer_engine import Chunks, EngineOptions

ROOT = Path(__file__).parents[1]
CHUNK_BYTES = 2 * MIB
_FABRIC = ROOT / ".venv-fabric"


def _nothing() -> str:
    return ""


def _no_fabric() -> str:
    stamp = _FABRIC / ".stamp"
    return "" if stamp.is_file() else "NIXL's LIBFABRIC is not installed: make fabric"


def _no_mooncake() -> str:
    found = importlib.util.find_spec("mooncake")
    return (
        ""
        if found
        else "Mooncake's Transfer Engine is not installed: pip install 'pdoffload[mooncake]'"
    )


def _this_python() -> Nursery:
    return Nursery(CHILD)


def _fabric_python() -> Nursery:
    """NIXL's LIBFABRIC needs another NIXL, in an environment of its own; libfabric's TCP on the loopback."""
    from pdoffload.testing import interpreter

    libraries = _FABRIC / "lib" / "fabric"
    python = interpreter.of_environment(
        _FABRIC / "bin" / "python",
        LD_LIBRARY_PATH=str(libraries),
        LD_PRELOAD=str(libraries / "loopback.so"),
        FI_PROVIDER="tcp",
        FI_TCP_IFACE="lo",
    )
    return Nursery(CHILD, python)


def _mooncake_python() -> Nursery:
    """Mooncake's package wants libibverbs, even for TCP: where it is missing, a stand-in without devices."""
    from pdoffload.testing import interpreter, verbs

    return Nursery(CHILD, interpreter.this_one(**verbs.environment()))


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A way for peers' bytes. The table below is all that has to grow."""

    options: Mapping[str, Any]
    """Of an `EngineOptions`."""
    like: str
    """The end of the names of its yardsticks: the same kind of transport."""
    missing: Callable[[], str] = _nothing
    """Why it cannot be measured here; nothing if it can."""
    nursery: Callable[[], Nursery] = _this_python


YARDSTICKS: dict[str, dict[str, str]] = {"": {}, " tcp": {"UCX_TLS": "tcp"}}
BACKENDS: dict[str, Backend] = {
    "UCX": Backend(options={}, like=""),
    "UCX tcp": Backend(options={"ucx_tls": "tcp"}, like=" tcp"),
    "LIBFABRIC tcp": Backend(
        options={"backends": ("LIBFABRIC",)},
        like=" tcp",
        missing=_no_fabric,
        nursery=_fabric_python,
    ),
    "MOONCAKE tcp": Backend(
        options={"backends": ("MOONCAKE",)},
        like=" tcp",
        missing=_no_mooncake,
        nursery=_mooncake_python,
    ),
}


class _Pair:
    """A prefiller and a decoder over one backend."""

    def __init__(self, stack: ExitStack, backend: Backend, num_chunks: int) -> None:
        nursery = backend.nursery()
        stack.callback(nursery.close)
        options = EngineOptions(
            num_slots=4 * num_chunks, chunk_bytes=CHUNK_BYTES, num_threads=4, **backend.options
        )
        self._producer, self._consumer = (
            stack.enter_context(EngineProcess(nursery, options)) for _ in range(2)
        )
        self._num_chunks = num_chunks
        self._serial = itertools.count()

    def pull(self) -> Cost:
        """New chunks, kept by one and pulled by the other. CPU seconds of both, comparison left out."""
        name = f"prompt {next(self._serial)}"
        chunks = Chunks(name, self._num_chunks)
        self._producer.keep(name, chunks)
        cpu_s = self._cpu_s()
        pulled = self._consumer.pull(PULL, self._producer, name, chunks)
        cpu_s = self._cpu_s() - cpu_s
        assert pulled.num_right == self._num_chunks, (pulled, self._consumer.look())
        self._consumer.forget()
        self._producer.forget()
        return Cost(pulled.took_s, pulled.cpu_s + cpu_s)

    def transports(self) -> str:
        """By which the producer has written, as it says itself."""
        return ", ".join(name for name, _ in self._producer.look().peers.transports)

    def _cpu_s(self) -> float:
        return time.clock_gettime(~self._producer.pid << 3 | 2)


def measure(run: Run, *, num_chunks: int, rounds: int) -> None:
    """All backends that are there take turns with the yardsticks; one row for each."""
    here = {name: backend for name, backend in BACKENDS.items() if not backend.missing()}
    run.remarks += [
        f"{name}: {backend.missing()}" for name, backend in BACKENDS.items() if name not in here
    ]
    if ucx_missing():
        run.remarks.append(f"UCX alone: {ucx_missing()}")
    with ExitStack() as stack:
        pairs = {name: _Pair(stack, backend, num_chunks) for name, backend in here.items()}
        contenders = {name: pair.pull for name, pair in pairs.items()}
        transports: dict[str, str] = {}
        for like, environment in YARDSTICKS.items():
            shape = {
                "chunk_bytes": CHUNK_BYTES,
                "num_chunks": num_chunks,
                "environment": environment,
            }
            bare = stack.enter_context(BareWrite(**shape))
            contenders[f"bare NIXL{like}"] = bare.write
            transports[f"bare NIXL{like}"] = bare.transports
            if not ucx_missing():
                raw = stack.enter_context(RawUcx(Operation.PUT, **shape))
                contenders[f"UCX alone{like}"] = raw.write
                transports[f"UCX alone{like}"] = raw.connected.transports
        costs = alternate(contenders, rounds, warm_up=2)
        transports |= {name: pair.transports() for name, pair in pairs.items()}
    _add_rows(run, costs, num_chunks, transports)


def _add_rows(
    run: Run, costs: Mapping[str, list[Cost]], num_chunks: int, transports: Mapping[str, str]
) -> None:
    yardsticks = {}
    for who in costs:
        like = " tcp" if who.endswith(" tcp") else ""
        like = BACKENDS[who].like if who in BACKENDS else like
        against = {"bare": f"bare NIXL{like}", "ucx": f"UCX alone{like}"}
        yardsticks[who] = {name: other for name, other in against.items() if other in costs}
    if os.environ.get("UCX_TLS"):
        run.remarks.append(f"UCX_TLS is {os.environ['UCX_TLS']} for all of them.")
    for who, figures in figures_of(costs, num_chunks * CHUNK_BYTES, yardsticks).items():
        case: dict[str, str | int] = {
            "part": "peers",
            "who": who,
            "transport": transports[who],
            "chunks": num_chunks,
        }
        run.add(Row(case=case, figures=figures))
