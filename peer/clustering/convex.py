"""Convex clustering: models share a cluster when a penalty on differences makes them one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import pdist

from peer.clustering.fusion import Fused, fuse, unfused
from peer.clustering.interface import (
    Clusters,
    Labels,
    Points,
    Sizes,
    check_points,
    in_order_of_appearance,
    on_one_thread,
)
from protocol.errors import ConfigError, DataError


class RecoveryInterval(NamedTuple):
    """The penalties from `low` up to, but without, `high`: all recover the truth, if there are any.

    The truth may be recovered by others too: the interval is sufficient, not necessary.
    """

    low: float
    high: float

    @property
    def is_open(self) -> bool:
        """Whether there is any such penalty."""
        return self.low < self.high


def recovery_interval(points: Points, sizes: Sizes, truth: Labels) -> RecoveryInterval:
    """Return penalties for which convex clustering surely finds the clusters that are given.

    That is max_k diam(C_k)/n_k <= λ < min_{k≠l} ‖μ_k - μ_l‖/(2m - n_k - n_l), with the sum of
    weights, as in `path`, for every number of peers. Below `high` the means can't meet: each
    moves by less than λ times the weight of all others. From `low` on each cluster is one point.

    Args:
        points: Shape (num_peers, dim).
        sizes: Shape (num_peers,).
        truth: Shape (num_peers,).

    Raises:
        DataError: The points or sizes can't be clustered, or the truth isn't one label for each.
    """
    check_points(points, sizes)
    if truth.shape != sizes.shape:
        raise DataError(f"{len(points)} models came with true labels of shape {truth.shape}")
    weights = _weights(sizes)
    members = [np.flatnonzero(truth == label) for label in np.unique(truth)]
    totals = np.array([weights[cluster].sum() for cluster in members])
    means = np.array([np.average(points[c], axis=0, weights=weights[c]) for c in members])
    widths = [pdist(points[cluster]).max(initial=0.0) for cluster in members]
    return RecoveryInterval(low=float((widths / totals).max()), high=_first_meeting(means, totals))


def path(points: Points, sizes: Sizes, penalties: Sequence[float]) -> Iterator[Fused]:
    """Yield the solution for each of ascending penalties; the next starts where the last ended.

    It minimizes ½ Σ w_i ‖a_i - u_i‖² + λ Σ_{i<j} w_i w_j ‖u_i - u_j‖ (odcl.txt, convex clustering).
    Weights are sizes over their mean: 1 each in the paper, and a peer of twice the size counts
    like two peers with one model. So clusters that were one stay one as λ grows.

    Raises:
        DataError: The points or sizes can't be clustered.
        ConfigError: The penalties aren't above 0 and ascending.
    """
    check_points(points, sizes)
    if not (np.diff(penalties, prepend=0.0) >= 0).all() or not np.all(np.array(penalties) > 0):
        raise ConfigError("the penalties of a path must be above 0 and ascend")
    yield from _onward(unfused(points, _weights(sizes)), penalties)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvexClustering:
    """Models are one cluster where the minimizer of the penalized objective is one point."""

    penalty: float | None = None
    """λ, in the unit of distances per peer; None takes the middle of the widest plateau: where
    the number of clusters stays the same over the largest factor of λ."""

    num_penalties: int = 20
    """How many λ are tried, from where the first models meet to where all are one: more see
    narrower plateaus, and take longer."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        if self.penalty is not None and not 0 < self.penalty < np.inf:
            raise ConfigError(f"penalty = {self.penalty}: it must be above 0, or left out")
        if self.num_penalties < 3:
            raise ConfigError(f"num_penalties = {self.num_penalties}: it takes 3 to see a plateau")

    def __call__(self, points: Points, sizes: Sizes, rng: np.random.Generator) -> Clusters:
        """Cluster; see `Clustering`. Nothing is drawn."""
        check_points(points, sizes)
        start = unfused(points, _weights(sizes))
        if len(start.weights) == 1:
            return _clusters(start, "one peer" if len(points) == 1 else "all models are equal")
        if self.penalty is not None:
            return _at_penalty(next(_onward(start, [self.penalty])), self.penalty)
        return self._at_plateau(start)

    def _at_plateau(self, start: Fused) -> Clusters:
        alone = np.bincount(start.members) == 1
        if alone.sum() <= len(start.members) / 2:
            return _clusters(start, "most models have an equal: equal models are the clusters")
        penalties, found = self._zoom(start)
        numbers = [len(fused.weights) for fused in found]
        runs = [list(run) for _, run in groupby(range(len(found)), numbers.__getitem__)]
        between = [run for run in runs if 1 < numbers[run[0]] < len(start.weights)]
        if not between:
            note = "no plateau: the penalty merges none or all, so each model is left alone"
            return _clusters(start, note)
        widest = max(between, key=lambda run: (len(run), run))  # of equals, the fewest clusters
        low, high = penalties[widest[0]], penalties[widest[-1]]
        note = f"plateau of {numbers[widest[0]]} clusters, penalty {low:.3g} to {high:.3g}"
        return _clusters(found[widest[len(widest) // 2]], note)

    def _zoom(self, start: Fused) -> tuple[npt.NDArray[np.float64], list[Fused]]:
        """Return penalties, evenly spaced in log λ, from none merged to all merged, and solutions.

        What is known beforehand of both ends is far from them, so a first grid finds the second's.
        """
        # A diameter of λ times the weight makes all one.
        last = pdist(start.points).max() / start.weights.sum()
        first = min(_first_meeting(start.points, start.weights), last) / 2
        penalties = np.geomspace(first, last * (1 + 1e-12), self.num_penalties)
        found = list(_onward(start, penalties))
        numbers = np.array([len(fused.weights) for fused in found])
        low = int(np.flatnonzero(numbers == len(start.weights))[-1])
        high = int(np.flatnonzero(numbers == 1)[0])
        penalties = np.geomspace(penalties[low], penalties[high], self.num_penalties)
        return penalties, list(_onward(found[low], penalties))


def _onward(fused: Fused, penalties: Sequence[float] | npt.NDArray[np.float64]) -> Iterator[Fused]:
    for penalty in penalties:
        with on_one_thread():
            fused = fuse(fused, float(penalty))
        yield fused


def _at_penalty(fused: Fused, penalty: float) -> Clusters:
    number = len(fused.weights)
    if number == 1:
        return _clusters(fused, f"penalty {penalty:.3g} merges all")
    if number == len(fused.members):
        return _clusters(fused, f"penalty {penalty:.3g} merges nothing")
    return _clusters(fused, f"{number} clusters at penalty {penalty:.3g}")


def _clusters(fused: Fused, note: str) -> Clusters:
    return Clusters(labels=in_order_of_appearance(fused.members.tolist()), note=note)


def _weights(sizes: Sizes) -> npt.NDArray[np.float64]:
    weights: npt.NDArray[np.float64] = sizes / sizes.mean()
    return weights


def _first_meeting(points: Points, weights: npt.NDArray[np.float64]) -> float:
    """Return a λ below which no two points meet: min ‖a_i - a_j‖/(2W - w_i - w_j)."""
    if len(points) == 1:
        return float(np.inf)
    others = weights.sum() - weights
    pairs = np.triu_indices(len(points), 1)
    return float((pdist(points) / (others[pairs[0]] + others[pairs[1]])).min())
