"""A machine without RDMA libraries, as far as Mooncake's package is concerned, made fit for it.

`mooncake.engine` is linked against the system's libibverbs, even where there is no such device. Where that is
missing, tests compile one that knows no device; it is for tests alone and ships with nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

_NAME = "libibverbs.so.1"
_FUNCTIONS = {
    "IBVERBS_1.0": "create_comp_channel destroy_comp_channel",
    "IBVERBS_1.1": (
        "ack_async_event ack_cq_events alloc_pd close_device create_cq create_qp dealloc_pd dereg_mr "
        "destroy_cq destroy_qp event_type_str fork_init free_device_list get_async_event get_cq_event "
        "get_device_list get_device_name modify_qp open_device query_device query_gid query_port "
        "query_qp reg_mr wc_status_str"
    ),
    "IBVERBS_1.8": "reg_mr_iova2",
    "IBVERBS_1.11": "_ibv_query_gid_ex",
}
"""What Mooncake 0.3.13 takes from the library, by the version of the symbol; `ibv_` stands before most."""


def environment() -> Mapping[str, str]:
    """Variables with which a child process can import `mooncake.engine`; none where this one can as it is."""
    folder = _folder()
    if folder is None:
        return {}
    path = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(path)}


def provide() -> None:
    """Let this process import `mooncake.engine`."""
    folder = _folder()
    if folder is not None:
        ctypes.CDLL(str(folder / _NAME))


@functools.cache
def _folder() -> Path | None:
    """The folder of the compiled library; None where the machine has the real one."""
    try:
        ctypes.CDLL(_NAME)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="pdoffload-verbs-"))
        atexit.register(_remove, folder, os.getpid())
        return _compile(folder)
    return None


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:  # and not a process forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _compile(folder: Path) -> Path:
    code, versions = [], []
    for version, names in _FUNCTIONS.items():
        functions = [f"ibv_{name}" if name[0] != "_" else name for name in names.split()]
        code += [f"void *{function}(void) {{ return 0; }}" for function in functions]
        versions.append(f"{version} {{ global: {'; '.join(functions)}; }};")
    source, script = folder / "verbs.c", folder / "verbs.map"
    source.write_text("\n".join(code))
    script.write_text("\n".join(versions))
    linker = f"-Wl,-soname,{_NAME},--version-script={script}"
    command = ["gcc", "-shared", "-fPIC", linker, "-o", str(folder / _NAME), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder
