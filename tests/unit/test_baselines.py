"""Baselines that average all models, or none, against their papers' own properties."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_cohort import (
    ADAM,
    FULL_SGD,
    SGD,
    accuracies,
    assert_same_bits,
    digits,
    make_learner,
    make_members,
    models_of,
    probabilities,
    run,
)
from hypothesis import given
from hypothesis import strategies as st

from peer.algorithm import trainable
from peer.data import Examples, Split
from peer.learner import Batch
from sim.baselines.arithmetic import average, shuffled
from sim.baselines.dpsgd import dpsgd, draw_graph, gossip, metropolis_weights
from sim.baselines.fedavg import fedavg
from sim.baselines.fedavg_plus import fedavg_plus, next_epoch
from sim.baselines.fedfomo import choose, combine, fedfomo, helpfulness
from sim.baselines.local import local


@pytest.mark.parametrize("training", [ADAM, SGD])
def test_fedavg_with_one_peer_is_plain_training_to_the_bit(training):
    slices = digits(1)
    together = run(fedavg, make_members(slices, training=training))
    alone = run(local, make_members(slices, training=training))
    assert_same_bits(probabilities(together, slices), probabilities(alone, slices))


def test_local_is_what_a_learner_does_by_itself():
    slices = digits(2)
    members = make_members(slices)
    outcome = run(local, members, steps=5, local_steps=2)
    learner = make_learner(slices[1].dataset, members[1].split, "logistic", ADAM, 1)
    trained = learner.train(None, [Batch(step, full=True) for step in range(5)])
    assert models_of(outcome)[1] == trained


def test_fedavg_of_identical_peers_is_one_of_them():
    slices = digits(1)
    alone = run(fedavg, make_members(slices))
    members = [make_members(slices)[0] for _ in range(3)]
    for number, member in enumerate(members):
        member.peer_id = f"peer-{number}"
    together = run(fedavg, members)
    # a third of a number, three times, is off by a rounding; twelve steps amplify it
    np.testing.assert_allclose(
        trainable(models_of(together)[0]), trainable(models_of(alone)[0]), atol=1e-5
    )


def test_fedavg_with_one_full_gradient_a_round_is_gradient_descent_on_all_data():
    slices = digits(3)
    members = make_members(slices, training=FULL_SGD)
    together = run(fedavg, members, steps=6, local_steps=1)
    pooled = Examples(
        np.concatenate([member.split.train.inputs for member in members]),
        np.concatenate([member.split.train.labels for member in members]),
    )
    everything = Split(fit=pooled, holdout=pooled.take(np.arange(0)), test=pooled)
    learner = make_learner(slices[0].dataset, everything, "logistic", FULL_SGD, 0)
    descended = learner.train(None, [Batch(step) for step in range(6)])
    # sums of f32 in another order
    np.testing.assert_allclose(
        trainable(models_of(together)[0]), trainable(descended), rtol=1e-4, atol=1e-6
    )


def test_fedavg_plus_is_an_epoch_more_than_fedavg():
    slices = digits(2)
    tuned = run(fedavg_plus, make_members(slices), steps=9)
    members = make_members(slices)
    shared = models_of(run(fedavg, members, steps=9))[0]
    for member, spent, model in zip(members, tuned.spending, models_of(tuned), strict=True):
        extra = spent.gradients - 9
        assert 0 <= extra * 32 - member.num_train < 32  # each example about once
        assert model != shared
        epoch = next_epoch(member, member.new_learner(), 9)
        assert all(batch.full for batch in epoch)  # the holdout, too
        assert len(epoch) == extra
    assert accuracies(tuned, members).mean() > 0


@given(st.integers(1, 12), st.integers(1, 3), st.integers(0, 99))
def test_a_mixing_matrix_is_symmetric_and_doubly_stochastic(num_peers, rings, seed):
    matrix = metropolis_weights(draw_graph(num_peers, rings, np.random.default_rng(seed)))
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=0), 1.0)
    assert (matrix >= 0).all()
    assert ((matrix > 0).sum(axis=1) <= 2 * rings + 1).all()
    # connected: after as many mixings as there are peers, everybody has heard of everybody
    assert (np.linalg.matrix_power(matrix, num_peers) > 0).all()


def test_without_learning_mixing_leads_to_the_mean_of_all_models():
    members = make_members(digits(5))
    rng = np.random.default_rng(0)
    initial = members[0].new_learner().parameters()
    models = [shuffled(initial, rng) for _ in members]
    mean = np.mean([trainable(model) for model in models], axis=0)
    matrix = metropolis_weights(draw_graph(5, 1, rng))
    spread = [np.inf]
    for _ in range(40):
        models = gossip(members, matrix, models)
        np.testing.assert_allclose(
            np.mean([trainable(model) for model in models], axis=0), mean, atol=1e-6
        )
        spread.append(np.std([trainable(model) for model in models], axis=0).max())
    assert spread[-1] < 1e-5 < spread[1]


def test_dpsgd_of_one_peer_is_learning_alone_and_of_two_is_averaging():
    slices = digits(1)
    alone = run(local, make_members(slices))
    assert_same_bits(
        probabilities(run(dpsgd, make_members(slices)), slices), probabilities(alone, slices)
    )
    slices = digits(2)
    first, second = models_of(run(dpsgd, make_members(slices)))
    np.testing.assert_allclose(trainable(first), trainable(second), atol=1e-7)


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    st.integers(0, 9),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_fedfomo_downloads_distinct_peers_and_never_the_own_model(peers, downloads, epsilon, seed):
    count, place = peers
    rng = np.random.default_rng(seed)
    chosen = choose(place, rng.normal(size=count), downloads, epsilon, rng)
    assert place not in chosen
    assert len(set(chosen)) == len(chosen) == min(downloads, count - 1)


def test_fedfomo_without_chance_downloads_those_of_highest_affinity():
    affinities = np.array([9.0, 0.1, 0.4, -0.2, 0.3])
    assert choose(0, affinities, 2, 0.0, np.random.default_rng(0)) == [2, 4]


def test_a_better_model_is_helpful_and_a_worse_one_is_not():
    (member,) = make_members(digits(1))
    learner = member.new_learner()
    before = learner.parameters()
    better = learner.train(None, [Batch(step) for step in range(20)])
    worse = shuffled(better, np.random.default_rng(0))
    helpful = helpfulness(learner, before, [before, better, worse], [0, 1, 2])
    assert helpful[0] == 0
    assert helpful[1] > 0 > helpful[2]
    assert np.abs(helpful).sum() == pytest.approx(1)


def test_help_is_the_fall_of_the_loss_by_the_distance_to_the_model():
    (member,) = make_members(digits(1))
    learner = member.new_learner()
    before = learner.parameters()
    near, far = (learner.train(None, [Batch(step) for step in range(count)]) for count in (5, 30))
    helpful = helpfulness(learner, before, [near, far], [0, 1])
    distances = [np.linalg.norm(trainable(model) - trainable(before)) for model in (near, far)]
    assert distances[1] > 1.5 * distances[0]
    falls = [learner.measure(before).loss - learner.measure(model).loss for model in (near, far)]
    slopes = np.array(falls) / distances
    np.testing.assert_allclose(helpful, slopes / np.abs(slopes).sum())


def test_fedfomo_downloads_by_the_sum_of_all_that_helped_before(monkeypatch):
    seen, helped = [], []

    def choosing(place, affinities, *others):
        seen.append((place, affinities.copy()))
        return choose(place, affinities, *others)

    def helping(*arguments):
        helped.append(helpfulness(*arguments))
        return helped[-1]

    monkeypatch.setattr("sim.baselines.fedfomo.choose", choosing)
    monkeypatch.setattr("sim.baselines.fedfomo.helpfulness", helping)
    run(fedfomo, make_members(digits(3)), steps=6, local_steps=2, downloads=1)
    for number in range(9):
        place, affinities = seen[number]
        assert place == number % 3
        np.testing.assert_allclose(affinities, sum(helped[place:number:3], np.zeros(3)))
    assert np.abs(seen[-1][1]).sum() > 0


def test_a_diverged_model_neither_helps_nor_spreads():
    (member,) = make_members(digits(1))
    learner = member.new_learner()
    before = learner.parameters()
    better = learner.train(None, [Batch(step) for step in range(20)])
    diverged = shuffled(before, np.random.default_rng(0))
    diverged["1.bias"][0] = np.nan
    helpful = helpfulness(learner, before, [before, better, diverged], [0, 1, 2])
    np.testing.assert_array_equal(helpful, [0, 1, 0])


def test_models_that_help_are_averaged_and_where_none_does_the_own_steps_are_kept():
    members = make_members(digits(3))
    rng = np.random.default_rng(0)
    initial = members[0].new_learner().parameters()
    trained = [shuffled(initial, rng) for _ in members]
    helpful = np.array([[0.1, 0.3, -0.6], [-0.5, -0.5, 0.0], [0.0, 0.0, 1.0]])
    models, weights = combine(members, helpful, trained)
    np.testing.assert_allclose(weights, [[0.25, 0.75, 0], [0, 1, 0], [0, 0, 1]])
    expected = 0.25 * trainable(trained[0]) + 0.75 * trainable(trained[1])
    np.testing.assert_allclose(trainable(models[0]), expected, atol=1e-6)
    assert models[1:] == trained[1:]


def test_fedfomo_puts_its_weight_on_peers_with_the_same_labels():
    members = make_members(digits(6, groups=2, size=100), model="mlp")
    outcome = run(fedfomo, members, steps=20, local_steps=5)
    groups = np.array([member.group for member in members])
    same = np.equal.outer(groups, groups)
    others = same & ~np.eye(6, dtype=bool)
    assert (outcome.weights * same).sum(axis=1).min() > 0.9
    assert (outcome.weights * others).sum(axis=1).min() > 0.3


def test_averages_are_weighted_by_local_size():
    members = make_members(digits(3))
    rng = np.random.default_rng(0)
    initial = members[0].new_learner().parameters()
    models = [shuffled(initial, rng) for _ in members]
    sizes = [member.num_train for member in members]
    assert len(set(sizes)) > 1
    expected = np.average([trainable(model) for model in models], axis=0, weights=sizes)
    np.testing.assert_allclose(trainable(average(members, models)), expected, atol=1e-6)


def test_a_shuffled_model_holds_the_same_numbers_in_other_places():
    (member,) = make_members(digits(1), model="mlp")
    initial = member.new_learner().parameters()
    other = shuffled(initial, np.random.default_rng(0))
    for name in initial:
        assert sorted(other[name].ravel()) == sorted(initial[name].ravel())
        assert not np.array_equal(other[name], initial[name])
