"""Daemons in lockstep over the memory transport and the simulator: the same bits, every round."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from helpers import Participant, initial_of, make_participants, peer_id, run_lockstep
from helpers_daemons import Member, digits, make_members, members_of, run_all, until
from helpers_simulation import make_simulation, swarm_settings

from peer.algorithm import PROFILES, AlgorithmSettings
from peer.core import PeerCore
from peer.events import (
    Cluster,
    Effect,
    Event,
    GradientArrived,
    ModelAsked,
    ModelFetched,
    Publish,
    RoundClosed,
    RoundFinished,
)
from peer.pace import Lockstep as LockstepPace
from protocol.messages import PeerId
from protocol.transport.memory import MemoryNetwork
from sim.engine import LearnerCrowd, Lockstep

Log = list[tuple[Event, Sequence[Effect]]]

PEERS, ROUNDS = 6, 12


def settings_of(profile: str, **others) -> AlgorithmSettings:
    tree = {"profile": profile, **PROFILES[profile], **others}
    return msgspec.convert(tree, AlgorithmSettings)


def effects_of(log: Log, kind: type) -> list[Effect]:
    return [effect for _, effects in log for effect in effects if isinstance(effect, kind)]


def simulate(
    participants: dict[PeerId, Participant], settings: AlgorithmSettings
) -> dict[PeerId, Log]:
    """Run the simulator's lockstep; return what went into each core and what came out."""
    logs: dict[PeerId, Log] = {each: [] for each in participants}
    Lockstep(
        {each: participant.core for each, participant in participants.items()},
        LearnerCrowd({each: participant.learner for each, participant in participants.items()}),
        bits=settings.bits,
        initial=initial_of(participants) if settings.codes_first_models else None,
        on_event=lambda each, event, effects: logs[each].append((event, effects)),
    ).run()
    return logs


async def run_daemons(settings: AlgorithmSettings, network: MemoryNetwork) -> dict[PeerId, Member]:
    pace = LockstepPace(peer_id(number) for number in range(PEERS))
    members = make_members(network, PEERS, ROUNDS, settings=settings, pace_of=pace.of)
    await run_all(members)
    return members


def assert_same_bits(members: dict[PeerId, Member], logs: dict[PeerId, Log]) -> None:
    """Every published model, weight, loss average, sample and verdict, of every round."""
    for each, member in members.items():
        assert effects_of(member.events, Publish) == effects_of(logs[each], Publish)
        assert effects_of(member.events, RoundFinished) == effects_of(logs[each], RoundFinished)
        assert len(member.reports) == ROUNDS


@pytest.mark.parametrize(
    ("profile", "others"),
    [
        ("default", {}),
        ("default", {"codec": "f32"}),
        ("thrifty", {"codec": "8bit"}),
        ("odcl", {}),
        ("odcl", {"clustered_by": "one"}),
        ("default", {"warm_start": "odcl", "clustered_by": "one"}),
        ("paper", {}),
    ],
)
async def test_daemons_in_lockstep_equal_the_simulator_bit_for_bit(profile, others):
    settings = settings_of(profile, **others)
    members = await run_daemons(settings, MemoryNetwork())
    participants = make_participants(
        digits(PEERS), model="logistic", rounds=ROUNDS, settings=settings
    )
    logs = simulate(participants, settings)
    assert_same_bits(members, logs)
    for each, member in members.items():
        ours, theirs = member.participant, participants[each]
        assert ours.learner.parameters() == theirs.learner.parameters()
        assert ours.core.mixture() == theirs.core.mixture()
        assert ours.core.snapshot() == theirs.core.snapshot()
    moved = [effect for log in logs.values() for effect in effects_of(log, RoundFinished)]
    averaging = settings.exchange == "average"
    assert averaging or any(sum(finished.verdicts.values()) for finished in moved)
    assert any(len(finished.collaboration_weights) > 1 for finished in moved)


@pytest.mark.parametrize("clustered_by", ["all", "one"])
async def test_one_shot_daemons_average_by_examples_and_find_one_clustering_as_the_simulator_does(
    clustered_by,
):
    settings = settings_of("odcl", start_steps=60, clustered_by=clustered_by)
    pace = LockstepPace(peer_id(number) for number in range(PEERS))
    members = make_members(MemoryNetwork(), PEERS, 1, settings=settings, pace_of=pace.of)
    await run_all(members)
    participants = make_participants(digits(PEERS), model="logistic", rounds=1, settings=settings)
    logs = simulate(participants, settings)
    sizes = {each: len(of.split.fit) + len(of.split.holdout) for each, of in participants.items()}
    assert len(set(sizes.values())) > 1
    for each, member in members.items():
        (finished,) = effects_of(member.events, RoundFinished)
        assert [finished] == effects_of(logs[each], RoundFinished)
        assert member.participant.core.snapshot() == participants[each].core.snapshot()
        weights = finished.collaboration_weights
        assert len(weights) > 1
        total = sum(sizes[other] for other in weights)
        assert weights == pytest.approx({other: sizes[other] / total for other in weights})
    finished = {each: log[-1][1][0] for each, log in logs.items()}
    (digest,) = {each.clustering for each in finished.values()}
    assert digest
    clustered = {each for each, log in logs.items() if effects_of(log, Cluster)}
    assert clustered == {each for each, of in finished.items() if of.clustered_by == each}
    assert clustered == ({peer_id(0)} if clustered_by == "one" else set(logs))


