"""Checksums of a write, computed by several threads, and by none once it is over."""

from __future__ import annotations

import threading

import pytest
import xxhash

from pdoffload.errors import MisuseError
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.hashing import Hashing
from pdoffload.p2p.messages import Fetch
from pdoffload.p2p.serving import Serve, Write
from pdoffload.p2p.terms import Target
from pdoffload.testing.tier_rig import filled_region

SLOTS = (3, 0, 2)
KEYS = (b"three", b"zero", b"two")
TARGET = Target("10.0.0.1:1", b"", 0, 8, 1)


def hashing_of(region: HostRegion) -> Hashing:
    serve = Serve(None, Fetch("id", KEYS, SLOTS, 0), TARGET, 0.0)  # type: ignore[arg-type]
    return Hashing(region, Write(serve, KEYS, SLOTS, SLOTS))


def right(region: HostRegion) -> dict[bytes, bytes]:
    views = {key: region.slot_view(slot) for key, slot in zip(KEYS, SLOTS, strict=True)}
    return {key: xxhash.xxh3_128_digest(view) for key, view in views.items()}


def test_what_was_computed_ahead_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    region = filled_region(4)
    digests = right(region)
    hashing = hashing_of(region)
    hashing.go_ahead()
    monkeypatch.setattr(region, "slot_view", None)
    assert hashing.finish() == digests
    region.close()


def test_nothing_is_computed_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot may have other bytes by then."""
    region = filled_region(4)
    for end in (Hashing.stop, Hashing.finish):
        hashing = hashing_of(region)
        end(hashing)
        for slot in SLOTS:
            region.forget_checksum(slot)
        with monkeypatch.context() as patched:
            patched.setattr(HostRegion, "checksum", lambda *_: pytest.fail("a slot was read"))
            hashing.go_ahead()
            with pytest.raises(MisuseError, match="was ended before"):
                hashing.finish()
    region.close()


def test_the_end_waits_for_a_chunk_that_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    region = filled_region(4)
    hashing = hashing_of(region)
    is_reading, may_go_on = threading.Event(), threading.Event()

    def slow(self: HostRegion, slot: int) -> bytes:
        is_reading.set()
        assert may_go_on.wait(10)
        return b""

    monkeypatch.setattr(HostRegion, "checksum", slow)
    reader = threading.Thread(target=hashing.go_ahead)
    reader.start()
    assert is_reading.wait(10)
    ender = threading.Thread(target=hashing.stop)
    ender.start()
    ender.join(0.05)
    assert ender.is_alive(), "a slot is given back while it is read"
    may_go_on.set()
    for thread in (ender, reader):
        thread.join(10)
        assert not thread.is_alive()
    region.close()
