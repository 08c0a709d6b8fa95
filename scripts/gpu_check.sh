#!/usr/bin/env bash
# Run every test that needs a GPU, with what it measures, on a machine that has one. A few minutes.
#
# Written on a machine without a GPU: this script and the tests it runs have NEVER RUN. Expect to mend them.
#
# Needed: NVIDIA's driver; Python with a CUDA build of torch, NIXL, this package, pytest and pytest-timeout;
# libcufile.so.0 and libcudart.so where the linker finds them (torch's wheels bring both: add their folders
# to LD_LIBRARY_PATH); and a file system that cuFile takes, or compat mode in its cufile.json.
#
# Usage: scripts/gpu_check.sh [FOLDER ON THE DISK TO MEASURE]   (PYTHON=/path/to/python)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PDOFFLOAD_GPU_CHECK=1
if [ $# -gt 0 ]; then
    export PDOFFLOAD_GPU_DIR=$1
    df -hT "$1"
fi
nvidia-smi -L || { echo "gpu_check: no GPU, or no driver: there is nothing to check here" >&2; exit 1; }
"$python" - <<'PY'
from pdoffload.agent.plugins import usability

for name in ("UCX", "POSIX", "GDS_MT", "GDS"):
    found = usability(name)
    print(f"{name}: {'usable' if found.usable else found.why}", *found.remarks, sep="\n    ")
PY
# -s: the figures are printed. cuFile's own log goes to cufile.log here.
exec "$python" -m pytest -q -s -ra -m gpu --import-mode=importlib -p no:cacheprovider tests/gpu
