#!/usr/bin/env bash
# Put Azurite, the local server for Azure's blobs that some tests start, into .cache/azurite (once).
# Needs npm; without it those tests are skipped, with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."

version=3.35.0
folder=.cache/azurite
if ! command -v npm >/dev/null; then
    echo "azurite: npm is not installed; the tests of Azure's blobs will be skipped" >&2
    exit 0
fi
if [ "$(cat "$folder/.version" 2>/dev/null)" != "$version" ]; then
    mkdir -p "$folder"
    npm install --prefix "$folder" --no-audit --no-fund --silent "azurite@$version"
    echo "$version" >"$folder/.version"
fi
