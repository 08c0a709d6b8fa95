"""Backends as data: what NIXL would swallow is refused here, in words that help."""

from __future__ import annotations

import msgspec
import pytest

from pdoffload.agent.backends import (
    KNOWN_BACKENDS,
    GdsBackend,
    GdsMtBackend,
    PluginBackend,
    PosixBackend,
    UcxBackend,
    backend_named,
)
from pdoffload.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "near"), [("posix", "POSIX"), ("UXC", "UCX"), ("GDSMT", "GDS_MT")]
)
def test_c13_a_misspelt_name_is_told_the_nearest_and_all_known(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{wrong!r} is not known; did you mean {near}") as caught:
        backend_named(wrong)
    assert all(name in str(caught.value) for name in KNOWN_BACKENDS)


def test_c13_a_name_like_no_other_still_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'NOPE' is not known.*\(known: UCX, POSIX"):
        PluginBackend("NOPE")


def test_every_known_name_is_a_backend_of_that_name() -> None:
    assert [backend_named(name).name for name in KNOWN_BACKENDS] == list(KNOWN_BACKENDS)


def test_c12_numbers_out_of_range_name_field_value_and_range() -> None:
    for field in ("max_ios", "kernel_queue"):
        for value in (0, -1, "16", 1.5, True, None, 10**12, float("nan")):
            with pytest.raises(ConfigError, match=field):
                PosixBackend(**{field: value})
    for value in (-1, "1", 65, False):
        with pytest.raises(ConfigError, match="num_threads"):
            UcxBackend(num_threads=value)


def test_both_problems_of_one_backend_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        PosixBackend(max_ios=1, kernel_queue=1)
    assert len(caught.value.problems) == 2


def test_words_that_are_no_choice_are_refused() -> None:
    with pytest.raises(ConfigError, match="aio_uring"):
        PosixBackend(queue="aio_uring")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lan"):
        UcxBackend(reach="lan")  # type: ignore[arg-type]


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError):
        PosixBackend(use_uring=True)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="use_uring"):
        msgspec.convert({"use_uring": True}, PosixBackend)


def test_auto_tries_uring_then_aio_and_nothing_that_loses_track() -> None:
    first, second = PosixBackend().candidates()
    assert first["use_uring"] == "true"
    assert second["use_aio"] == "true"
    (only,) = PosixBackend(queue="posix_aio", max_ios=64, kernel_queue=16).candidates()
    assert only == {"use_posix_aio": "true", "ios_pool_size": "64", "kernel_queue_size": "16"}


def test_copies_in_a_process_go_without_the_kernel() -> None:
    (inside,) = UcxBackend().candidates()
    assert inside["engine_config"] == "TLS=^cma"
    (outside,) = UcxBackend(reach="network", num_threads=4).candidates()
    assert outside == {"num_threads": "4"}


def test_an_agent_may_have_a_transport_of_its_own() -> None:
    (params,) = UcxBackend(reach="network", tls="^cma").candidates()
    assert params == {"engine_config": "TLS=^cma"}
    for wrong in ("tcp,sm", "TCP ", "^", "a=b"):
        with pytest.raises(ConfigError, match="is not one transport"):
            UcxBackend(reach="network", tls=wrong)
    with pytest.raises(ConfigError, match="for reach network"):
        UcxBackend(tls="tcp")


@pytest.mark.parametrize("value", [-1, "4", 257, True, None, 1.5, 10**12, float("nan")])
def test_c12_threads_of_gds_mt_are_a_number_in_range(value: object) -> None:
    with pytest.raises(ConfigError, match=r"GdsMtBackend.num_threads: .* from 0 to 256"):
        GdsMtBackend(num_threads=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, "16", 1.5, True, None, 10**12, float("nan"), "10GB"])
@pytest.mark.parametrize("field", ["max_batches", "batch_pieces", "max_piece_bytes"])
def test_c12_sizes_of_gds_are_numbers_in_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"GdsBackend.{field}: .* is not an integer from"):
        GdsBackend(**{field: value})  # type: ignore[arg-type]


def test_pieces_of_gds_are_whole_pages_for_the_sake_of_direct_io() -> None:
    with pytest.raises(ConfigError, match="4097 is not whole pages of 4096"):
        GdsBackend(max_piece_bytes=4097)


@pytest.mark.parametrize(("struct", "name"), [(GdsMtBackend, "thread_count"), (GdsBackend, "x")])
def test_a_parameter_that_gds_does_not_have_is_refused(struct: type, name: str) -> None:
    with pytest.raises(TypeError):
        struct(**{name: 1})
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({name: 1}, struct)


def test_the_gds_plugins_get_their_own_names_of_parameters() -> None:
    assert GdsMtBackend().candidates() == ({},)
    assert GdsMtBackend(num_threads=4).candidates() == ({"thread_count": "4"},)
    assert GdsBackend(max_batches=2, batch_pieces=3, max_piece_bytes=8192).candidates() == (
        {"batch_pool_size": "2", "batch_limit": "3", "max_request_size": "8192"},
    )
