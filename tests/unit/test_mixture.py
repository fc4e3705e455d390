"""Mixtures of two groups: their proportions, in train and test, for whatever is mixed."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from helpers_partition import (
    arrows,
    dataset_of,
    even,
    parts,
    quarter_turns,
    seeded,
)
from hypothesis import given
from hypothesis import strategies as st

from peer.data import Examples
from sim.groups import describe_labels
from sim.partition import PartitionSettings, Slice, partition


def percents(one: Slice) -> list[tuple[int, str]]:
    """Read a description such as "62 % rotated 90°, 38 % rotated 180°"."""
    found = re.fullmatch(r"(\d+) % (\D.*), (\d+) % (\D.*)", one.description)
    assert found is not None
    return [(int(found[1]), found[2]), (int(found[3]), found[4])]


def labels_by_class(examples: Examples) -> list[tuple[int, int]]:
    """Return, of each image of `dataset_of(even(...))`, the original label and the given one."""
    images = examples.inputs[:, 0, 1, 1].astype(np.int64).tolist()
    return [(image % 10, label) for image, label in zip(images, examples.labels, strict=True)]


@given(
    num_peers=st.integers(4, 12),
    most=st.integers(1, 20),
    test_examples=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_a_mixture_has_its_two_groups_in_its_proportion_in_train_and_test(
    num_peers: int, most: int, test_examples: int, seed: int
) -> None:
    settings = PartitionSettings(
        kind="mixture", min_examples=1, max_examples=most, test_examples=test_examples
    )

    slices = partition(arrows(240, 200), num_peers, settings, seeded(seed))

    for one in slices:
        (first, own), (second, other) = percents(one)
        assert first + second == 100 and first > second
        assert own == f"rotated {90 * one.group}°" != other
        for part in ("train", "test"):
            (examples,) = parts([one], part)
            num_own = (len(examples) * first + 50) // 100
            turns = Counter(quarter_turns(examples))
            assert turns[one.group] == num_own
            assert turns[int(other.split()[1][:-1]) // 90] == len(examples) - num_own
    sizes = [len(own) for own in parts(slices, "test")]
    assert sizes == [min(200 // num_peers, test_examples or 200)] * num_peers


@given(num_peers=st.integers(4, 12), most=st.integers(0, 15), seed=st.integers(0, 2**32))
def test_a_mixture_of_label_groups_has_the_labels_of_both_in_its_proportion(
    num_peers: int, most: int, seed: int
) -> None:
    label_groups = ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    settings = PartitionSettings(
        kind="mixture", base="label_groups", label_groups=label_groups, max_examples=most
    )

    slices = partition(dataset_of(even(600), 10, even(300)), num_peers, settings, seeded(seed))

    for one in slices:
        (percent, own), (_, other) = percents(one)
        described = {describe_labels(labels): labels for labels in label_groups}
        assert described[own] == label_groups[one.group]
        for part in ("train", "test"):
            (examples,) = parts([one], part)
            num_own = (len(examples) * percent + 50) // 100
            assert np.isin(examples.labels, described[own]).sum() == num_own
            assert np.isin(examples.labels, described[other]).sum() == len(examples) - num_own


def test_a_mixture_of_permutations_gives_its_other_part_other_labels() -> None:
    dataset = dataset_of(even(1000), 10, even(500))
    settings = PartitionSettings(kind="permuted", groups=2)
    _, permuted = partition(dataset, 2, settings, seeded())
    relabeled = dict(labels_by_class(permuted.dataset.train))
    moved = [old for old, new in relabeled.items() if old != new]

    settings = PartitionSettings(kind="mixture", base="permuted", groups=2)
    for one, names in zip(
        partition(dataset, 2, settings, seeded()),
        (["permutation 0", "permutation 1"], ["permutation 1", "permutation 0"]),
        strict=True,
    ):
        assert [name for _, name in percents(one)] == names
        expected = dict((name, percent) for percent, name in percents(one))["permutation 0"] / 100
        for part in ("train", "test"):
            (examples,) = parts([one], part)
            pairs = [(old, new) for old, new in labels_by_class(examples) if old in moved]
            assert set(pairs) == {(old, old) for old in moved} | {
                (old, relabeled[old]) for old in moved
            }
            assert abs(np.mean([old == new for old, new in pairs]) - expected) < 0.05


def test_mixtures_dominate_in_blocks_take_all_others_in_turn_and_are_all_unlike() -> None:
    settings = PartitionSettings(kind="mixture")

    slices = partition(arrows(320, 160), 16, settings, seeded())

    assert [one.group for one in slices] == [peer // 4 for peer in range(16)]
    for group in range(4):
        others = {percents(one)[1][1] for one in slices if one.group == group}
        assert others == {f"rotated {90 * other}°" for other in range(4) if other != group}
    shares = [percents(one)[0][0] for one in slices]
    assert len(set(shares)) == 16
    assert 55 <= min(shares) < 60 and 85 < max(shares) <= 90


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    num_examples=st.integers(40, 200),
    seed=st.integers(0, 2**32),
)
def test_an_unbounded_mixture_of_rotations_wastes_less_than_an_example_per_peer(
    sizes: list[int], num_examples: int, seed: int
) -> None:
    settings = PartitionSettings(kind="mixture", groups=len(sizes), group_sizes=tuple(sizes))

    slices = partition(dataset_of(even(num_examples), 10, None), sum(sizes), settings, seeded(seed))

    assert {len(own) for own in parts(slices, "train")} == {num_examples // sum(sizes)}