def test_whoever_clusters_the_averages_and_weights_of_one_shot_are_the_same_bits():
    published = {}
    for clustered_by in ("all", "one"):
        settings = settings_of("odcl", start_steps=60, clustered_by=clustered_by)
        participants = make_participants(
            digits(PEERS), model="logistic", rounds=1, settings=settings
        )
        simulate(participants, settings)
        published[clustered_by] = {
            each: (of.core.model, of.core.collaboration_weights(), of.core.snapshot().groups)
            for each, of in participants.items()
        }
    assert published["all"] == published["one"]


async def test_delays_do_not_change_a_bit_of_a_lockstep():
    settings = settings_of("default")
    members = await run_daemons(settings, MemoryNetwork(delay_s=0.003))
    participants = make_participants(
        digits(PEERS), model="logistic", rounds=ROUNDS, settings=settings
    )
    assert_same_bits(members, simulate(participants, settings))


async def test_daemons_score_what_the_simulation_of_their_settings_scores():
    settings = swarm_settings(4, 10, model="mlp")
    simulated, real = make_simulation(settings), make_simulation(settings)
    simulated.run()
    pace = LockstepPace(real.peers)
    participants = {
        each: Participant(peer.core, peer.learner, peer.examples)
        for each, peer in real.peers.items()
    }
    await run_all(members_of(participants, MemoryNetwork(), pace.of, settings.algorithm))
    for each, peer in real.peers.items():
        ours, theirs = real.evaluate(peer), simulated.evaluate(simulated.peers[each])
        for spent in ("bytes_sent", "bytes_received", "seconds"):
            del ours[spent], theirs[spent]
        assert ours == theirs


async def test_in_a_lockstep_nobody_is_ever_a_round_ahead():
    """What a peer hears from others between two closes belongs to that round alone."""
    members = await run_daemons(settings_of("default"), MemoryNetwork(delay_s=0.001))
    for member in members.values():
        closed, asked = 0, 0
        for event, _ in member.events:
            match event:
                case RoundClosed(round_number):
                    assert round_number == closed
                    closed += 1
                case ModelFetched(_, round_number, snapshot):
                    assert round_number == snapshot.version.round_number == closed
                case GradientArrived(update):
                    assert update.sender_round == update.on_version.round_number == closed
                case ModelAsked():
                    asked += 1
        assert closed == ROUNDS
        assert asked > 0


async def test_a_daemon_that_stops_holds_nobody_up():
    pace = LockstepPace(peer_id(number) for number in range(4))
    members = make_members(MemoryNetwork(), 4, ROUNDS, pace_of=pace.of)
    quitter = members[peer_id(2)]

    async def during():
        await until(lambda: len(quitter.reports) >= 3)
        quitter.daemon.stop()
        quitter.daemon.finished.set()

    await run_all(members, during)
    for member in members.values():
        assert len(member.reports) == ROUNDS or member is quitter
    assert len(quitter.reports) < ROUNDS


async def test_a_peer_that_has_finished_holds_nobody_up():
    """Rounds are the core's own business: some may do fewer."""
    pace = LockstepPace(peer_id(number) for number in range(3))
    members = make_members(MemoryNetwork(), 3, 6, pace_of=pace.of)
    short = make_members(MemoryNetwork(), 3, 2)[peer_id(1)].participant.core
    members[peer_id(1)].daemon._core = short
    await run_all(members)
    assert [len(member.reports) for member in members.values()] == [6, 2, 6]


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_log_of_the_simulator_replayed_into_fresh_cores_gives_the_same_effects(profile):
    settings = settings_of(profile)
    arguments = {"model": "logistic", "rounds": ROUNDS, "settings": settings}
    logs = simulate(make_participants(digits(PEERS), **arguments), settings)
    for each, fresh in make_participants(digits(PEERS), **arguments).items():
        for event, effects in logs[each]:
            assert list(fresh.core.handle(event)) == list(effects)


async def test_a_log_of_a_daemon_replayed_into_a_simulated_peers_core_gives_the_same_effects():
    """Of daemons that run freely: their order of events is no lockstep's."""
    members = make_members(MemoryNetwork(loss=0.05, delay_s=0.002), 4, 8)
    for member in members.values():
        member.daemon._fetch_timeout_s = 0.1
    await run_all(members)
    fresh = make_participants(digits(4), model="logistic", rounds=8, settings=AlgorithmSettings())
    for each, member in members.items():
        core: PeerCore = fresh[each].core
        for event, effects in member.events:
            assert list(core.handle(event)) == list(effects)


def test_the_simulator_gives_the_same_bits_twice_and_others_with_another_seed():
    first, second, other = (
        make_participants(
            digits(4), model="mlp", rounds=5, settings=settings_of("default"), seed=seed
        )
        for seed in (0, 0, 1)
    )
    for participants in (first, second, other):
        run_lockstep(participants)
    for each in first:
        assert first[each].core.snapshot() == second[each].core.snapshot()
        assert first[each].learner.parameters() != other[each].learner.parameters()
    assert not np.shares_memory(
        first[peer_id(0)].core.model.tensors.buffer, second[peer_id(0)].core.model.tensors.buffer
    )
