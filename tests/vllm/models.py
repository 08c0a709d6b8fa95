"""Make a tiny model of random weights, with a tokenizer made on the spot; nothing is downloaded.

    python tests/vllm/models.py llama FOLDER     one kind of layer: one KV-cache group
    python tests/vllm/models.py hybrid FOLDER    sliding and full layers in turn: several groups

A program of its own, so that neither torch nor its warnings enter the process that runs the tests.
The same kind gives the same weights every time. FOLDER appears whole, by one rename.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

VOCABULARY = 512
HEAD_DIM = 64
SEED = 20
SPREAD = 0.1
"""Wide, and with an output matrix of its own: the tokens then follow from the whole prompt, so that
one wrong block of 32 tokens among 1,000 changes most of the output. Tied weights only echo the last
token, whatever the KV holds."""


def make_tokenizer(folder: Path) -> None:
    """Byte-level, so that any text has tokens; two specials, and the rest of the ids unused."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def make_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    )
    _save(LlamaForCausalLM(config), folder)


def make_hybrid(folder: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        layer_types=[kinds[layer % 3 == 2] for layer in range(6)],
        sliding_window=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    _save(Gemma3ForCausalLM(config), folder)


def _save(model: object, folder: Path) -> None:
    # float32, and to be served as such: near ties of random logits must not depend on how a
    # prompt was cut into steps.
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    make_tokenizer(folder)


KINDS: dict[str, Callable[[Path], None]] = {"llama": make_llama, "hybrid": make_hybrid}


def main(kind: str, out: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        KINDS[kind](made)
        made.rename(out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
