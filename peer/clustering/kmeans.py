"""K-means and K-means++, by scikit-learn."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from sklearn.cluster import KMeans as Lloyd
from sklearn.exceptions import ConvergenceWarning

from peer.clustering.interface import (
    Clusters,
    Points,
    Sizes,
    check_number,
    check_points,
    in_order_of_appearance,
    on_one_thread,
)
from protocol.errors import ConfigError

Start = Literal["k-means++", "random"]
"""The first centers: models drawn far from each other, or any."""

_MOST_ITERATIONS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class KMeans:
    """Clusters whose squared distances to their means, weighted by sizes, are least."""

    num_clusters: int
    """K, at most the number of models that differ."""

    start: Start = "k-means++"
    """Random starts often leave two true clusters to one center (ODCL-KM)."""

    restarts: int = 10
    """The best of so many starts is kept."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        check_restarts(self.restarts)

    def __call__(self, points: Points, sizes: Sizes, rng: np.random.Generator) -> Clusters:
        """Cluster; see `Clustering`."""
        check_points(points, sizes)
        check_number(points, self.num_clusters)
        lloyd = Lloyd(
            self.num_clusters,
            init=self.start,
            n_init=self.restarts,
            max_iter=_MOST_ITERATIONS,
            tol=0.0,
            random_state=int(rng.integers(2**31)),
        )
        with on_one_thread(), warnings.catch_warnings():
            # Of models that differ by rounding only; the note says it.
            warnings.simplefilter("ignore", ConvergenceWarning)
            lloyd.fit(points, sample_weight=sizes)
        labels = in_order_of_appearance(lloyd.labels_.tolist())
        return Clusters(labels=labels, note=found_note(labels.max() + 1, self.num_clusters))


def check_restarts(restarts: int) -> None:
    """Check a number of starts.

    Raises:
        ConfigError: It is below 1.
    """
    if restarts < 1:
        raise ConfigError(f"restarts = {restarts}: there must be at least one start")


def found_note(found: int, asked: int) -> str:
    """Return a note on the number found."""
    if found == asked:
        return f"{asked} clusters, as asked"
    return f"{found} clusters, not {asked}: the others have no member"
