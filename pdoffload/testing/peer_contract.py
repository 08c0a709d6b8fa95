"""What `pdoffload.agent.agent.Agent` promises of peers, as tests: inherit `PeerContract`, run it by pytest.

Two agents of this process are peers: `agent` with the memory `here` moves bytes to and from `other` with
the memory `there`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import Descriptors
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.peer import Peer
from pdoffload.agent.transfer import Transfer, TransferState
from pdoffload.errors import DeadlineExceeded, MisuseError, NixlError
from pdoffload.testing.agent_rig import PAGE, SLOTS, AgentRig, Memory, file_rows
from pdoffload.testing.clock import FakeClock


class PeerContract(AgentRig):
    """Every agent passes this."""

    @pytest.fixture
    def other(self, clock: FakeClock) -> Iterator[DrivenAgent]:
        other = self.make_agent(clock)
        yield other
        other.check()
        assert other.close() == []
        assert other.counts.balanced, other.counts

    @pytest.fixture
    def there(self, other: DrivenAgent) -> Memory:
        memory = Memory()
        other.register_memory(memory.address, memory.size_bytes)
        return memory

    @pytest.fixture
    def peer(self, agent: DrivenAgent, other: DrivenAgent, there: Memory) -> Peer:
        return agent.add_peer(other.metadata())

    def stall_write(
        self, agent: DrivenAgent, local: Descriptors, remote: Descriptors, peer: Peer
    ) -> Transfer:
        """The first write to a peer, of 0.05 s, that runs while the peer makes no progress."""
        return agent.submit(
            Op.WRITE, local, remote, timeout_s=0.05, what="a stalled write", peer=peer
        )

    def carry(
        self,
        agent: DrivenAgent,
        other: DrivenAgent,
        op: Op,
        local: Descriptors,
        remote: Descriptors,
        peer: Peer,
    ) -> Transfer:
        """Submit, and make progress on both sides until it is no longer running."""
        transfer = agent.submit(op, local, remote, timeout_s=1e6, what="a test", peer=peer)
        pause = threading.Event()
        for _ in range(20000):
            if transfer.state is not TransferState.RUNNING:
                break
            agent.poll()
            other.progress()
            pause.wait(0.001)
        return transfer

    # --- bytes ---

    def test_a_write_and_a_read_move_each_row(
        self, agent: DrivenAgent, other: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        here.fill(0, 1, 2)
        there.fill(7)
        sent = self.carry(agent, other, Op.WRITE, here.rows(0, 2), there.rows(5, 3), peer)
        back = self.carry(agent, other, Op.READ, here.rows(9), there.rows(7), peer)
        assert (sent.state, back.state) == (TransferState.DONE, TransferState.DONE)
        assert (there.page(5), there.page(3)) == (here.page(0), here.page(2))
        assert here.page(9) == there.page(7)
        assert there.page(4) == bytes(PAGE), "a byte outside the rows has changed"
        assert (sent.peer, sent.settled, peer.unsettled) == (peer, True, 0)

    def test_both_may_write_to_each_other(
        self, agent: DrivenAgent, other: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        back = other.add_peer(agent.metadata())
        here.fill(0)
        self.carry(agent, other, Op.WRITE, here.rows(0), there.rows(1), peer)
        self.carry(other, agent, Op.WRITE, there.rows(1), here.rows(2), back)
        assert here.page(2) == there.page(1) == here.page(0)

    def test_memory_that_the_metadata_did_not_name_is_out_of_reach(
        self, agent: DrivenAgent, other: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        late = Memory()
        for bad in (there.rows(0, SLOTS), late.rows(0, 1)):
            cut = self.carry(agent, other, Op.WRITE, here.rows(0, 1), bad, peer)
            assert cut.state is TransferState.FAILED
            assert cut.settled
        other.register_memory(late.address, late.size_bytes)
        assert (
            self.carry(agent, other, Op.WRITE, here.rows(0), late.rows(0), peer).state
            is TransferState.FAILED
        )
        peer.remove()
        again = agent.add_peer(other.metadata())
        here.fill(0)
        done = self.carry(agent, other, Op.WRITE, here.rows(0), late.rows(0), again)
        assert done.state is TransferState.DONE
        assert late.page(0) == here.page(0)

    # --- what is refused ---

    def test_rows_are_checked_as_far_as_they_are_ours(
        self, agent: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        self.refuse(agent, here.rows(0, SLOTS), there.rows(0, 1), "local row 1", peer=peer)
        self.refuse(agent, here.rows(0, 1), there.rows(0), "2 local rows", peer=peer)
        self.refuse(agent, here.rows(0, 1), there.rows(4, 4), "same bytes", peer=peer)
        self.refuse(agent, here.rows(4, 4), there.rows(0, 1), "same bytes", op=Op.READ, peer=peer)
        self.refuse(agent, here.rows(0), file_rows(3, 0), "cannot be reached", peer=peer)

    def test_c17_a_name_is_one_peer_until_it_is_removed(
        self, agent: DrivenAgent, other: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        with pytest.raises(MisuseError, match="a peer already"):
            agent.add_peer(other.metadata())
        peer.remove()
        assert peer.removed
        with pytest.raises(MisuseError, match="removed"):
            peer.remove()
        self.refuse(agent, here.rows(0), there.rows(0), "removed", peer=peer)
        again = agent.add_peer(other.metadata())
        assert again.name == peer.name == other.name
        here.fill(0)
        done = self.carry(agent, other, Op.WRITE, here.rows(0), there.rows(0), again)
        assert done.state is TransferState.DONE
        assert there.page(0) == here.page(0)

    def test_an_agent_is_no_peer_of_its_own_and_a_peer_belongs_to_one_agent(
        self, agent: DrivenAgent, other: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        with pytest.raises(MisuseError, match="itself"):
            agent.add_peer(agent.metadata())
        self.refuse(other, there.rows(0), here.rows(0), "another agent", peer=peer)

    def test_garbled_metadata_is_refused_and_harms_nothing(
        self, agent: DrivenAgent, other: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        good = other.metadata()
        rng = random.Random(3)
        bad = [good[:cut] for cut in range(0, len(good), 20)]
        bad += [rng.randbytes(size) for size in (1, 11, 500)] + [good + b"x", good[:11] + good]
        before = agent.counts
        for each in bad:
            with pytest.raises(NixlError, match="garbled"):
                agent.add_peer(each)
        assert agent.counts == before
        here.fill(0)
        self.carry(agent, other, Op.WRITE, here.rows(0), there.rows(0), peer)
        assert there.page(0) == here.page(0)

    # --- lifetimes ---

    def test_a_peer_outlives_the_transfers_that_use_it(
        self, clock: FakeClock, other: DrivenAgent, there: Memory
    ) -> None:
        agent = self.make_agent(clock)
        here = Memory()
        agent.register_memory(here.address, here.size_bytes)
        peer = agent.add_peer(other.metadata())
        late = self.stall_write(agent, here.rows(0), there.rows(0), peer)
        with pytest.raises(MisuseError, match="in use"):
            peer.remove()
        assert agent.wait(late).state is TransferState.UNKNOWN
        assert isinstance(late.error, DeadlineExceeded)
        with pytest.raises(MisuseError, match="in use"):
            peer.remove()
        assert "1 unsettled" in repr(peer)
        agent.check()
        assert agent.close(timeout_s=0.05) == []
        assert (late.settled_state, peer.unsettled) == (TransferState.FAILED, 0)
        assert peer.removed
        assert agent.counts.balanced, agent.counts

    def test_a_peer_that_wakes_up_settles_what_was_given_up(
        self, agent: DrivenAgent, other: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        here.fill(0)
        late = self.stall_write(agent, here.rows(0), there.rows(0), peer)
        assert agent.wait(late).state is TransferState.UNKNOWN
        self.wake(agent)
        told: list[Transfer] = []
        pause = threading.Event()
        for _ in range(20000):
            other.progress()
            told += agent.poll()
            if late.settled:
                break
            pause.wait(0.001)
        assert (told, late.settled_state) == ([late], TransferState.DONE)
        assert there.page(0) == here.page(0)

    def wake(self, agent: DrivenAgent) -> None:
        """Whatever it takes, besides progress, that a stalled write goes on."""

    def test_closing_forgets_the_peers(
        self, clock: FakeClock, other: DrivenAgent, there: Memory
    ) -> None:
        agent = self.make_agent(clock)
        peer = agent.add_peer(other.metadata())
        assert (agent.counts.peers_added, agent.counts.peers_removed) == (1, 0)
        assert agent.close() == []
        assert (peer.removed, agent.counts.peers_removed) == (True, 1)
        with pytest.raises(MisuseError, match="removed"):
            peer.remove()

    def test_another_thread_is_refused(
        self, agent: DrivenAgent, other: DrivenAgent, peer: Peer
    ) -> None:
        calls: tuple[Callable[[], object], ...] = (
            agent.metadata,
            agent.progress,
            lambda: agent.add_peer(b""),
            lambda: agent.transport_of(peer),
            peer.remove,
        )
        seen: list[str] = []

        def intrude() -> None:
            for call in calls:
                try:
                    call()
                except MisuseError as error:
                    seen.append(str(error))

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        assert ["another thread" in each for each in seen] == [True] * len(calls)
        other.progress()

    # --- what there is to see ---

    def test_the_transport_of_a_peer_has_a_name(
        self, agent: DrivenAgent, other: DrivenAgent, here: Memory, there: Memory, peer: Peer
    ) -> None:
        self.carry(agent, other, Op.WRITE, here.rows(0), there.rows(0), peer)
        assert agent.transport_of(peer) not in ("", "unknown")
        peer.remove()
        with pytest.raises(MisuseError, match="removed"):
            agent.transport_of(peer)
