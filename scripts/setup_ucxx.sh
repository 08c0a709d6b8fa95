#!/usr/bin/env bash
# Make .venv-ucxx: UCX alone, for benchmarks/raw_ucx.py. Run twice, it does nothing the second time.
# Usage: scripts/setup_ucxx.sh   (PYTHON=python3.12 scripts/setup_ucxx.sh)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=.venv-ucxx
log=.cache/setup-ucxx.log
stamp=$venv/.stamp

command -v "$python" >/dev/null || { echo "set-up: $python is not installed" >&2; exit 1; }
made_from=$({ pwd; "$python" --version; cat requirements/ucxx.txt scripts/setup_ucxx.sh; } | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$made_from" ]; then
    exit 0
fi

run() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "set-up: failed: $*" >&2
        exit 1
    fi
}

mkdir -p .cache
echo "set-up: installing ucxx into $venv (about 10 seconds, 300 MB; log: $log)"
: >"$log"
rm -rf "$venv"
run "$python" -m venv "$venv"
run "$venv/bin/pip" install --no-input --progress-bar off --no-deps -r requirements/ucxx.txt
run "$venv/bin/python" -c 'import ucxx'
echo "$made_from" >"$stamp"
echo "set-up: done"
