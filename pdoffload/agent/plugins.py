"""Why a NIXL plugin cannot be loaded on this machine.

NIXL lists every plugin whose library lies in its folder, and says NIXL_ERR_NOT_FOUND if that does not load.
The dynamic linker knows the reason: a library that is missing, or a version of a symbol that it has not. It
is asked in a process of its own, because a plugin may do anything while it is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

LOAD_TIMEOUT_S = 5.0
_LOAD = (
    "import ctypes, sys\ntry:\n ctypes.CDLL(sys.argv[1])\nexcept OSError as e:\n sys.exit(str(e))"
)
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


_STARTS_WITH = {
    "LIBFABRIC": "libfabric must have a provider that reaches other hosts (the loopback alone is none; "
    "FI_PROVIDER, FI_TCP_IFACE; fi_info lists them)",
}
"""What a plugin that loads still has to find."""


def plugin_dir() -> Path | None:
    """Where NIXL looks: NIXL_PLUGIN_DIR, else beside its library; None where no wheel of it is installed."""
    given = os.environ.get("NIXL_PLUGIN_DIR")
    if given:
        return Path(given)
    for cuda in ("cu12", "cu13"):
        spec = importlib.util.find_spec(f"nixl_{cuda}")
        if spec is not None and spec.origin is not None:
            site = Path(spec.origin).parent.parent
            return site / f".nixl_{cuda}.mesonpy.libs" / "plugins"
    return None


def why_not_loaded(name: str) -> str:
    """What keeps the plugin `name` from being loaded, and the remedy where one is known.

    Empty if it loads, which does not say that it can be used. Takes `LOAD_TIMEOUT_S` at most; any thread.
    """
    folder = plugin_dir()
    library = folder / f"libplugin_{name}.so" if folder is not None else None
    if library is None or not library.is_file():
        return f"this NIXL has no such plugin (looked in {folder or 'no folder: no wheel is installed'})"
    try:
        asked = subprocess.run(
            [sys.executable, "-S", "-c", _LOAD, str(library)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{library} does not load within {LOAD_TIMEOUT_S:g} s"
    if asked.returncode < 0:
        return f"loading {library} ends a process by signal {-asked.returncode}"
    if asked.returncode == 0:
        return ""
    reason = (asked.stderr.strip().splitlines() or ["for an unknown reason"])[-1]
    remedy = next((text for missed, text in _REMEDIES.items() if missed in reason), "")
    return f"it does not load: {reason}" + (f"; {remedy}" if remedy else "")


def why_not_started(name: str) -> str:
    """Said of a plugin that NIXL could not start: why it does not load, or what it has to find."""
    needs = _STARTS_WITH.get(name, "")
    return why_not_loaded(name) or "it loads, and refuses to start" + (
        f": {needs}" if needs else ""
    )


def nixl_version() -> tuple[int, int]:
    """NIXL's (major, minor); (0, 0), treated as old, where the package does not tell."""
    import importlib.metadata  # here, because it is slow to import

    try:
        major, minor = importlib.metadata.version("nixl").split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0, 0
