"""The tree of errors: what a caller may catch, what a message tells, and how errors travel."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

from pdoffload.errors import (
    BackendUnusable,
    ConfigError,
    CorruptChunk,
    DeadlineExceeded,
    MisuseError,
    NixlError,
    PdOffloadError,
    ProtocolError,
    StorageError,
    StorageFull,
    TransferError,
    WireError,
)

ONE_OF_EACH = [
    PdOffloadError("anything"),
    ConfigError(["a: got 1", "b: got 2"]),
    MisuseError("slot 3 is free and cannot be pinned"),
    NixlError("make_prepped_xfer", "NIXL_ERR_INVALID_PARAM"),
    BackendUnusable("create_backend", "NIXL_ERR_NOT_FOUND"),
    TransferError("the peer is gone"),
    DeadlineExceeded("load of 16 chunks", 30.0),
    StorageError("/tier/a.bin", "is a directory", errno.EISDIR),
    StorageError("/tier/a.bin", "does not parse"),
    StorageFull("/tier/a.bin", "No space left on device", errno.ENOSPC),
    CorruptChunk("/tier/a.bin", "checksum differs"),
    ProtocolError("Lookup may not come before connect"),
    WireError("keys[3]", "Expected `bytes`, got `str`"),
    WireError("", "Input data was truncated"),
]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_the_root_catches_every_error(error):
    with pytest.raises(PdOffloadError):
        raise error


@pytest.mark.parametrize(
    ("kind", "caught_as"),
    [
        (ConfigError, ValueError),
        (MisuseError, RuntimeError),
        (BackendUnusable, NixlError),
        (DeadlineExceeded, TransferError),
        (StorageFull, StorageError),
        (CorruptChunk, StorageError),
        (WireError, ProtocolError),
    ],
)
def test_errors_are_kinds_of_their_cause(kind, caught_as):
    assert issubclass(kind, caught_as)


@pytest.mark.parametrize("travel", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_between_processes(error, travel):
    """An engine's processes hand exceptions to each other pickled; no field may be lost or break it."""
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_all_problems_of_a_configuration_are_told_together():
    error = ConfigError(["block_size: got 0", "n_read_thread: unknown, nearest: n_read_threads"])
    assert str(error).startswith("2 problems in the configuration:")
    assert all(problem in str(error) for problem in error.problems)
    assert "1 problem in" in str(ConfigError(["block_size: got 0"]))


def test_an_expired_wait_says_what_it_waited_for():
    assert str(DeadlineExceeded("load of 16 chunks", 0.5)) == "waited 0.5 s for load of 16 chunks"


def test_nixl_errors_name_the_call():
    error = NixlError("check_xfer_state", "NIXL_ERR_BACKEND")
    assert str(error) == "NIXL check_xfer_state failed: NIXL_ERR_BACKEND"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_c01_a_full_disk_is_told_from_other_refusals(number):
    error = StorageError.from_os_error("/tier/a.bin", OSError(number, "whatever"))
    assert type(error) is StorageFull


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EROFS, errno.EMFILE])
def test_a_refusal_names_path_reason_and_errno(number):
    error = StorageError.from_os_error("/tier/a.bin", OSError(number, "whatever"))
    assert type(error) is StorageError
    assert error.errno == number
    assert "/tier/a.bin" in str(error)
    assert f"({errno.errorcode[number]})" in str(error)


def test_an_os_error_without_a_number_keeps_its_words():
    error = StorageError.from_os_error("/tier/a.bin", OSError("short write"))
    assert error.errno is None
    assert str(error) == "/tier/a.bin: short write"


def test_an_errno_that_has_no_name_is_shown_as_a_number():
    assert str(StorageError("/tier/a.bin", "odd", 99999)) == "/tier/a.bin: odd (99999)"
