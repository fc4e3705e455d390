"""Convex clustering: its recovery interval, its plateaus, and penalties that say nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from peer.clustering.convex import ConvexClustering, path, recovery_interval
from peer.clustering.interface import in_order_of_appearance
from protocol.errors import ConfigError, DataError

NO_RNG = np.random.default_rng(0)


def groups_of(seed, number=4, dim=6, width=0.02):
    """Tight groups of different numbers of peers, in any order; their truth, and sizes."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(number), rng.integers(2, 6, number)))
    centers = 3 * rng.standard_normal((number, dim))
    points = centers[truth] + width * rng.standard_normal((len(truth), dim))
    return points, np.ones(len(truth)), truth


@given(
    st.integers(0, 100_000),
    st.integers(1, 5),
    st.integers(1, 10),
    st.floats(0.001, 0.2),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 0.7, 0.99]),
)
@effort(max_examples=100, deadline=None)
def test_inside_the_recovery_interval_the_truth_is_found(seed, number, dim, width, equal, part):
    points, sizes, truth = groups_of(seed, number, dim, width)
    if not equal:
        sizes = np.random.default_rng(seed).uniform(10, 100, len(sizes))
    interval = recovery_interval(points, sizes, truth)
    assume(interval.is_open)
    high = min(interval.high, 10 * interval.low)  # there is no end with one cluster
    penalty = interval.low * (1 + 1e-9) + part * (high - interval.low)
    found = ConvexClustering(penalty=penalty)(points, sizes, NO_RNG)
    np.testing.assert_array_equal(found.labels, in_order_of_appearance(truth.tolist()))


def test_the_interval_is_that_of_its_formula():
    points = np.array([[0.0], [1.0], [10.0], [10.5], [10.25]])
    interval = recovery_interval(points, np.ones(5), np.array([0, 0, 1, 1, 1]))
    assert interval.low == pytest.approx(max(1 / 2, 0.5 / 3))
    assert interval.high == pytest.approx((10.25 - 0.5) / (2 * 5 - 2 - 3))
    scaled = recovery_interval(points, np.full(5, 30.0), np.array([0, 0, 1, 1, 1]))
    assert scaled == pytest.approx(interval)


def test_the_interval_of_one_cluster_has_no_end():
    interval = recovery_interval(np.array([[0.0], [4.0]]), np.ones(2), np.array([0, 0]))
    assert interval == (2.0, np.inf)
    assert interval.is_open


@pytest.mark.parametrize("seed", range(5))
def test_without_a_penalty_the_widest_plateau_is_taken(seed):
    points, sizes, truth = groups_of(seed)
    found = ConvexClustering()(points, sizes, NO_RNG)
    np.testing.assert_array_equal(found.labels, in_order_of_appearance(truth.tolist()))
    assert found.note.startswith("plateau of 4 clusters, penalty")


def test_a_penalty_that_merges_all_or_nothing_says_so():
    points, sizes, _ = groups_of(0)
    all_of_them = ConvexClustering(penalty=1e3)(points, sizes, NO_RNG)
    assert (all_of_them.number, all_of_them.note) == (1, "penalty 1e+03 merges all")
    nothing = ConvexClustering(penalty=1e-9)(points, sizes, NO_RNG)
    assert (nothing.number, nothing.note) == (len(points), "penalty 1e-09 merges nothing")


def test_where_there_is_no_plateau_each_is_left_alone_and_told():
    simplex = np.eye(6)  # all meet at once
    found = ConvexClustering()(simplex, np.ones(6), NO_RNG)
    assert found.number == 6
    assert found.note.startswith("no plateau")


def test_equal_models_are_the_clusters_where_most_have_an_equal():
    points = np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 7.0]])[[0, 1, 2, 1, 0, 1, 2]]
    found = ConvexClustering()(points, np.ones(7), NO_RNG)
    assert found.labels.tolist() == [0, 1, 2, 1, 0, 1, 2]


@pytest.mark.parametrize("penalty", [None, 0.5])
def test_equal_models_and_a_single_one_are_one_cluster(penalty):
    clustering = ConvexClustering(penalty=penalty)
    equal = clustering(np.full((5, 3), 0.1), np.ones(5), NO_RNG)
    assert (equal.number, equal.note) == (1, "all models are equal")
    single = clustering(np.ones((1, 3)), np.ones(1), NO_RNG)
    assert (single.number, single.note) == (1, "one peer")


def test_a_path_that_does_not_ascend_is_refused():
    points, sizes, truth = groups_of(0)
    for penalties in ([0.2, 0.1], [0.0, 0.1], [-1.0]):
        with pytest.raises(ConfigError, match="ascend"):
            list(path(points, sizes, penalties))
    assert [len(fused.weights) for fused in path(points, sizes, [1e-9, 1e3])] == [len(points), 1]
    with pytest.raises(DataError, match="true labels"):
        recovery_interval(points, sizes, truth[:-1])


@pytest.mark.parametrize("penalty", [0.0, -1.0, np.nan, np.inf])
def test_a_penalty_that_is_no_positive_number_is_refused(penalty):
    with pytest.raises(ConfigError, match="penalty"):
        ConvexClustering(penalty=penalty)


def test_a_grid_too_coarse_to_see_a_plateau_is_refused():
    with pytest.raises(ConfigError, match="num_penalties"):
        ConvexClustering(num_penalties=2)
