"""Prototypes answer as a datastore does, within their budget, whatever they are learned from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import compression
from peer.compression import Prototypes, compress, prototypes_within
from peer.datastore import Datastore, DatastoreSettings
from peer.interpolation import LAMBDAS, KnnSettings, choose, tune
from protocol.errors import CheckpointError, ConfigError, DataError

CLASSES = 5


def store_of(embeddings: np.ndarray, labels: np.ndarray) -> Datastore:
    shape = embeddings.shape
    store = Datastore(DatastoreSettings(), shape[1], CLASSES, np.random.default_rng(0))
    store.add(embeddings.astype(np.float32), labels.astype(np.int64))
    return store


def clouds(count: int, dim: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return points around two centers for each class."""
    rng = np.random.default_rng(seed)
    centers = 6 * np.random.default_rng(9).standard_normal((2 * CLASSES, dim))
    kinds = rng.integers(2 * CLASSES, size=count)
    points = centers[kinds] + rng.standard_normal((count, dim))
    return points.astype(np.float32), kinds % CLASSES


def learn(store: Datastore, size_bytes: int = 2048, seed: int = 0) -> Prototypes:
    return compress(store, size_bytes, np.random.default_rng(seed))


def assert_distributions(found: np.ndarray, count: int) -> None:
    assert found.shape == (count, CLASSES)
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)


@st.composite
def stores(draw) -> Datastore:
    """Few points or many, far or near, with duplicates, of some classes or of one."""
    count, dim = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["normal", "equal", "duplicates", "huge", "tiny", "outlier"]))
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    points = rng.standard_normal((count, dim))
    match kind:
        case "equal":
            points[:] = points[0]
        case "duplicates":
            points = points[rng.integers(count, size=count) // 3]
        case "huge":
            points *= 1e38 / max(1.0, np.abs(points).max())
        case "tiny":
            points *= 1e-42
        case "outlier":
            points[0] = 3e38
    labels = rng.integers(draw(st.integers(1, CLASSES)), size=count)
    return store_of(points, labels)


@settings(max_examples=60, deadline=None)
@given(stores(), st.integers(300, 5000), st.sampled_from([0.0, 1.0, 3e38, 1e-45]))
def test_any_store_gives_label_distributions_within_its_budget(store, size_bytes, magnitude):
    found = learn(store, size_bytes)
    assert found.size_bytes <= size_bytes
    queries = np.concatenate((store.embeddings, np.full((1, store.dim), magnitude, np.float32)))
    said = found.recall(queries)
    assert_distributions(said, len(queries))
    unheard = np.setdiff1d(np.arange(CLASSES), store.labels)
    assert not said[:, unheard].any()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 100_000), st.integers(1, 2000), st.integers(1, 100), st.integers(1, 10_000))
