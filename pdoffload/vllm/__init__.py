"""The adapter to vLLM: a connector, its specs, and both sides of their work.

vLLM imports this module by name (`kv_connector_module_path`, `spec_module_path`). `compat` is the only
file that knows vLLM's versions.
"""

from pdoffload.vllm.connector import PdOffloadConnector
from pdoffload.vllm.spec import NixlCPUOffloadingSpec, NixlTieringOffloadingSpec

__all__ = ["NixlCPUOffloadingSpec", "NixlTieringOffloadingSpec", "PdOffloadConnector"]
