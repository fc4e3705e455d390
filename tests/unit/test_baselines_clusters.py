"""Baselines that sort peers into clusters: the oracle, Clustered FL, IFCA and FedEM."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_cohort import (
    FULL_SGD,
    accuracies,
    assert_same_bits,
    digits,
    make_members,
    models_of,
    probabilities,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from peer.algorithm import trainable
from peer.learner import Batch
from sim.baselines.arithmetic import example_losses
from sim.baselines.clustered import Criterion, bipartition, clustered
from sim.baselines.fedavg import fedavg
from sim.baselines.fedem import _Mixture, fedem
from sim.baselines.ifca import draw_start, ifca
from sim.baselines.local import local
from sim.baselines.oracle import oracle


def test_the_oracle_of_one_group_is_fedavg_to_the_bit():
    slices = digits(3)
    known = run(oracle, make_members(slices))
    together = run(fedavg, make_members(slices))
    assert_same_bits(probabilities(known, slices), probabilities(together, slices))
    assert known.spending == together.spending


def test_the_oracle_of_two_groups_is_fedavg_in_each():
    slices = digits(4, groups=2)
    known = run(oracle, make_members(slices))
    members = make_members(slices)
    halves = [run(fedavg, members[:2]), run(fedavg, members[2:])]
    assert models_of(known) == [model for half in halves for model in models_of(half)]
    np.testing.assert_array_equal(known.weights[:2, 2:], 0)


vectors = arrays.arrays(
    np.float32,
    st.tuples(st.integers(3, 7), st.just(4)),
    elements=st.floats(-1, 1, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3),
)


@given(vectors)
def test_no_other_bipartition_has_a_smaller_largest_similarity_across(updates):
    norms = np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), 1e-30)
    similarities = (updates / norms) @ (updates / norms).T

    def across(half):
        rest = [row for row in range(len(updates)) if row not in half]
        return similarities[np.ix_(list(half), rest)].max()

    found, largest = bipartition(updates)
    assert found
    assert 0 not in found
    halves = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(updates)), size) for size in range(1, len(updates))
    )
    assert across(found) <= min(across(half) for half in halves) + 1e-6
    assert largest == pytest.approx(across(found), abs=1e-6)


OPPOSED = np.array([[1, 0.1], [1, -0.1], [-1, 0.1], [-1, -0.1]], np.float32)


def test_opposed_updates_that_cancel_out_split_a_cluster():
    assert Criterion(0.25, 0.5).split([0] * 4, OPPOSED, [1] * 4) == [0, 0, 1, 1]


def test_the_weights_of_local_sizes_decide_what_cancels_out():
    assert Criterion(0.25, 0.5).split([0] * 4, OPPOSED, [3, 3, 1, 1]) == [0] * 4


def test_updates_that_agree_do_not_split_a_cluster():
    agreeing = np.abs(OPPOSED)
    assert Criterion(0.25, 0.5).split([0] * 4, agreeing, [1] * 4) == [0] * 4


def test_small_updates_do_not_split_a_cluster_even_if_they_cancel_out():
    criterion = Criterion(0.25, 0.5)
    criterion.split([0] * 4, np.abs(OPPOSED), [1] * 4)
    assert criterion.split([0] * 4, OPPOSED * np.float32(0.4), [1] * 4) == [0] * 4
    assert criterion.split([0] * 4, OPPOSED * np.float32(0.6), [1] * 4) == [0, 0, 1, 1]


def test_noise_that_cancels_out_opposes_nothing_and_does_not_split_a_cluster():
    noise = np.random.default_rng(0).normal(size=(40, 500)).astype(np.float32)
    assert np.linalg.norm(noise.mean(axis=0)) < 0.25 * np.linalg.norm(noise, axis=1).max()
    assert Criterion(0.25, 0.5).split([0] * 40, noise, [1] * 40) == [0] * 40


def test_clusters_of_two_stay_and_new_ones_get_new_numbers():
    updates = np.concatenate([OPPOSED[[0, 2]], OPPOSED])
    clusters = Criterion(0.25, 0.5).split([0, 0, 1, 1, 1, 1], updates, [1] * 6)
    assert clusters == [0, 0, 1, 1, 2, 2]


def test_clustered_fl_splits_opposed_groups_and_then_does_as_well_as_the_oracle():
    slices = digits(6, groups=2)
    outcome = run(clustered, make_members(slices, training=FULL_SGD), steps=80, local_steps=10)
    members = make_members(slices, training=FULL_SGD)
    known = run(oracle, members, steps=80, local_steps=10)
    np.testing.assert_allclose(outcome.weights, known.weights)
    assert accuracies(outcome, members).mean() > accuracies(known, members).mean() - 0.1


def test_clustered_fl_never_splits_peers_that_are_alike():
    slices = digits(6)
    outcome = run(clustered, make_members(slices, training=FULL_SGD), steps=80, local_steps=10)
    together = run(fedavg, make_members(slices, training=FULL_SGD), steps=80, local_steps=10)
    assert_same_bits(probabilities(outcome, slices), probabilities(together, slices))


def near_the_truth(slices):
    """Return models that saw a little of one group each."""
    members = make_members(slices)
    return [
        members[place].new_learner().train(None, [Batch(step) for step in range(5)])
        for place in (0, -1)
    ]


def test_ifca_started_near_the_truth_finds_the_groups():
    slices = digits(6, groups=2)
    start = near_the_truth(slices)
    outcome = run(
        ifca, make_members(slices), steps=30, clusters=2, starts=1, start=lambda *_: list(start)
    )
    known = run(oracle, make_members(slices), steps=30)
    np.testing.assert_allclose(outcome.weights, known.weights)


def test_ifca_keeps_the_start_that_ends_with_the_least_training_loss():
    slices = digits(6, groups=2)
    good = near_the_truth(slices)
    starts = iter([[good[0]] * 2, good, [good[1]] * 2])
    members = make_members(slices)
    outcome = run(
        ifca, members, steps=30, clusters=2, starts=3, start=lambda *_: list(next(starts))
    )
    alone = run(
        ifca, make_members(slices), steps=30, clusters=2, starts=1, start=lambda *_: list(good)
    )
    assert models_of(outcome) == models_of(alone)
    assert [spent.gradients for spent in outcome.spending] == [90] * 6


def test_ifca_with_one_model_and_one_peer_is_learning_alone():
    slices = digits(1)
    outcome = run(ifca, make_members(slices), clusters=1, starts=1)
    alone = run(local, make_members(slices))
    assert_same_bits(probabilities(outcome, slices), probabilities(alone, slices))


def test_starts_of_one_seed_are_the_same_and_differ_from_each_other():
    (member,) = make_members(digits(1))
    initial = member.new_learner().parameters()
    first, second = (draw_start(initial, 3, np.random.default_rng(5)) for _ in range(2))
    assert first == second
    assert first[0] == initial
    assert first[1] != first[2] != initial


def test_fedem_with_one_component_is_fedavg():
    slices = digits(3)
    mixed = run(fedem, make_members(slices), components=1)
    together = run(fedavg, make_members(slices))
    # a loss weighted by ones is summed in another order than a mean
    for one, other in zip(
        probabilities(mixed, slices), probabilities(together, slices), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert mixed.spending == together.spending


def test_fedem_gives_each_group_a_component_of_its_own():
    slices = digits(6, groups=2)
    members = make_members(slices, model="mlp")
    outcome = run(fedem, members, steps=120, components=2)
    together = run(fedavg, make_members(slices, model="mlp"), steps=120)
    assert accuracies(outcome, members).mean() > accuracies(together, members).mean() + 0.2


def test_fedem_predicts_by_the_proportions_of_the_last_average(monkeypatch):
    steps, update = [], _Mixture.update

    def updating(mixture, models):
        posteriors = update(mixture, models)
        steps.append((mixture, list(models), posteriors.mean(axis=0)))
        return posteriors

    monkeypatch.setattr(_Mixture, "update", updating)
    slices = digits(2)
    outcome = run(fedem, make_members(slices), steps=4, local_steps=2, components=2)
    assert len(steps) == 2 * (2 + 1)  # an E-step a round, and one after the last average
    for number, predicted in enumerate(probabilities(outcome, slices)):
        mixture, models, proportions = steps[4 + number]
        assert models != steps[2 + number][1]
        expected = sum(
            share * mixture.learners[0].predict(model, slices[number].dataset.train.inputs)
            for share, model in zip(proportions, models, strict=True)
        )
        np.testing.assert_allclose(predicted, expected, atol=1e-6)


def test_the_losses_of_examples_average_to_what_a_learner_measures():
    (member,) = make_members(digits(1))
    learner = member.new_learner()
    losses = example_losses(learner, learner.parameters(), member.split.holdout)
    assert losses.shape == (len(member.split.holdout),)
    assert losses.mean() == pytest.approx(learner.measure(learner.parameters()).loss, rel=1e-5)
    assert trainable(learner.parameters()).dtype == np.float32
