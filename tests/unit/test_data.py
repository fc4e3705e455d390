"""Examples, their split, and files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.data import Dataset, Examples, split
from peer.files import replacing
from protocol.errors import DataError


def numbered(num_examples: int, first: int = 0) -> Examples:
    """Return examples that can be told apart: input i holds first + i."""
    ids = np.arange(first, first + num_examples, dtype=np.float32)
    return Examples(ids[:, np.newaxis], np.zeros(num_examples, dtype=np.int64))


def slice_of(num_train: int, num_test: int | None) -> Dataset:
    test = None if num_test is None else numbered(num_test, first=num_train)
    return Dataset(name="peer 3", train=numbered(num_train), test=test, num_classes=1)


@given(
    num_train=st.integers(1, 60),
    num_test=st.none() | st.integers(0, 20),
    holdout_fraction=st.floats(0, 0.99),
    seed=st.integers(0, 2**32),
)
def test_every_example_lands_in_exactly_one_part_and_something_is_left_to_train_on(
    num_train: int, num_test: int | None, holdout_fraction: float, seed: int
) -> None:
    parts = split(slice_of(num_train, num_test), holdout_fraction, np.random.default_rng(seed))

    ids = np.concatenate([parts.fit.inputs, parts.holdout.inputs, parts.test.inputs]).ravel()
    assert sorted(ids) == list(range(num_train + (num_test or 0)))
    assert len(parts.fit) >= 1
    assert len(parts.train) == len(parts.fit) + len(parts.holdout)
    if holdout_fraction > 0 and len(parts.train) > 1:
        assert len(parts.holdout) >= 1


@given(num_train=st.integers(1, 60), num_test=st.integers(0, 20))
def test_an_own_test_part_stays_the_test_part_and_never_trains(
    num_train: int, num_test: int
) -> None:
    dataset = slice_of(num_train, num_test)

    parts = split(dataset, 0.2, np.random.default_rng(0))

    assert parts.test is dataset.test
    assert parts.train.inputs.max() < num_train


def test_a_fifth_is_for_testing_and_a_fifth_of_the_rest_is_held_out() -> None:
    parts = split(slice_of(100, None), 0.2, np.random.default_rng(0))

    assert (len(parts.fit), len(parts.holdout), len(parts.test)) == (64, 16, 20)


def test_the_same_seed_splits_alike() -> None:
    one, other = (split(slice_of(40, None), 0.2, np.random.default_rng(5)) for _ in range(2))

    assert np.array_equal(one.fit.inputs, other.fit.inputs)
    assert np.array_equal(one.test.inputs, other.test.inputs)


def test_a_single_example_is_trained_on() -> None:
    parts = split(slice_of(1, None), 0.2, np.random.default_rng(0))

    assert (len(parts.fit), len(parts.holdout), len(parts.test)) == (1, 0, 0)


def test_an_empty_slice_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="peer 3: no training example"):
        split(slice_of(0, None), 0.2, np.random.default_rng(0))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_holdout_fraction_that_leaves_nothing_is_refused(fraction: float) -> None:
    with pytest.raises(DataError, match="holdout_fraction"):
        split(slice_of(10, None), fraction, np.random.default_rng(0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    inputs = np.ones((3, 2), dtype=np.float32)
    inputs[1, 1] = value
    with pytest.raises(DataError, match="not finite"):
        Examples(inputs, np.zeros(3, dtype=np.int64))


def test_inputs_and_labels_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="don't fit"):
        Examples(np.ones((3, 2), dtype=np.float32), np.zeros(2, dtype=np.int64))


def test_negative_labels_are_refused() -> None:
    with pytest.raises(DataError, match="negative"):
        Examples(np.ones((1, 2), dtype=np.float32), np.array([-1]))


def test_labels_beyond_the_classes_are_refused() -> None:
    examples = Examples(np.ones((2, 2), dtype=np.float32), np.array([0, 3]))
    with pytest.raises(DataError, match="a train label is 3, but with 3 classes"):
        Dataset(name="mine", train=examples, test=None, num_classes=3)


def test_a_test_part_of_another_shape_is_refused() -> None:
    one = Examples(np.ones((2, 2), dtype=np.float32), np.zeros(2, dtype=np.int64))
    other = Examples(np.ones((2, 3), dtype=np.float32), np.zeros(2, dtype=np.int64))
    with pytest.raises(DataError, match=r"test inputs have the shape \(3,\)"):
        Dataset(name="mine", train=one, test=other, num_classes=1)


OWNERS = np.array([1, 0, 1])


def owned(**changes: object) -> Dataset:
    """Return a data set of three train and two test examples of two owners, with changes."""
    fields: dict[str, object] = {
        "name": "plays",
        "train": numbered(3),
        "test": numbered(2),
        "num_classes": 1,
        "train_owners": OWNERS,
        "test_owners": OWNERS[:2],
        "owner_names": ("Ann", "Bob"),
        "owner_groups": (0, 4),
    }
    return Dataset(**(fields | changes))  # type: ignore[arg-type]


def test_examples_may_have_owners_and_owners_groups() -> None:
    assert owned().owner_names == ("Ann", "Bob")
    assert owned(owner_groups=()).owner_groups == ()
    assert owned(test=None, test_owners=None).test_owners is None
    assert owned(train_owners=None, test_owners=None, owner_names=(), owner_groups=()).test


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"train_owners": None}, "there are owner_names, but no train_owners: add them"),
        ({"test_owners": None}, "no test_owners: add them"),
        ({"owner_names": (), "owner_groups": ()}, "there are train_owners, but no owner_names"),
        ({"test": None}, "there are test_owners, but no owner_names or no test part"),
        ({"train_owners": OWNERS[:2]}, "train_owners are int64 of shape (2,): give one whole"),
        ({"test_owners": np.zeros(2)}, "test_owners are float64 of shape (2,)"),
        ({"train_owners": OWNERS + 1}, "go from 1 to 2, but there are 2 owner_names, from 0"),
        ({"train_owners": OWNERS - 1}, "train_owners go from -1 to 0"),
        ({"owner_groups": (0,)}, "2 owners have 1 groups"),
    ],
)
def test_owners_that_do_not_fit_the_examples_are_refused(
    changes: dict[str, object], fault: str
) -> None:
    with pytest.raises(DataError) as caught:
        owned(**changes)
    assert str(caught.value).startswith("plays: ")
    assert fault in str(caught.value)


def test_a_replaced_file_holds_the_new_content_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"old", b"new"):
        with replacing(path) as file:
            file.write(content)

    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_content_until_the_writer_is_done(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
