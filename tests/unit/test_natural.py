"""Peers by nature: a peer is one owner of a data set that knows whose its examples are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.data import Dataset, Examples
from protocol.errors import ConfigError
from sim.natural import partition_natural
from sim.partition import PartitionSettings, partition


def owned(train: list[int], test: list[int] | None = None, groups: tuple[int, ...] = ()) -> Dataset:
    """Return a data set in which owner i has so many examples; each example has its own number."""
    rng = np.random.default_rng(0)

    def part(sizes: list[int], first: int) -> tuple[Examples, np.ndarray]:
        ids = np.arange(first, first + sum(sizes), dtype=np.float32)[:, np.newaxis]
        owners = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
        return Examples(ids, np.zeros(len(ids), dtype=np.int64)), owners

    learned, train_owners = part(train, 0)
    kept, test_owners = part(test, sum(train)) if test is not None else (None, None)
    return Dataset(
        name="plays",
        train=learned,
        test=kept,
        num_classes=1,
        train_owners=train_owners,
        test_owners=test_owners,
        owner_names=tuple(f"role {owner}" for owner in range(len(train))),
        owner_groups=groups,
    )


def settings(**sizes: int) -> PartitionSettings:
    return PartitionSettings(kind="natural", **sizes)


def owners_of(dataset: Dataset, examples: Examples) -> set[int]:
    assert dataset.train_owners is not None
    owners = dataset.train_owners
    if dataset.test_owners is not None:
        owners = np.concatenate([owners, dataset.test_owners])
    return {int(owners[int(number)]) for number in examples.inputs.ravel()}


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=12),
    num_peers=st.integers(1, 12),
    least=st.integers(0, 4),
    spread=st.none() | st.integers(0, 4),
    most_tests=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_each_peer_is_another_owner_that_is_large_enough_or_the_number_of_owners_is_told(
    sizes: list[tuple[int, int]],
    num_peers: int,
    least: int,
    spread: int | None,
    most_tests: int,
    seed: int,
) -> None:
    train, test = ([size[part] for size in sizes] for part in (0, 1))
    dataset = owned(train, test)
    most = 0 if spread is None else max(least, 1) + spread
    wanted = settings(min_examples=least, max_examples=most, test_examples=most_tests)
    able = [owner for owner, (a, b) in enumerate(sizes) if a >= max(least, 1) and b]
    if len(able) < num_peers:
        with pytest.raises(ConfigError, match=f"only {len(able)} of {len(sizes)} owners"):
            partition_natural(dataset, num_peers, wanted, np.random.default_rng(seed))
        return

    slices = partition_natural(dataset, num_peers, wanted, np.random.default_rng(seed))

    assert len({each.description for each in slices}) == num_peers
    for each in slices:
        owner = int(each.description.removeprefix("role "))
        assert owner in able and each.group == 0
        own = each.dataset
        assert own.test is not None
        assert owners_of(dataset, own.train) == owners_of(dataset, own.test) == {owner}
        assert len(np.unique(own.train.inputs)) == len(own.train)
        assert len(own.train) == min(train[owner], most or train[owner])
        assert len(own.test) == min(test[owner], most_tests or test[owner])


def test_peers_of_one_group_are_side_by_side() -> None:
    dataset = owned([5] * 6, groups=(2, 0, 2, 1, 0, 2))

    slices = partition_natural(dataset, 6, settings(), np.random.default_rng(0))

    assert [each.group for each in slices] == [0, 0, 1, 2, 2, 2]
    assert [each.description for each in slices] == [
        f"role {owner}" for owner in (1, 4, 3, 0, 2, 5)
    ]
    assert [each.dataset.name for each in slices[:2]] == ["plays, peer 0", "plays, peer 1"]
    assert slices[0].dataset.test is None


def test_every_owner_is_as_likely_as_any_other_whatever_its_size() -> None:
    dataset = owned([1, 40, 2, 90])
    drawn = [
        partition_natural(dataset, 1, settings(), np.random.default_rng(seed))[0].description
        for seed in range(400)
    ]
    counts = [drawn.count(f"role {owner}") for owner in range(4)]
    assert min(counts) > 60  # 100 are expected, with a standard deviation of 9


def test_the_seed_decides_and_test_examples_change_nothing_else() -> None:
    dataset = owned([30] * 9, [10] * 9)

    def drawn(seed: int, **sizes: int) -> list[tuple[str, list[float]]]:
        slices = partition_natural(
            dataset, 4, settings(max_examples=8, **sizes), np.random.default_rng(seed)
        )
        return [(each.description, each.dataset.train.inputs.ravel().tolist()) for each in slices]

    assert drawn(1) == drawn(1) == drawn(1, test_examples=3)
    assert drawn(1) != drawn(2)


def test_data_that_nobody_owns_are_refused() -> None:
    examples = Examples(np.zeros((4, 2), np.float32), np.zeros(4, np.int64))
    dataset = Dataset(name="digits", train=examples, test=None, num_classes=1)
    with pytest.raises(ConfigError, match=r"partition\.kind = natural: nobody owns.* digits"):
        partition_natural(dataset, 1, settings(), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        (settings(), "2 peers: have fewer peers, or more data"),
        (settings(min_examples=9), r"partition\.min_examples = 9: .*lower it, or have fewer peers"),
    ],
)
def test_too_few_owners_are_told_with_what_to_do(wanted: PartitionSettings, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        partition_natural(owned([8, 0]), 2, wanted, np.random.default_rng(0))


def test_the_kind_natural_is_this_partition() -> None:
    dataset = owned([6, 4], [3, 2])
    one, other = (
        make(dataset, 2, settings(), np.random.default_rng(5))
        for make in (partition, partition_natural)
    )
    assert [each.description for each in one] == [each.description for each in other]
    for each, same in zip(one, other, strict=True):
        assert np.array_equal(each.dataset.train.inputs, same.dataset.train.inputs)
