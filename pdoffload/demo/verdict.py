"""What a demo has seen, and whether it is what was promised. Values and judgement only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdoffload.testing.openai_api import Completion, Metrics

BLOCK_SIZE = 32
"""Tokens per block, and per chunk, of every server that a demo starts."""

_PREFIX = "vllm:pdoffload_"
_SOURCE_OF_TIER = {"": "host memory", "fs": "disk", "p2p": "peer"}
COMPUTED = "computed"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One sending of the prompt; every count is what the server's own counters grew by."""

    name: str
    completion: Completion
    device_tokens: int
    """Prompt tokens found in device memory: 0, or the step proves nothing."""
    restored_tokens: int
    """Prompt tokens whose KV came from outside the device."""
    computed_tokens: int
    """Prompt tokens that the model computed."""
    host_bytes: int
    """Bytes copied from the host pool to the device."""
    tier: str
    """The tier that the host pool had chunks from; empty where none gave any."""
    tier_bytes: int
    """Bytes that came from the tier."""
    tier_chunks: int
    verified_chunks: int
    """Of `tier_chunks`, those whose checksum was compared and matched."""
    corrupt_chunks: int
    physical_bytes: int
    """Bytes that the kernel fetched from a block device for the server's processes."""

    @classmethod
    def between(
        cls, name: str, completion: Completion, grown: Metrics, physical_bytes: int
    ) -> Step:
        """The step in which /metrics grew by `grown`."""

        def tier(counter: str) -> int:
            return int(grown.total(f"{_PREFIX}tier_{counter}_total"))

        tiers = grown.by_label(f"{_PREFIX}tier_loaded_chunks_total", "tier")
        return cls(
            name=name,
            completion=completion,
            device_tokens=int(grown.total("vllm:prefix_cache_hits_total")),
            restored_tokens=int(grown.total("vllm:external_prefix_cache_hits_total")),
            computed_tokens=grown.computed_tokens(),
            host_bytes=int(grown.total("vllm:kv_offload_load_bytes_total")),
            tier="+".join(name for name, chunks in tiers.items() if chunks),
            tier_bytes=tier("bytes_read"),
            tier_chunks=tier("loaded_chunks"),
            verified_chunks=tier("verified_chunks"),
            corrupt_chunks=tier("corrupt_chunks"),
            physical_bytes=physical_bytes,
        )

    @property
    def source(self) -> str:
        """Where the restored tokens came from."""
        if not self.restored_tokens:
            return COMPUTED
        return _SOURCE_OF_TIER.get(self.tier, self.tier)


class Outcome(Protocol):
    """What every demo ends with: steps of which the first one is cold, for the table, and a judgement."""

    title: str
    tier_column: str
    """Heads the column of bytes that came from the tier."""

    @property
    def steps(self) -> Sequence[Step]:
        """At least two, in the order of time."""

    def problems(self) -> list[str]:
        """Every promise that was not kept, as a sentence; empty if all were."""

    def sentences(self) -> list[str]:
        """What the table does not show, for a demo without problems."""


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Three steps on one server, and what an independent reader found on disk between them."""

    title = "One prompt, three ways"
    tier_column = "from disk"

    cold: Step
    host: Step
    disk: Step
    files: int
    file_bytes: int

    @property
    def steps(self) -> tuple[Step, Step, Step]:
        return self.cold, self.host, self.disk

    def problems(self) -> list[str]:
        problems = _step_problems(self.steps)
        for step, source in zip(self.steps, (COMPUTED, "host memory", "disk"), strict=True):
            problems += _source_problems(step, source)
        if not self.files:
            problems.append("No chunk file was on disk when the server was killed.")
        return problems

    def sentences(self) -> list[str]:
        return [
            f"On disk while no server ran: {self.files} chunk files, {size_text(self.file_bytes)}. "
            f"The kernel fetched {size_text(self.disk.physical_bytes)} from the device for the last step."
        ]


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Four steps on a decoder, two of them with a prefiller's help."""

    title = "One prompt on a decoder, four ways"
    tier_column = "from peer"

    cold: Step
    pulled: Step
    prefix: Step
    again: Step
    prefill_s: float
    """How long the prefiller took over its leg of `pulled`."""
    transports: tuple[str, ...]
    """What the prefiller writes to its peers by, as it says itself."""
    served_bytes: int
    """What the prefiller says it has written for the steps."""

    @property
    def steps(self) -> tuple[Step, Step, Step, Step]:
        return self.cold, self.pulled, self.prefix, self.again

    def problems(self) -> list[str]:
        problems = _step_problems(self.steps)
        sources = (COMPUTED, "peer", "peer", COMPUTED)
        for step, source in zip(self.steps, sources, strict=True):
            problems += _source_problems(step, source)
            if source == "peer" and step.computed_tokens > BLOCK_SIZE:
                problems.append(
                    f"'{step.name}' computed {step.computed_tokens} tokens, more than what is left "
                    f"behind the last full block of {BLOCK_SIZE}."
                )
        pulled_bytes = sum(step.tier_bytes for step in self.steps)
        if self.served_bytes != pulled_bytes:
            problems.append(
                f"The prefiller has written {self.served_bytes} bytes, the decoder has got {pulled_bytes}."
            )
        if not self.transports:
            problems.append("The prefiller does not say which transport it used.")
        return problems

    def sentences(self) -> list[str]:
        return [
            f"Before the second step the prefiller computed the prompt in {ms_text(self.prefill_s)}. "
            f"It wrote {size_text(self.served_bytes)} to the decoder by NIXL, over "
            f"{', '.join(self.transports)}; every chunk was checked where it arrived."
        ]


def _step_problems(steps: Sequence[Step]) -> list[str]:
    """What is wrong with any step of any demo."""
    problems = []
    for step in steps:
        expected, got = steps[0].completion, step.completion
        if (got.text, got.token_ids) != (expected.text, expected.token_ids):
            problems.append(
                f"The completion of '{step.name}' differs from the cold one:\n"
                f"    cold: {expected.text!r}\n    here: {got.text!r}"
            )
        if step.device_tokens:
            problems.append(
                f"'{step.name}' found {step.device_tokens} tokens in device memory, "
                "so it shows nothing about the tiers."
            )
        if step.corrupt_chunks:
            problems.append(f"'{step.name}' met {step.corrupt_chunks} corrupt chunks.")
        if step.verified_chunks != step.tier_chunks:
            problems.append(
                f"'{step.name}' verified {step.verified_chunks} of {step.tier_chunks} chunks."
            )
    return problems


def _source_problems(step: Step, source: str) -> list[str]:
    """What is wrong if the prefix of `step` was to come from `source`."""
    problems = []
    if step.source != source:
        problems.append(
            f"'{step.name}' should have had its prefix from: {source}; it was: {step.source}."
        )
    prompt = step.completion.prompt_tokens
    if source != COMPUTED and 2 * step.restored_tokens < prompt:
        problems.append(
            f"'{step.name}' reused {step.restored_tokens} of {prompt} prompt tokens, less than half."
        )
    return problems


def size_text(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes else "-"


def ms_text(duration_s: float) -> str:
    return f"{1000 * duration_s:,.0f} ms"
