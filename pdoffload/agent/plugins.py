"""Whether a NIXL plugin can be used on this machine, asked in advance and without loading NIXL.

NIXL lists every plugin whose library lies in its folder, and says NIXL_ERR_NOT_FOUND if that does not load.
The dynamic linker knows the reason: a library that is missing, or a version of a symbol that it has not. It
is asked in a process of its own, because a plugin may do anything while it is loaded; so is the library
below the plugin whether it starts. Where it does not, the devices that are not there tell why.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from pdoffload.agent.backends import refuse_unknown
from pdoffload.agent.needs import NEEDS, Needs

LOAD_TIMEOUT_S = 4.0
START_TIMEOUT_S = 30.0
"""Where devices are there, which a library may take seconds to set up: CUDA does on hosts with many GPUs."""
# Loads argv[1]; with two more, calls the function argv[3] of the library argv[2] and expects a 0.
_ASK = """
import ctypes, sys
try:
    ctypes.CDLL(sys.argv[1])
    if len(sys.argv) > 2:
        class Status(ctypes.Structure):
            _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]
        start = ctypes.CDLL(sys.argv[2])[sys.argv[3]]
        start.argtypes, start.restype = [], Status
        error = start().err
        if error:
            print(f"\\n{error}", file=sys.stderr)
            sys.exit(3)
except OSError as e:
    print(f"\\n{e}", file=sys.stderr)
    sys.exit(2)
"""
_DOES_NOT_START = 3
_REMEDIES = {
    "libcudart.so": "install NVIDIA's CUDA runtime (nvidia-cuda-runtime-cu12 or the CUDA toolkit)",
    "libcuda.so": "it comes with NVIDIA's driver, for a machine with a GPU",
    "libcufile.so": "install NVIDIA's GPUDirect Storage (nvidia-cufile-cu12 or the CUDA toolkit)",
    "version `FABRIC_": "install a newer libfabric",
    "libfabric.so": "install libfabric",
    "libhwloc.so": "install hwloc (libhwloc15)",
    "libred_client.so": "it comes with DDN Infinia",
}
"""What the linker misses, and what brings it; the first that fits."""


class Usability(msgspec.Struct, frozen=True):
    """What is known of a plugin before an agent is made with it.

    `reason` says why it cannot be used, empty if nothing speaks against it; `remedy` what helps, empty
    where nothing is known. `remarks`: what it lacks and works without.
    """

    name: str
    reason: str = ""
    remedy: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return not self.reason

    @property
    def why(self) -> str:
        """Reason and remedy in one line; empty if it can be used."""
        return f"{self.reason}; {self.remedy}" if self.reason and self.remedy else self.reason


def plugin_dir() -> Path | None:
    """Where NIXL looks: NIXL_PLUGIN_DIR, else beside its library; None where no wheel of it is installed."""
    given = os.environ.get("NIXL_PLUGIN_DIR")
    if given:
        return Path(given).absolute()
    for cuda in ("cu12", "cu13"):
        spec = importlib.util.find_spec(f"nixl_{cuda}")
        if spec is not None and spec.origin is not None:
            site = Path(spec.origin).parent.parent
            return site / f".nixl_{cuda}.mesonpy.libs" / "plugins"
    return None


def usability(name: str) -> Usability:
    """Whether the plugin `name` can be used here: it loads, what it stands on starts, devices are there.

    Raises `ConfigError` for a name that is not known. Takes `LOAD_TIMEOUT_S` at most, or `START_TIMEOUT_S`
    where something is to start on devices that are there; any thread. What only bytes can tell (a file
    system that refuses, a store that is not there) is left to a trial.
    """
    refuse_unknown(name)
    needs = NEEDS[name]
    absent = [device for device in needs.devices if not glob.glob(device.pattern)]
    missed = tuple(f"{each.pattern} is not there: {each.without}" for each in absent)
    may_set_up = needs.start is not None and len(absent) < len(needs.devices)
    timeout_s = START_TIMEOUT_S if may_set_up else LOAD_TIMEOUT_S
    found = _ask(name, needs, likely="".join(missed[:1]), timeout_s=timeout_s)
    if not found.usable:
        return found
    blocking = [line for line, each in zip(missed, absent, strict=True) if each.needed]
    return Usability(name, "; ".join(blocking), remarks=() if blocking else missed)


def _ask(name: str, needs: Needs, *, likely: str, timeout_s: float) -> Usability:
    """Ask the linker, and what is to start whether it does; `likely` is why not, if it does not."""
    folder = plugin_dir()
    if folder is None:
        return Usability(
            name, "no wheel of NIXL is installed", "get NIXL by: pip install pdoffload[nixl]"
        )
    library = folder / f"libplugin_{name}.so"
    if not library.is_file():
        reason = f"this NIXL has no such plugin (looked in {folder})"
        return Usability(name, reason, f"it comes with {needs.comes_with}")
    start = needs.start
    steps = [str(library)] if start is None else [str(library), start.library, start.function]
    try:
        # In a folder of its own: some libraries write a log where they are started.
        with tempfile.TemporaryDirectory(prefix="pdoffload-") as scratch:
            asked = subprocess.run(
                [sys.executable, "-S", "-c", _ASK, *steps],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd=scratch,
                timeout=timeout_s,
                check=False,
            )
    except subprocess.TimeoutExpired:
        what = "load" if start is None else "load and start"
        return Usability(name, f"{library} does not {what} within {timeout_s:g} s")
    if asked.returncode < 0:
        reason = f"loading {library} ends a process by signal {-asked.returncode}"
        return Usability(name, reason)
    if asked.returncode == 0:
        return Usability(name)
    last = (asked.stderr.strip().splitlines() or ["for an unknown reason"])[-1]
    if asked.returncode == _DOES_NOT_START and start is not None:
        reason = f"it loads, and {start.library} refuses to start (error {last})"
        return Usability(name, f"{reason}; {likely}" if likely else reason, start.remedy)
    remedy = next((text for missed, text in _REMEDIES.items() if missed in last), "")
    return Usability(name, f"it does not load: {last}", remedy)
