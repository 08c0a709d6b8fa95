"""The few calls to an OpenAI-compatible server that the demo, tests and benchmarks make.

`httpx` and `prometheus_client` come with the extra `demo`; they are imported where they are used.
"""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from pdoffload.clock import SYSTEM_CLOCK, Clock
from pdoffload.errors import ConfigError, DeadlineExceeded, PdOffloadError

_POLL_S = 0.1
_REQUEST_TIMEOUT_S = 180.0


class ApiError(PdOffloadError):
    """The server refused a request, or the connection broke; `status` is None then."""

    def __init__(self, request: str, reason: str, status: int | None = None) -> None:
        super().__init__(f"{request}: {reason}" + (f" (HTTP {status})" if status else ""))
        self.request = request
        self.reason = reason
        self.status = status

    def __reduce__(self) -> tuple[type[ApiError], tuple[str, str, int | None]]:
        return type(self), (self.request, self.reason, self.status)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished completion, and how long it took."""

    text: str
    token_ids: tuple[int, ...]
    """Empty where the server does not give them."""
    prompt_tokens: int
    ttft_s: float
    """From sending the request to the first token."""
    total_s: float
    kv_transfer_params: dict[str, Any] | None = None
    """What the server wants handed on with the next leg of a prefill/decode pair."""


class Metrics(msgspec.Struct, frozen=True):
    """One reading of /metrics: `(name, ((label, value), ...) sorted) -> value`."""

    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` that carry all of `labels`; 0 where there is none."""
        wanted = set(labels.items())
        return sum(
            value
            for (sample, has), value in self.samples.items()
            if sample == name and wanted <= set(has)
        )

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The samples of `name`, summed per value of `label`."""
        values = {
            value
            for (sample, has), _ in self.samples.items()
            if sample == name
            for key, value in has
            if key == label
        }
        return {value: self.total(name, **labels, **{label: value}) for value in sorted(values)}

    def names(self) -> set[str]:
        return {name for name, _ in self.samples}

    def since(self, before: Metrics) -> Metrics:
        """What was added after `before`; meant for counters of one server process."""
        return Metrics(
            {key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()}
        )

    def cached_tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens that were not computed, by where their KV came from, zeros left out.

        The sources are vLLM's: device, host, disk, p2p, external_unspecified.
        """
        found = self.by_label("vllm:prompt_tokens_cached_by_source_total", "source")
        return {source: int(tokens) for source, tokens in found.items() if tokens}

    def computed_tokens(self) -> int:
        """Prompt tokens that the model really computed."""
        name = "vllm:prompt_tokens_by_source_total"
        return int(self.total(name, source="local_compute"))


class ApiClient:
    """A client of one server. One thread uses it; `close` is idempotent.

    With `uds` it connects to that Unix socket, whatever host and port `base_url` names.
    """

    def __init__(
        self, base_url: str, *, uds: Path | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._httpx = _need("httpx")
        self._clock = clock
        self._uds = uds
        # No proxies from the environment: the server is on this host.
        self._http = self._httpx.Client(
            base_url=base_url,
            timeout=_REQUEST_TIMEOUT_S,
            trust_env=False,
            transport=self._httpx.HTTPTransport(uds=str(uds)) if uds else None,
        )

    def close(self) -> None:
        self._http.close()

    def is_healthy(self) -> bool:
        """Whether /health answers 200 within a second."""
        if self._uds and not _is_listened_on(self._uds):
            return False
        try:
            return bool(self._http.get("/health", timeout=1.0).status_code == 200)
        except self._httpx.TransportError:
            return False

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        stream: bool = True,
        timeout_s: float = _REQUEST_TIMEOUT_S,
        **parameters: object,
    ) -> Completion:
        """POST /v1/completions. `parameters` go into the request's body as they are.

        vLLM puts `kv_transfer_params` into an answer only where it comes in one piece: give
        `stream=False` to have them. The first token is then seen when the last one is.

        Raises `ApiError`, also when nothing comes for `timeout_s`; the connection is closed then, at
        which vLLM aborts the request, some time later.
        """
        body = {
            "model": "model",
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            "return_token_ids": True,
            **parameters,
        }
        text, token_ids, ttft_s, prompt_tokens = "", list[int](), None, 0
        kv_transfer_params = None
        started_s = self._clock.monotonic_s()
        for event in self._post("/v1/completions", body, timeout_s):
            prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
            kv_transfer_params = event.get("kv_transfer_params") or kv_transfer_params
            for choice in event.get("choices", ()):
                if ttft_s is None:
                    ttft_s = self._clock.monotonic_s() - started_s
                text += choice.get("text") or ""
                token_ids += choice.get("token_ids") or ()
        total_s = self._clock.monotonic_s() - started_s
        if ttft_s is None:
            raise ApiError("POST /v1/completions", "the answer ended without a token")
        return Completion(
            text=text,
            token_ids=tuple(token_ids),
            prompt_tokens=prompt_tokens,
            ttft_s=ttft_s,
            total_s=total_s,
            kv_transfer_params=kv_transfer_params,
        )

    def _post(
        self, path: str, body: dict[str, object], timeout_s: float
    ) -> Iterator[dict[str, Any]]:
        """The answer as JSON objects: one, or its server-sent events up to the end mark."""
        try:
            with self._http.stream("POST", path, json=body, timeout=timeout_s) as response:
                if response.status_code != 200:
                    raise ApiError(f"POST {path}", response.read().decode(), response.status_code)
                if not body["stream"]:
                    yield _event(path, response.read().decode())
                    return
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield _event(path, data)
        except self._httpx.HTTPError as error:
            raise ApiError(f"POST {path}", str(error) or type(error).__name__) from error

    def reset_prefix_cache(self, *, timeout_s: float = 30.0, host_too: bool = False) -> None:
        """Make the device forget every cached block. What lies outside it stays; with `host_too` the
        host pool forgets its chunks as well, and only the tiers keep theirs.

        The server refuses while blocks are held by running work, so this asks again until
        `timeout_s` has passed, then raises `DeadlineExceeded`. Raises `ApiError` if there is no
        such route (the server must run in development mode).
        """
        deadline_s = self._clock.monotonic_s() + timeout_s
        while True:
            response = self._http.post(
                "/reset_prefix_cache", params={"reset_external": str(host_too).lower()}
            )
            if response.status_code != 200:
                raise ApiError("POST /reset_prefix_cache", response.text, response.status_code)
            # Older servers answer with an empty body.
            if not response.content or response.json().get("success", True):
                return
            if self._clock.monotonic_s() >= deadline_s:
                raise DeadlineExceeded("the server to let go of its device blocks", timeout_s)
            self._clock.sleep(_POLL_S)

    def metrics(self) -> Metrics:
        """Every sample of /metrics, now."""
        parser = _need("prometheus_client.parser")
        text = self._http.get("/metrics").text
        return Metrics(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in parser.text_string_to_metric_families(text)
                for sample in family.samples
            }
        )


def _is_listened_on(uds: Path) -> bool:
    """Asked without httpx, which forgets to close a Unix socket that did not connect."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(str(uds)) == 0


def _event(path: str, data: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise ApiError(f"POST {path}", str(event["error"]))
    return event


def _need(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            [f"{package} is not installed; pip install 'pdoffload[demo]' brings it"]
        ) from error
