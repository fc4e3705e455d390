"""Partitions: who gets which examples, for every kind; each at most once, within bounds."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.data import Dataset, Examples
from peer.sources import load_source
from protocol.errors import ConfigError, DataError
from sim import deal
from sim.groups import describe_labels, rotate
from sim.partition import PartitionSettings, Slice, partition

KINDS = ["label_groups", "permuted", "rotated", "dirichlet", "iid"]


def dataset_of(labels: Sequence[int], num_classes: int, test: Sequence[int] | None) -> Dataset:
    """Return images that can be told apart even when turned: all pixels of image i are i."""

    def examples(labels: Sequence[int]) -> Examples:
        ids = np.arange(len(labels), dtype=np.float32)[:, None, None, None]
        return Examples(np.tile(ids, (1, 1, 3, 3)), np.asarray(labels, dtype=np.int64))

    return Dataset(
        name="mine",
        train=examples(labels),
        test=None if test is None else examples(test),
        num_classes=num_classes,
    )


def even(num_examples: int, num_classes: int = 10) -> list[int]:
    return [index % num_classes for index in range(num_examples)]


def parts(slices: Sequence[Slice], which: str) -> list[Examples]:
    return [getattr(one.dataset, which) for one in slices]


def ids(examples: Sequence[Examples]) -> list[int]:
    """Return which original examples these are, of all of them together."""
    # The middle pixel, which no rotation moves.
    return sorted(int(middle) for own in examples for middle in own.inputs[:, 0, 1, 1])


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dataset, int, PartitionSettings, int]:
    num_classes = draw(st.integers(1, 8))
    labels = st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=120)
    dataset = dataset_of(
        draw(labels), num_classes, draw(st.none() | st.one_of(labels, st.just([])))
    )
    most = draw(st.integers(0, 20))
    width = draw(st.integers(0, 4))
    settings = PartitionSettings(
        kind=draw(st.sampled_from(KINDS)),  # type: ignore[arg-type]
        groups=draw(st.integers(1, 5)),
        labels_per_group=width,
        overlap=draw(st.integers(0, max(0, width - 1))),
        alpha=draw(st.floats(1e-3, 100)),
        min_examples=draw(st.integers(0, most or 3)),
        max_examples=most,
        test_examples=draw(st.integers(0, 10)),
    )
    return dataset, draw(st.integers(1, 12)), settings, draw(st.integers(0, 2**32))


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
    train = parts(slices, "train")
    assert len(ids(train)) == len(set(ids(train)))
    for own in train:
        assert len(own) >= max(1, settings.min_examples)
        assert len(own) <= (settings.max_examples or len(dataset.train))
    if dataset.test is None:
        assert all(one.dataset.test is None for one in slices)
    else:
        test = parts(slices, "test")
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
        for part in ("train", "test"):
            first, second = getattr(left.dataset, part), getattr(right.dataset, part)
            if first is not None:
                assert np.array_equal(first.inputs, second.inputs)
                assert np.array_equal(first.labels, second.labels)


@pytest.mark.parametrize("kind", KINDS)
@given(
    num_peers=st.integers(4, 15),
    num_examples=st.integers(60, 300),
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


@pytest.mark.parametrize("kind", KINDS)
def test_more_test_examples_change_nothing_else(kind: str) -> None:
    dataset = dataset_of(even(200), 10, even(80))
    few, many = (
        partition(
            dataset,
            8,
            PartitionSettings(kind=kind, test_examples=count),  # type: ignore[arg-type]
            seeded(),
        )
        for count in (2, 0)
    )
    for left, right in zip(few, many, strict=True):
        assert np.array_equal(left.dataset.train.inputs, right.dataset.train.inputs)
        assert left.description == right.description


@pytest.mark.parametrize("kind", ["label_groups", "permuted", "rotated"])
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


def test_without_a_least_size_all_peers_get_the_greatest() -> None:
    settings = PartitionSettings(max_examples=7)

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
    for kind in ("iid", "dirichlet", "permuted", "rotated"):
        settings = PartitionSettings(kind=kind, groups=2)  # type: ignore[arg-type]
        slices = partition(dataset, 4, settings, seeded())
        assert 40 in ids(parts(slices, "train"))


def test_a_test_part_smaller_than_the_number_of_peers_leaves_some_without() -> None:
    slices = partition(dataset_of(even(80), 10, [3]), 8, PartitionSettings(kind="iid"), seeded())

    assert sorted(len(own) for own in parts(slices, "test")) == [0] * 7 + [1]


@pytest.mark.parametrize("kind", KINDS)
def test_one_peer_alone_gets_everything(kind: str) -> None:
    settings = PartitionSettings(kind=kind, groups=1)  # type: ignore[arg-type]

    (only,) = partition(dataset_of(even(20), 10, even(5)), 1, settings, seeded())

    assert len(only.dataset.train) == 20
    assert only.dataset.test is not None and len(only.dataset.test) == 5
    assert only.dataset.name == "mine, peer 0"


# Label groups


def labels_of(slices: Sequence[Slice], part: str = "train") -> list[list[int]]:
    return [np.unique(own.labels).tolist() for own in parts(slices, part)]


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
    dataset = dataset_of(even(240, num_classes), num_classes, even(120, num_classes))
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

    monkeypatch.setattr("sim.partition.draw_shares", counted)
    settings = PartitionSettings(kind="dirichlet", alpha=1e-6, min_examples=5)
    with pytest.raises(ConfigError, match=r"partition\.alpha = 1e-06: in 100 draws, some of 100"):
        partition(dataset_of(even(1000), 10, None), 100, settings, seeded())
    assert draws == 100


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
    source = Path(partition.__code__.co_filename).read_text(encoding="utf-8")
    _, _, after = source.partition(f"\n    {name}: ")
    assert after.split("\n", 1)[1].lstrip().startswith('"""')
