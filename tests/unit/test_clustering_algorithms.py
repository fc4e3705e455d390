"""The clusterings of models: what holds for all, what each finds, and input that is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from peer.clustering.convex import ConvexClustering
from peer.clustering.gradient import GradientClustering
from peer.clustering.interface import in_order_of_appearance
from peer.clustering.kmeans import KMeans
from peer.clustering.linkage import AverageLinkage
from peer.clustering.number import ByGap, BySilhouette
from protocol.errors import ConfigError, DataError


def kmeans(number):
    return KMeans(num_clusters=number, restarts=5)


TOLD = {
    "k-means": lambda number: KMeans(num_clusters=number, start="random", restarts=20),
    "k-means++": lambda number: KMeans(num_clusters=number),
    "gradient": lambda number: GradientClustering(num_clusters=number),
}
UNTOLD = {
    "linkage": AverageLinkage(),
    "convex": ConvexClustering(),
    "silhouette": BySilhouette(make=kmeans),
    "gap": ByGap(make=kmeans, most=6),
}
ALL = {**{name: make(3) for name, make in TOLD.items()}, **UNTOLD}


def three_groups(seed, width=0.1):
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(3), 4))
    points = (4 * np.eye(3, 8) + 1)[truth] + width * rng.standard_normal((12, 8))
    return points, rng.uniform(50, 150, 12), truth


def found_by(clustering, points, sizes=None, seed=0):
    sizes = np.ones(len(points)) if sizes is None else sizes
    return clustering(points, sizes, np.random.default_rng(seed))


def regression_models(num_examples, seed, num_peers=100, number=10, dim=20):
    """Each peer's least squares, of noise 1; every tenth of the peers has a truth of its own."""
    rng = np.random.default_rng(seed)
    truths = rng.uniform(-3, 3, (number, dim))
    truth = np.repeat(np.arange(number), num_peers // number)
    models = np.empty((num_peers, dim))
    for peer, label in enumerate(truth):
        inputs = rng.standard_normal((num_examples, dim))
        outputs = inputs @ truths[label] + rng.standard_normal(num_examples)
        models[peer] = np.linalg.lstsq(inputs, outputs)[0]
    return models, in_order_of_appearance(truth.tolist())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_every_clustering_finds_groups_that_are_apart(name, seed):
    points, sizes, truth = three_groups(seed)
    found = found_by(ALL[name], points, sizes)
    np.testing.assert_array_equal(found.labels, in_order_of_appearance(truth.tolist()))
    assert found.number == 3
    assert found.note


@pytest.mark.parametrize("name", ALL)
def test_the_same_input_gives_the_same_labels_in_order_of_appearance(name):
    points = np.random.default_rng(1).standard_normal((14, 3))
    first, again = found_by(ALL[name], points, seed=5), found_by(ALL[name], points, seed=5)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert first.note == again.note
    np.testing.assert_array_equal(first.labels, in_order_of_appearance(first.labels.tolist()))
    assert first.labels.dtype == np.intp


@given(st.integers(0, 1000), st.sampled_from([1e-9, 1.0, 1e9]), st.sampled_from(sorted(ALL)))
@effort(max_examples=25, deadline=None)
def test_neither_unit_nor_origin_nor_order_change_who_belongs_together(seed, scale, name):
    points, sizes, _ = three_groups(seed)
    order = np.random.default_rng(seed).permutation(len(points))
    moved = scale * (points + 3.0)[order]
    labels = found_by(ALL[name], points, sizes).labels[order]
    np.testing.assert_array_equal(
        found_by(ALL[name], moved, sizes[order]).labels, in_order_of_appearance(labels.tolist())
    )


@pytest.mark.parametrize("name", UNTOLD)
def test_equal_models_are_one_cluster_and_so_is_one_peer(name):
    for points in (np.full((6, 4), 0.1), np.ones((1, 4))):
        found = found_by(UNTOLD[name], points)
        assert found.number == 1
        assert found.note


@pytest.mark.parametrize("name", ["linkage", "silhouette", "gap"])
def test_one_cloud_of_many_dimensions_is_one_cluster(name):
    for seed in range(3):
        cloud = np.random.default_rng(seed).standard_normal((24, 40))
        assert found_by(UNTOLD[name], cloud).number == 1


@pytest.mark.parametrize("name", TOLD)
def test_more_clusters_than_models_or_than_models_that_differ_are_refused(name):
    with pytest.raises(ConfigError, match="num_clusters = 4: with 3 models it must be from 1 to 3"):
        found_by(TOLD[name](4), np.eye(3))
    twins = np.eye(3)[[0, 1, 2, 0, 1, 2]]
    with pytest.raises(ConfigError, match=r"with 6 models \(3 that differ\)"):
        found_by(TOLD[name](4), twins)
    assert found_by(TOLD[name](3), twins).labels.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ConfigError, match="from 1 to 1"):
        found_by(TOLD[name](2), np.ones((4, 2)))
    assert found_by(TOLD[name](1), np.eye(3)).number == 1


