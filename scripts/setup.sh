#!/usr/bin/env bash
# Make .venv: Python, the pinned packages, and this package from its source tree. Run twice, it does
# nothing the second time. Usage: scripts/setup.sh   (PYTHON=python3.12 scripts/setup.sh)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=.venv
log=.cache/setup.log
# Each stamp holds a digest of what its part was made from. A moved checkout needs a new environment:
# scripts inside it name their path.
packages_stamp=$venv/.stamp
package_stamp=$venv/.stamp-pdoffload

command -v "$python" >/dev/null || { echo "set-up: $python is not installed" >&2; exit 1; }
packages=$({ pwd; "$python" --version; cat requirements/test.txt scripts/setup.sh; } | sha256sum)
package=$(sha256sum <pyproject.toml)

run() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "set-up: failed: $*" >&2
        exit 1
    fi
}

install() {
    run "$venv/bin/pip" install --no-input --progress-bar off --no-deps "$@"
}

install_packages() {
    count=$(grep -c == requirements/test.txt)
    echo "set-up: installing $count pinned packages into $venv (about 4 minutes, 3 GB; log: $log)"
    : >"$log"
    # A finished environment of other pins is thrown away, since what it has too much may break an
    # import. An unfinished one is continued.
    if [ -e "$packages_stamp" ]; then
        rm -rf "$venv"
    fi
    run "$python" -m venv "$venv"
    install -r requirements/test.txt
    if ! "$venv/bin/python" -c 'import torch, nixl, vllm' >>"$log" 2>&1; then
        tail -n 5 "$log" >&2
        echo "set-up: the packages are there but do not import. If torch misses a CUDA library," \
            "pip found its CUDA build: make the CPU build known to pip (requirements/test.txt)" >&2
        exit 1
    fi
    echo "$packages" >"$packages_stamp"
    echo "set-up: done"
}

mkdir -p .cache
if [ "$(cat "$packages_stamp" 2>/dev/null)" != "$packages" ]; then
    install_packages
fi
if [ "$(cat "$package_stamp" 2>/dev/null)" != "$package" ]; then
    install --no-build-isolation -e .
    echo "$package" >"$package_stamp"
fi