def test_the_shape_never_exceeds_the_budget_and_is_used_up(budget, dim, classes, examples):
    least = 4 * (2 * dim + 1 + classes) + 8 * classes + 8
    if budget < least:
        with pytest.raises(ConfigError, match="no room for a prototype") as caught:
            prototypes_within(budget, dim=dim, num_classes=classes, num_examples=examples)
        assert f"{least / 1024:.2f} KiB" in str(caught.value)
        return
    count, dims = prototypes_within(budget, dim=dim, num_classes=classes, num_examples=examples)
    taken = 4 * (dim + dim * dims + count * (dims + classes)) + 8 * classes + 8
    assert taken <= budget
    assert 1 <= count <= examples
    assert 1 <= dims <= min(dim, max(examples, 1), compression.MOST_DIMS)
    useful = min(examples, max(classes, examples // compression.EXAMPLES_EACH))
    assert count == useful or taken + 4 * (dims + classes) > budget


def test_the_reported_size_is_that_of_its_arrays():
    found = learn(store_of(*clouds(200)))
    arrays = found.to_arrays().values()
    assert found.size_bytes == sum(array.nbytes for array in arrays)


def test_the_same_generator_gives_the_same_bits_and_another_does_not():
    store = store_of(*clouds(200))
    first, again, other = learn(store), learn(store), learn(store, seed=1)
    for name, array in first.to_arrays().items():
        np.testing.assert_array_equal(array, again.to_arrays()[name])
    assert not np.array_equal(first.positions, other.positions)


def test_one_example_is_all_that_is_ever_said():
    found = learn(store_of(np.ones((1, 3)), np.array([2])))
    said = found.recall(np.array([[1, 1, 1], [-5, 0, 9]], np.float32))
    np.testing.assert_array_equal(said, np.eye(CLASSES, dtype=np.float32)[[2, 2]])


def test_equal_points_say_how_often_each_label_was_seen_there():
    found = learn(store_of(np.ones((40, 3)), np.arange(40) % 4 // 3), 4096)
    said = found.recall(np.ones((1, 3), np.float32))[0]
    assert said[0] > said[1] > 0


def test_an_empty_store_and_wrong_queries_are_refused():
    with pytest.raises(DataError, match="empty datastore"):
        learn(store_of(np.empty((0, 3)), np.empty(0)))
    found = learn(store_of(*clouds(50, dim=3)))
    with pytest.raises(DataError, match="queries: number 1 is not finite"):
        found.recall(np.array([[0, 0, 0], [np.inf, 0, 0]], np.float32))
    with pytest.raises(DataError, match="have the dimension 2"):
        found.recall(np.zeros((1, 2), np.float32))
    assert found.recall(np.empty((0, 3), np.float32)).shape == (0, CLASSES)


def test_the_slopes_are_those_of_the_loss():
    rng = np.random.default_rng(3)
    points, labels = rng.standard_normal((7, 4)), rng.integers(3, size=7)
    parts = [rng.standard_normal(shape) for shape in ((2, 4), (5, 2), (5, 3))]

    def loss() -> float:
        projected = points @ parts[0].T
        distances = np.linalg.norm(projected[:, np.newaxis] - parts[1], axis=2)
        weights = np.exp(-distances) / np.exp(-distances).sum(axis=1, keepdims=True)
        says = np.exp(parts[2]) / np.exp(parts[2]).sum(axis=1, keepdims=True)
        return float(-np.log((weights @ says)[np.arange(7), labels]).mean())

    found = compression._gradient(compression._Parts(*parts), points, labels)
    for part, slopes in zip(parts, found, strict=True):
        expected = np.empty_like(part)
        for place in np.ndindex(part.shape):
            kept, ends = part[place], []
            for step in (1e-5, -1e-5):
                part[place] = kept + step
                ends.append(loss())
            part[place] = kept
            expected[place] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(slopes, expected, atol=1e-6)


def test_classes_of_clusters_are_told_by_a_twentieth_of_the_memory():
    store = store_of(*clouds(400))
    queries, labels = clouds(300, seed=1)
    found = learn(store, store.size_bytes // 20)
    assert found.size_bytes <= store.size_bytes // 20
    assert (found.recall(queries).argmax(axis=1) == labels).mean() > 0.97


def test_lambda_is_chosen_by_what_prototypes_say():
    points, labels = clouds(100)
    store = store_of(points[:60], labels[:60])
    held, truth = points[60:], labels[60:]
    model = np.full((40, CLASSES), 1 / CLASSES, np.float32)
    exact = tune(store, KnnSettings(), embeddings=held, model=model, labels=truth)
    found = learn(store)
    tuning = choose(found.recall(held), model, truth, exact.blend, LAMBDAS)
    said = (found.recall(held).argmax(axis=1) == truth).mean()
    assert tuning.memory_accuracy == pytest.approx(said)
    assert tuning.model_accuracy == exact.model_accuracy
    assert tuning.blend.lam > 0
    assert tuning.accuracy >= max(said, exact.model_accuracy)


def test_saved_prototypes_come_back_and_damaged_ones_are_refused():
    store = store_of(*clouds(100))
    found = learn(store)
    arrays = {**store.to_arrays(), **found.to_arrays()}
    restored = Prototypes.from_arrays(arrays, store.dim, CLASSES)
    assert restored is not None
    queries = store.embeddings[:9]
    np.testing.assert_array_equal(restored.recall(queries), found.recall(queries))
    assert Prototypes.from_arrays(store.to_arrays(), store.dim, CLASSES) is None
    lost = {name: array for name, array in arrays.items() if name != "prototypes_says"}
    flat = {**arrays, "prototypes_positions": arrays["prototypes_positions"].reshape(-1)}
    fewer = {**arrays, "prototypes_says": arrays["prototypes_says"][1:]}
    for damaged in (lost, flat, fewer):
        with pytest.raises(CheckpointError, match="prototypes can't be used"):
            Prototypes.from_arrays(damaged, store.dim, CLASSES)
    with pytest.raises(CheckpointError, match="dimension 13"):
        Prototypes.from_arrays(arrays, 13, CLASSES)
    with pytest.raises(CheckpointError, match="4 classes"):
        Prototypes.from_arrays(arrays, store.dim, 4)
