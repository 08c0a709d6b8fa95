"""Whatever peers, engines, networks and processes do: every command ends, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdoffload.config import Verify
from pdoffload.errors import NixlError
from pdoffload.layout import BlockKey
from pdoffload.memory.lending import ABSENT, FILLING, READY, Presence
from pdoffload.p2p.news import Keep, KeepEnds, Leave, Offer
from pdoffload.p2p.receiving import Stage
from pdoffload.p2p.terms import Deadlines
from pdoffload.testing.fake_peer import FakePeer, terms_of
from pdoffload.testing.peer_rig import FakeCluster
from pdoffload.testing.tier_rig import keys_of

DEADLINES = Deadlines()
NAMES = ("one", "two", "three")
IDS = ("x", "y")
KEYS = keys_of(*range(8))

names = st.sampled_from(NAMES)
chunks = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=5, unique=True)
Name = tuple[str, str, str]
"""Of a request: who asks, whom, under which id."""


class Conversations(RuleBasedStateMachine):
    """Three processes, of one host or not; the third may run stock vLLM."""

    @initialize(
        is_one_host=st.booleans(),
        third_is_stock=st.booleans(),
        verify=st.sampled_from(Verify),
        tells_ends_late=st.booleans(),
    )
    def begin(
        self, is_one_host: bool, third_is_stock: bool, verify: Verify, tells_ends_late: bool
    ) -> None:
        self.cluster = FakeCluster(max_peers=4, is_one_host=is_one_host)
        self.cluster.tells_ends_late = tells_ends_late
        self.patches = ExitStack()
        self.patches.enter_context(self.cluster.neighbourhood())
        self.terms = terms_of(verify=verify)
        self.third_is_stock = third_is_stock
        self.asked: dict[tuple[str, str, str, BlockKey], float] = {}
        self.pulled: dict[tuple[str, int], float] = {}
        self.kept: set[tuple[str, str]] = set()
        self.by_name: dict[str, FakePeer] = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        is_stock = name == NAMES[2] and self.third_is_stock
        self.by_name[name] = self.cluster.start(name, self.terms, is_stock=is_stock)

    @property
    def now_s(self) -> float:
        return self.cluster.clock.monotonic_s()

    def filtered(
        self, peer: FakePeer, keys: Sequence[BlockKey], *presence: Presence
    ) -> list[BlockKey]:
        """Those of `keys` that stand so in the pool, and that no pull is bringing."""
        pulled = {key for pull in peer.wanted_pulls() for key in pull.keys}
        return [key for key in keys if peer.index.find(key) in presence and key not in pulled]

    # --- what happens ---

    @rule(
        name=names,
        chunks=chunks,
        what=st.sampled_from(["hold", "hold", "reserve", "commit", "commit", "abandon", "reset"]),
    )
    def pool(self, name: str, chunks: list[int], what: str) -> None:
        peer, keys = self.by_name[name], [KEYS[chunk] for chunk in chunks]
        if what == "hold":
            peer.hold(self.filtered(peer, keys, ABSENT))
        elif what == "reserve":
            peer.reserve(self.filtered(peer, keys, ABSENT))
        elif what == "commit":
            peer.index.commit(self.filtered(peer, keys, FILLING))
        elif what == "abandon":
            peer.index.abandon(self.filtered(peer, keys, FILLING))
        else:
            self.forget_all(name)

    def forget_all(self, name: str) -> None:
        peer = self.by_name[name]
        peer.index.abandon(self.filtered(peer, KEYS, FILLING))
        peer.reset()

    @rule(
        name=names,
        source=names,
        kv_id=st.sampled_from(IDS),
        chunks=chunks,
        what=st.sampled_from(["ask", "ask", "pull", "pull", "pull", "leave"]),
    )
    def consumer(self, name: str, source: str, kv_id: str, chunks: list[int], what: str) -> None:
        request, keys = (name, source, kv_id), [KEYS[chunk] for chunk in chunks]
        if name == source:
            return
        if what == "ask":
            self.ask(request, keys)
        elif what == "pull":
            self.pull(request, keys)
        else:
            self.leave(request)

    @rule(
        request=st.tuples(names, names, st.sampled_from(IDS)),
        steps=st.integers(0, 6),
        writers_first=st.booleans(),
        who=st.integers(0, 1),
        what=st.sampled_from(["freeze", "cut", "restart", "leave", "ask", "reset", "late"]),
    )
    def something_happens_in_a_pull(
        self, request: Name, steps: int, writers_first: bool, who: int, what: str
    ) -> None:
        """The chunks are there, so that the pull comes as far as these steps bring it."""
        consumer, source = self.by_name[request[0]], self.by_name[request[1]]
        if consumer is source:
            return
        source.hold(self.filtered(source, KEYS[:5], ABSENT))
        held = [key for key in KEYS if source.index.find(key) is READY]
        source.movers.is_stuck = source.movers.is_stuck or what == "late"
        self.pull(request, held)
        for _ in range(steps):
            self.cluster.step(writers_first=writers_first)
        if what == "freeze":
            self.freeze(request[who])
        elif what == "cut":
            self.cluster.cut(consumer, source)
        elif what == "restart":
            self.restart(request[who])
        elif what == "leave":
            self.leave(request)
        elif what == "ask":
            self.ask(request, held)
        elif what == "reset":
            self.forget_all(request[who])
        else:
            self.time(DEADLINES.load_timeout_s + 1)
            source.movers.is_stuck = False

    def ask(self, request: Name, keys: Sequence[BlockKey]) -> None:
        name, source, kv_id = request
        new = [key for key in keys if (*request, key) not in self.asked]
        self.by_name[name].ask(self.by_name[source], f"{source} {kv_id}", new)
        self.asked.update({(*request, key): self.now_s for key in new})

    def pull(self, request: Name, keys: Sequence[BlockKey]) -> None:
        name, source, kv_id = request
        peer = self.by_name[name]
        absent = self.filtered(peer, keys, ABSENT)
        if absent and len(absent) <= peer.index.pool.num_free:
            job_id = peer.pull(self.by_name[source], f"{source} {kv_id}", absent)
            self.pulled[(name, job_id)] = self.now_s

    def leave(self, request: Name) -> None:
        name, source, kv_id = request
        self.by_name[name].post(Leave(self.by_name[source].address, f"{source} {kv_id}"))
        for each in [each for each in self.asked if each[:3] == request]:
            del self.asked[each]

    @rule(name=names, kv_id=st.sampled_from(IDS), chunks=chunks, ends=st.booleans())
    def producer(self, name: str, kv_id: str, chunks: list[int], ends: bool) -> None:
        peer = self.by_name[name]
        if (name, kv_id) not in self.kept:
            self.kept.add((name, kv_id))
            peer.post(Keep(f"{name} {kv_id}"))
        elif ends:
            self.end_keep(name, kv_id)
        else:
            here = [KEYS[c] for c in chunks if peer.index.find(KEYS[c]) is not ABSENT]
            peer.post(Offer(f"{name} {kv_id}", tuple(here)))

    def end_keep(self, name: str, kv_id: str) -> None:
        if (name, kv_id) in self.kept:
            self.kept.discard((name, kv_id))
            self.by_name[name].post(KeepEnds(f"{name} {kv_id}"))

    @rule(name=names, fault=st.sampled_from(["refused", "lost", "lost", "garbled"]))
    def write(self, name: str, fault: str) -> None:
        if fault != "garbled" or self.terms.verify is Verify.ALWAYS:
            self.by_name[name].movers.faults.append(fault)

    @rule(name=names, what=st.sampled_from(["land", "land", "settle"]))
    def adrift(self, name: str, what: str) -> None:
        movers = self.by_name[name].movers
        movers.settle() if what == "settle" else movers.land()

    @rule(one=names, other=names, what=st.sampled_from(["cut", "lose", "double"]))
    def network(self, one: str, other: str, what: str) -> None:
        start, end = self.by_name[one], self.by_name[other]
        queue = self.cluster.queue(start.address, end.address)
        if what == "cut":
            self.cluster.cut(start, end)
        elif queue and what == "lose":
            queue.popleft()
        elif queue:
            queue.append(queue[0])

    @rule(name=names, what=st.sampled_from(["restart", "freeze", "full", "slow", "stuck", "fail"]))
    def process(self, name: str, what: str) -> None:
        peer = self.by_name[name]
        if what == "restart":
            self.restart(name)
        elif what == "freeze":
            self.freeze(name)
        elif what == "full":
            peer.wire.is_full = not peer.wire.is_full
        elif what == "stuck":
            peer.movers.is_stuck = not peer.movers.is_stuck
        elif what == "slow":
            peer.is_slow_to_open = not peer.is_slow_to_open
        elif peer.opened and peer.opened[-1].stage in (Stage.OPENING, Stage.OPEN):
            peer.opened[-1].fail(NixlError("progress", "a fault of the test"))

    def freeze(self, name: str) -> None:
        """Or let it go on."""
        peer = self.by_name[name]
        peer.is_frozen = not peer.is_frozen
        for book in (self.asked, self.pulled):  # deadlines count from when its service hears
            book.update({each: self.now_s for each in book if each[0] == name})

    def restart(self, name: str) -> None:
        self.cluster.kill(self.by_name[name])
        self.start(name)
        for book in (self.asked, self.pulled):
            for each in [each for each in book if each[0] == name]:
                del book[each]
        self.kept = {each for each in self.kept if each[0] != name}

    @rule(steps=st.integers(1, 3), writers_first=st.booleans())
    def step(self, steps: int, writers_first: bool) -> None:
        for _ in range(steps):
            self.cluster.step(writers_first=writers_first)

    @rule()
    def run(self) -> None:
        self.cluster.run()

    @rule(duration_s=st.sampled_from([0.1, 1.0, 5.0, 9.0, 31.0, 70.0]))
    def time(self, duration_s: float) -> None:
        self.cluster.pass_time(duration_s)
        self.all_have_ended_in_time()

    # --- what must hold ---

    def all_have_ended_in_time(self) -> None:
        longest_s = DEADLINES.load_timeout_s + DEADLINES.abort_timeout_s
        for (name, job_id), since_s in list(self.pulled.items()):
            peer = self.by_name[name]
            if job_id in peer.ended:
                del self.pulled[(name, job_id)]
            else:
                assert peer.is_frozen or self.now_s - since_s <= longest_s, "a pull does not end"
        longest_s = DEADLINES.lookup_timeout_s
        for each, since_s in list(self.asked.items()):
            peer = self.by_name[each[0]]
            if (f"{each[1]} {each[2]}", each[3]) in peer.answers:
                del self.asked[each]
            else:
                assert peer.is_frozen or self.now_s - since_s <= longest_s, "no answer"

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            with self.patches:
                self.all_comes_to_rest()

    def all_comes_to_rest(self) -> None:
        for name, peer in self.by_name.items():
            peer.is_frozen = peer.is_slow_to_open = peer.wire.is_full = False
            peer.movers.faults.clear()
            peer.movers.is_stuck = False
            peer.index.abandon(self.filtered(peer, KEYS, FILLING))
            for kv_id in IDS:
                self.end_keep(name, kv_id)
                for source in NAMES:
                    self.leave((name, source, kv_id))
        for _ in range(5):
            self.cluster.pass_time(60)
            for peer in self.by_name.values():
                peer.movers.settle()
        self.cluster.check()
        for peer in self.by_name.values():
            assert not peer.pulls
            assert not peer.unsettled, "slots are in quarantine for ever"
            assert peer.is_at_rest, peer
            assert sum(each.stage is Stage.OPEN for each in peer.opened) <= 1, peer.receivers


TestConversations = Conversations.TestCase
TestConversations.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
