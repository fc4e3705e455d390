"""Average linkage, cut where the next merge would be much farther than the last: no K, no λ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

from peer.clustering.interface import (
    Clusters,
    Points,
    Sizes,
    check_points,
    in_order_of_appearance,
)
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageLinkage:
    """The two clusters nearest on average are merged, until the largest gap between two merges.

    Every peer counts once, whatever its size: distances are averaged, not models.
    """

    least_gap: float = 0.1
    """The least gap that separates clusters, as a part of the last merge's distance: below it all
    are one cluster. In one cloud of many dimensions all merges are about equally far."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        if not 0 <= self.least_gap < 1:
            raise ConfigError(f"least_gap = {self.least_gap}: it must be from 0 to below 1")

    def __call__(self, points: Points, sizes: Sizes, rng: np.random.Generator) -> Clusters:
        """Cluster; see `Clustering`. Nothing is drawn."""
        check_points(points, sizes)
        distances = pdist(points)
        if not distances.any():
            note = "one peer" if len(points) == 1 else "all models are equal"
            return Clusters(labels=np.zeros(len(points), np.intp), note=note)
        if len(points) == 2:
            note = "two models that differ: nothing to compare their distance with, so left alone"
            return Clusters(labels=np.arange(2), note=note)
        tree = linkage(distances, "average")
        heights = tree[:, 2]
        gaps = np.diff(heights) / heights[-1]
        cut = int(gaps.argmax())
        if gaps[cut] < self.least_gap:
            note = f"one cluster: no gap is over {gaps[cut]:.0%} of the last merge's distance"
            return Clusters(labels=np.zeros(len(points), np.intp), note=note)
        labels = in_order_of_appearance(fcluster(tree, heights[cut], "distance").tolist())
        note = (
            f"{labels.max() + 1} clusters: merges up to {heights[cut]:.3g} apart, the next "
            f"{heights[cut + 1]:.3g}"
        )
        return Clusters(labels=labels, note=note)
