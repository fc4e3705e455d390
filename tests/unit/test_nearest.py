"""Exact search, checked against measuring every point and against scikit-learn's brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.neighbors import NearestNeighbors

from peer.nearest import NearestSearch
from protocol.errors import DataError

F32_MAX = float(np.finfo(np.float32).max)


def cloud(number: int, dim: int = 8, seed: int = 0, scale: float = 1.0, offset: float = 0.0):
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal((number, dim)) + offset).astype(np.float32)


def by_measuring_all(points, queries, k):
    """Differences in f64 of every pair, sorted by distance, then by position."""
    differences = queries[:, np.newaxis].astype(np.float64) - points[np.newaxis]
    squares = np.square(differences).sum(axis=2)
    positions = np.argsort(squares, axis=1, kind="stable")[:, :k]
    return positions, np.sqrt(np.take_along_axis(squares, positions, axis=1))


def assert_exact(points, queries, k):
    found = NearestSearch(points).find(queries, k)
    positions, distances = by_measuring_all(points, queries, k)
    np.testing.assert_array_equal(found.positions, positions)
    np.testing.assert_array_equal(found.distances, distances)


def outlier(points):
    points = points.copy()
    points[len(points) // 2] = 1e30
    return points


ADVERSARIAL = {
    "far from the origin": cloud(3000, scale=0.01, offset=1e4),
    "two far clusters": np.concatenate((cloud(700, offset=-1e6), cloud(700, 8, 1, offset=1e6))),
    "one outlier": outlier(cloud(900)),
    "all equal": np.full((600, 8), 0.1, np.float32),
    "duplicates": np.repeat(cloud(60), 30, axis=0),
    "a grid of ties": np.random.default_rng(0).integers(0, 3, (2500, 8)).astype(np.float32),
    "squares overflow": cloud(700, scale=1e30),
    "the largest numbers": np.sign(cloud(500)) * np.float32(F32_MAX),
    "squares underflow": cloud(700, scale=1e-30),
    "denormal": cloud(500, scale=1e-42),
    "norms of all sizes": cloud(800) * np.logspace(-20, 15, 800, dtype=np.float32)[:, np.newaxis],
    "sorted away from the queries": np.sort(cloud(3000), axis=0)[::-1].copy(),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_the_nearest_are_those_of_measuring_every_point_whatever_the_numbers(name):
    points = ADVERSARIAL[name]
    size = np.abs(points).mean(dtype=np.float64).astype(np.float32)
    strangers = np.clip(cloud(5, seed=9), -1, 1) * size
    own = points[:: len(points) // 7]
    near = np.nextafter(own, np.float32(0))  # a last bit away from a stored point
    assert_exact(points, np.concatenate((own, near, strangers)).astype(np.float32), 10)


def test_a_query_far_beyond_all_points_is_answered_exactly():
    queries = np.array([[3e38] * 8, [-3e38] * 8, [1e25] + [0] * 7, [0] * 8], np.float32)
    assert_exact(cloud(3000, scale=1e-3), queries, 10)
    assert_exact(np.zeros((50, 8), np.float32), queries, 3)


def test_blocks_and_batches_of_queries_change_nothing():
    assert_exact(cloud(5001, 3), cloud(300, 3, seed=1), 7)


@given(
    arrays(np.float32, st.tuples(st.integers(1, 12), st.just(3)), elements=st.floats(width=32)),
    arrays(np.float32, st.tuples(st.integers(1, 4), st.just(3)), elements=st.floats(width=32)),
    st.integers(1, 14),
)
@effort(max_examples=60, deadline=None)
def test_any_numbers_are_searched_exactly_or_refused(points, queries, k):
    if np.isfinite(points).all() and np.isfinite(queries).all():
        assert_exact(points, queries, k)
    else:
        with pytest.raises(DataError, match="not finite"):
            NearestSearch(points).find(queries, k)


@pytest.mark.parametrize("dim", [1, 3, 64])
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_scikit_learn_finds_the_same(dim, offset):
    points, queries = cloud(4000, dim, offset=offset), cloud(100, dim, 1, offset=offset)
    found = NearestSearch(points).find(queries, 10)
    theirs = NearestNeighbors(n_neighbors=10, algorithm="brute").fit(points.astype(np.float64))
    distances, positions = theirs.kneighbors(queries.astype(np.float64))
    # Theirs are of squared norms and products: with an offset they lose digits that ours keep, and
    # two points so near to equally far change places.
    np.testing.assert_allclose(found.distances, distances, rtol=1e-6, atol=1e-6)
    assert (found.positions == positions).mean() > (0.99 if offset else 0.9999)


@pytest.mark.parametrize("name", ["a grid of ties", "duplicates", "far from the origin"])
def test_scikit_learn_finds_the_same_distances_where_points_are_as_far(name):
    points = ADVERSARIAL[name]
    queries = points[::50]
    theirs = NearestNeighbors(n_neighbors=10, algorithm="brute", metric="minkowski", p=2)
    distances, _ = theirs.fit(points.astype(np.float64)).kneighbors(queries.astype(np.float64))
    found = NearestSearch(points).find(queries, 10)
    # Their products of numbers around 1e4 lose half of f64's digits: square root of 1e8 * 2**-52.
    np.testing.assert_allclose(found.distances, distances, rtol=1e-6, atol=1e-3)


def test_of_equally_near_points_the_earlier_ones_come_first():
    found = NearestSearch(np.ones((5000, 4), np.float32)).find(np.zeros((2, 4), np.float32), 5)
    np.testing.assert_array_equal(found.positions, [[0, 1, 2, 3, 4]] * 2)
    np.testing.assert_array_equal(found.distances, np.full((2, 5), 2.0))


def test_with_fewer_points_than_asked_for_all_are_found():
    points = cloud(3)
    assert NearestSearch(points).find(points, 10).positions.shape == (3, 3)
    assert NearestSearch(points[:0]).find(points, 10).positions.shape == (3, 0)
    assert NearestSearch(points).find(points[:0], 2).positions.shape == (0, 2)


@pytest.mark.parametrize(
    ("points", "queries", "k", "message"),
    [
        (cloud(3), cloud(2, 5), 1, "dimension 5, the datastore's have 8"),
        (cloud(3), cloud(2).astype(np.float16), 1, "float16 .* must be f32"),
        (cloud(3).astype(np.float64), cloud(2), 1, "float64 .* must be f32"),
        (cloud(3)[0], cloud(2), 1, "must be f32 of shape"),
        (np.array([[0], [np.nan]], np.float32), cloud(2, 1), 1, "stored .* number 1 is not fin"),
        (cloud(3, 1), np.array([[-np.inf]], np.float32), 1, "queries: number 0 is not finite"),
        (cloud(3), cloud(2), 0, "k_nearest = 0"),
    ],
)
def test_what_can_not_be_searched_is_refused_by_name(points, queries, k, message):
    with pytest.raises(DataError, match=message):
        NearestSearch(points).find(queries, k)
