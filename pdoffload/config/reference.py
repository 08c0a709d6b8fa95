"""The reference of every setting, written from the structs in `pdoffload.config.options`."""

from __future__ import annotations

import msgspec

from pdoffload.config.options import (
    CustomTierConfig,
    FsTierConfig,
    ObjTierConfig,
    OffloadConfig,
    P2pTierConfig,
)
from pdoffload.config.reading import Key, keys_of, text
from pdoffload.config.store_options import StoreConfig

TABLES: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("kv_connector_extra_config", OffloadConfig),
    ("secondary_tiers: type fs", FsTierConfig),
    ("secondary_tiers: type obj", ObjTierConfig),
    ("store_config of an obj tier", StoreConfig),
    ("secondary_tiers: type p2p", P2pTierConfig),
    ("secondary_tiers: a tier class from elsewhere", CustomTierConfig),
)

_HEAD = """\
# Configuration

<!-- Written by `pdoffload config keys --markdown`; a test compares. Change the structs instead. -->

pdoffload is configured where vLLM's KV offloading is: in `kv_connector_extra_config`. Keys that
vLLM's own offloading has mean here what they mean there; those marked **+** are ours.

```json
{"kv_connector": "PdOffloadConnector", "kv_connector_module_path": "pdoffload.vllm",
 "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
 "kv_connector_extra_config": {
   "spec_name": "NixlTieringOffloadingSpec",
   "cpu_bytes_to_use": 10737418240,
   "secondary_tiers": [{"type": "fs", "root_dir": "/var/cache/kv"}]}}
```

Under the stock connector, name the spec: `"kv_connector": "OffloadingConnector"` and in the extra
config `"spec_name": "NixlTieringOffloadingSpec", "spec_module_path": "pdoffload.vllm"`. Both work as
members of vLLM's `MultiConnector`.

Check a configuration before an engine is started with it; the argument is the JSON, a file, or `-`:

```
pdoffload config check '{"kv_connector": "PdOffloadConnector", ...}'
```

It exits with 0 and prints every setting as it will be used, or with 2 and one line per problem.

## How values are read

- All problems are reported together, each naming the key, the value and what is allowed.
- An unknown key is a problem, and the nearest known key is named.
- Booleans are JSON `true` and `false`. `"false"`, `"no"`, `0` and `1` are problems, not guesses.
- Numbers are not read out of strings: `"16"` and `"10GB"` are problems. A number without a fraction
  counts as whole (`1e10`, `4294967296.0`), because `--kv-offloading-size` of vLLM arrives so.
- `null` is allowed only where the table says so.
- No environment variable is read, but for two: a p2p tier whose `host` or `port` is not given takes
  vLLM's `VLLM_P2P_SIDE_CHANNEL_HOST` or `VLLM_P2P_SIDE_CHANNEL_PORT` when the engine starts. One that is
  set to nothing counts as not set.
- `cpu_bytes_to_use` must pay for at least one chunk. How large a chunk is depends on the model, so
  this one is found when the engine starts; the message says how much is needed.
- Not together: `block_size` and `blocks_per_chunk`; `store_threshold` of 2 or more and several
  tiers; `secondary_tiers` and `NixlCPUOffloadingSpec`; two `fs` tiers with one `root_dir`; two `p2p`
  tiers.
- `NixlDirectOffloadingSpec` wants one table of type `fs` in `secondary_tiers`, without `max_bytes`, the
  connector `PdOffloadConnector`, and one worker. Settings of the host pool are not used then.

Settings that work but are perhaps not meant so (a tiering spec without tiers, `verify` off, a
relative `root_dir`, a store reached by `http`, credentials in the configuration, a `p2p` tier without
authentication) are warnings.

## Object stores

An `obj` tier keeps chunks as objects in a bucket of an S3 store, or in a container of Azure's:

```json
{"spec_name": "NixlTieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
 "secondary_tiers": [{"type": "obj", "prefix": "kv",
                      "store_config": {"bucket": "kv-cache", "region": "eu-central-1",
                                       "scheme": "https"}}]}
```

Leave credentials out: then the SDK takes them from its own chain (environment, files, the machine's role;
with AZURE_BLOB also `AZURE_STORAGE_CONNECTION_STRING`). Where they are given here, no message, log or listing
of pdoffload shows them, but vLLM prints its whole configuration into its own log; that is a warning. At
start the store is tried: an object is written and read back, and whatever is in the way is named within ten
seconds. `max_bytes` is not a key of this tier, because NIXL deletes no object: give the bucket a lifecycle
rule, or run `pdoffload gc`.

## Peers

A `p2p` tier gets chunks from the host memory of other engines and lends them its own. Every engine of a
cluster may have the same table, but for the host:

```json
{"spec_name": "NixlTieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
 "secondary_tiers": [{"type": "p2p", "host": "10.0.0.11",
                      "cluster_secret_file": "/run/secrets/kv-cluster"}]}
```

Which engine a request's chunks come from stands in the request, in `kv_transfer_params`. Prefill here,
decode there: the first request goes to the prefiller, the second, with the same prompt and the same id, to
the decoder. A decoder asks nothing, it takes every block to be there:

```json
{"remote_decoder": {"kv_request_id": "r-1"}}
{"remote_prefiller": {"kv_request_id": "r-1", "remote_host": "10.0.0.11", "remote_port": 5710}}
```

A prefix that another engine may hold: this one asks it first, and pulls what is there. The id is new for
each request, and the other engine needs no word of it:

```json
{"remote_kv_source": {"kv_request_id": "r-2", "remote_host": "10.0.0.11", "remote_port": 5710}}
```

`remote_decoder` and `remote_kv_source` may stand together, no other two. `host` is:

- bound and dialled verbatim, so `0.0.0.0`, `::` and `*` are problems; IPv6 with or without brackets;
- a problem where it is an address that other hosts can reach while there is no `cluster_secret_file`,
  unless `allow_unauthenticated` is true. What a name stands for is found when the engine starts.

`verify` decides on chunks that bring no checksum, as those of stock vLLM do: under `always` they are not
loaded, so sharing with stock vLLM needs `if_present`.
"""

_TAIL = """
"""


def key_text(key: Key) -> str:
    """The name of `key` as an operator writes it: `options` stands for the class's own names."""
    return "..." if key.name == "options" else key.name


def default_text(key: Key) -> str:
    """The default of `key` as the reference prints it."""
    if key.required:
        return "required"
    return "none" if key.default in ((), {}) else text(key.default, key.unit)


def markdown() -> str:
    """docs/configuration.md, complete."""
    parts = [_HEAD]
    for title, table in TABLES:
        parts.append(
            f"\n## `{title}`\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n"
        )
        parts.extend(_row(key) for key in keys_of(table))
    return "".join((*parts, _TAIL))


def _row(key: Key) -> str:
    mark = "**+** " if key.own else ""
    cells = (f"{mark}`{key_text(key)}`", default_text(key), key.allowed, key.meaning)
    return f"| {' | '.join(cells)} |\n"
