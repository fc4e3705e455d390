"""FedeRiCo's equations, as properties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from helpers import peer_id
from hypothesis import given
from hypothesis import strategies as st

from peer.algorithm import (
    Verdict,
    WeightedGradient,
    best_neighbors,
    collaboration_weights,
    combine_gradients,
    mix_predictions,
    prune_weights,
    raise_weight,
    uniform_neighbors,
    update_loss_average,
)

losses = st.floats(0, 1e6)
peer_losses = st.dictionaries(st.integers(0, 40).map(peer_id), losses, min_size=1, max_size=20)
temperatures = st.floats(0.01, 100)
CLIP = 3.0
vectors = st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4).map(
    lambda values: np.array(values, np.float32)
)


@given(losses, losses, st.floats(0.01, 1))
def test_a_loss_average_lies_between_its_old_value_and_the_new_loss(old, new, beta):
    average = update_loss_average(old, new, beta)
    assert average is not None
    assert min(old, new) - 1e-6 <= average <= max(old, new) + 1e-6


def test_the_first_measurement_sets_the_average_and_a_large_beta_favors_the_new_loss():
    assert update_loss_average(None, 3.0, 0.6) == 3.0
    assert update_loss_average(1.0, 2.0, 0.6) == pytest.approx(1.6)
    assert update_loss_average(1.0, 2.0, None) == 3.0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_forgets_the_peer(loss):
    assert update_loss_average(1.0, loss, 0.6) is None


@given(peer_losses, temperatures)
def test_weights_sum_to_one_and_order_peers_by_their_losses(averages, temperature):
    weights = collaboration_weights(averages, temperature)
    assert math.fsum(weights.values()) == pytest.approx(1.0)
    assert list(weights) == sorted(averages)
    by_weight = sorted(weights, key=lambda peer: -weights[peer])
    assert all(
        averages[better] <= averages[worse] or weights[better] == weights[worse]
        for better, worse in itertools.pairwise(by_weight)
    )


@given(peer_losses, temperatures, st.randoms(use_true_random=False))
def test_the_order_in_which_peers_were_measured_changes_no_bit(averages, temperature, random):
    shuffled = list(averages.items())
    random.shuffle(shuffled)
    assert collaboration_weights(averages, temperature) == collaboration_weights(
        dict(shuffled), temperature
    )


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0.1, 10))
def test_the_ratio_of_two_weights_is_the_exponential_of_the_difference(first, second, temperature):
    weights = collaboration_weights({peer_id(0): first, peer_id(1): second}, temperature)
    expected = 1 / (1 + math.exp(min((first - second) / temperature, 700)))
    assert weights[peer_id(0)] == pytest.approx(expected, abs=1e-12)


def test_without_a_measurement_there_are_no_weights():
    assert collaboration_weights({}, 0.3) == {}


@given(peer_losses, st.floats(0, 1))
def test_pruning_keeps_the_largest_weight_and_the_sum(averages, minimum):
    weights = collaboration_weights(averages, 1.0)
    pruned = prune_weights(weights, minimum)
    assert math.fsum(pruned.values()) == pytest.approx(1.0)
    bound = min(minimum, max(weights.values()))
    assert list(pruned) == [peer for peer in sorted(weights) if weights[peer] >= bound]


@given(peer_losses, st.floats(0, 1), st.integers(0, 12))
def test_a_raised_weight_leaves_the_others_in_proportion(averages, minimum, number):
    weights = collaboration_weights(averages, 1.0)
    raised = raise_weight(weights, peer_id(number), minimum)
    assert math.fsum(raised.values()) == pytest.approx(1.0)
    assert raised.get(peer_id(number), 0.0) >= minimum
    others = [peer for peer in weights if peer != peer_id(number) and raised[peer] > 1e-9]
    ratios = {round(weights[peer] / raised[peer], 6) for peer in others if weights[peer] > 1e-9}
    assert len(ratios) <= 1 or max(ratios) == pytest.approx(min(ratios), rel=1e-4)


@given(
    st.integers(0, 30),
    st.integers(0, 8),
    st.sets(st.integers(0, 29)),
    st.sampled_from(["best", "uniform"]),
    st.integers(0, 1000),
)
def test_sampling_gives_distinct_candidates_and_as_many_as_asked_for(
    number, count, measured, how, seed
):
    candidates = [peer_id(index) for index in range(number)]
    weights = {peer_id(index): index / 100 for index in measured if index < number}
    rng = np.random.default_rng(seed)
    if how == "best":
        sampled = best_neighbors(candidates, weights, count, rng)
    else:
        sampled = uniform_neighbors(candidates, count, rng)
    assert len(set(sampled)) == len(sampled) == min(count, number)
    assert set(sampled) <= set(candidates)
    assert list(sampled) == sorted(sampled)


def test_greedy_sampling_takes_the_highest_weights_and_uniform_sampling_takes_all_alike():
    candidates = [peer_id(index) for index in range(6)]
    weights = {peer_id(index): index / 15 for index in range(6)}
    rng = np.random.default_rng(0)
    greedy = [best_neighbors(candidates, weights, 2, rng) for _ in range(50)]
    assert set(greedy) == {(peer_id(4), peer_id(5))}
    uniform = [uniform_neighbors(candidates, 2, rng) for _ in range(3000)]
    counts = [sum(peer in sampled for sampled in uniform) for peer in candidates]
    # 3000 draws of 2 out of 6: mean 1000, standard deviation 26; five of them never occur by luck
    assert all(abs(count - 1000) < 130 for count in counts)


def test_greedy_sampling_breaks_ties_of_unmeasured_peers_at_random():
    candidates = [peer_id(index) for index in range(5)]
    rng = np.random.default_rng(0)
    seen = {best_neighbors(candidates, {}, 1, rng) for _ in range(200)}
    assert len(seen) == 5


@given(vectors, st.dictionaries(st.integers(1, 9).map(peer_id), vectors, max_size=5))
def test_no_defended_sender_moves_the_model_further_than_its_owner_by_more_than_the_clip(
    own, remote
):
    gradients = {peer: WeightedGradient(1.0, vector) for peer, vector in remote.items()}
    total, verdicts = combine_gradients(own, 1.0, gradients, clip=CLIP)
    assert verdicts.keys() == remote.keys()
    assert total is not None
    applied = sum(verdict is Verdict.APPLIED for verdict in verdicts.values())
    norm = float(np.linalg.norm(own))
    assert float(np.linalg.norm(total - own)) <= applied * CLIP * norm * 1.0001 + 1e-5
    assert float(np.dot(total, own)) >= norm * norm * 0.999 - 1e-4


@given(vectors, st.dictionaries(st.integers(1, 9).map(peer_id), vectors, max_size=5))
def test_the_undefended_sum_is_equation_6(own, remote):
    gradients = {peer: WeightedGradient(0.5, vector) for peer, vector in remote.items()}
    total, _ = combine_gradients(own, 0.25, gradients, clip=None)
    expected = 0.25 * own.astype(np.float64) + sum(
        0.5 * v.astype(np.float64) for v in remote.values()
    )
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-3)  # f32 sums of up to 600


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("clip", [CLIP, None])
def test_a_gradient_that_is_not_finite_or_overflows_is_refused(poison, clip):
    own = np.ones(4, np.float32)
    bad = WeightedGradient(1.0, np.array([0, poison, 0, 0], np.float32))
    total, verdicts = combine_gradients(own, 1.0, {peer_id(1): bad}, clip=clip)
    assert verdicts == {peer_id(1): Verdict.NOT_FINITE}
    np.testing.assert_array_equal(total, own)


def test_an_opposed_gradient_is_refused_and_a_claimed_weight_is_capped():
    own = np.array([1, 0, 0, 0], np.float32)
    remote = {
        peer_id(1): WeightedGradient(1.0, np.array([-1, 5, 0, 0], np.float32)),
        peer_id(2): WeightedGradient(100.0, np.array([0.5, 0, 0, 0], np.float32)),
    }
    total, verdicts = combine_gradients(own, 1.0, remote, clip=CLIP)
    assert verdicts == {peer_id(1): Verdict.OPPOSED, peer_id(2): Verdict.APPLIED}
    np.testing.assert_allclose(total, [1.5, 0, 0, 0])


def test_without_an_own_gradient_a_defended_model_is_left_alone():
    remote = {peer_id(1): WeightedGradient(1.0, np.ones(4, np.float32))}
    assert combine_gradients(None, 1.0, remote, clip=CLIP)[0] is None
    total, _ = combine_gradients(None, 1.0, remote, clip=None)
    np.testing.assert_array_equal(total, np.ones(4))
    nan = np.full(4, np.nan, np.float32)
    assert combine_gradients(nan, 1.0, remote, clip=CLIP)[0] is None


@given(peer_losses, st.integers(0, 100))
def test_a_mixture_of_probabilities_is_one(averages, seed):
    weights = collaboration_weights(averages, 1.0)
    rng = np.random.default_rng(seed)
    members = {peer: rng.dirichlet(np.ones(5), size=3).astype(np.float32) for peer in weights}
    mixed = mix_predictions(weights, members)
    np.testing.assert_allclose(mixed.sum(axis=1), 1.0, rtol=1e-5)
    assert (mixed >= 0).all()
