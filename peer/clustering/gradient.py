"""Gradient clustering: centers follow the gradient of their cluster's cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.cluster import kmeans_plusplus

from peer.clustering.interface import (
    Clusters,
    Points,
    Sizes,
    check_number,
    check_points,
    in_order_of_appearance,
    on_one_thread,
)
from peer.clustering.kmeans import Start, check_restarts, found_note
from protocol.errors import ConfigError

_MOST_STEPS = 5000
_STILL = 1e-10  # a move so small, in units of the first distances, is the end


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientClustering:
    """Each model joins its nearest center, each center takes one step down its cluster's cost.

    The cost is ½ Σ p_i ‖x_k - a_i‖² with p_i the sizes over their sum, the squared distance of
    Armacki et al., "Gradient Based Clustering" (odcl.txt's [44]): fixed points are K-means'.
    """

    num_clusters: int
    """K, at most the number of models that differ."""

    start: Start = "k-means++"
    """Where the centers start."""

    restarts: int = 10
    """The start that ends at the least cost is kept."""

    step: float = 1.0
    """At most 1 / the cost's Lipschitz constant, which is 1 or less as the p_i sum to 1."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        check_restarts(self.restarts)
        if not 0 < self.step <= 1:
            raise ConfigError(f"step = {self.step}: it must be above 0, at most 1")

    def __call__(self, points: Points, sizes: Sizes, rng: np.random.Generator) -> Clusters:
        """Cluster; see `Clustering`."""
        check_points(points, sizes)
        check_number(points, self.num_clusters)
        shares = sizes / sizes.sum()
        with on_one_thread():
            ends = [
                self._descend(points, shares, self._start(points, sizes, rng))
                for _ in range(self.restarts)
            ]
        labels = in_order_of_appearance(min(ends, key=lambda end: end[0])[1])
        return Clusters(labels=labels, note=found_note(labels.max() + 1, self.num_clusters))

    def _start(self, points: Points, sizes: Sizes, rng: np.random.Generator) -> Points:
        if self.start == "random":
            distinct = np.unique(points, axis=0)
            return distinct[rng.choice(len(distinct), self.num_clusters, replace=False)]
        seed = int(rng.integers(2**31))
        centers: Points = kmeans_plusplus(
            points, self.num_clusters, sample_weight=sizes, random_state=seed
        )[0]
        return centers

    def _descend(self, points: Points, shares: Sizes, centers: Points) -> tuple[float, list[int]]:
        """Return the cost at the end, and the nearest center of each model."""
        still = _STILL * cdist(points, centers).max()
        for _ in range(_MOST_STEPS):
            labels = cdist(points, centers).argmin(axis=1)
            joined = (labels == np.arange(len(centers))[:, np.newaxis]) * shares
            slope = joined.sum(axis=1)[:, np.newaxis] * centers - joined @ points
            centers = centers - self.step * slope
            if np.abs(slope).max() <= still:
                break
        distances = cdist(points, centers)
        cost = shares @ np.square(distances.min(axis=1)) / 2
        return float(cost), distances.argmin(axis=1).tolist()
