"""The lockstep engine and the simulation around it: the paper's rounds, counted and repeatable."""

from __future__ import annotations

import gc
from collections import defaultdict

import numpy as np
import pytest
from helpers import make_participants, peer_id
from helpers_simulation import effects_of, log_of, make_simulation, swarm_settings

from peer.algorithm import AlgorithmSettings
from peer.events import (
    Differentiate,
    Fetch,
    GradientArrived,
    Measure,
    ModelAsked,
    ModelFetched,
    ModelUnchanged,
    RoundClosed,
    RoundFinished,
    SendGradient,
    Step,
    Train,
)
from peer.sources import load_source
from protocol.errors import ConfigError, ModelError
from protocol.lowbit import coded_size_bytes
from sim.engine import LearnerCrowd, Lockstep
from sim.partition import PartitionSettings, partition


def test_all_sample_the_models_of_the_round_before_and_all_gradients_arrive_before_any_step():
    closed: dict[str, int] = defaultdict(int)
    arrived: dict[tuple[str, int], int] = defaultdict(int)
    simulation = make_simulation(swarm_settings(peers=6, rounds=8))
    log = log_of(simulation)
    for _, who, event, _ in log:
        match event:
            case RoundClosed(round_number):
                assert closed[who] == round_number
                closed[who] += 1
            case ModelFetched(_, round_number, snapshot):
                assert snapshot.version.round_number == round_number == closed[who]
            case GradientArrived(update):
                assert update.sender_round == update.on_version.round_number == closed[who]
                arrived[update.sender, closed[who]] += 1
    sent: dict[tuple[str, int], int] = defaultdict(int)
    for _, effect in effects_of(log, SendGradient):
        sent[effect.update.sender, effect.update.sender_round] += 1
    assert sent == arrived
    assert sent
    assert set(closed.values()) == {8}
    for _, finished in effects_of(log, RoundFinished):
        assert not {"stale", "departed"} & finished.verdicts.keys()


def test_every_fetch_is_answered_and_the_owner_is_told():
    simulation = make_simulation(swarm_settings(peers=5, rounds=6))
    log = log_of(simulation)
    for each in simulation.peers:
        fetches = effects_of(log, Fetch, each)
        answers = [e for _, who, e, _ in log if who == each and type(e) in _ANSWERS]
        asked = [e for _, who, e, _ in log if e == ModelAsked(each)]
        assert len(fetches) == len(answers) == len(asked)


_ANSWERS = (ModelFetched, ModelUnchanged)


