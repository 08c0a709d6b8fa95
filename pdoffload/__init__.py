"""pdoffload: the KV cache of LLM inference, kept beyond device memory and moved by NIXL.

Importing this package has no side effect and loads neither torch, vLLM nor NIXL.
"""

__version__ = "0.1.0"
