"""kNN-Per's prediction: the label distribution, the blend, and how its weight is chosen."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.datasets import load_iris
from sklearn.neighbors import KNeighborsClassifier

from peer.datastore import Datastore, DatastoreSettings
from peer.interpolation import (
    Blend,
    KnnSettings,
    interpolate,
    label_distribution,
    tune,
)
from peer.nearest import Nearest
from peer.validation import accuracy_of
from protocol.errors import ConfigError, DataError

CLASSES = 3


def store_of(embeddings, labels) -> Datastore:
    rng = np.random.default_rng(0)
    store = Datastore(DatastoreSettings(), embeddings.shape[1], CLASSES, rng)
    store.add(embeddings, labels)
    return store


def flowers():
    """Iris in a random order, as f32."""
    inputs, labels = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return inputs[order].astype(np.float32), labels[order]


def uniform(number: int) -> np.ndarray:
    return np.full((number, CLASSES), 1 / CLASSES, np.float32)


def one_hot(labels) -> np.ndarray:
    return np.eye(CLASSES, dtype=np.float32)[labels]


@pytest.mark.parametrize("sigma", [0.05, 1.0, 20.0])
def test_scikit_learn_predicts_the_same_with_the_same_kernel(sigma):
    inputs, labels = flowers()
    theirs = KNeighborsClassifier(
        10, algorithm="brute", weights=lambda distances: np.exp(-distances / sigma)
    ).fit(inputs[:100].astype(np.float64), labels[:100])
    ours = Blend(lam=1.0, k_nearest=10, sigma=sigma).recall(
        store_of(inputs[:100], labels[:100]), inputs[100:]
    )
    expected = theirs.predict_proba(inputs[100:].astype(np.float64))
    # Where the tenth and eleventh nearest are as far, which of them speaks is a matter of taste.
    distances, _ = theirs.kneighbors(inputs[100:].astype(np.float64), 11)
    clear = distances[:, 10] - distances[:, 9] > 1e-9
    assert clear.sum() > 30
    np.testing.assert_allclose(ours[clear], expected[clear], atol=1e-6)


@given(
    arrays(np.float64, (4, 5), elements=st.floats(0, 1e39)),
    arrays(np.int64, 5, elements=st.integers(0, CLASSES - 1)),
    st.floats(1e-300, 1e300),
)
@effort(max_examples=150, deadline=None)
def test_a_distribution_is_one_whatever_distances_and_sigma(distances, labels, sigma):
    nearest = Nearest(np.tile(np.arange(5), (4, 1)), np.sort(distances, axis=1))
    memory = label_distribution(nearest, labels, CLASSES, sigma)
    assert (memory >= 0).all()
    np.testing.assert_allclose(memory.sum(axis=1), 1, atol=1e-6)
    assert (memory[:, labels[0]] >= 1 / 5 - 1e-6).all()  # the nearest never speaks less than others


def test_distances_are_neither_squared_nor_underflow():
    far = Nearest(np.array([[0, 1]]), np.array([[5000.0, 5001.0]]))
    memory = label_distribution(far, np.array([0, 2]), CLASSES, 1.0)
    np.testing.assert_allclose(memory, [[1 / (1 + np.exp(-1)), 0, 1 / (1 + np.e)]], atol=1e-7)


def test_equal_distances_and_duplicates_vote_alike():
    points = np.zeros((4, 2), np.float32)
    store = store_of(points, np.array([0, 0, 1, 2]))
    memory = Blend(lam=1.0, k_nearest=10, sigma=1.0).recall(store, points[:1] + 7)
    np.testing.assert_allclose(memory, [[0.5, 0.25, 0.25]])


def test_an_empty_store_leaves_the_model_alone():
    store = store_of(np.zeros((0, 2), np.float32), np.zeros(0, np.int64))
    queries, model = np.ones((3, 2), np.float32), uniform(3)
    blend = Blend(lam=0.9, k_nearest=10, sigma=1.0)
    np.testing.assert_array_equal(blend.predict(store, queries, model), model)
    tuning = tune(
        store, KnnSettings(lambdas=(0.5, 1.0)), embeddings=queries, model=model, labels=np.arange(3)
    )
    assert (tuning.blend.lam, tuning.memory_accuracy) == (0.0, None)


@given(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 99))
@effort(max_examples=40, deadline=None)
def test_probabilities_are_blended_with_probabilities(lam, seed):
    rng = np.random.default_rng(seed)
    memory, model = rng.dirichlet(np.ones(CLASSES), (2, 6)).astype(np.float32)
    blend = interpolate(memory, model, lam)
    np.testing.assert_allclose(blend, lam * memory + (1 - lam) * model, atol=1e-6)
    np.testing.assert_allclose(blend.sum(axis=1), 1, atol=1e-5)
    if lam in (0.0, 1.0):
        np.testing.assert_array_equal(blend, memory if lam else model)


def test_the_most_accurate_weight_wins_and_the_smallest_of_equal_ones():
    inputs, labels = flowers()
    store, asked, truth = store_of(inputs[:100], labels[:100]), inputs[100:], labels[100:]
    wrong = one_hot((truth + 1) % CLASSES)
    for model, lambdas in ((one_hot(truth), [0.0]), (uniform(50), [0.1]), (wrong, [0.7, 0.9, 1.0])):
        tuning = tune(store, KnnSettings(), embeddings=asked, model=model, labels=truth)
        assert tuning.blend.lam in lambdas
        predicted = tuning.blend.predict(store, asked, model)
        assert tuning.accuracy == accuracy_of(predicted, truth)
        assert tuning.accuracy >= max(tuning.model_accuracy, tuning.memory_accuracy)
        assert tuning.num_examples == 50


def test_a_store_is_not_asked_about_what_it_remembers():
    """Labels are noise, so a memory that answers by the query's own example would seem perfect."""
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((300, 4)).astype(np.float32)
    labels = rng.integers(0, CLASSES, 300)
    store, asked = store_of(embeddings, labels), slice(200, 300)
    settings = KnnSettings(k_nearest=1)
    told = {"embeddings": embeddings[asked], "model": uniform(100), "labels": labels[asked]}
    fooled = tune(store, settings, **told)
    right = tune(store, settings, **told, arrivals=store.arrivals[asked])
    disjoint = tune(store_of(embeddings[:200], labels[:200]), settings, **told)
    assert fooled.memory_accuracy == 1.0
    # Chance is 1/3, its standard deviation over 100 examples 0.047.
    assert right.memory_accuracy == disjoint.memory_accuracy < 0.5
    assert len(store) == 300


