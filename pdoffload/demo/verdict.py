"""What the demo has seen, and whether it is what was promised. Values and judgement only."""

from __future__ import annotations

import msgspec

from pdoffload.testing.openai_api import Completion, Metrics

_PREFIX = "vllm:pdoffload_"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One sending of the prompt; every count is what the server's own counters grew by."""

    name: str
    completion: Completion
    device_tokens: int
    """Prompt tokens found in device memory: 0, or the step proves nothing."""
    restored_tokens: int
    """Prompt tokens whose KV came from outside the device."""
    host_bytes: int
    """Bytes copied from the host pool to the device."""
    disk_bytes: int
    """Bytes read by the file tier."""
    disk_chunks: int
    verified_chunks: int
    """Of `disk_chunks`, those whose checksum was compared and matched."""
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

        return cls(
            name=name,
            completion=completion,
            device_tokens=int(grown.total("vllm:prefix_cache_hits_total")),
            restored_tokens=int(grown.total("vllm:external_prefix_cache_hits_total")),
            host_bytes=int(grown.total("vllm:kv_offload_load_bytes_total")),
            disk_bytes=tier("bytes_read"),
            disk_chunks=tier("loaded_chunks"),
            verified_chunks=tier("verified_chunks"),
            corrupt_chunks=tier("corrupt_chunks"),
            physical_bytes=physical_bytes,
        )

    @property
    def source(self) -> str:
        """Where the restored tokens came from."""
        if not self.restored_tokens:
            return "computed"
        return "disk" if self.disk_chunks else "host memory"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The three steps, and what an independent reader found on disk between them."""

    cold: Step
    host: Step
    disk: Step
    files: int
    file_bytes: int

    @property
    def steps(self) -> tuple[Step, Step, Step]:
        return self.cold, self.host, self.disk


def judge(result: Result) -> list[str]:
    """Every promise that was not kept, as a sentence; empty if all were."""
    problems = [problem for step in result.steps for problem in _step_problems(step, result)]
    problems += _source_problems(result)
    if not result.files:
        problems.append("No chunk file was on disk when the server was killed.")
    return problems


def _step_problems(step: Step, result: Result) -> list[str]:
    problems = []
    expected, got = result.cold.completion, step.completion
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
    if step.verified_chunks != step.disk_chunks:
        problems.append(
            f"'{step.name}' verified {step.verified_chunks} of {step.disk_chunks} chunks from disk."
        )
    return problems


def _source_problems(result: Result) -> list[str]:
    problems = []
    wanted = {"computed": result.cold, "host memory": result.host, "disk": result.disk}
    for source, step in wanted.items():
        if step.source != source:
            problems.append(
                f"'{step.name}' should have had its prefix from: {source}; it was: {step.source}."
            )
    for step in (result.host, result.disk):
        prompt = step.completion.prompt_tokens
        if 2 * step.restored_tokens < prompt:
            problems.append(
                f"'{step.name}' reused {step.restored_tokens} of {prompt} prompt tokens, "
                "less than half."
            )
    return problems
