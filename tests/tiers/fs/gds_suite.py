"""The fs tier by GDS_MT and GDS over the cuFile for tests: run by test_gds.py, a process for each."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.agent.nixl import NixlAgent
from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.config import FsTierConfig
from pdoffload.errors import ConfigError, CorruptChunk
from pdoffload.layout import BlockKey
from pdoffload.testing.cufile import MARK, Call, CufileForTests, Fault
from pdoffload.testing.fs_rig import FsRig, open_fs
from pdoffload.testing.tier_contract import TierContract
from pdoffload.testing.tier_rig import ShiftedClock, filled_region, keys_of
from pdoffload.tiers.base import Lookup, Tier, TierContext, Verify
from pdoffload.tiers.fs.gds import Use, choose
from pdoffload.tiers.fs.tier import FsTier

NAME = os.environ.get("PDOFFLOAD_TEST_BACKEND", "GDS_MT")
pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(MARK not in os.environ, reason="run by test_gds.py"),
]
KEYS = keys_of(*range(16))
HIT, MISS = Lookup.HIT, Lookup.MISS


@pytest.fixture(autouse=True)
def cufile() -> Iterator[CufileForTests]:
    """Heals what a test has broken."""
    cufile = CufileForTests()
    yield cufile
    cufile.heal()


class TestContract(TierContract):
    def open(self, context: TierContext, folder: Path) -> Tier:
        # Of a tier that may load unverified chunks, which GDS must not be.
        named = NAME if context.verify is Verify.ALWAYS else "GDS_MT"
        return FsTier(FsTierConfig(root_dir=str(folder), min_free_bytes=0, backend=named), context)

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, FsTier)
        FsRig(tier, filled_region(1), Path()).flip(key, 4096)

    def remove(self, tier: Tier, key: BlockKey) -> None:
        assert isinstance(tier, FsTier)
        os.unlink(tier.path(key))


@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize("writer_is_posix", [True, False])
def test_c06_files_are_the_same_whoever_writes_them(
    tmp_path: Path, cufile: CufileForTests, direct: str, writer_is_posix: bool
) -> None:
    names = ("POSIX", NAME) if writer_is_posix else (NAME, "POSIX")
    cufile.heal()
    for number, name in enumerate(names):
        with open_fs(tmp_path, backend=name, direct=direct) as rig:
            if number == 0:
                assert rig.store(KEYS, range(16)).succeeded == KEYS
            else:
                assert rig.lookup(*KEYS) == [HIT] * 16
                loaded = rig.load(KEYS, range(32, 48))
                assert (loaded.succeeded, loaded.verified) == (KEYS, 16)
                assert rig.bytes_of(*range(32, 48)) == rig.bytes_of(*range(16))
    assert cufile.calls(Call.READ) + cufile.calls(Call.WRITE) > 0


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.SHORT])
@pytest.mark.parametrize("count", [1, 3])
def test_writes_that_fail_cost_their_chunks_alone(
    tmp_path: Path, cufile: CufileForTests, fault: Fault, count: int
) -> None:
    with open_fs(tmp_path, backend=NAME) as rig:
        cufile.order(Call.WRITE, fault, value=errno.ENOSPC, first=4, count=count)
        stored = rig.store(KEYS, range(16))
        assert stored.settled
        lost = [key for key, _ in stored.failed]
        assert 1 <= len(lost) <= count
        assert set(stored.succeeded) | set(lost) == set(KEYS)
        assert rig.lookup(*KEYS) == [MISS if key in lost else HIT for key in KEYS]
        assert rig.temps() == []
        cufile.heal()
        assert rig.store(KEYS, range(16)).succeeded == KEYS
        assert rig.load(KEYS, range(32, 48)).succeeded == KEYS
        assert rig.bytes_of(*range(32, 48)) == rig.bytes_of(*range(16))


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.SHORT])
def test_reads_that_fail_are_misses_and_never_wrong_bytes(
    tmp_path: Path, cufile: CufileForTests, fault: Fault
) -> None:
    with open_fs(tmp_path, backend=NAME) as rig:
        rig.store(KEYS, range(16))
        rig.clear(*range(32, 48))
        cufile.order(Call.READ, fault, value=errno.EIO, first=4, count=2)
        loaded = rig.load(KEYS, range(32, 48))
        assert loaded.settled
        lost = [key for key, _ in loaded.failed]
        assert 1 <= len(lost) <= 2
        good = [number for number, key in enumerate(KEYS) if key not in lost]
        assert [rig.bytes_of(32 + number) for number in good] == [
            rig.bytes_of(number) for number in good
        ]
        if NAME == "GDS_MT":
            assert all(rig.path(key).exists() for key in KEYS), "the files are not to blame"
        else:
            # GDS says that all is well: what does not match is taken for corrupt, and computed anew.
            assert all(isinstance(error, CorruptChunk) for _, error in loaded.failed)
        cufile.heal()
        assert rig.store(KEYS, range(16)).failed == ()
        assert rig.load(KEYS, range(32, 48)).succeeded == KEYS


def test_files_that_cufile_refuses_are_misses(tmp_path: Path, cufile: CufileForTests) -> None:
    with open_fs(tmp_path, backend=NAME) as rig:
        cufile.order(Call.HANDLE, Fault.FAIL, value=5008)
        stored = rig.store(KEYS, range(16))
        assert (len(stored.failed), stored.settled) == (16, True)
        assert rig.temps() == []
        cufile.heal()
        assert rig.store(KEYS, range(16)).succeeded == KEYS


@pytest.mark.parametrize("call", [Call.READ, Call.WRITE])
def test_io_that_hangs_fails_by_deadline_and_settles_when_it_has_ended(
    tmp_path: Path, cufile: CufileForTests, call: Call
) -> None:
    clock = ShiftedClock()
    with open_fs(tmp_path, backend=NAME, clock=clock, context={"transfer_timeout_s": 60.0}) as rig:
        rig.store(KEYS[:2], range(2))
        cufile.order(call, Fault.HANG)
        submit = rig.submit_load if call is Call.READ else rig.submit_store
        keys = KEYS[:2] if call is Call.READ else KEYS[2:4]
        job = submit(keys, (8, 9))
        rig.until(lambda: cufile.hanging() > 0, "a call that hangs")
        clock.shift_s += 61
        late = rig.result(job)
        assert (late.succeeded, late.settled) == ((), False)
        cufile.heal()
        rig.until(lambda: job in rig.settled, "the end of the I/O")
        assert rig.load(KEYS[:2], (10, 11)).succeeded == KEYS[:2]
        assert rig.bytes_of(10, 11) == rig.bytes_of(0, 1)


def test_c08_descriptors_and_handles_do_not_pile_up(tmp_path: Path, cufile: CufileForTests) -> None:
    randomness = random.Random(8)
    with open_fs(tmp_path, backend=NAME, n_read_threads=1, n_write_threads=1) as rig:
        rig.store(KEYS, range(16))
        rig.load(KEYS, range(32, 48))
        fds, live = len(os.listdir("/proc/self/fd")), cufile.live()["files"]
        for number in range(40):
            if number % 5 == 0:
                at = randomness.randrange(1, 32)
                cufile.order(Call.WRITE, Fault.FAIL, value=errno.EIO, first=at, count=1)
            keys = keys_of(*((number, each) for each in range(16)))
            rig.store(keys, range(16))
            rig.load(keys, range(32, 48))
        assert (len(os.listdir("/proc/self/fd")), cufile.live()["files"]) == (fds, live)
        assert live == 0


def test_c20_jobs_over_the_same_files_do_not_close_each_others(tmp_path: Path) -> None:
    randomness = random.Random(20)
    with open_fs(tmp_path, backend=NAME, n_read_threads=4, n_write_threads=2) as rig:
        rig.store(KEYS, range(16))
        jobs = []
        for place in range(100):
            some = randomness.sample(range(16), 4)
            keys = tuple(KEYS[each] for each in some)
            slots = [16 + (place * 4 + i) % 48 for i in range(4)]
            if place % 12 == 0:
                for job, *_ in jobs:
                    rig.result(job)
                jobs.clear()
            jobs.append((rig.submit_load(keys, slots), some, slots))
            if place % 12 == 11:
                for job, wanted, there in jobs:
                    assert len(rig.result(job).succeeded) == 4
                    assert rig.bytes_of(*there) == rig.bytes_of(*wanted)


# --- the start: what only bytes can tell ---


def use(**changes: object) -> Use:
    terms: dict[str, object] = {
        "chunk_bytes": 8192,
        "most_chunks": 32,
        "verify": Verify.ALWAYS,
        "shows_holes": True,
        "open_flags": 0,
        "file_mode": 0o600,
        **changes,
    }
    return Use(**terms)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (Call.HANDLE, Fault.FAIL),
        (Call.WRITE, Fault.FAIL),
        (Call.WRITE, Fault.SHORT),
        (Call.READ, Fault.FAIL),
        (Call.READ, Fault.SHORT),
        (Call.WRITE, Fault.HANG),
        (Call.READ, Fault.HANG),
    ],
)
def test_c13_a_plugin_that_starts_and_moves_nothing_is_not_used(
    tmp_path: Path, cufile: CufileForTests, call: Call, fault: Fault
) -> None:
    cufile.order(call, fault, value=errno.EIO if call is not Call.HANDLE else 5008)
    path = str(tmp_path / "trial")
    began_s = SYSTEM_CLOCK.monotonic_s()
    with pytest.raises(ConfigError, match=f"backend: '{NAME}' is not usable here: "):
        choose(NAME, use(), path, SYSTEM_CLOCK)  # type: ignore[arg-type]
    assert SYSTEM_CLOCK.monotonic_s() - began_s < 5, "a start is not held up by a plugin"
    if NAME == "GDS_MT":
        said = choose("auto", use(), path, SYSTEM_CLOCK)
        assert isinstance(said, str)
        assert said.startswith("GDS_MT is not usable here: ")
    assert list(tmp_path.iterdir()) == []


def test_the_trial_leaves_nothing(tmp_path: Path, cufile: CufileForTests) -> None:
    before = cufile.live()
    fds = len(os.listdir("/proc/self/fd"))
    backend = choose(NAME, use(), str(tmp_path / "trial"), SYSTEM_CLOCK)  # type: ignore[arg-type]
    assert not isinstance(backend, str)
    assert list(tmp_path.iterdir()) == []
    assert cufile.live() == before
    assert len(os.listdir("/proc/self/fd")) == fds
    NixlAgent("after", [backend]).close()


if NAME == "GDS":

    def test_a_refused_submit_costs_its_chunks_and_the_tier_goes_on(
        tmp_path: Path, cufile: CufileForTests
    ) -> None:
        terms = {"transfer_timeout_s": 1.0}
        with open_fs(tmp_path, backend=NAME, context=terms, close_s=1.0) as rig:
            cufile.order(Call.SUBMIT, Fault.FAIL, value=5035, count=1)
            bad = rig.store(KEYS[:4], range(4))
            assert (bad.succeeded, bad.settled) == ((), False)
            assert rig.lookup(*KEYS[:4]) == [MISS] * 4
            assert rig.store(KEYS[4:8], range(4, 8)).succeeded == KEYS[4:8]