@pytest.mark.parametrize("codec", ["f32", "8bit", "4bit"])
def test_work_and_traffic_are_counted_to_the_byte(codec):
    simulation = make_simulation(swarm_settings(peers=4, rounds=6, algorithm={"codec": codec}))
    log = log_of(simulation)
    work = simulation.engine.work
    for each in simulation.peers:
        steps = effects_of(log, Step, each) + effects_of(log, Train, each)
        assert work[each].measured == len(effects_of(log, Measure, each))
        assert work[each].gradients == len(effects_of(log, Differentiate, each)) + sum(
            len(step.batches) for _, step in steps
        )
    fetched = [event.snapshot.tensors for _, _, event, _ in log if isinstance(event, ModelFetched)]
    pushed = [e.update.gradient for _, e in effects_of(log, SendGradient)]
    moved = sum(w.bytes_sent for w in work.values())
    assert sum(w.bytes_received for w in work.values()) == moved
    whole = sum(tensors.buffer.nbytes for tensors in [*fetched, *pushed])
    if codec == "f32":
        assert moved == whole
    else:  # in f16 at most, and gradients always coded
        bits = {"8bit": 8, "4bit": 4}[codec]
        coded = sum(coded_size_bytes(gradient.buffer.size // 4, bits) for gradient in pushed)
        models = sum(tensors.buffer.nbytes // 2 for tensors in fetched)
        assert 0 < moved < models + coded


def test_the_order_in_which_peers_are_given_changes_no_bit():
    settings = PartitionSettings(kind="permuted", groups=2, min_examples=20, max_examples=30)
    slices = partition(load_source("digits"), 5, settings, np.random.default_rng(0))
    models = []
    for backwards in (False, True):
        participants = make_participants(
            [part.dataset for part in slices],
            model="logistic",
            rounds=5,
            settings=AlgorithmSettings(),
        )
        order = sorted(participants, reverse=backwards)
        Lockstep(
            {each: participants[each].core for each in order},
            LearnerCrowd({each: participants[each].learner for each in order}),
        ).run()
        models.append({each: participants[each].core.snapshot() for each in sorted(order)})
    assert models[0] == models[1]


def test_a_run_that_is_no_longer_wanted_ends_between_two_rounds_of_the_core():
    simulation = make_simulation(swarm_settings(peers=3, rounds=50))
    done: list[int] = []
    simulation.run(
        on_round=lambda peer, report, totals: done.append(report.finished.round_number),
        wanted=lambda: len(done) < 9,
    )
    for peer in simulation.peers.values():
        saved = peer.core.snapshot()
        assert saved.round_number == 3
        assert saved.model.tensors == peer.learner.parameters()
        assert not simulation.has_finished(peer)


def test_a_model_that_fails_is_one_error_that_names_peer_and_round():
    simulation = make_simulation(swarm_settings(peers=3, rounds=9))
    learner = simulation.peers[peer_id(1)].learner
    differentiate, wanted = learner.differentiate, AlgorithmSettings().steps_after(4)

    def failing(model, batch, **options):
        if batch.number == wanted:
            raise RuntimeError("out of luck")
        return differentiate(model, batch, **options)

    learner.differentiate = failing  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="at peer-01 in round 4: out of luck"):
        simulation.run()


def test_what_is_trained_on_validates_nothing():
    """In the last rounds the holdout is: the accuracy stays what it was when they began."""
    nobody_else = {"num_neighbors": 2, "min_probes": 0.0, "alarm": 0.0, "min_gradient_weight": 0.0}
    simulation = make_simulation(swarm_settings(peers=3, rounds=40, algorithm=nobody_else))
    accuracies: dict[str, list] = defaultdict(list)
    simulation.run(
        lambda peer, report, totals: accuracies[peer.name].append(report.validation_accuracy)
    )
    changed = False
    for peer in simulation.peers.values():
        before, last = np.split(accuracies[peer.name], [peer.core.horizon.settles_at])
        assert len(set(last)) == 1
        changed |= len(set(before)) > 1
    assert changed


def test_a_report_says_what_a_round_took_and_all_of_them_add_up():
    simulation = make_simulation(swarm_settings(peers=3, rounds=6))
    reports: dict[str, list] = defaultdict(list)
    simulation.run(lambda peer, report, totals: reports[peer.name].append((report, totals)))
    for peer in simulation.peers.values():
        mine = reports[peer.name]
        assert [report.finished.round_number for report, _ in mine] == list(range(6))
        work = simulation.engine.work[peer.peer_id]
        assert sum(report.work["measured"] for report, _ in mine) == work.measured
        assert sum(report.work["differentiated"] for report, _ in mine) == work.gradients
        assert all(0.0 <= report.validation_accuracy <= 1.0 for report, _ in mine)
        sent = [totals["bytes_sent"] for _, totals in mine]
        assert sent == sorted(sent)
        assert sent[-1] == work.bytes_sent


def test_a_result_has_all_accuracies_and_a_digest_of_the_bits():
    simulation = make_simulation(swarm_settings(peers=3, rounds=6))
    simulation.run()
    results = [simulation.evaluate(peer) for peer in simulation.peers.values()]
    for peer, result in zip(simulation.peers.values(), results, strict=True):
        assert result["name"] == peer.name
        assert result["rounds"] == 6
        assert result["num_train"] == len(peer.examples.train)
        assert all(0 <= result[f"{key}accuracy"] <= 1 for key in ("", "own_", "local_"))
        assert sum(result["weights"].values()) == pytest.approx(1.0, abs=1e-5)
    assert len({result["digest"] for result in results}) == 3
    assert simulation.evaluate(next(iter(simulation.peers.values())), lambda: False) is None


def test_data_that_drift_change_half_way_for_learning_and_for_the_test():
    settings = swarm_settings(
        peers=4, rounds=5, model="mlp", partition={"kind": "rotated", "drifting": 2}
    )
    simulation = make_simulation(settings)
    drifting = [peer for peer in simulation.peers.values() if peer.later is not None]
    assert len(drifting) == 2
    changed: dict[str, int] = {}
    for peer in drifting:
        use_examples = peer.learner.use_examples

        def watched(split, peer=peer, use_examples=use_examples):
            changed[peer.name] = peer.core.round_number
            assert split is peer.later
            use_examples(split)

        peer.learner.use_examples = watched  # type: ignore[method-assign]
    simulation.run()
    assert changed == {peer.name: 3 for peer in drifting}  # of rounds 0 to 4: 3 is the first after
    for peer in drifting:
        result = simulation.evaluate(peer)
        own = peer.learner.predict(peer.core.model.tensors, peer.later.test.inputs)
        accuracy = float((own.argmax(axis=1) == peer.later.test.labels).mean())
        assert result["own_accuracy"] == accuracy
        assert result["num_test"] == len(peer.later.test)


@pytest.mark.parametrize("key", ["slow", "churn"])
def test_a_peer_that_there_is_not_can_neither_be_slow_nor_leave(key):
    value = {"slow": {"peer-07": 2.0}, "churn": {"peer-07": {"leaves_s": 3.0}}}[key]
    with pytest.raises(ConfigError, match=rf"simulate\.{key} names 'peer-07'.* to peer-03"):
        make_simulation(swarm_settings(peers=4, simulate={key: value}))


def test_the_collector_is_as_it_was_after_a_run_and_after_one_that_fails():
    class Stop(Exception):
        pass

    before, during = gc.get_threshold(), []

    def wanted() -> bool:
        during.append(gc.get_threshold())
        if len(during) > 1:
            raise Stop
        return True

    simulation = make_simulation(swarm_settings(peers=2, rounds=2))
    with pytest.raises(Stop):
        simulation.engine.run(wanted)
    assert during[0][2] > before[2]
    assert gc.get_threshold() == before
