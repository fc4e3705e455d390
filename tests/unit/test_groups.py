"""Groups of peers: their labels, permutations, angles and sizes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_partition import (
    GROUPED,
    dataset_of,
    even,
    ids,
    labels_of,
    parts,
    seeded,
)
from hypothesis import given
from hypothesis import strategies as st

from peer.data import Dataset, Examples
from peer.sources import load_source
from protocol.errors import ConfigError, DataError
from sim.groups import describe_labels, rotate
from sim.partition import PartitionSettings, partition


@pytest.mark.parametrize("kind", [*GROUPED, "mixture"])
def test_groups_have_the_sizes_that_are_spelled_out(kind: str) -> None:
    settings = PartitionSettings(kind=kind, group_sizes=(1, 2, 5, 8))  # type: ignore[arg-type]

    slices = partition(dataset_of(even(400), 10, even(100)), 16, settings, seeded())

    assert [one.group for one in slices] == [0] + 2 * [1] + 5 * [2] + 8 * [3]


# Label groups


def test_disjoint_groups_see_their_labels_in_train_and_test() -> None:
    slices = partition(dataset_of(even(400), 10, even(100)), 8, PartitionSettings(), seeded())

    assert [one.description for one in slices[::2]] == [
        "labels 0-2",
        "labels 3-5",
        "labels 6-7",
        "labels 8-9",
    ]
    assert labels_of(slices) == labels_of(slices, "test")
    assert labels_of(slices)[::2] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_overlapping_groups_share_labels_with_their_neighbors_but_no_example() -> None:
    settings = PartitionSettings(labels_per_group=5, overlap=3)

    slices = partition(dataset_of(even(1000), 10, None), 8, settings, seeded())

    assert labels_of(slices)[::2] == [
        [0, 1, 2, 3, 4],
        [2, 3, 4, 5, 6],
        [4, 5, 6, 7, 8],
        [0, 6, 7, 8, 9],
    ]
    assert slices[-1].description == "labels 0, 6-9"
    assert ids(parts(slices, "train")) == list(range(1000))


def test_shared_labels_are_as_frequent_as_others_while_they_last() -> None:
    settings = PartitionSettings(labels_per_group=5, overlap=3, max_examples=60)

    slices = partition(dataset_of(even(2000), 10, None), 8, settings, seeded())

    for group in range(4):
        own = [one.dataset.train.labels for one in slices if one.group == group]
        frequencies = np.bincount(np.concatenate(own), minlength=10)
        assert sorted(frequencies)[-5:] == [24] * 5


def test_label_groups_can_be_spelled_out() -> None:
    settings = PartitionSettings(groups=2, label_groups=((7, 1), (1, 4)))

    slices = partition(dataset_of(even(200), 10, None), 2, settings, seeded())

    assert labels_of(slices) == [[1, 7], [1, 4]]
    assert [one.description for one in slices] == ["labels 1, 7", "labels 1, 4"]


def test_only_labels_that_there_are_are_divided() -> None:
    dataset = dataset_of([2, 5, 7, 8] * 10, 10, None)

    slices = partition(dataset, 2, PartitionSettings(groups=2), seeded())

    assert labels_of(slices) == [[2, 5], [7, 8]]


@given(st.sets(st.integers(0, 12), min_size=1))
def test_a_description_names_exactly_the_labels(labels: set[int]) -> None:
    text = describe_labels(list(labels))
    named: set[int] = set()
    for run in text.split(" ", 1)[1].split(", "):
        first, _, last = run.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == labels


# Permuted


@given(
    num_classes=st.integers(1, 9),
    groups=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_permutations_are_distinct_consistent_and_leave_the_first_group_alone(
    num_classes: int, groups: int, seed: int
) -> None:
    dataset = dataset_of(even(720, num_classes), num_classes, even(360, num_classes))
    settings = PartitionSettings(kind="permuted", groups=groups)
    if groups > np.prod(np.arange(1, num_classes + 1)):
        with pytest.raises(ConfigError, match=r"partition\.groups"):
            partition(dataset, groups, settings, seeded(seed))
        return

    slices = partition(dataset, groups, settings, seeded(seed))

    tables = []
    for one in slices:
        assert one.dataset.test is not None
        table: dict[int, int] = {}
        for own in (one.dataset.train, one.dataset.test):
            for image, label in zip(own.inputs[:, 0, 1, 1], own.labels, strict=True):
                old = int(image) % num_classes
                assert table.setdefault(old, int(label)) == label
        assert sorted(table) == sorted(table.values()) == list(range(num_classes))
        tables.append(tuple(table[old] for old in range(num_classes)))
    assert tables[0] == tuple(range(num_classes))
    assert len(set(tables)) == groups


def test_permutations_stay_among_the_labels_that_there_are() -> None:
    dataset = dataset_of([2, 5, 7] * 40, 10, None)

    slices = partition(dataset, 6, PartitionSettings(kind="permuted", groups=6), seeded())

    assert labels_of(slices) == [[2, 5, 7]] * 6
    assert slices[2].description == "permutation 2"


# Rotated


def test_quarter_turns_move_pixels_exactly() -> None:
    digits = load_source("digits", part=(0, 4))
    settings = PartitionSettings(kind="rotated")

    turned = partition(digits, 4, settings, seeded())
    straight = partition(digits, 4, PartitionSettings(kind="iid"), seeded())

    for turns, (one, other) in enumerate(zip(turned, straight, strict=True)):
        expected = np.rot90(other.dataset.train.inputs, turns, axes=(-2, -1))
        assert np.array_equal(one.dataset.train.inputs, expected)
    assert [one.description for one in turned] == [
        "rotated 0°",
        "rotated 90°",
        "rotated 180°",
        "rotated 270°",
    ]


def test_other_angles_turn_the_same_way_and_keep_the_value_range() -> None:
    # A blot a little right of the middle goes up, counterclockwise, and around.
    image = np.zeros((1, 1, 9, 9), dtype=np.float32)
    image[0, 0, 4, 7] = 1
    examples = Examples(image, np.zeros(1, dtype=np.int64))
    rows, columns = np.mgrid[:9, :9] - 4
    for group in range(12):
        turned = rotate(examples, group, 12).inputs[0, 0]
        assert turned.min() >= 0 and turned.max() <= 1
        x, y = (turned * columns).sum() / turned.sum(), -(turned * rows).sum() / turned.sum()
        angle = np.degrees(np.arctan2(y, x)) % 360
        assert abs((angle - 30 * group + 180) % 360 - 180) < 2
        assert abs(np.hypot(x, y) - 3) < 0.2


def test_the_train_and_test_parts_turn_alike() -> None:
    arrow = np.zeros((20, 1, 3, 3), dtype=np.float32)
    arrow[:, 0, 1, 2] = 1
    examples = Examples(arrow, np.zeros(20, dtype=np.int64))
    dataset = Dataset(name="arrows", train=examples, test=examples, num_classes=1)

    for one in partition(dataset, 4, PartitionSettings(kind="rotated"), seeded()):
        assert one.dataset.test is not None
        assert np.array_equal(one.dataset.train.inputs[0], one.dataset.test.inputs[0])


@pytest.mark.parametrize("shape", [(4,), (1, 3, 4)])
def test_what_is_no_square_image_cannot_be_rotated(shape: tuple[int, ...]) -> None:
    examples = Examples(np.ones((8, *shape), dtype=np.float32), np.zeros(8, dtype=np.int64))
    dataset = Dataset(name="mine", train=examples, test=None, num_classes=1)
    with pytest.raises(DataError, match="can't be rotated for 4 groups"):
        partition(dataset, 4, PartitionSettings(kind="rotated"), seeded())


# Continuum


def test_the_images_of_a_continuum_are_turned_by_equal_steps_from_peer_to_peer() -> None:
    digits = load_source("digits", part=(0, 4))

    turned = partition(digits, 16, PartitionSettings(kind="continuum"), seeded())
    straight = partition(digits, 16, PartitionSettings(kind="iid"), seeded())

    assert [one.group for one in turned] == list(range(16))
    assert [one.description for one in turned[:3]] == [
        "rotated 0°",
        "rotated 22.5°",
        "rotated 45°",
    ]
    for which in ("train", "test"):
        pairs = zip(parts(turned, which), parts(straight, which), strict=True)
        for peer, (one, other) in enumerate(pairs):
            assert np.array_equal(one.inputs, rotate(other, peer, 16).inputs)
            assert np.array_equal(one.labels, other.labels)
