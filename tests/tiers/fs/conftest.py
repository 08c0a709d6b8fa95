"""Small real disks for the tests of this room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of its own of so many bytes; skips where mounting is not allowed."""
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", os.fspath(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small tmpfs needs privileges this process lacks")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", os.fspath(folder)], check=True)
