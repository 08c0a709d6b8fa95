"""Why a plugin does not load: asked of the dynamic linker, over libraries that the tests compile."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdoffload.agent import plugins
from pdoffload.agent.needs import Device, Needs, StartCheck
from pdoffload.agent.plugins import Usability, plugin_dir, usability
from pdoffload.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    return tmp_path


def why(name: str) -> str:
    return usability(name).why


def compiled(path: Path, source: str, *options: str) -> None:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True)


def test_one_that_loads_is_not_complained_of(folder: Path) -> None:
    compiled(folder / "libplugin_POSIX.so", "int x;")
    assert why("POSIX") == ""


def test_one_that_is_not_there_is_told_with_the_folder(folder: Path) -> None:
    assert why("UCX").startswith(f"this NIXL has no such plugin (looked in {folder})")


def test_a_library_that_is_missing_is_named_with_what_brings_it(folder: Path) -> None:
    compiled(folder / "libcudart.so.12", "int cuda(void) { return 1; }")
    needs = ("-L", str(folder), "-l:libcudart.so.12")
    compiled(folder / "libplugin_OBJ.so", "int cuda(void); int x(void) { return cuda(); }", *needs)
    (folder / "libcudart.so.12").unlink()
    said = why("OBJ")
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
        folder / "libplugin_OBJ.so", "int fabric(void); int x(void) { return fabric(); }", *needs
    )
    versions.write_text("FABRIC_1.1 { global: fabric; };")
    compiled(
        folder / "libfabric.so",
        "int fabric(void) { return 1; }",
        script,
        "-Wl,-soname,libfabric.so",
    )
    said = why("OBJ")
    assert "version `FABRIC_1.10' not found" in said
    assert said.endswith("; install a newer libfabric")


def test_one_that_is_no_library_or_ends_its_process_or_never_comes_back_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "libplugin_OBJ.so").write_text("no library")
    assert why("OBJ").startswith("it does not load: ")
    constructor = "__attribute__((constructor)) static void at_load(void)"
    compiled(folder / "libplugin_GUSLI.so", f"#include <stdlib.h>\n{constructor} {{ abort(); }}")
    assert why("GUSLI").endswith("ends a process by signal 6")
    compiled(folder / "libplugin_HF3FS.so", f"#include <unistd.h>\n{constructor} {{ pause(); }}")
    monkeypatch.setattr(plugins, "LOAD_TIMEOUT_S", 0.5)
    assert why("HF3FS").endswith("does not load within 0.5 s")


@pytest.mark.nixl
def test_nixls_own_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    found = plugin_dir()
    assert found is not None
    assert (found / "libplugin_UCX.so").is_file()
    assert why("UCX") == ""


# --- usable, or why not ---

PLUGIN = "UCCL"
"""Any name that NIXL's wheel does not bring."""
START = StartCheck("libstart.so", "start", "wind it up")


