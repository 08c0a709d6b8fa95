"""What tests of the links share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdoffload.p2p.secret import ClusterSecret
from pdoffload.testing.engine_process import CHILD
from pdoffload.testing.link_rig import Ends
from pdoffload.testing.nursery import Nursery


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


@pytest.fixture(params=[None, ClusterSecret(b"a secret of these tests")], ids=["open", "secret"])
def secret(request: pytest.FixtureRequest) -> ClusterSecret | None:
    value: ClusterSecret | None = request.param
    return value


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery(CHILD)
    yield made
    made.close()
