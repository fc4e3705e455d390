"""Partitions: who gets which examples, for every kind; each at most once, within bounds."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers_partition import (
    GROUPED,
    all_parts,
    dataset_of,
    even,
    ids,
    parts,
    seeded,
)
from hypothesis import given
from hypothesis import strategies as st

from peer.data import Dataset
from protocol.errors import ConfigError
from sim.partition import PartitionSettings, partition

WHOLE = [*GROUPED, "continuum", "dirichlet", "pathological", "iid"]
KINDS = [*WHOLE, "mixture"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dataset, int, PartitionSettings, int]:
    num_classes = draw(st.integers(1, 8))
    labels = st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=120)
    dataset = dataset_of(
        draw(labels), num_classes, draw(st.none() | st.one_of(labels, st.just([])))
    )
    kind = draw(st.sampled_from(KINDS))
    groups = draw(st.integers(2 if kind == "mixture" else 1, 5))
    num_peers = draw(st.integers(1, 12))
    sizes: list[int] = []
    if kind in (*GROUPED, "mixture") and draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 5), min_size=groups, max_size=groups))
        num_peers = sum(sizes)
    most = draw(st.integers(0, 20))
    width = draw(st.integers(0, 4))
    settings = PartitionSettings(
        kind=kind,  # type: ignore[arg-type]
        groups=groups,
        group_sizes=tuple(sizes),
        drifting=draw(st.integers(0, 6)) if kind in GROUPED and groups > 1 else 0,
        base=draw(st.sampled_from(GROUPED)),
        labels_per_group=width,
        overlap=draw(st.integers(0, max(0, width - 1))),
        alpha=draw(st.floats(1e-3, 100)),
        shards_per_peer=draw(st.integers(1, 4)),
        min_examples=draw(st.integers(0, most or 3)),
        max_examples=most,
        test_examples=draw(st.integers(0, 10)),
    )
    return dataset, num_peers, settings, draw(st.integers(0, 2**32))


# Every kind


@given(cases())
def test_every_example_is_used_at_most_once_within_the_bounds_or_the_setting_is_named(
    case: tuple[Dataset, int, PartitionSettings, int],
) -> None:
    dataset, num_peers, settings, seed = case
    try:
        slices = partition(dataset, num_peers, settings, seeded(seed))
    except ConfigError as error:
        assert any(text in str(error) for text in ("partition.", "have fewer peers"))
        return

    assert len(slices) == num_peers
    train = all_parts(slices, "train")
    assert len(ids(train)) == len(set(ids(train)))
    for own in train:
        assert len(own) >= max(1, settings.min_examples)
        assert len(own) <= (settings.max_examples or len(dataset.train))
    if dataset.test is None:
        assert all(one.dataset.test is None for one in slices)
    else:
        test = all_parts(slices, "test")
        assert len(ids(test)) == len(set(ids(test)))
        assert all(len(own) <= (settings.test_examples or len(dataset.test)) for own in test)


@given(cases())
def test_the_same_seed_gives_the_same_slices(
    case: tuple[Dataset, int, PartitionSettings, int],
) -> None:
    dataset, num_peers, settings, seed = case
    try:
        one, other = (partition(dataset, num_peers, settings, seeded(seed)) for _ in range(2))
    except ConfigError:
        return
    for left, right in zip(one, other, strict=True):
        assert (left.group, left.description) == (right.group, right.description)
        assert left.later_group == right.later_group
    for part in ("train", "test"):
        if dataset.test is None and part == "test":
            continue
        for first, second in zip(all_parts(one, part), all_parts(other, part), strict=True):
            assert np.array_equal(first.inputs, second.inputs)
            assert np.array_equal(first.labels, second.labels)


@given(cases())
def test_whoever_lowers_what_an_error_says_to_what_it_says_gets_there(
    case: tuple[Dataset, int, PartitionSettings, int],
) -> None:
    dataset, num_peers, settings, seed = case
    for _ in range(2 * settings.groups + 3):  # groups are checked one after the other
        try:
            partition(dataset, num_peers, settings, seeded(seed))
        except ConfigError as error:
            advice = re.search(r"partition\.(\w+) = (\d+): .*lower it to at most (\d+)", str(error))
            if advice is None or advice[1] == "groups":  # peers and labels limit these, each apart
                return
            name, refused, most = advice[1], int(advice[2]), int(advice[3])
            assert getattr(settings, name) == refused > most
            values = {"min_examples": min(settings.min_examples, most), name: most}
            settings = msgspec.structs.replace(settings, **values)
        else:
            return
    raise AssertionError(f"still refused: {settings}")


@pytest.mark.parametrize("kind", WHOLE)
@given(
    num_peers=st.integers(4, 15),
    num_examples=st.integers(150, 300),
    num_test=st.integers(0, 100),
    seed=st.integers(0, 2**32),
)
def test_without_bounds_every_example_is_used_exactly_once(
    kind: str, num_peers: int, num_examples: int, num_test: int, seed: int
) -> None:
    dataset = dataset_of(even(num_examples), 10, even(num_test))
    settings = PartitionSettings(kind=kind, alpha=5.0)  # type: ignore[arg-type]

    slices = partition(dataset, num_peers, settings, seeded(seed))

    assert ids(parts(slices, "train")) == list(range(num_examples))
    assert ids(parts(slices, "test")) == list(range(num_test))


@pytest.mark.parametrize(
    ("kind", "drifting"), [*((kind, 0) for kind in KINDS), *((kind, 3) for kind in GROUPED)]
)
def test_more_test_examples_change_nothing_else(kind: str, drifting: int) -> None:
    dataset = dataset_of(even(200), 10, even(80))
    few, many = (
        partition(
            dataset,
            8,
            PartitionSettings(kind=kind, drifting=drifting, test_examples=count),  # type: ignore[arg-type]
            seeded(),
        )
        for count in (2, 0)
    )
    for left, right in zip(few, many, strict=True):
        assert (left.description, left.later_group) == (right.description, right.later_group)
    train = all_parts(few, "train"), all_parts(many, "train")
    for first, second in zip(*train, strict=True):
        assert np.array_equal(first.inputs, second.inputs)
        assert np.array_equal(first.labels, second.labels)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize(("num_peers", "groups"), [(8, 4), (7, 3), (5, 5), (3, 1)])
def test_groups_are_contiguous_blocks_of_peers(kind: str, num_peers: int, groups: int) -> None:
    settings = PartitionSettings(kind=kind, groups=groups)  # type: ignore[arg-type]

    slices = partition(dataset_of(even(100), 10, None), num_peers, settings, seeded())

    assert [one.group for one in slices] == [
        peer * groups // num_peers for peer in range(num_peers)
    ]


def test_sizes_are_drawn_between_the_bounds_and_reach_both() -> None:
    settings = PartitionSettings(kind="iid", min_examples=3, max_examples=6)

    slices = partition(dataset_of(even(600), 10, None), 60, settings, seeded())

    assert {len(own) for own in parts(slices, "train")} == {3, 4, 5, 6}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dirichlet"])
def test_without_a_least_size_all_peers_get_the_greatest(kind: str) -> None:
    settings = PartitionSettings(kind=kind, max_examples=7)  # type: ignore[arg-type]

    slices = partition(dataset_of(even(100), 10, None), 8, settings, seeded())

    assert [len(own) for own in parts(slices, "train")] == [7] * 8


def test_equal_shares_differ_by_at_most_one() -> None:
    slices = partition(
        dataset_of(even(103), 10, even(31)), 9, PartitionSettings(kind="permuted"), seeded()
    )

    for part in ("train", "test"):
        sizes = [len(own) for own in parts(slices, part)]
        assert max(sizes) - min(sizes) <= 1


def test_a_class_with_one_example_goes_to_one_peer() -> None:
    dataset = dataset_of([0] * 40 + [1], 2, None)
    for kind in ("iid", "dirichlet", "pathological", "permuted", "rotated", "continuum"):
        settings = PartitionSettings(kind=kind, groups=2)
        slices = partition(dataset, 4, settings, seeded())
        assert 40 in ids(parts(slices, "train"))


def test_a_test_part_smaller_than_the_number_of_peers_leaves_some_without() -> None:
    slices = partition(dataset_of(even(80), 10, [3]), 8, PartitionSettings(kind="iid"), seeded())

    assert sorted(len(own) for own in parts(slices, "test")) == [0] * 7 + [1]


@pytest.mark.parametrize("kind", WHOLE)
def test_one_peer_alone_gets_everything(kind: str) -> None:
    settings = PartitionSettings(kind=kind, groups=1)  # type: ignore[arg-type]

    (only,) = partition(dataset_of(even(20), 10, even(5)), 1, settings, seeded())

    assert len(only.dataset.train) == 20
    assert only.dataset.test is not None and len(only.dataset.test) == 5
    assert only.dataset.name == "mine, peer 0"


# Settings that can't be met


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"groups": 0}, "partition.groups = 0: it must be 1 or more"),
        ({"max_examples": -1}, "partition.max_examples = -1"),
        ({"alpha": 0.0}, "partition.alpha = 0.0: it must be above 0"),
        ({"alpha": float("nan")}, "partition.alpha = nan"),
        ({"min_examples": 5, "max_examples": 4}, "partition.min_examples = 5: lower it"),
        ({"overlap": 2}, "partition.overlap = 2: it must be below labels_per_group = 0"),
        ({"label_groups": ((1,),)}, "partition.groups = 4: set it to 1"),
        ({"shards_per_peer": 0}, "partition.shards_per_peer = 0: it must be 1 or more"),
        ({"drifting": -1}, "partition.drifting = -1: it must be 0 or more"),
        ({"kind": "mixture", "groups": 1}, "partition.groups = 1: with one alone nothing can be"),
        ({"groups": 1, "drifting": 2}, "partition.groups = 1: with one alone peers can't change"),
        ({"kind": "mixture", "drifting": 2}, "partition.drifting = 2: mixture has no use for it"),
        ({"kind": "iid", "drifting": 2}, "set kind to label_groups, permuted or rotated"),
        ({"kind": "dirichlet", "group_sizes": (1, 1, 1, 1)}, "dirichlet has no use for it"),
        ({"group_sizes": (1, 2, 3)}, "partition.groups = 4: set it to 3, as many as group_sizes"),
        ({"group_sizes": (1, 0, 3, 4)}, "partition.group_sizes = [1, 0, 3, 4]: a group has at"),
        (
            {"groups": 1, "label_groups": ((1,),), "labels_per_group": 2},
            "partition.labels_per_group = 2: leave it out",
        ),
    ],
)
def test_settings_that_no_data_could_meet_are_refused_at_once(
    values: dict[str, object], fault: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PartitionSettings(**values)  # type: ignore[arg-type]
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("values", "num_peers", "fault"),
    [
        ({}, 0, "0 peers: there must be at least one"),
        ({}, 3, "partition.groups = 4: lower it to at most 3, the number of peers"),
        ({"groups": 11}, 11, "partition.groups = 11: lower it to at most 10, the number of label"),
        ({"labels_per_group": 3}, 4, "4 groups with overlap = 0 need 12 labels"),
        ({"labels_per_group": 11, "overlap": 10}, 4, "need 11 labels, and the data have 10"),
        ({"max_examples": 40}, 8, "group 0 (labels 0-2) has 60 training examples for 2 peers"),
        ({"max_examples": 40}, 8, "lower it to at most 30"),
        ({"kind": "iid", "max_examples": 40, "min_examples": 1}, 8, "lower it to at most 25"),
        ({"kind": "iid", "min_examples": 26}, 8, "partition.min_examples = 26: the data set has"),
        ({"kind": "iid"}, 201, "200 training examples for 201 peers: have fewer peers"),
        ({"kind": "dirichlet"}, 201, "mine has 200 training examples for 201 peers: have fewer"),
        ({"kind": "dirichlet", "min_examples": 30}, 8, "lower it to at most 25"),
        (
            {"group_sizes": (1, 2, 5, 8)},
            8,
            "[1, 2, 5, 8]: they add up to 16, and there are 8 peers",
        ),
        ({"drifting": 9}, 8, "partition.drifting = 9: lower it to at most 8, the number of peers"),
        ({"kind": "rotated", "drifting": 2, "max_examples": 25}, 8, "for 8 peers and the later"),
        ({"kind": "rotated", "drifting": 2, "max_examples": 25}, 8, "lower it to at most 20"),
        (
            {"kind": "mixture", "max_examples": 26},
            8,
            "for 8 peers that mix: lower it to at most 25",
        ),
        ({"kind": "mixture"}, 201, "200 training examples for 201 peers that mix: have fewer"),
        ({"kind": "mixture", "min_examples": 26}, 8, "partition.min_examples = 26: mine has 200"),
        ({"kind": "pathological"}, 201, "200 training examples for 201 peers: have fewer peers"),
        ({"kind": "pathological", "shards_per_peer": 26}, 8, "shards_per_peer = 26: mine has 200"),
        ({"kind": "pathological", "shards_per_peer": 26}, 8, "lower it to at most 25"),
        ({"kind": "pathological", "max_examples": 26}, 8, "lower it to at most 24"),
        ({"kind": "pathological", "min_examples": 25}, 8, "lower it to at most 24"),
        ({"groups": 2, "label_groups": ((1,), (11,))}, 2, "no training example has label 11"),
        ({"groups": 2, "label_groups": ((1,), ())}, 2, "group 1 must name at least one label"),
        ({"groups": 2, "label_groups": ((1,), (2, 2))}, 2, "group 1 must name at least one"),
        ({"groups": 2, "label_groups": ((1, 2), (2, 1))}, 2, "groups 0 and 1 are alike"),
    ],
)
def test_settings_that_this_data_cannot_meet_are_refused_with_what_would_work(
    values: dict[str, object], num_peers: int, fault: str
) -> None:
    settings = PartitionSettings(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        partition(dataset_of(even(200), 10, None), num_peers, settings, seeded())
    assert fault in str(caught.value)


def test_settings_are_read_from_toml_and_an_unknown_one_is_refused() -> None:
    table = tomllib.loads("groups = 2\nlabel_groups = [[0, 1], [2]]\nmax_examples = 50")

    settings = msgspec.convert(table, PartitionSettings)

    assert settings.label_groups == ((0, 1), (2,))
    with pytest.raises(msgspec.ValidationError, match="grops"):
        msgspec.convert({"grops": 3}, PartitionSettings)


@pytest.mark.parametrize("name", PartitionSettings.__struct_fields__)
def test_every_setting_is_followed_by_what_it_means(name: str) -> None:
    source = Path(inspect.getfile(PartitionSettings)).read_text(encoding="utf-8")
    _, _, after = source.partition(f"\n    {name}: ")
    assert after.split("\n", 1)[1].lstrip().startswith('"""')