@pytest.fixture
def needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what the plugin needs, in a folder that has it."""
    compiled(folder / f"libplugin_{PLUGIN}.so", "int x;")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))

    def set_needs(**changes: Any) -> None:
        needs = Needs(memory=("DRAM",), far="files", use="", tested="", **changes)
        monkeypatch.setitem(plugins.NEEDS, PLUGIN, needs)

    return set_needs


def starting(folder: Path, body: str) -> None:
    status = "typedef struct { int err, cu_err; } Status;"
    compiled(
        folder / START.library,
        f"#include <stdlib.h>\n#include <unistd.h>\n{status} Status start(void) {{ {body} }}",
    )


def test_one_that_needs_nothing_and_loads_is_usable(needs: Callable[..., None]) -> None:
    needs()
    assert usability(PLUGIN) == Usability(PLUGIN)
    assert usability(PLUGIN).usable


def test_one_that_starts_is_usable_and_what_it_lacks_is_remarked(
    folder: Path, needs: Callable[..., None]
) -> None:
    starting(folder, "return (Status){0, 7};")
    needs(start=START, devices=(Device(pattern="/dev/no-such*", without="it is slower"),))
    found = usability(PLUGIN)
    assert (found.usable, found.why) == (True, "")
    assert found.remarks == ("/dev/no-such* is not there: it is slower",)


def test_one_that_does_not_start_is_told_with_number_likely_cause_and_remedy(
    folder: Path, needs: Callable[..., None]
) -> None:
    starting(folder, "return (Status){42, 0};")
    lacks = (
        Device(pattern="/dev/null", without="impossible"),
        Device(pattern="/dev/no-such*", without="there is none"),
        Device(pattern="/dev/nor-such*", without="nor that"),
    )
    needs(start=START, devices=lacks)
    assert usability(PLUGIN).why == (
        "it loads, and libstart.so refuses to start (error 42); "
        "/dev/no-such* is not there: there is none; wind it up"
    )


def test_a_device_without_which_it_is_of_no_use_is_a_reason(needs: Callable[..., None]) -> None:
    needs(devices=(Device(pattern="/dev/no-such*", without="nothing moves", needed=True),))
    found = usability(PLUGIN)
    assert not found.usable
    assert found.reason == "/dev/no-such* is not there: nothing moves"
    needs(devices=(Device(pattern="/dev/nul*", without="", needed=True),))
    assert usability(PLUGIN).usable


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("abort();", "ends a process by signal 6"),
        ("for (;;) {}", "does not load and start within 0.5 s"),
    ],
)
def test_a_start_that_crashes_or_hangs_does_so_elsewhere(
    folder: Path,
    needs: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    told: str,
) -> None:
    starting(folder, body)
    needs(start=START)
    monkeypatch.setattr(plugins, "LOAD_TIMEOUT_S", 0.5 if "for" in body else 5.0)
    assert usability(PLUGIN).reason.endswith(told)


def test_a_start_on_devices_that_are_there_may_take_long(
    folder: Path, needs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    starting(folder, "sleep(1); return (Status){0, 0};")
    monkeypatch.setattr(plugins, "LOAD_TIMEOUT_S", 0.01)
    needs(start=START, devices=(Device(pattern="/dev/no-such*", without=""),))
    assert "within 0.01 s" in usability(PLUGIN).reason
    needs(start=START, devices=(Device(pattern="/dev/null", without=""),))
    assert usability(PLUGIN).usable


def test_what_a_start_prints_does_not_hide_its_answer(
    folder: Path, needs: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    starting(folder, 'system("echo out; echo err >&2"); return (Status){9, 0};')
    needs(start=START)
    assert "(error 9)" in usability(PLUGIN).reason
    assert capfd.readouterr() == ("", "")


def test_a_start_leaves_no_file_where_the_engine_was_started(
    folder: Path, needs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    starting(folder, 'system("touch start.log"); return (Status){0, 0};')
    needs(start=START)
    here = folder / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert usability(PLUGIN).usable
    assert list(here.iterdir()) == []


def test_a_folder_of_plugins_may_be_named_from_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(folder / "libplugin_OBJ.so", "int x;")
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("NIXL_PLUGIN_DIR", folder.name)
    assert usability("OBJ").usable


def test_one_that_is_missing_is_told_with_what_brings_it(folder: Path) -> None:
    assert usability("MOONCAKE").why == (
        f"this NIXL has no such plugin (looked in {folder}); "
        "it comes with a NIXL that was built with it"
    )


def test_without_a_wheel_of_nixl_the_remedy_is_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "plugin_dir", lambda: None)
    assert usability("UCX").remedy == "get NIXL by: pip install pdoffload[nixl]"


@pytest.mark.parametrize("name", ["posix", "NOPE", ["posix"], None])
def test_c13_a_name_that_is_not_known_is_an_error_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ConfigError, match="is not known") as caught:
        usability(name)
    assert "GDS_MT" in str(caught.value)
