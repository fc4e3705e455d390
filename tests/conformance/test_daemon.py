"""The daemon over the memory transport: real learners, real waiting, chosen faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers import Participant, make_participants, peer_id

from peer.algorithm import AlgorithmSettings
from peer.core import PeerCore
from peer.daemon import Daemon, RoundReport
from peer.data import Dataset
from peer.events import NeighborsChanged, Started
from peer.sources import load_source
from protocol.errors import ModelError
from protocol.messages import PeerId
from protocol.transport.interface import Address
from protocol.transport.memory import MemoryNetwork, MemoryTransport
from sim.partition import PartitionSettings, partition

DEADLINE_S = 60.0
FETCH_S = 2.0  # long beside a round's work, also on a busy machine


@dataclass
class Member:
    participant: Participant
    daemon: Daemon
    transport: MemoryTransport
    reports: list[RoundReport] = field(default_factory=list)
    events: list[object] = field(default_factory=list)


def digits(peers: int) -> list[Dataset]:
    settings = PartitionSettings(
        kind="permuted", groups=min(2, peers), min_examples=30, max_examples=40
    )
    slices = partition(load_source("digits"), peers, settings, np.random.default_rng(0))
    return [part.dataset for part in slices]


def make_members(network: MemoryNetwork, peers: int = 4, rounds: int | None = 20, **settings):
    participants = make_participants(
        digits(peers), model="logistic", rounds=rounds, settings=AlgorithmSettings(**settings)
    )
    members: dict[PeerId, Member] = {}
    for each, participant in participants.items():
        daemon = Daemon(
            peer_id=each,
            core=participant.core,
            learner=participant.learner,
            labels=participant.learner.measured_labels,
            fetch_timeout_s=FETCH_S,
            push_timeout_s=FETCH_S,
            min_round_s=0.0,
            on_round=lambda report, each=each: members[each].reports.append(report),
        )
        transport = MemoryTransport(
            network=network,
            peer_id=each,
            layout=participant.learner.layout,
            task=participant.learner.task,
            listener=daemon,
        )
        members[each] = Member(participant, daemon, transport)
        record_events(participant.core, members[each].events)
    return members


def record_events(core: PeerCore, events: list[object]) -> None:
    """Keep what goes into a core and what comes out, for a replay."""
    handle = core.handle

    def recording(event):
        effects = handle(event)
        events.append((event, effects))
        return effects

    core.handle = recording  # type: ignore[method-assign]


async def start(members: dict[PeerId, Member]) -> None:
    addresses = {
        each: Address(name=each, endpoint="tcp://127.0.0.1:1", public_key="x") for each in members
    }
    for member in members.values():
        await member.transport.start()
        member.transport.publish(member.participant.core.model)
        member.transport.set_neighbors(addresses)
    await asyncio.sleep(0)  # the transports report their neighbors on the next turn of the loop


async def until(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for has no event of its own."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def run_all(members: dict[PeerId, Member], during=None) -> None:
    """Run every daemon until all have finished, then stop them."""
    await start(members)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        for member in members.values():
            tasks.create_task(member.daemon.run(member.transport))
        if during is not None:
            await during()
        for member in members.values():
            await member.daemon.finished.wait()
        for member in members.values():
            member.daemon.stop()
    for member in members.values():
        await member.transport.close()


async def test_daemons_learn_together_and_replaying_their_events_gives_the_same_effects():
    members = make_members(MemoryNetwork())
    await run_all(members)
    for index, (each, member) in enumerate(members.items()):
        assert [report.finished.round_number for report in member.reports] == list(range(20))
        accuracies = [report.validation_accuracy for report in member.reports]
        assert all(accuracy is not None for accuracy in accuracies)
        fresh = PeerCore(
            peer_id=each,
            settings=AlgorithmSettings(),
            model=make_participants(
                digits(4), model="logistic", rounds=20, settings=AlgorithmSettings()
            )[each].core.model.tensors,
            incarnation=0,
            rounds=20,
            rng=np.random.default_rng(np.random.SeedSequence((0, index)).spawn(2)[1]),
        )
        for event, effects in member.events:
            assert list(fresh.handle(event)) == list(effects)
    assert any(len(m.reports[-1].finished.prediction_weights) > 1 for m in members.values())


async def test_loss_and_delay_cost_no_round_more_than_its_deadline():
    members = make_members(MemoryNetwork(loss=0.1, delay_s=0.005, seed=1), rounds=10)
    await run_all(members)
    for member in members.values():
        assert len(member.reports) == 10
        # One deadline, however many of its fetches were lost; in a row they would take two or more.
        assert max(report.seconds["total"] for report in member.reports) < 2 * FETCH_S


async def test_a_peer_cut_off_is_left_out_and_used_again_when_it_is_back():
    network = MemoryNetwork()
    members = make_members(network, rounds=None)
    victim, witness = peer_id(3), members[peer_id(0)]

    async def during():
        await until(lambda: len(witness.reports) >= 5)
        network.kill(victim)
        await until(lambda: victim not in witness.daemon.neighbors)
        seen = len(witness.reports) + 1
        await until(lambda: len(witness.reports) >= seen + 10)
        assert all(victim not in r.finished.sampled for r in witness.reports[seen:])
        network.revive(victim)
        await until(lambda: victim in witness.daemon.neighbors)
        await until(lambda: any(victim in r.finished.sampled for r in witness.reports[seen + 10 :]))
        for member in members.values():
            member.daemon.finished.set()

    await run_all(members, during)


async def test_stopping_leaves_core_and_optimizer_in_step():
    members = make_members(MemoryNetwork(), peers=2, rounds=None)

    async def during():
        member = members[peer_id(0)]
        await until(lambda: len(member.reports) >= 7)
        for each in members.values():
            each.daemon.finished.set()

    await run_all(members, during)
    for member in members.values():
        saved = member.participant.core.snapshot()
        steps = member.participant.learner.optimizer_state()["1.bias/step"]
        assert saved.round_number == len(member.reports) == steps
        assert saved.model.tensors == member.participant.learner.parameters()


async def test_a_model_that_fails_in_mid_run_ends_the_daemon_with_its_reason():
    members = make_members(MemoryNetwork(), peers=1, rounds=None)
    (member,) = members.values()
    learner = member.participant.learner
    differentiate = learner.differentiate

    def failing(model, round_number, *, own):
        if round_number == 3:
            raise RuntimeError("out of luck")
        return differentiate(model, round_number, own=own)

    learner.differentiate = failing
    await start(members)
    with pytest.raises(ExceptionGroup) as caught:
        await member.daemon.run(member.transport)
    (error,) = caught.value.exceptions
    assert isinstance(error, ModelError)
    assert "round 3: out of luck" in str(error)
    await member.transport.close()


async def test_work_for_the_learner_is_done_in_order_or_cancelled_at_the_end():
    members = make_members(MemoryNetwork(), peers=1, rounds=2)
    (member,) = members.values()
    await start(members)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(member.daemon.run(member.transport))
        await member.daemon.finished.wait()
        assert await member.daemon.call(lambda: 42) == 42
        member.daemon.stop()
    assert not any(isinstance(event, NeighborsChanged) for event, _ in member.events[:1])
    assert isinstance(member.events[0][0], Started)
    await member.transport.close()
