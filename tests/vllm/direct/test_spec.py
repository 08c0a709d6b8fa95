"""What the spec refuses before it makes anything."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from pdoffload.errors import ConfigError

with warnings.catch_warnings():
    # vLLM and what it imports warn of one another; that is not ours to judge.
    warnings.simplefilter("ignore")
    config = pytest.importorskip("vllm.v1.kv_offload.config", reason="no vLLM here: make setup")
    from pdoffload.vllm import NixlDirectOffloadingSpec, compat

pytestmark = pytest.mark.vllm


def settings_of(root, world_size: int = 1):
    return config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(tokens_per_block=32, layer_names=("l",), group_id=0),),
        worker_kv_bytes_per_block=4000,
        enable_kv_cache_events=False,
        extra_config={
            "spec_name": "NixlDirectOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        },
        engine_id="e",
        model=config.OffloadingModelConfig(name="m", dtype="float32"),
        cache=config.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=3),
        parallel=config.OffloadingParallelConfig(
            rank=0,
            world_size=world_size,
            tp_size=world_size,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


def engine():
    text = SimpleNamespace(to_dict=lambda: {"rope": 1})
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        model_config=SimpleNamespace(hf_text_config=text),
    )


def test_chunks_have_the_host_pools_length_and_nothing_is_made(tmp_path):
    root = tmp_path / "kv"
    with compat.building_for(engine()):
        spec = NixlDirectOffloadingSpec(settings_of(root))
    assert spec.chunk_bytes == 12288
    assert spec.run_config.guards["model_config_digest"]
    assert not root.exists()


def test_several_workers_and_a_root_that_is_a_file_are_told_together(tmp_path):
    (tmp_path / "file").write_text("")
    with compat.building_for(engine()), pytest.raises(ConfigError) as caught:
        NixlDirectOffloadingSpec(settings_of(tmp_path / "file", world_size=2))
    root, workers = caught.value.problems
    assert root.startswith("secondary_tiers[0].root_dir: ")
    assert "works with one worker in this version, this engine has 2" in workers


def test_under_vllms_own_connector_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs kv_connector PdOffloadConnector"):
        NixlDirectOffloadingSpec(settings_of(tmp_path))
