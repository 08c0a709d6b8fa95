"""The adapter to vLLM: a connector, its specs, and both sides of their work.

vLLM imports this module by name (`kv_connector_module_path`, `spec_module_path`) and takes a class from
it; only then is vLLM itself imported. `compat` is the only file that knows vLLM's versions.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "PdOffloadConnector": "pdoffload.vllm.connector",
    "NixlCPUOffloadingSpec": "pdoffload.vllm.spec",
    "NixlDirectOffloadingSpec": "pdoffload.vllm.direct.spec",
    "NixlTieringOffloadingSpec": "pdoffload.vllm.spec",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
