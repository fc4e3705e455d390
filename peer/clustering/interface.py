"""What a clustering takes and gives, alike for every algorithm of this package."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from protocol.errors import ConfigError, DataError

Points = npt.NDArray[np.float64]
"""One model a row, in the order of peer ids. Shape (num_peers, dim), finite."""

Sizes = npt.NDArray[np.float64]
"""The number of examples each model was trained on, above 0. Shape (num_peers,)."""

Labels = npt.NDArray[np.intp]
"""The cluster of each peer. Shape (num_peers,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """Which peers belong together.

    Attributes:
        labels: From 0, numbered in the order in which clusters appear.
        note: In plain words: what was chosen, or what is odd about it.
    """

    labels: Labels
    note: str

    @property
    def number(self) -> int:
        """The number of clusters."""
        return int(self.labels.max()) + 1


class Clustering(Protocol):
    """An algorithm with its settings: the same arguments give the same labels, on every peer."""

    def __call__(self, points: Points, sizes: Sizes, rng: np.random.Generator) -> Clusters:
        """Cluster the models.

        Args:
            points: Shape (num_peers, dim).
            sizes: Shape (num_peers,).
            rng: Where random starts come from; peers that must agree seed it alike.

        Raises:
            DataError: The points or sizes aren't finite, or there are none.
            ConfigError: A setting doesn't fit them.
        """


def in_order_of_appearance(labels: Iterable[int]) -> Labels:
    """Number clusters by who is their first member, so that equal partitions are equal arrays."""
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.intp)


def check_points(points: Points, sizes: Sizes) -> None:
    """Check what every clustering is given.

    Raises:
        DataError: It can't be clustered; the row at fault is named.
    """
    if points.ndim != 2 or points.dtype != np.float64 or not len(points):
        raise DataError(
            f"models to cluster are {points.dtype} of shape {points.shape}: there must be at least "
            "one, as f64 of shape (num_peers, dim)"
        )
    if sizes.shape != (len(points),):
        raise DataError(f"{len(points)} models came with sizes of shape {sizes.shape}")
    wrong = np.flatnonzero(~(np.isfinite(points).all(axis=1) & np.isfinite(sizes) & (sizes > 0)))
    if wrong.size:
        raise DataError(
            f"model {wrong[0]} can't be clustered: its parameters and its number of examples "
            f"({sizes[wrong[0]]:g}) must be finite, and the number above 0"
        )


def check_number(points: Points, num_clusters: int) -> None:
    """Check that so many clusters can be had.

    Raises:
        ConfigError: There are fewer peers, or fewer models that differ.
    """
    distinct = num_distinct(points)
    if not 1 <= num_clusters <= distinct:
        differ = "" if distinct == len(points) else f" ({distinct} that differ)"
        raise ConfigError(
            f"num_clusters = {num_clusters}: with {len(points)} models{differ} it must be from 1 "
            f"to {distinct}"
        )


def num_distinct(points: Points) -> int:
    """Return how many models differ in any bit that counts."""
    return len(np.unique(points, axis=0)) if points.shape[1] else 1


def on_one_thread() -> AbstractContextManager[object]:
    """Return a context in which the sums of BLAS and OpenMP don't depend on the machine's cores.

    Peers compare digests of their labels. What can still differ are the kernels that BLAS
    picks by processor: last bits, which count only where a tie decides.
    """
    limits: AbstractContextManager[object] = threadpool_limits(limits=1)
    return limits
