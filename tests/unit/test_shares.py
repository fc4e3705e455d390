"""Dirichlet and pathological partitions: each peer's share of each label."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_partition import (
    dataset_of,
    even,
    ids,
    labels_of,
    parts,
    seeded,
)
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from sim import deal
from sim.groups import describe_labels
from sim.partition import PartitionSettings, partition

# Pathological shards


@given(
    num_peers=st.integers(1, 15),
    per_peer=st.integers(1, 4),
    labels=st.lists(st.integers(0, 5), min_size=60, max_size=200),
    test=st.lists(st.integers(0, 5), max_size=100),
    seed=st.integers(0, 2**32),
)
def test_shards_are_equal_and_the_test_part_has_the_same_labels(
    num_peers: int, per_peer: int, labels: list[int], test: list[int], seed: int
) -> None:
    settings = PartitionSettings(kind="pathological", shards_per_peer=per_peer)

    slices = partition(dataset_of(labels, 6, test), num_peers, settings, seeded(seed))

    sizes = [len(own) for own in parts(slices, "train")]
    assert max(sizes) - min(sizes) <= per_peer
    for train, tested in zip(labels_of(slices), labels_of(slices, "test"), strict=True):
        assert set(tested) <= set(train)
    assert len(ids(parts(slices, "test"))) == sum(label in set(labels) for label in test)


def test_shards_that_fit_the_labels_give_each_peer_so_many_labels_and_alike_tests() -> None:
    dataset = dataset_of(even(1000), 10, even(500))

    for seed in range(5):
        slices = partition(dataset, 10, PartitionSettings(kind="pathological"), seeded(seed))

        assert ids(parts(slices, "train")) == list(range(1000))
        for one in slices:
            assert one.dataset.test is not None
            train, test = (
                np.bincount(own.labels, minlength=10)
                for own in (one.dataset.train, one.dataset.test)
            )
            assert 1 <= np.count_nonzero(train) <= 2
            assert np.array_equal(train, 2 * test)
            assert train[one.group] == train.max()
            assert one.description == describe_labels(np.flatnonzero(train).tolist())


def test_a_test_label_that_no_training_example_has_goes_to_no_peer() -> None:
    dataset = dataset_of([0, 1] * 20, 3, [0, 1, 2] * 10)

    for one in partition(dataset, 4, PartitionSettings(kind="pathological"), seeded()):
        assert one.dataset.test is not None
        assert set(one.dataset.test.labels) == set(one.dataset.train.labels)


def test_shards_are_drawn_anew_for_another_seed() -> None:
    dataset = dataset_of(even(1000), 10, None)

    divisions = {
        str(labels_of(partition(dataset, 10, PartitionSettings(kind="pathological"), seeded(seed))))
        for seed in range(5)
    }

    assert len(divisions) == 5


@given(
    counts=st.lists(st.lists(st.integers(0, 10**6), min_size=3, max_size=3), min_size=1),
    data=st.data(),
)
def test_scaled_counts_keep_the_proportions_to_within_one_example(
    counts: list[list[int]], data: st.DataObject
) -> None:
    labels = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=200))

    scaled = deal.scale_counts(np.asarray(counts), np.asarray(labels, dtype=np.int64))

    for label, (row, own) in enumerate(zip(counts, scaled.tolist(), strict=True)):
        assert sum(own) == (labels.count(label) if any(row) else 0)
        for count, number in zip(row, own, strict=True):
            assert abs(number - count * labels.count(label) / max(1, sum(row))) < 1
            assert number == 0 or count > 0


# Dirichlet


@given(
    alpha=st.floats(5e-324, 1e300),
    num_peers=st.integers(1, 50),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_shares_are_finite_and_lose_no_example_at_any_alpha(
    alpha: float, num_peers: int, counts: list[int], seed: int
) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    shares = deal.draw_shares(len(counts), num_peers, alpha, seeded(seed))

    dealt = deal.count_shares(labels, shares)

    assert np.isfinite(shares).all()
    assert dealt.min() >= 0
    assert dealt.sum(axis=1).tolist() == counts


def test_a_small_alpha_gives_few_labels_and_a_large_one_all() -> None:
    dataset = dataset_of(even(4000), 10, None)

    def strongest(alpha: float) -> float:
        settings = PartitionSettings(kind="dirichlet", alpha=alpha)
        slices = partition(dataset, 10, settings, seeded())
        return float(
            np.mean([np.bincount(own.labels).max() / len(own) for own in parts(slices, "train")])
        )

    assert strongest(1000) < 0.12
    assert strongest(0.1) > 0.4


def test_the_test_part_follows_the_same_shares() -> None:
    dataset = dataset_of(even(5000), 10, even(5000))

    for one in partition(dataset, 6, PartitionSettings(kind="dirichlet"), seeded()):
        assert one.dataset.test is not None
        train, test = (
            np.bincount(own.labels, minlength=10) for own in (one.dataset.train, one.dataset.test)
        )
        assert np.array_equal(train, test)


def test_a_dirichlet_slice_is_named_after_its_dominant_label() -> None:
    slices = partition(
        dataset_of(even(500), 10, None), 5, PartitionSettings(kind="dirichlet"), seeded()
    )

    for one in slices:
        frequencies = np.bincount(one.dataset.train.labels)
        assert frequencies[one.group] == frequencies.max()
        assert one.description.startswith(f"mostly label {one.group} (")


def test_conditions_that_no_draw_meets_end_in_an_error_that_names_alpha(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = 0

    def counted(*args: object) -> object:
        nonlocal draws
        draws += 1
        return deal.draw_shares(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("sim.shares.draw_shares", counted)
    settings = PartitionSettings(kind="dirichlet", alpha=1e-6, min_examples=5)
    with pytest.raises(ConfigError, match=r"partition\.alpha = 1e-06: in 100 draws, some of 100"):
        partition(dataset_of(even(1000), 10, None), 100, settings, seeded())
    assert draws == 100
