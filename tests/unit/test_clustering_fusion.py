"""The convex clustering solver, checked against cvxpy, against its dual and along its path."""

from __future__ import annotations

import warnings

import cvxpy
import numpy as np
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from peer.clustering.fusion import fuse, unfused


def cloud(seed, most=14, dims=5):
    """Points of a few groups, more or less wide, and weights that are equal or not."""
    rng = np.random.default_rng(seed)
    number, dim, groups = rng.integers(2, most), rng.integers(1, dims), rng.integers(1, 5)
    centers = 3 * rng.standard_normal((groups, dim))
    width = rng.choice([0.05, 0.3, 1.0])
    points = centers[rng.integers(0, groups, number)] + width * rng.standard_normal((number, dim))
    weights = np.ones(number) if seed % 2 else rng.uniform(0.3, 3, number)
    return points, weights, rng


def objective(points, weights, penalty, centers):
    first, second = np.triu_indices(len(points), 1)
    norms = np.linalg.norm(centers[first] - centers[second], axis=1)
    moved = np.square(points - centers).sum(axis=1)
    return weights @ moved / 2 + penalty * (weights[first] * weights[second]) @ norms


def by_cvxpy(points, weights, penalty):
    """An interior-point solver's answer, every pair a cone, and whether it vouches for it."""
    first, second = np.triu_indices(len(points), 1)
    pairs = np.eye(len(points))[first] - np.eye(len(points))[second]
    centers = cvxpy.Variable(points.shape)
    norms = cvxpy.norm(pairs @ centers, 2, axis=1)
    rows = np.broadcast_to(weights[:, np.newaxis], points.shape)
    moved = cvxpy.sum(cvxpy.multiply(rows, cvxpy.square(points - centers)))
    pulled = cvxpy.sum(cvxpy.multiply(weights[first] * weights[second], norms))
    problem = cvxpy.Problem(cvxpy.Minimize(moved / 2 + penalty * pulled))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        problem.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return centers.value, problem.status == cvxpy.OPTIMAL


def penalty_for(points, weights, part):
    """A penalty between where nothing can merge and where everything must."""
    distances = pdist(points)
    low = distances.min() / (2 * weights.sum())
    return float(low * (distances.max() / weights.sum() / low) ** part)


def test_the_minimizer_is_that_of_cvxpy_to_a_millionth():
    vouched_for = 0
    for seed in range(40):
        points, weights, rng = cloud(seed)
        penalty = penalty_for(points, weights, rng.uniform(0.2, 1.0))
        ours = fuse(unfused(points, weights), penalty).centers
        theirs, is_exact = by_cvxpy(points, weights, penalty)
        value = objective(points, weights, penalty, ours)
        excess = objective(points, weights, penalty, theirs) - value
        assert -1e-12 * value <= excess <= 1e-6 * max(1.0, value)  # the lower one is right
        if is_exact:  # to 1e-12 of the value, which leaves its centers a millionth
            vouched_for += 1
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert vouched_for >= 10


def test_two_points_meet_where_the_penalty_is_half_their_distance():
    points = np.array([[0.0, 0.0], [3.0, 4.0]])
    apart = fuse(unfused(points, np.ones(2)), 2.0)
    np.testing.assert_allclose(apart.centers, [[1.2, 1.6], [1.8, 2.4]], rtol=1e-9)
    together = fuse(apart, 2.5)
    assert len(together.weights) == 1
    np.testing.assert_allclose(together.centers, [[1.5, 2.0]] * 2)


@given(st.integers(0, 10_000), st.sampled_from([1e-6, 1.0, 1e6]))
@effort(max_examples=40, deadline=None)
def test_along_a_path_the_gap_is_closed_and_clusters_only_merge(seed, scale):
    points, weights, _ = cloud(seed, most=30, dims=8)
    points = scale * points
    scatter = weights @ np.square(points - np.average(points, axis=0, weights=weights)).sum(axis=1)
    fused = unfused(points, weights)
    for part in np.linspace(0, 1, 8):
        before, fused = fused, fuse(fused, penalty_for(points, weights, part) * (1 + 1e-12))
        assert fused.gap <= 1e-13 * scatter
        for cluster in range(len(before.weights)):
            assert np.ptp(fused.members[before.members == cluster]) == 0
    assert len(fused.weights) == 1


@given(st.integers(0, 10_000), st.floats(0.2, 1.0))
@effort(max_examples=40, deadline=None)
def test_a_solution_is_the_same_from_nothing_as_along_a_path(seed, part):
    points, weights, _ = cloud(seed)
    penalty = penalty_for(points, weights, part)
    start = unfused(points, weights)
    at_once = fuse(start, penalty)
    by_steps = fuse(fuse(fuse(start, penalty / 4), penalty / 2), penalty)
    size = np.abs(points).max()
    np.testing.assert_allclose(at_once.centers, by_steps.centers, atol=1e-6 * size)


def test_a_point_of_weight_two_is_like_two_points():
    points, _, _ = cloud(7)
    doubled = np.concatenate((points, points[:1]))
    weights = np.ones(len(points))
    weights[0] = 2.0
    penalty = penalty_for(points, weights, 0.8)
    weighted = fuse(unfused(points, weights), penalty).centers
    repeated = fuse(unfused(doubled, np.ones(len(doubled))), penalty).centers
    np.testing.assert_allclose(weighted, repeated[:-1], atol=1e-8)
    np.testing.assert_array_equal(repeated[0], repeated[-1])


def test_points_far_from_the_origin_have_the_same_solution():
    points, weights, _ = cloud(3)
    penalty = penalty_for(points, weights, 0.7)
    near = fuse(unfused(points, weights), penalty)
    far = fuse(unfused(points + 1e6, weights), penalty)
    np.testing.assert_array_equal(far.members, near.members)
    np.testing.assert_allclose(far.centers - 1e6, near.centers, rtol=0, atol=1e-8)
