"""How many clusters there are, for the clusterings that have to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import silhouette_score

from peer.clustering.interface import (
    Clustering,
    Clusters,
    Points,
    Sizes,
    check_points,
    num_distinct,
    on_one_thread,
)
from protocol.errors import ConfigError

OfNumber = Callable[[int], Clustering]
"""From K to a clustering into K, as in `lambda number: KMeans(num_clusters=number)`."""

_MOST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BySilhouette:
    """The K whose clusters have the largest mean silhouette; one where none has a large one.

    A silhouette is (b - a) / max(a, b), with a the mean distance to one's own cluster and b that
    to the next one. One cluster has none, so it is what remains.
    """

    make: OfNumber
    """What clusters."""

    most: int | None = None
    """The largest K tried; None tries up to half the number of peers, but 100 at most."""

    least: float = 0.25
    """Up to this mean silhouette all are one cluster: the bound below which Kaufman and Rousseeuw
    (1990) see no structure."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        _check_most(self.most)

    def __call__(self, points: Points, sizes: Sizes, rng: np.random.Generator) -> Clusters:
        """Cluster; see `Clustering`."""
        check_points(points, sizes)
        distances = squareform(pdist(points))
        best, best_score = None, self.least
        for number in _numbers(points, self.most):
            clusters = self.make(number)(points, sizes, rng)
            if 1 < clusters.number < len(points):
                score = silhouette_score(distances, clusters.labels, metric="precomputed")
                if score > best_score:
                    best, best_score = clusters, float(score)
        if best is None:
            return _one(points, f"one cluster: no other number has a silhouette over {self.least}")
        return Clusters(
            labels=best.labels, note=f"{best.number} clusters, by a silhouette of {best_score:.2f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByGap:
    """The least K whose gap is within an error of the largest.

    The gap statistic of Tibshirani, Walther and Hastie (2001): Gap(K) is the mean over references
    of log W*_K, less log W_K, with W_K the sum of squared distances to the clusters' means. The
    references are even in the box along the principal axes. It can find one cluster. Their rule,
    the first K that the next isn't better than, finds one where ten are far apart; this is that
    of Dudoit and Fridlyand (2002).
    """

    make: OfNumber
    """What clusters, the references too."""

    most: int | None = None
    """The largest K tried; None tries up to half the number of peers, but 100 at most."""

    references: int = 10
    """How many sets of even points there are: the error falls by their root."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        _check_most(self.most)
        if self.references < 2:
            raise ConfigError(f"references = {self.references}: an error takes at least 2")

    def __call__(self, points: Points, sizes: Sizes, rng: np.random.Generator) -> Clusters:
        """Cluster; see `Clustering`."""
        check_points(points, sizes)
        if num_distinct(points) == 1:
            return _one(points, "one cluster: all models are equal")
        with on_one_thread():
            references = list(self._even(points, rng))
        found = [_one(points, "")]
        gaps, errors = [], []
        for number in (1, *_numbers(points, self.most)):
            if number > 1:
                found.append(self.make(number)(points, sizes, rng))
            logs = [self._log_within(even, number, sizes, rng) for even in references]
            within = _within(points, found[-1])
            gaps.append(float(np.mean(logs)) - np.log(within) if within else np.inf)
            errors.append(float(np.std(logs)) * np.sqrt(1 + 1 / self.references))
        widest = int(np.argmax(gaps))
        least = gaps[widest] - errors[widest]
        best = found[next(place for place, gap in enumerate(gaps) if gap >= least)]
        return Clusters(labels=best.labels, note=f"{best.number} clusters, by the gap statistic")

    def _log_within(
        self, even: Points, number: int, sizes: Sizes, rng: np.random.Generator
    ) -> float:
        clusters = _one(even, "") if number == 1 else self.make(number)(even, sizes, rng)
        return float(np.log(_within(even, clusters)))

    def _even(self, points: Points, rng: np.random.Generator) -> Iterator[Points]:
        middle = points.mean(axis=0)
        axes = np.linalg.svd(points - middle, full_matrices=False)[2]
        along = (points - middle) @ axes.T
        for _ in range(self.references):
            yield rng.uniform(along.min(axis=0), along.max(axis=0), along.shape) @ axes + middle


def _numbers(points: Points, most: int | None) -> range:
    """Return the K from 2 on that leave neither a cluster empty nor each model alone."""
    largest = min(_MOST, max(2, len(points) // 2)) if most is None else most
    return range(2, min(largest, num_distinct(points), len(points) - 1) + 1)


def _check_most(most: int | None) -> None:
    if most is not None and most < 1:
        raise ConfigError(f"most = {most}: there is at least one cluster")


def _within(points: Points, clusters: Clusters) -> float:
    total = 0.0
    for label in range(clusters.number):
        members: npt.NDArray[np.float64] = points[clusters.labels == label]
        total += float(np.square(members - members.mean(axis=0)).sum())
    return total


def _one(points: Points, note: str) -> Clusters:
    return Clusters(labels=np.zeros(len(points), np.intp), note=note)
