"""What the adapter says of vLLM, compared with vLLM itself."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # vLLM and what it imports warn of one another; that is not ours to judge.
    warnings.simplefilter("ignore")
    hashing = pytest.importorskip("vllm.utils.hashing", reason="no vLLM here: make setup")
    from vllm.v1.core import kv_cache_utils

    from pdoffload.vllm import compat

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", [None, "0", "123"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_c15_the_seed_on_disk_is_the_one_the_engine_will_take(
    seed: str | None, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    environ = {} if seed is None else {"PYTHONHASHSEED": seed}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    taken = kv_cache_utils.resolve_none_hash_seed(hashing.get_hash_fn_by_name(algorithm))
    assert compat.hash_seed_to_come(algorithm, environ) == taken


def test_c15_a_seed_of_one_process_alone_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    assert compat.hash_seed_to_come("xxhash", {"PYTHONHASHSEED": "1"}) == "1"
    assert not caplog.records
    assert compat.hash_seed_to_come("xxhash", {}) == compat.RANDOM_SEED
    assert "set PYTHONHASHSEED" in caplog.text