def test_sigma_in_units_of_spacing_does_not_depend_on_the_scale_of_embeddings():
    inputs, labels = flowers()
    predictions = []
    for scale in (1.0, 1024.0):  # a power of two, so that not even rounding differs
        told = {"embeddings": inputs[100:] * scale, "model": uniform(50), "labels": labels[100:]}
        store = store_of(inputs[:100] * np.float32(scale), labels[:100])
        told["embeddings"] = told["embeddings"].astype(np.float32)
        blend = tune(store, KnnSettings(sigma_unit="spacing"), **told).blend
        assert blend.sigma == store.spacing()
        predictions.append(blend.recall(store, told["embeddings"]))
    np.testing.assert_array_equal(*predictions)


def test_without_validation_examples_the_model_is_used_alone():
    inputs, labels = flowers()
    nothing = {"embeddings": inputs[:0], "model": uniform(0), "labels": labels[:0]}
    tuning = tune(store_of(inputs, labels), KnnSettings(), **nothing)
    assert (tuning.blend.lam, tuning.accuracy, tuning.num_examples) == (0.0, None, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambdas": []}, "lambdas is empty"),
        ({"lambdas": [0.5, 1.5]}, "lambdas holds 1.5"),
        ({"lambdas": [-0.1]}, "lambdas holds -0.1"),
        ({"lambdas": [float("nan")]}, "lambdas holds nan"),
        ({"strategy": "fifo"}, "needs a bound"),
        ({"k_nearest": 0}, "k_nearest"),
        ({"sigma": 0.0}, "sigma"),
        ({"capacity": 0}, "capacity"),
        ({"sigmas": 1}, "sigmas"),
    ],
)
def test_settings_that_can_not_be_are_refused_by_name(settings, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(settings, KnnSettings)


def test_what_does_not_fit_is_refused_with_a_reason():
    nearest = Nearest(np.zeros((1, 1), np.intp), np.ones((1, 1)))
    for sigma in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ConfigError, match="sigma"):
            label_distribution(nearest, np.array([0]), CLASSES, sigma)
    nothing = Nearest(np.zeros((1, 0), np.intp), np.ones((1, 0)))
    with pytest.raises(DataError, match="empty datastore"):
        label_distribution(nothing, np.array([0]), CLASSES, 1.0)
    with pytest.raises(ConfigError, match="lambdas holds 2"):
        interpolate(uniform(1), uniform(1), 2.0)
    with pytest.raises(DataError, match="same examples and classes"):
        interpolate(uniform(1), uniform(2), 0.5)
    with pytest.raises(DataError, match="not finite"):
        interpolate(uniform(1), uniform(1) * np.nan, 0.5)
    inputs, labels = flowers()
    store = store_of(inputs, labels)
    with pytest.raises(DataError, match="give one of each"):
        tune(store, KnnSettings(), embeddings=inputs, model=uniform(3), labels=labels[:3])
    queries = inputs[:2].copy()
    queries[1, 0] = np.inf
    with pytest.raises(DataError, match="queries: number 1 is not finite"):
        Blend(lam=0.5, k_nearest=3, sigma=1.0).predict(store, queries, uniform(2))