def test_models_that_differ_by_less_than_rounding_shows_give_fewer_clusters_and_a_note():
    points = np.array([[1.0], [1.0 + 2**-52], [1.0 + 2**-51], [5.0]])
    found = found_by(KMeans(num_clusters=4), points)
    assert found.labels.tolist() == [0, 0, 0, 1]
    assert found.note == "2 clusters, not 4: the others have no member"


@pytest.mark.parametrize("name", ALL)
def test_input_that_cannot_be_clustered_names_the_row_at_fault(name):
    points = np.arange(12.0).reshape(6, 2)
    ones = np.ones(6)
    spoiled = points.copy()
    spoiled[4, 1] = np.nan
    with pytest.raises(DataError, match="model 4 can't be clustered"):
        found_by(ALL[name], spoiled, ones)
    with pytest.raises(DataError, match="model 2 can't be clustered"):
        found_by(ALL[name], points, np.array([1, 1, 0, 1, 1, 1.0]))
    with pytest.raises(DataError, match="6 models came with sizes"):
        found_by(ALL[name], points, np.ones(5))
    for wrong in (points[:0], points.astype(np.float32), points.ravel()):
        with pytest.raises(DataError, match="models to cluster are"):
            found_by(ALL[name], wrong, np.ones(len(wrong)))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: KMeans(num_clusters=2, restarts=0), "restarts"),
        (lambda: GradientClustering(num_clusters=2, restarts=0), "restarts"),
        (lambda: GradientClustering(num_clusters=2, step=1.5), "step"),
        (lambda: AverageLinkage(least_gap=1.0), "least_gap"),
        (lambda: BySilhouette(make=kmeans, most=0), "most"),
        (lambda: ByGap(make=kmeans, references=1), "references"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(make, setting):
    with pytest.raises(ConfigError, match=setting):
        make()


def test_two_models_that_differ_are_left_alone_by_linkage():
    assert found_by(AverageLinkage(), np.eye(2)).number == 2


def test_linkage_cuts_at_the_largest_gap_and_tells_where():
    points = np.array([[0.0], [1.0], [10.0], [11.5], [18.0]])  # merges at 1, 1.5, 7.25, 12.7
    found = found_by(AverageLinkage(), points)
    assert found.labels.tolist() == [0, 0, 1, 1, 2]
    assert found.note == "3 clusters: merges up to 1.5 apart, the next 7.25"


def test_a_larger_peer_draws_the_means_to_itself():
    points = np.array([[0.0], [1.0], [2.2], [3.0]])
    alike = found_by(KMeans(num_clusters=2), points)
    assert alike.labels.tolist() == [0, 0, 1, 1]
    unlike = found_by(KMeans(num_clusters=2), points, np.array([100.0, 100.0, 1.0, 1.0]))
    assert unlike.labels.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("num_examples", [25, 100])
def test_kmeans_plus_plus_and_gradient_clustering_find_the_truth_of_regression_models(num_examples):
    for seed in range(5):
        models, truth = regression_models(num_examples, seed)
        for name in ("k-means++", "gradient"):
            np.testing.assert_array_equal(found_by(TOLD[name](10), models, seed=seed).labels, truth)


def test_one_random_start_of_kmeans_misses_the_truth_of_regression_models():
    missed = 0
    for seed in range(10):
        models, truth = regression_models(100, seed)
        once = KMeans(num_clusters=10, start="random", restarts=1)
        missed += not np.array_equal(found_by(once, models, seed=seed).labels, truth)
    assert missed >= 5


def test_average_linkage_finds_the_truth_without_k_where_no_peer_is_far_off():
    for seed in range(5):
        models, truth = regression_models(100, seed)
        np.testing.assert_array_equal(found_by(AverageLinkage(), models).labels, truth)
    # At 25 examples for 20 unknowns some least squares are ill-conditioned: right for most seeds.
    right = sum(
        np.array_equal(found_by(AverageLinkage(), models).labels, truth)
        for models, truth in (regression_models(25, seed) for seed in range(40))
    )
    assert right >= 24


def test_convex_clustering_finds_the_truth_from_a_hundred_examples_on_without_k():
    for seed in range(3):
        models, truth = regression_models(100, seed)
        found = found_by(ConvexClustering(), models)
        np.testing.assert_array_equal(found.labels, truth)
        assert "plateau of 10 clusters" in found.note
    models, _ = regression_models(25, 0)
    assert "no plateau" in found_by(ConvexClustering(), models).note


@pytest.mark.parametrize("rule", [BySilhouette, ByGap])
def test_the_number_of_regression_models_is_found(rule):
    for num_examples in (25, 100):
        models, truth = regression_models(num_examples, 0)
        found = found_by(rule(make=kmeans, most=15), models)
        np.testing.assert_array_equal(found.labels, truth)
