"""A peer's labelled examples: their type and their split into train, holdout and test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError

TEST_FRACTION = 0.2
HOLDOUT_FRACTION = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Labelled examples.

    Attributes:
        inputs: Shape (num_examples, *input_shape), f32.
        labels: Shape (num_examples,), i64, from 0 to num_classes - 1.

    Raises:
        DataError: The two don't fit each other, or an input is not finite.
    """

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.inputs.ndim < 2 or self.labels.shape != self.inputs.shape[:1]:
            raise DataError(
                f"inputs of shape {self.inputs.shape} and labels of shape {self.labels.shape} "
                "don't fit: the first must be (num_examples, ...), the second (num_examples,)"
            )
        # By the extremes, since a mask would take a quarter of the inputs' own memory.
        if self.inputs.size and not np.isfinite([self.inputs.min(), self.inputs.max()]).all():
            raise DataError("an input holds a number that is not finite: clean the data first")
        if self.labels.size and self.labels.min() < 0:
            raise DataError("a label is negative: labels count from 0")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: npt.NDArray[np.intp]) -> Examples:
        """Return a copy of the examples at these positions."""
        return Examples(self.inputs[indices], self.labels[indices])


@dataclass(frozen=True, slots=True, eq=False)
class StoredExamples(Examples):
    """Examples as they lie on the disk, such as bytes, of which only what is taken is converted.

    Attributes:
        convert: Turns some of the inputs and their labels into examples, or raises a DataError.
    """

    convert: Callable[[npt.NDArray[Any], npt.NDArray[np.int64]], Examples]

    def take(self, indices: npt.NDArray[np.intp]) -> Examples:
        """Return the examples at these positions, converted."""
        return self.convert(self.inputs[indices], self.labels[indices])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """A data set as it was published, or one peer's slice of it.

    Attributes:
        name: Its name.
        train: Examples to learn from.
        test: The data set's own test part, or None when it has none.
        num_classes: Number of classes in the whole data set.
        train_owners: Whose each example is, where they are somebody's, such as a speaking role's: a
            position in `owner_names`. Shape (num_examples,).
        test_owners: The same of the test part.
        owner_names: The owners' names; not all need have examples. Empty when nobody's.
        owner_groups: A number from 0 for each owner, alike for those that belong together, such as
            the roles of one play; empty when they don't.

    Raises:
        DataError: A label is num_classes or more, the two parts hold inputs of two shapes, or the
            owners don't fit the examples.
    """

    name: str
    train: Examples
    test: Examples | None
    num_classes: int
    train_owners: npt.NDArray[np.int64] | None = None
    test_owners: npt.NDArray[np.int64] | None = None
    owner_names: tuple[str, ...] = ()
    owner_groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for part, examples in (("train", self.train), ("test", self.test)):
            if examples is None:
                continue
            if len(examples) and examples.labels.max() >= self.num_classes:
                raise DataError(
                    f"{self.name}: a {part} label is {examples.labels.max()}, but with "
                    f"{self.num_classes} classes labels end at {self.num_classes - 1}: "
                    "correct the labels or num_classes"
                )
            if examples.inputs.shape[1:] != self.input_shape:
                raise DataError(
                    f"{self.name}: the test inputs have the shape {examples.inputs.shape[1:]}, "
                    f"the train inputs {self.input_shape}: prepare both parts alike"
                )
        self._check_owners("train", self.train, self.train_owners)
        self._check_owners("test", self.test, self.test_owners)
        if self.owner_groups and len(self.owner_groups) != len(self.owner_names):
            raise DataError(
                f"{self.name}: {len(self.owner_names)} owners have {len(self.owner_groups)} "
                "groups: give one for each owner, or none at all"
            )

    def _check_owners(
        self, part: str, examples: Examples | None, owners: npt.NDArray[np.int64] | None
    ) -> None:
        if examples is None or not self.owner_names:
            if owners is not None:
                raise DataError(
                    f"{self.name}: there are {part}_owners, but no owner_names or no {part} part: "
                    "leave them out"
                )
            return
        if owners is None:
            raise DataError(f"{self.name}: there are owner_names, but no {part}_owners: add them")
        if owners.shape != (len(examples),) or owners.dtype.kind not in "iu":
            raise DataError(
                f"{self.name}: {part}_owners are {owners.dtype} of shape {owners.shape}: give one "
                f"whole number for each of the {len(examples)} examples"
            )
        if len(owners) and not 0 <= owners.min() <= owners.max() < len(self.owner_names):
            raise DataError(
                f"{self.name}: {part}_owners go from {owners.min()} to {owners.max()}, but there "
                f"are {len(self.owner_names)} owner_names, from 0"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, such as (channels, height, width)."""
        return self.train.inputs.shape[1:]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """What one peer does with its slice.

    Attributes:
        fit: Examples that gradients are computed on.
        holdout: Local training examples kept for measuring models, never trained on; empty when
            there are too few.
        test: Examples that only the reports see; may be empty.
    """

    fit: Examples
    holdout: Examples
    test: Examples

    @property
    def train(self) -> Examples:
        """All local training examples, the holdout included: what local-only trains on."""
        return Examples(
            np.concatenate([self.fit.inputs, self.holdout.inputs]),
            np.concatenate([self.fit.labels, self.holdout.labels]),
        )


def split(dataset: Dataset, holdout_fraction: float, rng: np.random.Generator) -> Split:
    """Split a peer's slice: test first unless it has its own, then the holdout out of train.

    Every example lands in exactly one part. The parts are drawn at random, without regard to
    labels, so that a class with a single example works too.

    Args:
        dataset: The peer's slice; `TEST_FRACTION` of its train part becomes the test part when it
            has none of its own.
        holdout_fraction: Part of the training examples kept for measuring, from 0 to below 1; 0
            keeps none, anything above at least one example when there are two.
        rng: Decides who lands where.

    Raises:
        DataError: There is no training example, or the fraction is out of range.
    """
    if not 0 <= holdout_fraction < 1:
        raise DataError(
            f"holdout_fraction = {holdout_fraction}: it must be from 0 to below 1, so that "
            "something remains to train on"
        )
    if not len(dataset.train):
        raise DataError(
            f"{dataset.name}: no training example, so there is nothing to measure or to train on; "
            "give this peer data, or leave it out"
        )
    order = rng.permutation(len(dataset.train))
    num_test = 0 if dataset.test is not None else round(TEST_FRACTION * len(order))
    test, train = order[:num_test], order[num_test:]
    num_holdout = min(round(holdout_fraction * len(train)), len(train) - 1)
    if holdout_fraction > 0 and len(train) > 1:
        num_holdout = max(num_holdout, 1)
    return Split(
        fit=dataset.train.take(train[num_holdout:]),
        holdout=dataset.train.take(train[:num_holdout]),
        test=dataset.test if dataset.test is not None else dataset.train.take(test),
    )
