"""The daemon over the memory transport: real learners, real waiting, chosen faults."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from helpers import make_participants, peer_id
from helpers_daemons import DEADLINE_S, FETCH_S, digits, make_members, run_all, start, until

from peer.algorithm import PROFILES, AlgorithmSettings
from peer.core import PeerCore
from peer.events import Fetch, NeighborsChanged, Started
from protocol.deadlines import Deadlines
from protocol.errors import ModelError
from protocol.transport.memory import MemoryNetwork


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


async def test_when_the_one_who_clusters_dies_the_next_does_and_nobody_waits_in_vain():
    network = MemoryNetwork(delay_s=0.3)
    preset = {**PROFILES["odcl"], "start_steps": 60, "clustered_by": "one"}
    members = make_members(network, rounds=1, settings=AlgorithmSettings(**preset))
    first, *others = members
    gathering = members[first].events

    async def during():
        await until(lambda: any(isinstance(e, Fetch) for _, out in gathering for e in out))
        network.kill(first)

    await run_all(members, during)
    finished = {each: member.reports[0].finished for each, member in members.items()}
    (digest,) = {finished[each].clustering for each in others}
    assert digest != finished[first].clustering
    assert {finished[each].clustered_by for each in others} == {others[0]}
    # It alone has fetched everybody's model; the others no more than that of their one friend.
    counts = [members[each].transport.counters.models_fetched for each in others]
    assert counts[0] == 2
    assert counts[1:] == [len(finished[each].collaboration_weights) - 1 for each in others[1:]]


async def test_who_does_not_know_in_time_is_followed_by_the_next():
    preset = {**PROFILES["odcl"], "start_steps": 60, "clustered_by": "one"}
    members = make_members(MemoryNetwork(), 3, 1, settings=AlgorithmSettings(**preset))
    first, *others = members
    members[first].transport.publish_groups = lambda groups: None  # it never tells
    for each in others:
        members[each].daemon._deadlines = Deadlines(0.3)
    await run_all(members)
    finished = [members[each].reports[0].finished for each in members]
    assert [each.clustered_by for each in finished] == [first, others[0], others[0]]
    assert len({each.clustering for each in finished}) == 1


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
        assert saved.round_number == len(member.reports)
        assert steps == AlgorithmSettings().steps_after(saved.round_number)
        assert saved.model.tensors == member.participant.learner.parameters()


async def test_a_model_that_fails_in_mid_run_ends_the_daemon_with_its_reason():
    members = make_members(MemoryNetwork(), peers=1, rounds=None)
    (member,) = members.values()
    learner = member.participant.learner
    differentiate = learner.differentiate

    def failing(model, batch, *, own):
        if batch.number == AlgorithmSettings().steps_after(3):
            raise RuntimeError("out of luck")
        return differentiate(model, batch, own=own)

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
