"""The paper's claims, small and seeded.

Permuted labels on Fashion-MNIST, 16 peers with 60 to 150 images in four groups, a CNN at 14x14,
100 steps of every model; digits with 8 peers in two groups where Fashion-MNIST isn't installed.
Bounds lie well inside what was seen, so that another CPU's rounding can't cross them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
import pytest
from helpers import make_learner, make_participants, run_lockstep

from peer.algorithm import PROFILES, AlgorithmSettings
from peer.data import Split
from peer.evaluate import evaluate, train_alone
from peer.sources import load_source
from protocol.errors import DataError
from sim.partition import PartitionSettings, Slice, partition

STEPS = 100


@dataclass(frozen=True)
class Outcome:
    mixture: list[float]
    own: list[float]
    same_group_weight: float
    mb_received: float


@cache
def slices() -> tuple[str, tuple[Slice, ...]]:
    try:
        dataset = load_source("fashion-mnist", pool=2)
        settings = PartitionSettings(
            kind="permuted", groups=4, min_examples=60, max_examples=150, test_examples=300
        )
        return "cnn", tuple(partition(dataset, 16, settings, np.random.default_rng(0)))
    except DataError:
        dataset = load_source("digits")
        settings = PartitionSettings(kind="permuted", groups=2, min_examples=40, max_examples=80)
        return "mlp", tuple(partition(dataset, 8, settings, np.random.default_rng(0)))


@cache
def outcome(profile: str) -> Outcome:
    settings = msgspec.convert({"profile": profile, **PROFILES[profile]}, AlgorithmSettings)
    model, parts = slices()
    datasets = [part.dataset for part in parts]
    rounds = settings.rounds_for(STEPS)
    participants = make_participants(datasets, model=model, rounds=rounds, settings=settings)
    engine = run_lockstep(participants, settings)
    groups = dict(zip(participants, (part.group for part in parts), strict=True))
    mixture, own, same = [], [], []
    for peer, each in participants.items():
        weights = each.core.collaboration_weights()
        accuracy = evaluate(
            each.learner,
            each.split.test,
            each.core.mixture(),
            each.core.prediction_weights(),
            each.core.model.tensors,
            None,
        )
        mixture.append(accuracy["accuracy"])
        own.append(accuracy["own_accuracy"])
        same.append(sum(w for other, w in weights.items() if groups[other] == groups[peer]))
    moved = [work.bytes_received for work in engine.work.values()]
    return Outcome(mixture, own, float(np.mean(same)), float(np.mean(moved)) / 1e6)


@cache
def local_only() -> list[float]:
    """Local-only on all the local training data, the holdout included, with as many steps."""
    model, parts = slices()
    settings = AlgorithmSettings()
    participants = make_participants(
        [part.dataset for part in parts], model=model, rounds=1, settings=settings
    )
    accuracies = []
    for part, each in zip(parts, participants.values(), strict=True):
        everything = Split(fit=each.split.train, holdout=each.split.holdout, test=each.split.test)
        learner = make_learner(everything, part.dataset, model=model, seed=len(accuracies))
        trained = train_alone(learner, STEPS)
        predicted = learner.predict(trained, everything.test.inputs).argmax(axis=1)
        accuracies.append(float((predicted == everything.test.labels).mean()))
    return accuracies


def bottom_decile(values: list[float]) -> float:
    return sorted(values)[math.ceil(len(values) / 10) - 1]


@pytest.mark.timeout(600)
def test_the_default_beats_local_only_in_mean_and_bottom_decile():
    default, local = outcome("default").mixture, local_only()
    assert np.mean(default) > np.mean(local) + 0.03
    assert bottom_decile(default) > bottom_decile(local) + 0.02


@pytest.mark.timeout(600)
def test_the_default_puts_its_weight_on_peers_of_the_same_group():
    assert outcome("default").same_group_weight >= 0.9


@pytest.mark.timeout(600)
def test_the_literal_algorithm_switches_labels_and_the_anchor_prevents_it():
    """An owner that prefers others' models stops training its own, and strangers take it over."""
    literal, default = outcome("paper"), outcome("default")
    assert np.mean(default.own) > np.mean(literal.own) + 0.1
    assert np.mean(literal.mixture) - np.mean(literal.own) > 0.1
    # In lockstep the literal mixture is no worse: a tie for ten times the traffic. Two standard
    # errors of the difference of two means over 16 peers with 300 test images each.
    assert np.mean(default.mixture) > np.mean(literal.mixture) - 0.02


@pytest.mark.timeout(600)
def test_averaging_gains_too_for_a_fraction_of_the_traffic():
    default, thrifty, literal = (outcome(name) for name in ("default", "thrifty", "paper"))
    assert np.mean(thrifty.mixture) > np.mean(local_only()) + 0.03
    # No worse than gradients; the same two standard errors as above.
    assert np.mean(thrifty.mixture) > np.mean(default.mixture) - 0.02
    # 0.69 was seen, of traffic that deflating has halved: the default's gradients and small steps
    # shrink more than ten steps at once do. Before, it was 0.52 of twice as much.
    assert thrifty.mb_received < 0.8 * default.mb_received
    assert default.mb_received < literal.mb_received / 15


def num_collaborators(settings: AlgorithmSettings) -> list[float]:
    """How many peers share each one's training weight, in effect: 1 / sum of squares, from 1."""
    digits = load_source("digits")
    permuted = PartitionSettings(kind="permuted", groups=2, min_examples=40, max_examples=80)
    parts = partition(digits, 8, permuted, np.random.default_rng(0))
    datasets = [part.dataset for part in parts]
    participants = make_participants(datasets, model="mlp", rounds=40, settings=settings)
    run_lockstep(participants, settings)
    rows = [each.core.training_weights().values() for each in participants.values()]
    return [1 / sum(weight**2 for weight in row) for row in rows]


def test_summed_losses_make_weights_one_hot_and_averages_that_forget_do_not():
    """As in the paper's figure 5: everybody is measured in every round, and four are alike."""
    everybody = {"num_neighbors": 7, "final_full": 0.0}
    average, total = (
        num_collaborators(AlgorithmSettings(accumulate=accumulate, **everybody))
        for accumulate in (False, True)
    )
    assert max(total) < 1.01
    assert min(average) > 1.5 and np.mean(average) > 2.0
