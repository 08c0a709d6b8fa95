"""The service's thread: it answers without its engine, outlives an error that nobody thought of, and ends."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from pdoffload.clock import SYSTEM_CLOCK
from pdoffload.layout import Geometry, RunConfig
from pdoffload.memory.host import HostRegion
from pdoffload.p2p.address import Address
from pdoffload.p2p.link import Link
from pdoffload.p2p.news import Answered, Ask, News, Pull, PullEnded
from pdoffload.p2p.service import SWITCH_INTERVAL_S, PeerService
from pdoffload.p2p.terms import PeerTerms
from pdoffload.policy.lru import Lru
from pdoffload.testing.agents import FakeAgent
from pdoffload.testing.tier_rig import filled_region, keys_of
from pdoffload.tiering.index import Index

NOBODY = Address("127.0.0.1", 9)


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = filled_region(8, 4096)
    yield region
    region.close()


@pytest.fixture
def service(region: HostRegion) -> Iterator[PeerService]:
    geometry: Geometry = region.geometry
    terms = PeerTerms(
        geometry=geometry,
        base_address=region.address,
        run_config=RunConfig(fields={"model_name": "org/model"}),
        hash_seed=lambda: "seed",
    )
    service = PeerService(
        Link.bind(Address("127.0.0.1", 0)),
        terms,
        Index(geometry.num_slots, Lru(geometry.num_slots)),
        region,
        FakeAgent,
        num_threads=1,
        max_peers=4,
    )
    yield service
    service.close(10.0)


def heard(service: PeerService, count: int) -> list[News]:
    news: list[News] = []
    give_up_s = SYSTEM_CLOCK.monotonic_s() + 20.0
    while len(news) < count:
        assert SYSTEM_CLOCK.monotonic_s() < give_up_s, news
        news += service.take_news()
        SYSTEM_CLOCK.sleep(0.001)
    return news


def test_a_peer_that_is_not_there_is_a_miss_and_a_failed_pull(service: PeerService) -> None:
    keys = keys_of("a", "b")
    service.post(Ask(NOBODY, "id", keys))
    service.post(Pull(1, NOBODY, "id", keys, (0, 1)))
    answered, ended = sorted(heard(service, 2), key=lambda news: isinstance(news, PullEnded))
    assert isinstance(answered, Answered)
    assert (answered.keys, answered.hits) == (keys, frozenset())
    assert isinstance(ended, PullEnded)
    assert [key for key, _ in ended.failed] == list(keys)
    assert ended.settled, "nothing was ever sent"


def test_an_error_that_nobody_thought_of_ends_a_turn_and_not_the_service(
    service: PeerService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = service._exchange.take
    failures = iter([RuntimeError("unthought of")])

    def take(item: object) -> None:
        for failure in failures:
            raise failure
        original(item)  # type: ignore[arg-type]

    monkeypatch.setattr(service._exchange, "take", take)
    with caplog.at_level(logging.ERROR):
        service.post(Ask(NOBODY, "lost", keys_of("a")))
        service.post(Ask(NOBODY, "heard", keys_of("a")))
        (news,) = heard(service, 1)
    assert isinstance(news, Answered)
    assert news.kv_request_id == "heard"
    assert "unthought of" in caplog.text


def test_closing_answers_what_is_open_and_leaves_no_thread(service: PeerService) -> None:
    service.post(Pull(7, NOBODY, "id", keys_of("a"), (0,)))
    news = service.close(10.0)
    assert [each.job_id for each in news if isinstance(each, PullEnded)] == [7]
    assert service.close(10.0) == []
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("pdoffload-p2p")]


def test_peers_do_not_wait_long_for_a_thread_that_runs_python(service: PeerService) -> None:
    assert sys.getswitchinterval() <= SWITCH_INTERVAL_S
