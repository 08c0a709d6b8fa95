"""The part of the contract of an agent that needs a store: inherit `ObjectContract` and run it by pytest.

A subclass says how to make an agent, whose store is a real one or a fake.
"""

from __future__ import annotations

import random
import uuid

import pytest

from pdoffload.agent.agent import Op
from pdoffload.agent.descriptors import MemoryKind, pieces
from pdoffload.agent.driven import DrivenAgent
from pdoffload.agent.region import Region
from pdoffload.agent.transfer import TransferState
from pdoffload.errors import MisuseError, TransferError
from pdoffload.testing.agent_rig import PAGE, AgentRig, Memory, object_rows


class ObjectContract(AgentRig):
    """Every agent that reaches a store passes this."""

    @pytest.fixture
    def objects(self) -> str:
        """The start of names that nothing in the agent's store has yet."""
        return f"contract/{uuid.uuid4().hex}"

    def test_an_object_is_there_once_it_was_written_and_gives_its_bytes_back(
        self, agent: DrivenAgent, here: Memory, objects: str
    ) -> None:
        names = [f"{objects}/a", f"{objects}/b/c", f"{objects}/absent"]
        here.fill(0, 1)
        region = agent.register_objects(names[:2], [2 * PAGE, PAGE])
        ids = region.rows[:, 2].tolist()
        assert agent.query_objects(names) == [False, False, False]
        for slot, device in enumerate(ids):
            sent = self.move(agent, Op.WRITE, here.rows(slot), object_rows(device))
            assert (sent.state, sent.error) == (TransferState.DONE, None)
        assert agent.query_objects(names) == [True, True, False]
        for slot, device in enumerate(ids):
            self.move(agent, Op.READ, here.rows(8 + slot), object_rows(device))
        assert (here.page(8), here.page(9)) == (here.page(0), here.page(1))
        part = pieces(MemoryKind.OBJECT, [100], 50, ids[0])
        self.move(agent, Op.READ, here.rows(10, size_bytes=50), part)
        assert here.page(10) == here.page(0)[100:150] + bytes(PAGE - 50)

    def test_a_second_write_replaces_an_object(
        self, agent: DrivenAgent, here: Memory, objects: str
    ) -> None:
        (device,) = agent.register_objects([f"{objects}/x"], [PAGE]).rows[:, 2].tolist()
        here.fill(0, 1)
        self.move(agent, Op.WRITE, here.rows(0), object_rows(device))
        self.move(agent, Op.WRITE, here.rows(1), object_rows(device))
        self.move(agent, Op.READ, here.rows(2), object_rows(device))
        assert here.page(2) == here.page(1)

    def test_an_object_that_is_not_there_fails_its_transfer_and_not_the_next(
        self, agent: DrivenAgent, here: Memory, objects: str
    ) -> None:
        names = [f"{objects}/absent", f"{objects}/there"]
        absent, there = agent.register_objects(names, [PAGE, PAGE]).rows[:, 2].tolist()
        lost = self.move(agent, Op.READ, here.rows(0), object_rows(absent))
        assert (lost.state, lost.settled) == (TransferState.FAILED, True)
        assert isinstance(lost.error, TransferError)
        assert self.move(agent, Op.WRITE, here.rows(0), object_rows(there)).error is None
        assert self.move(agent, Op.READ, here.rows(1), object_rows(there)).error is None

    def test_an_object_is_written_whole(
        self, agent: DrivenAgent, here: Memory, objects: str
    ) -> None:
        (device,) = agent.register_objects([f"{objects}/x"], [2 * PAGE]).rows[:, 2].tolist()
        second = pieces(MemoryKind.OBJECT, [PAGE], PAGE, device)
        self.refuse(agent, here.rows(0), second, "from its first byte on")
        self.refuse(agent, here.rows(0), object_rows(device + 1), "remote row 0")
        assert agent.query_objects([f"{objects}/x"]) == [False]

    def test_c20_ids_of_objects_are_unique_and_the_names_of_one_list_too(
        self, agent: DrivenAgent, here: Memory, objects: str
    ) -> None:
        rng = random.Random(20)
        names = [f"{objects}/{number}" for number in range(8)]
        here.fill(*range(8))
        live: list[Region] = []
        for _ in range(40):
            chosen = rng.sample(names, 3)
            region = agent.register_objects(chosen, [PAGE] * 3)
            live.append(region)
            ids = [device for each in live for device in each.rows[:, 2].tolist()]
            assert len(set(ids)) == len(ids)
            number, device = names.index(chosen[0]), int(region.rows[0, 2])
            assert not self.move(agent, Op.WRITE, here.rows(number), object_rows(device)).error
            self.move(agent, Op.READ, here.rows(20), object_rows(device))
            assert here.page(20) == here.page(number)
            if rng.random() < 0.5:
                live.pop(rng.randrange(len(live))).release()
        for bad in ([], [""], [names[0], names[0]]):
            with pytest.raises(MisuseError):
                agent.register_objects(bad, [PAGE] * len(bad))
            with pytest.raises(MisuseError):
                agent.query_objects(bad)
        with pytest.raises(MisuseError):
            agent.register_objects(names, [PAGE])
        agent.check()
