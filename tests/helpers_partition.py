"""Data sets whose examples can be told apart, and what slices hold of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peer.data import Dataset, Examples
from sim.partition import Slice

GROUPED = ["label_groups", "permuted", "rotated"]
"""Kinds that take group sizes and drift."""


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


def all_parts(slices: Sequence[Slice], which: str) -> list[Examples]:
    """Return the parts of all peers, then what drifting peers have later."""
    later = [getattr(one.later, which) for one in slices if one.later is not None]
    return parts(slices, which) + later


def ids(examples: Sequence[Examples]) -> list[int]:
    """Return which original examples these are, of all of them together."""
    # The middle pixel, which no rotation moves.
    return sorted(int(middle) for own in examples for middle in own.inputs[:, 0, 1, 1])


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def labels_of(slices: Sequence[Slice], part: str = "train") -> list[list[int]]:
    return [np.unique(own.labels).tolist() for own in parts(slices, part)]


def arrows(num_train: int, num_test: int) -> Dataset:
    """Return images that tell their angle: image i is i in the middle, and 999 right of it."""

    def examples(num_examples: int) -> Examples:
        images = np.zeros((num_examples, 1, 3, 3), dtype=np.float32)
        images[:, 0, 1, 1] = np.arange(num_examples)
        images[:, 0, 1, 2] = 999
        return Examples(images, np.asarray(even(num_examples), dtype=np.int64))

    return Dataset(
        name="arrows", train=examples(num_train), test=examples(num_test), num_classes=10
    )


def quarter_turns(examples: Examples) -> list[int]:
    """Return how often each of these arrows has been turned counterclockwise."""
    around = examples.inputs[:, 0][:, [1, 0, 1, 2], [2, 1, 0, 1]]  # right, up, left, down
    return [int(turns) for turns in around.argmax(axis=1)]
