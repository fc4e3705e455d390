"""What a datastore keeps, by strategy, and what it refuses."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from peer.datastore import Datastore, DatastoreSettings, entry_size_bytes
from protocol.errors import CheckpointError, ConfigError, DataError

DIM = 4
CLASSES = 3


def store_of(seed: int = 0, **settings) -> Datastore:
    rng = np.random.default_rng(seed)
    return Datastore(DatastoreSettings(**settings), DIM, CLASSES, rng)


def examples(first: int, count: int):
    """Examples whose arrival can be read off them."""
    numbers = np.arange(first, first + count)
    return np.repeat(numbers, DIM).reshape(count, DIM).astype(np.float32), numbers % CLASSES


def fill(store: Datastore, *counts: int) -> Datastore:
    for count in counts:
        store.add(*examples(store.num_offered, count))
    return store


strategies = st.sampled_from(["concatenate", "fifo", "fixed", "random"])
batches = st.lists(st.integers(0, 9), max_size=6)


@given(strategies, st.integers(1, 12), batches, st.integers(0, 5))
@effort(max_examples=150, deadline=None)
def test_entries_are_whole_in_order_and_never_above_the_capacity(strategy, capacity, counts, seed):
    store = store_of(seed, strategy=strategy, capacity=capacity)
    for count in counts:
        before = set(store.arrivals)
        kept = store.add(*examples(store.num_offered, count))
        assert kept == len(set(store.arrivals) - before)
    assert store.num_offered == sum(counts)
    first = next((count for count in counts if count), 0)
    offered = first if strategy == "fixed" else sum(counts)
    assert len(store) == min(capacity, offered)
    assert (np.diff(store.arrivals) > 0).all()
    np.testing.assert_array_equal(store.embeddings[:, 0], store.arrivals)
    np.testing.assert_array_equal(store.labels, store.arrivals % CLASSES)


def test_each_strategy_keeps_what_it_says():
    assert list(fill(store_of(strategy="fifo", capacity=3), 2, 2, 1).arrivals) == [2, 3, 4]
    assert list(fill(store_of(capacity=3), 2, 2, 1).arrivals) == [0, 1, 2]
    assert list(fill(store_of(), 2, 2, 1).arrivals) == [0, 1, 2, 3, 4]
    assert list(fill(store_of(strategy="fixed"), 0, 2, 2, 1).arrivals) == [0, 1]


def test_random_keeps_a_uniform_sample_however_examples_come():
    counts = np.zeros(20)
    for seed in range(600):
        counts[fill(store_of(seed, strategy="random", capacity=5), 7, 1, 12).arrivals] += 1
    # 600 draws with probability 1/4: standard deviation 10.6; five of them for the worst of 20
    np.testing.assert_allclose(counts, 150, atol=53)


def test_the_same_seed_keeps_the_same_sample_after_a_restart_too():
    settings = DatastoreSettings(strategy="random", capacity=5)
    whole = fill(store_of(3, strategy="random", capacity=5), 9, 9)
    rng = np.random.default_rng(3)
    saved = fill(Datastore(settings, DIM, CLASSES, rng), 9).to_arrays()
    restored = fill(Datastore.from_arrays(saved, settings, CLASSES, rng), 9)
    np.testing.assert_array_equal(whole.arrivals, restored.arrivals)


def test_a_capacity_in_mib_is_what_entries_take():
    store = fill(store_of(capacity_mib=0.001), 100)
    assert len(store) == int(0.001 * 2**20 / entry_size_bytes(DIM)) == 17
    assert store.size_bytes <= 0.001 * 2**20
    store.nearest(store.embeddings, 1)
    columns = sum(array.nbytes for array in store.to_arrays().values()) - 8
    assert columns + store._search._prepared.nbytes == store.size_bytes


@given(strategies, batches)
@effort(max_examples=40, deadline=None)
def test_a_store_comes_back_from_plain_arrays_as_it_was(strategy, counts):
    store = fill(store_of(strategy=strategy, capacity=6), *counts)
    rng = np.random.default_rng(9)
    again = Datastore.from_arrays(store.to_arrays(), store.settings, CLASSES, rng)
    for name, array in store.to_arrays().items():
        np.testing.assert_array_equal(again.to_arrays()[name], array)


def test_a_smaller_capacity_after_a_restart_keeps_what_the_strategy_would():
    saved = fill(store_of(strategy="fifo", capacity=9), 9).to_arrays()
    smaller = DatastoreSettings(strategy="fifo", capacity=2)
    store = Datastore.from_arrays(saved, smaller, CLASSES, np.random.default_rng(0))
    assert list(store.arrivals) == [7, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.array([0, 1, 7])}, "label of example 2 is 7"),
        ({"labels": np.array([0, 1])}, "labels are"),
        ({"embeddings": np.zeros((3, 0), np.float32)}, "saved embeddings"),
        ({"embeddings": np.full((3, DIM), np.inf, np.float32)}, "not finite"),
        ({"arrivals": np.array([0, 2, 1])}, "must ascend"),
        ({"num_offered": np.array(2)}, "below 2"),
        ({"num_offered": np.array("many")}, "can't be used"),
        ({"keys": np.array([0.1, np.nan, 0.2])}, "columns"),
        ({"keys": None}, "can't be used"),
    ],
)
def test_a_damaged_store_is_refused(change, message):
    saved = {**fill(store_of(), 3).to_arrays(), **change}
    with pytest.raises(CheckpointError, match=message):
        Datastore.from_arrays(saved, DatastoreSettings(), CLASSES, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("embeddings", "labels", "message"),
    [
        (examples(0, 2)[0], np.array([0, 3]), "label of example 1 is 3: .* 3 classes"),
        (examples(0, 2)[0], np.array([-1, 0]), "label of example 0 is -1"),
        (examples(0, 2)[0], np.array([0.0, 1.0]), "labels are float64"),
        (examples(0, 2)[0], np.array([0]), "one whole number for each of the 2"),
        (np.full((2, DIM), np.nan, np.float32), np.array([0, 1]), "number 0 is not finite"),
        (np.zeros((2, DIM + 1), np.float32), np.array([0, 1]), "dimension 5"),
        (np.zeros((2, DIM), np.float16), np.array([0, 1]), "float16"),
    ],
)
def test_bad_examples_are_refused_by_name_and_nothing_is_lost(embeddings, labels, message):
    store = fill(store_of(), 4)
    with pytest.raises(DataError, match=message):
        store.add(embeddings, labels)
    assert store.num_offered == len(store) == 4
    assert store.add(*examples(4, 1)) == 1


def test_settings_that_exclude_each_other_or_leave_no_room_are_refused():
    for settings in ({"capacity": 2, "capacity_mib": 1.0}, {"strategy": "fifo"}):
        with pytest.raises(ValueError, match="capacity"):
            DatastoreSettings(**settings)
    for zero in ({"capacity": 0}, {"capacity_mib": 0.0}, {"strategy": "lifo"}):
        with pytest.raises(msgspec.ValidationError, match=next(iter(zero))):
            msgspec.convert(zero, DatastoreSettings)
    with pytest.raises(ConfigError, match=r"no room for one example: .* takes 60 bytes"):
        store_of(capacity_mib=1e-6)
    with pytest.raises(ConfigError, match="capacity = 0"):
        store_of(capacity=0)


def test_another_model_embeds_the_kept_examples_anew():
    store = fill(store_of(strategy="fifo", capacity=3), 5)
    store.nearest(store.embeddings, 1)
    anew = -store.embeddings
    store.reembed(anew)
    anew[:] = 0  # the store has its own copy
    np.testing.assert_array_equal(store.embeddings[:, 0], [-2, -3, -4])
    assert store.nearest(np.full((1, DIM), -3, np.float32), 1).positions == 1
    with pytest.raises(DataError, match="2 new embeddings for 3 entries"):
        store.reembed(store.embeddings[:2])


def test_a_store_without_some_examples_does_not_answer_with_them():
    store = fill(store_of(), 6)
    asked = store.without(np.array([2, 4, 17]))
    assert list(asked.arrivals) == [0, 1, 3, 5]
    assert len(store) == 6
    found = asked.nearest(store.embeddings[[2]], 1)
    assert list(asked.arrivals[found.positions[:, 0]]) == [1]


def test_spacing_is_the_median_distance_to_the_nearest_other():
    store = store_of()
    assert store.spacing() == 1.0
    points = np.zeros((4, DIM), np.float32)
    points[:, 0] = [0, 0, 3, 10]  # two duplicates, which don't count
    store.add(points, np.zeros(4, np.int64))
    assert store.spacing() == 5.0
    alike = store_of()
    alike.add(np.ones((5, DIM), np.float32), np.zeros(5, np.int64))
    assert alike.spacing() == 1.0
