from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import RunConfig
from pdoffload.testing.tier_rig import keys_of
from pdoffload.tiers.fs.claims import Claims
from pdoffload.tiers.fs.evict import EvictorLock
from pdoffload.tiers.fs.ledger import Claim, LedgerBusy, LedgerDamaged, LedgerReplaced, Row
from pdoffload.tiers.fs.paths import Namespace, open_namespace

SIZE = 100
KEYS = keys_of(*range(6))


@pytest.fixture
def space(tmp_path: Path) -> Namespace:
    return open_namespace(str(tmp_path), RunConfig(fields={"model_name": "m"}), 0, 0o600)


@pytest.fixture
def claims(space: Namespace) -> Iterator[Claims]:
    made = Claims(space)
    made.open()
    yield made
    made.ledger.close()


def claimed(claims: Claims, count: int = 2) -> Claim:
    claim = Claim.new("me", count * SIZE, KEYS[:count])
    assert claims.claim(claim, 100 * SIZE)
    return claim


def rows(count: int) -> list[Row]:
    return [Row(key, SIZE, 1) for key in KEYS[:count]]


def test_a_claim_lives_until_it_is_settled(claims: Claims) -> None:
    claim = claimed(claims)
    assert claims.owners == {"me"}
    claims.settle({claim.id: rows(2)})
    assert claims.owners == set()
    assert claims.ledger.usage()[:2] == (2 * SIZE, 0)


def test_what_does_not_fit_is_not_claimed(claims: Claims) -> None:
    assert not claims.claim(Claim.new("me", SIZE, KEYS[:1]), SIZE - 1)
    assert claims.owners == set()


def test_a_settlement_that_cannot_be_written_goes_with_the_next(claims: Claims) -> None:
    one, two = claimed(claims), claimed(claims, 3)
    holder = sqlite3.connect(claims.ledger.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusy):
        claims.settle({one.id: rows(1)})
    assert claims.wait
    holder.execute("ROLLBACK")
    holder.close()
    claims.settle({two.id: rows(3)})
    assert not claims.wait
    assert claims.ledger.usage()[:2] == (3 * SIZE, 0)


def test_what_was_claimed_in_another_ledger_is_claimed_in_the_new_one(claims: Claims) -> None:
    claim = claimed(claims)
    Path(claims.ledger.path).unlink()
    with pytest.raises(LedgerReplaced):
        claims.ledger.usage()
    claims.open()
    assert claims.ledger.usage()[:2] == (0, 2 * SIZE)
    claims.settle({claim.id: rows(2)})
    assert claims.ledger.usage()[:2] == (2 * SIZE, 0)


def test_a_damaged_ledger_goes_unless_another_process_is_at_it(
    space: Namespace, claims: Claims, caplog: pytest.LogCaptureFixture
) -> None:
    claimed(claims)
    path = Path(claims.ledger.path)
    path.write_bytes(b"rubbish" * 1000)
    damage = LedgerDamaged(str(path), "is damaged")
    other, own = EvictorLock(space), EvictorLock(space)
    assert other.take()
    claims.make_anew(damage, own, SYSTEM_CLOCK)
    assert path.read_bytes().startswith(b"rubbish")
    other.give()
    claims.make_anew(damage, own, SYSTEM_CLOCK)
    assert not path.exists()
    assert "made anew" in caplog.text
    claims.open()
    assert claims.ledger.usage()[:2] == (0, 2 * SIZE)
    assert own.take(), "the lock was given back"
    own.give()
