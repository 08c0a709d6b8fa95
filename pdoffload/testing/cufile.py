"""NIXL's GDS plugins over a cuFile for tests: its set-up, and the faults a test orders from it.

The library itself is a C source of the tests, compiled when they run, and no part of this package. It moves
bytes by pread and pwrite on host memory, so a plugin's own code runs where there is no GPU. The process that
uses it is started with `environment`.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.metadata
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from pdoffload.clock import SYSTEM_CLOCK

SONAME = "libcufile.so.0"
MARK = "CUFILE_FOR_TESTS"
"""Set in the environment of a process that has the library."""
OPEN_ERROR = "CUFILE_FOR_TESTS_OPEN_ERROR"
"""In the environment: what every start of the library answers."""
_PATIENCE_S = 20.0


class Call(enum.IntEnum):
    """What a fault is for. A batch is one SUBMIT, and a READ or WRITE for each piece."""

    READ = 0
    WRITE = 1
    SUBMIT = 2
    HANDLE = 3
    BUFFER = 4
    STATUS = 5


class Fault(enum.IntEnum):
    """What happens: a READ or WRITE fails with an errno, the others with cuFile's number."""

    NONE = 0
    FAIL = 1
    SHORT = 2
    """Half of the bytes are moved."""
    HANG = 3
    """Until another fault is ordered for the same kind of call."""


class CufileForTests:
    """The library in this process, loaded by the plugin or by this. Any thread."""

    def __init__(self) -> None:
        assert MARK in os.environ, "this process was not started with the cuFile for tests"
        self._library = ctypes.CDLL(SONAME)
        self._library.cufile_for_tests_fault.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_int,
        ]
        for name in ("calls", "live"):
            getattr(self._library, f"cufile_for_tests_{name}").restype = ctypes.c_long

    def order(
        self, call: Call, fault: Fault, *, value: int = 0, first: int = 1, count: int = 1 << 40
    ) -> None:
        """From now on calls `first` to `first + count - 1` of that kind have that fault."""
        self._library.cufile_for_tests_fault(call, fault, first, first + count, value)

    def heal(self) -> None:
        """No fault any more; what hangs goes on."""
        for call in Call:
            self.order(call, Fault.NONE)

    def calls(self, call: Call) -> int:
        """How many there were since a fault was last ordered for that kind."""
        return int(self._library.cufile_for_tests_calls(call))

    def hanging(self) -> int:
        """How many calls hang now."""
        return int(self._library.cufile_for_tests_live(0))

    def live(self) -> dict[str, int]:
        """What was made and not given back."""
        names = ("drivers", "files", "buffers", "batches")
        return {
            name: int(self._library.cufile_for_tests_live(number))
            for number, name in enumerate(names, start=1)
        }

    def until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait for something that the plugin's own threads bring about."""
        give_up_s = SYSTEM_CLOCK.monotonic_s() + _PATIENCE_S
        while not happened():
            assert SYSTEM_CLOCK.monotonic_s() < give_up_s, f"waited {_PATIENCE_S:g} s for {what}"
            SYSTEM_CLOCK.sleep(0.001)


def build(source: Path, folder: Path) -> None:
    """Compile the library into `folder`."""
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"]
    library = folder / SONAME
    subprocess.run([*command, f"-Wl,-soname,{SONAME}", "-o", str(library), str(source)], check=True)


def library_folder(package: str, name: str) -> Path | None:
    """Where the wheel `package` has the library `name`; None if it is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = next((Path(str(each.locate())) for each in files if each.name == name), None)
    return found.parent if found is not None else None


def environment(*folders: Path) -> dict[str, str]:
    """This process's environment, with `folders` first among those the linker searches."""
    old = os.environ.get("LD_LIBRARY_PATH")
    path = ":".join([*map(str, folders), *([old] if old else [])])
    return {**os.environ, "LD_LIBRARY_PATH": path}
