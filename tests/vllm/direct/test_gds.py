"""Direct offloading through NIXL's real GDS_MT plugin, over a cuFile for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
@pytest.mark.nixl
def test_the_direct_way_over_the_plugin(run_suite: Callable[[Path, str], None]) -> None:
    run_suite(Path(__file__).parent / "gds_suite.py", "GDS_MT")
