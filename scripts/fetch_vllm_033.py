#!/usr/bin/env python3
"""Fetch the Python sources of vLLM 0.33.0, so that the adapter is checked against its interfaces too.

The wheel of that version is built for GPUs and is not installed: only its .py files are unpacked,
into .cache/vllm-0.33.0/. A finished folder is left as it is; an interrupted run leaves none behind.

    python scripts/fetch_vllm_033.py [--out .cache/vllm-0.33.0]

Exit status: 0 there, 1 the package index did not give it (the tests that need it say so).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
DEFAULT_OUT = Path(f".cache/vllm-{VERSION}")


def download(folder: Path) -> Path | None:
    """The wheel, saved in `folder`; None if pip could not get it (it has told why)."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar", "off"]
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    if subprocess.run([*command, *options, f"vllm=={VERSION}"], check=False).returncode != 0:
        return None
    return next(folder.glob("vllm-*.whl"))


def unpack_sources(wheel: Path, folder: Path) -> int:
    """Unpack the package's .py files into `folder`; how many there were."""
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")
        ]
        archive.extractall(folder, names)
    return len(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    out: Path = parser.parse_args().out
    if out.is_dir():
        return 0
    print(f"vllm {VERSION}: fetching its sources into {out} (336 MB on the way) ...", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        wheel = download(Path(scratch))
        if wheel is None:
            print(f"vllm {VERSION}: not available, tests against it will say so", file=sys.stderr)
            return 1
        made = Path(scratch) / "made"
        count = unpack_sources(wheel, made)
        made.rename(out)
    print(f"vllm {VERSION}: {count} source files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
