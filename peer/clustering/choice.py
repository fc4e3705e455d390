"""The clusterings that settings can name."""

from __future__ import annotations

from typing import get_args

from peer.algorithm import ClusteringName
from peer.clustering.convex import ConvexClustering
from peer.clustering.gradient import GradientClustering
from peer.clustering.interface import Clustering
from peer.clustering.kmeans import KMeans
from peer.clustering.linkage import AverageLinkage
from peer.clustering.number import BySilhouette
from protocol.errors import ConfigError

OF_UPDATES = 0.035
"""The `least_gap` of average linkage for the directions of networks' updates: many dimensions in
which peers differ by chance stand beside the few that tell groups apart. Chosen on Fashion-MNIST,
three splits of its training part: after 40 steps groups with labels or rotations of their own had
largest gaps from .043 to .062, peers without groups up to .030."""


def choose(name: str, num_clusters: int = 0) -> Clustering:
    """Return a clustering of updates' directions by name.

    Args:
        name: One of `ClusteringName`.
        num_clusters: K, for `kmeans` and `gradient`; 0 finds it by silhouette. The others find it
            by themselves.

    Raises:
        ConfigError: There is no such clustering, or it can't be told the number.
    """
    match name:
        case "linkage" | "convex" if num_clusters:
            raise ConfigError(
                f"num_clusters = {num_clusters}: {name} finds the number itself; leave it out, or "
                'cluster by "kmeans"'
            )
        case "linkage":
            return AverageLinkage(least_gap=OF_UPDATES)
        case "convex":
            return ConvexClustering()
        case "kmeans" | "gradient":
            make = KMeans if name == "kmeans" else GradientClustering
            if num_clusters:
                return make(num_clusters=num_clusters)
            return BySilhouette(make=lambda number: make(num_clusters=number))
        case _:
            known = ", ".join(get_args(ClusteringName))
            raise ConfigError(f"unknown clustering {name!r}; known are {known}")
