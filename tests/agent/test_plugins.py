"""Why a plugin does not load: asked of the dynamic linker, over libraries that the tests compile."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pdoffload.agent import plugins
from pdoffload.agent.plugins import plugin_dir, why_not_loaded


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    return tmp_path


def compiled(path: Path, source: str, *options: str) -> None:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True)


def test_one_that_loads_is_not_complained_of(folder: Path) -> None:
    compiled(folder / "libplugin_FINE.so", "int x;")
    assert why_not_loaded("FINE") == ""


def test_one_that_is_not_there_is_told_with_the_folder(folder: Path) -> None:
    assert why_not_loaded("GONE") == f"this NIXL has no such plugin (looked in {folder})"


def test_a_library_that_is_missing_is_named_with_what_brings_it(folder: Path) -> None:
    compiled(folder / "libcudart.so.12", "int cuda(void) { return 1; }")
    needs = ("-L", str(folder), "-l:libcudart.so.12")
    compiled(folder / "libplugin_GPU.so", "int cuda(void); int x(void) { return cuda(); }", *needs)
    (folder / "libcudart.so.12").unlink()
    said = why_not_loaded("GPU")
    assert said.startswith("it does not load: libcudart.so.12: cannot open shared object file")
    assert said.endswith(
        "; install NVIDIA's CUDA runtime (nvidia-cuda-runtime-cu12 or the CUDA toolkit)"
    )


def test_a_symbol_version_that_is_too_old_is_named(folder: Path) -> None:
    versions = folder / "versions"
    versions.write_text("FABRIC_1.10 { global: fabric; };")
    script = f"-Wl,--version-script={versions}"
    compiled(
        folder / "libfabric.so",
        "int fabric(void) { return 1; }",
        script,
        "-Wl,-soname,libfabric.so",
    )
    needs = ("-L", str(folder), "-lfabric", f"-Wl,-rpath,{folder}")
    compiled(
        folder / "libplugin_OLD.so", "int fabric(void); int x(void) { return fabric(); }", *needs
    )
    versions.write_text("FABRIC_1.1 { global: fabric; };")
    compiled(
        folder / "libfabric.so",
        "int fabric(void) { return 1; }",
        script,
        "-Wl,-soname,libfabric.so",
    )
    said = why_not_loaded("OLD")
    assert "version `FABRIC_1.10' not found" in said
    assert said.endswith("; install a newer libfabric")


def test_one_that_is_no_library_or_ends_its_process_or_never_comes_back_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "libplugin_TEXT.so").write_text("no library")
    assert why_not_loaded("TEXT").startswith("it does not load: ")
    constructor = "__attribute__((constructor)) static void at_load(void)"
    compiled(folder / "libplugin_CRASH.so", f"#include <stdlib.h>\n{constructor} {{ abort(); }}")
    assert why_not_loaded("CRASH").endswith("ends a process by signal 6")
    compiled(folder / "libplugin_HANG.so", f"#include <unistd.h>\n{constructor} {{ pause(); }}")
    monkeypatch.setattr(plugins, "LOAD_TIMEOUT_S", 0.5)
    assert why_not_loaded("HANG").endswith("does not load within 0.5 s")


@pytest.mark.nixl
def test_nixls_own_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    found = plugin_dir()
    assert found is not None
    assert (found / "libplugin_UCX.so").is_file()
    assert why_not_loaded("UCX") == ""
