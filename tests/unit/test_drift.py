"""Drift: who changes its group, where to, and with which examples."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from helpers_partition import (
    GROUPED,
    all_parts,
    arrows,
    dataset_of,
    even,
    ids,
    labels_of,
    quarter_turns,
    seeded,
)
from hypothesis import given
from hypothesis import strategies as st

from sim.partition import PartitionSettings, partition


@given(
    kind=st.sampled_from(GROUPED),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    drifting=st.integers(1, 20),
    bounds=st.sampled_from([(0, 0), (2, 10), (0, 8)]),
    test_examples=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**32),
)
def test_drifting_peers_get_as_many_other_examples_of_another_group(
    kind: str,
    sizes: list[int],
    drifting: int,
    bounds: tuple[int, int],
    test_examples: int,
    seed: int,
) -> None:
    num_peers = sum(sizes)
    drifting = min(drifting, num_peers)
    settings = PartitionSettings(
        kind=kind,  # type: ignore[arg-type]
        groups=len(sizes),
        group_sizes=tuple(sizes),
        drifting=drifting,
        min_examples=bounds[0],
        max_examples=bounds[1],
        test_examples=test_examples,
    )

    slices = partition(dataset_of(even(3000), 10, even(1000)), num_peers, settings, seeded(seed))

    assert sum(one.later is not None for one in slices) == drifting
    for one in slices:
        assert (one.later is None) == (one.later_group is None)
        if one.later is None:
            continue
        assert one.later_group in set(range(len(sizes))) - {one.group}
        for part in ("train", "test"):
            before, after = getattr(one.dataset, part), getattr(one.later, part)
            assert len(before) == len(after) > 0
            assert not set(ids([before])) & set(ids([after]))
    for part in ("train", "test"):
        everything = ids(all_parts(slices, part))
        assert len(everything) == len(set(everything))


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    drifting=st.integers(1, 25),
    seed=st.integers(0, 2**32),
)
def test_drift_takes_from_all_groups_as_evenly_as_they_allow(
    sizes: list[int], drifting: int, seed: int
) -> None:
    num_peers = sum(sizes)
    settings = PartitionSettings(
        kind="rotated",
        groups=len(sizes),
        group_sizes=tuple(sizes),
        drifting=min(drifting, num_peers),
    )

    slices = partition(arrows(200, 100), num_peers, settings, seeded(seed))

    leaving = Counter(one.group for one in slices if one.later is not None)
    most = max(leaving.values())
    assert all(leaving[group] >= min(most - 1, size) for group, size in enumerate(sizes))


def test_a_whole_pass_of_drift_leaves_groups_as_large_as_they_were() -> None:
    settings = PartitionSettings(kind="rotated", drifting=4)

    for seed in range(10):
        slices = partition(arrows(200, 100), 8, settings, seeded(seed))
        assert sorted(one.later_group for one in slices if one.later_group is not None) == [
            0,
            1,
            2,
            3,
        ]


def test_who_drifts_and_how_far_depends_on_the_seed() -> None:
    settings = PartitionSettings(kind="rotated", drifting=4)
    drifters: set[tuple[int, ...]] = set()
    steps: set[int] = set()

    for seed in range(20):
        slices = partition(arrows(200, 100), 8, settings, seeded(seed))
        moves = {
            peer: (one.later_group - one.group) % 4
            for peer, one in enumerate(slices)
            if one.later_group is not None
        }
        drifters.add(tuple(moves))
        steps.update(moves.values())

    assert len(drifters) > 5
    assert steps == {1, 2, 3}


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_drifting_peer_has_the_one_angle_before_and_the_other_after(part: str) -> None:
    settings = PartitionSettings(kind="rotated", drifting=8)

    for one in partition(arrows(400, 200), 8, settings, seeded()):
        assert one.later is not None
        assert set(quarter_turns(getattr(one.dataset, part))) == {one.group}
        assert set(quarter_turns(getattr(one.later, part))) == {one.later_group}
        assert one.description == f"rotated {90 * one.group}°"
        assert one.later.name == f"{one.dataset.name}, later"


def test_a_drifting_peer_has_the_labels_of_its_later_group() -> None:
    settings = PartitionSettings(drifting=3)

    slices = partition(dataset_of(even(800), 10, even(400)), 8, settings, seeded())

    group_labels = labels_of(slices)[::2]
    for one in slices:
        if one.later is not None and one.later_group is not None:
            for own in (one.later.train, one.later.test):
                assert own is not None
                assert np.unique(own.labels).tolist() == group_labels[one.later_group]


def test_drift_changes_no_permutation_and_nobody_s_number_of_examples() -> None:
    dataset = dataset_of(even(800), 10, even(400))
    still, drifting = (
        partition(
            dataset,
            8,
            PartitionSettings(kind="permuted", drifting=count, min_examples=10, max_examples=40),
            seeded(),
        )
        for count in (0, 4)
    )

    for left, right in zip(still, drifting, strict=True):
        assert len(left.dataset.train) == len(right.dataset.train)
        tables = [
            {
                (int(image) % 10, int(label))
                for image, label in zip(
                    one.dataset.train.inputs[:, 0, 1, 1], one.dataset.train.labels, strict=True
                )
            }
            for one in (left, right)
        ]
        assert len(dict(tables[0] | tables[1])) == len(tables[0] | tables[1])
