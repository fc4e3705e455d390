"""How long clusterings of models take: convex clustering's path, the others, and the projection.

The models are those of the linear study (ODCL), of 20 parameters; all is on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from peer.clustering.convex import path
from peer.clustering.gradient import GradientClustering
from peer.clustering.kmeans import KMeans
from peer.clustering.linkage import AverageLinkage
from peer.clustering.span import gather
from protocol.messages import PeerId

COMMAND = "make bench only=clustering"
NUM_PENALTIES = 20
PEERS = {100: 5, 300: 3, 1000: 1}
"""How often each is repeated, by number of peers."""
CLUSTERS = 10
DIM = 20
LARGE = 200_000
"""Parameters of the models that are projected."""


def bench() -> list[dict[str, object]]:
    """Return all rows of this module."""
    return [*path_rows(), *other_rows(), projection_row()]


def path_rows() -> Iterator[dict[str, object]]:
    """Yield the seconds of a path from where nothing is merged to where all is."""
    for num_peers, repeats in PEERS.items():
        models, sizes = regression_models(num_peers)
        penalties = np.geomspace(0.1, 14.0, NUM_PENALTIES) / num_peers
        solutions = list(path(models, sizes, penalties))
        scatter = np.square(models - models.mean(axis=0)).sum()
        numbers = [len(fused.weights) for fused in solutions]
        gap = max(fused.gap for fused in solutions) / scatter
        seen = f"{numbers[0]} to {numbers[-1]} clusters, gap at most {gap:.0e} of the scatter"
        taken = times_of(lambda m=models, s=sizes, p=penalties: list(path(m, s, p)), repeats)
        yield row(f"convex clustering, {num_peers} peers, {NUM_PENALTIES} penalties", taken, seen)


def other_rows() -> Iterator[dict[str, object]]:
    models, sizes = regression_models(100)
    clusterings = {
        "k-means++, 10 starts": KMeans(num_clusters=CLUSTERS),
        "gradient clustering, 10 starts": GradientClustering(num_clusters=CLUSTERS),
        "average linkage": AverageLinkage(),
    }
    for name, clustering in clusterings.items():
        taken = times_of(lambda c=clustering: c(models, sizes, np.random.default_rng(0)), 5)
        yield row(f"{name}, 100 peers", taken, "")


def projection_row() -> dict[str, object]:
    rng = np.random.default_rng(0)
    models = {
        PeerId(f"{peer:032x}"): {"weight": rng.standard_normal(LARGE, dtype=np.float32)}
        for peer in range(100)
    }
    name = f"projection of 100 models of {LARGE:,} parameters"
    return row(name, times_of(lambda: gather(models), 3), "")


def regression_models(num_peers: int) -> tuple[Any, Any]:
    """Return least squares on 100 examples of noise 1, ten truths in turn, and sizes."""
    rng = np.random.default_rng(0)
    truths = rng.uniform(-3, 3, (CLUSTERS, DIM))
    models = np.empty((num_peers, DIM))
    for peer in range(num_peers):
        inputs = rng.standard_normal((100, DIM))
        outputs = inputs @ truths[peer % CLUSTERS] + rng.standard_normal(100)
        models[peer] = np.linalg.lstsq(inputs, outputs)[0]
    return models, np.full(num_peers, 100.0)


def times_of(call: Callable[[], Any], repeats: int) -> list[float]:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


def row(name: str, taken: list[float], compared_with: str) -> dict[str, object]:
    return {
        "name": name,
        "value": round(statistics.median(taken), 4),
        "spread": [round(min(taken), 4), round(max(taken), 4)],
        "unit": "s",
        "compared_with": compared_with,
        "command": COMMAND,
    }
