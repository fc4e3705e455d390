"""A peer's memory within a budget: few learned prototypes in a learned projection of embeddings.

ProtoNN (Gupta et al., ICML 2017) with kNN-Per's kernel: all prototypes speak for a query, each as
softmax(-d) weighs it, d its Euclidean distance in the projection, whose scale stands for sigma.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from peer.clustering.interface import on_one_thread
from peer.datastore import Datastore, Labels
from peer.learner import Probabilities
from peer.nearest import Embeddings, NearestSearch, check_embeddings
from protocol.errors import CheckpointError, ConfigError, DataError

MOST_DIMS = 32
"""Most dimensions of a projection: with 8 to 32 memories did alike on Fashion-MNIST."""
EXAMPLES_EACH = 5
"""Examples for a prototype at least: with three each, a memory lost a point on Fashion-MNIST."""

_STEPS = 300
_BATCH = 128
_RATE = 0.05  # of the first step, in sizes of what it changes; the others fall to 0 evenly
_DECAYS = (0.9, 0.999)  # Adam's usual ones
_VANISHING = 1e-3  # slopes times the size of what they change, below which steps shrink too
_LLOYD_STEPS = 3
_DOUBT = 0.1  # of a prototype in its class at first: without any, softmax could learn nothing
_SCALES = tuple(2.0**power for power in range(-3, 9))
_SAMPLE = 512  # examples by which axes and scale are found
_TINY = np.float32(1e-30)
_CLOSEST = np.float32(1e-6)  # a distance whose gradient has a direction still
_QUERIES_AT_ONCE = 1024
_PREFIX = "prototypes_"

_Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prototypes:
    """What is kept in place of a datastore's embeddings; it answers the same question.

    Attributes:
        center: Taken from each embedding. Shape (dim,).
        spread: What is left is divided by it. Shape ().
        projection: Of that. Shape (projected_dim, dim).
        positions: Of the prototypes. Shape (num_prototypes, projected_dim).
        says: Their label distributions. Shape (num_prototypes, len(classes)).
        classes: The labels that there were, ascending; of others a memory says nothing.
        num_classes: Of the model.
    """

    center: _Array
    spread: npt.NDArray[np.float64]
    projection: _Array
    positions: _Array
    says: _Array
    classes: Labels
    num_classes: int

    @property
    def size_bytes(self) -> int:
        """Memory of all that is kept."""
        return sum(array.nbytes for array in self._arrays().values())

    def recall(self, queries: Embeddings) -> Probabilities:
        """Return what the memory says of queries. Shape (num_queries, num_classes).

        Args:
            queries: By the model that embedded the examples. Shape (num_queries, dim).

        Raises:
            DataError: A query is not finite or of another dimension.
        """
        check_embeddings(queries, "queries", len(self.center))
        found = np.zeros((len(queries), self.num_classes), np.float32)
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
            # f64: a query may be as far away as f32 can say.
            points = (queries[part].astype(np.float64) - self.center) / self.spread
            projected = points @ self.projection.T.astype(np.float64)
            spoken = _softmax(-_distances(projected, self.positions.astype(np.float64)))
            found[part, self.classes] = spoken @ self.says
        return found

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all that a checkpoint needs, by names of their own."""
        return {_PREFIX + name: array for name, array in self._arrays().items()}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, npt.NDArray[Any]], dim: int, num_classes: int
    ) -> Prototypes | None:
        """Restore prototypes; None where there are none among the arrays.

        Raises:
            CheckpointError: They are not whole, or not of such embeddings and classes.
        """
        names = [field.name for field in fields(cls) if field.name != "num_classes"]
        own = {name: arrays[_PREFIX + name] for name in names if _PREFIX + name in arrays}
        if not own:
            return None
        if len(own) == len(names):
            made = cls(num_classes=num_classes, **own)
            if made._fits(dim):
                return made
        raise CheckpointError(
            "the saved prototypes can't be used: they are not whole, or not of embeddings of "
            f"dimension {dim} and {num_classes} classes"
        )

    def _fits(self, dim: int) -> bool:
        count, projected_dim = (*self.positions.shape, 0, 0)[:2]
        labels = self.classes
        said, of_classes = (count, labels.size), (labels.size,)
        shapes = [(dim,), (), (projected_dim, dim), (count, projected_dim), said, of_classes]
        if not count or not labels.size:
            return False
        known = labels.min() >= 0 and labels.max() < self.num_classes
        return bool(known) and [array.shape for array in self._arrays().values()] == shapes

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        names = (field.name for field in fields(self) if field.name != "num_classes")
        return {name: getattr(self, name) for name in names}


def prototypes_within(
    size_bytes: int, *, dim: int, num_classes: int, num_examples: int
) -> tuple[int, int]:
    """Return how many prototypes fit a budget, and the dimensions that they have.

    The projection has as many dimensions as fit half of the budget, at most `MOST_DIMS`; then
    there are as many prototypes as fit what is left, at most one for `EXAMPLES_EACH` examples,
    or for each class where those are more.

    Args:
        size_bytes: The budget.
        dim: Of the embeddings.
        num_classes: That occur.
        num_examples: To learn from.

    Raises:
        ConfigError: One prototype in one dimension doesn't fit.
    """
    projected_dim = (size_bytes - _size_bytes(dim, num_classes)) // 2 // (4 * dim)
    projected_dim = max(1, min(projected_dim, dim, num_examples, MOST_DIMS))
    room = size_bytes - _size_bytes(dim, num_classes, projected_dim)
    useful = min(num_examples, max(num_classes, num_examples // EXAMPLES_EACH))
    count = min(room // (4 * (projected_dim + num_classes)), useful)
    if count < 1:
        least = _size_bytes(dim, num_classes, 1, 1)
        raise ConfigError(
            f"compress_kib = {size_bytes / 1024:.3g} has no room for a prototype: with embeddings "
            f"of dimension {dim} and {num_classes} classes it takes {least / 1024:.2f} KiB"
        )
    return count, projected_dim


def compress(store: Datastore, size_bytes: int, rng: np.random.Generator) -> Prototypes:
    """Learn prototypes from a store's entries, by as many steps whatever its size.

    They begin where the examples of each class cluster, along the principal axes of all.

    Args:
        store: Not empty.
        size_bytes: What they may take.
        rng: Decides where clusters begin, and the batches.

    Raises:
        ConfigError: Not one prototype fits.
        DataError: The store is empty.
    """
    if not len(store):
        raise DataError("an empty datastore holds nothing to compress: use the model alone")
    classes, labels = np.unique(store.labels, return_inverse=True)
    count, projected_dim = prototypes_within(
        size_bytes, dim=store.dim, num_classes=len(classes), num_examples=len(store)
    )
    with on_one_thread():
        center = store.embeddings.mean(axis=0, dtype=np.float64).astype(np.float32)
        points = store.embeddings - center.astype(np.float64)
        spread = float(np.sqrt(np.square(points).sum(axis=1).mean())) or 1.0
        points = (points / spread).astype(np.float32)
        parts = _start(points, labels, count, projected_dim, rng)
        _learn(parts, points, labels, rng)
    return Prototypes(
        center=center,
        spread=np.array(spread),
        projection=parts.projection,
        positions=parts.positions,
        says=_softmax(parts.logits),
        classes=classes,
        num_classes=store.num_classes,
    )


class _Parts(NamedTuple):
    """What is learned, changed in place.

    Attributes:
        projection: Shape (projected_dim, dim).
        positions: Shape (num_prototypes, projected_dim).
        logits: What prototypes say is their softmax. Shape (num_prototypes, num_classes).
    """

    projection: _Array
    positions: _Array
    logits: _Array


def _size_bytes(dim: int, num_classes: int, projected_dim: int = 0, count: int = 0) -> int:
    numbers = dim * (1 + projected_dim) + count * (projected_dim + num_classes)
    return 4 * numbers + 8 * num_classes + 8


def _start(
    points: _Array, labels: Labels, count: int, projected_dim: int, rng: np.random.Generator
) -> _Parts:
    """Return clusters of each class, scaled so that softmax(-d) already tells labels best."""
    sample = slice(None, None, -(-len(points) // _SAMPLE))
    projection = np.linalg.svd(points[sample], full_matrices=False)[2][:projected_dim]
    projected = points @ projection.T
    shares = _shares(np.bincount(labels), count)
    positions = np.concatenate(
        [
            _cluster(projected[labels == label], shares[label], rng)
            for label in np.flatnonzero(shares)
        ]
    )
    certain = np.eye(len(shares), dtype=np.float32).repeat(shares, axis=0)
    says = certain * np.float32(1 - _DOUBT) + np.float32(_DOUBT / len(shares))

    def loss(scale: float) -> float:
        distances = _distances(projected[sample], positions) * np.float32(scale)
        right = (_softmax(-distances) @ says)[np.arange(len(distances)), labels[sample]]
        return -float(np.log(np.maximum(right, _TINY)).mean())

    scale = np.float32(min(_SCALES, key=loss))
    return _Parts(projection * scale, positions * scale, np.log(says))


def _shares(counts: npt.NDArray[np.intp], total: int) -> npt.NDArray[np.intp]:
    """Return prototypes by class: one each, the most frequent first, the others by examples."""
    shares = np.zeros(len(counts), np.intp)
    shares[np.argsort(-counts, kind="stable")[:total]] = 1
    for _ in range(total - len(counts)):
        shares[np.argmax(np.where(shares < counts, counts / np.maximum(shares, 1), 0.0))] += 1
    return shares


def _cluster(points: _Array, count: int, rng: np.random.Generator) -> _Array:
    """Return centers of points by a few steps of k-means. Shape (count, dim)."""
    centers = points[rng.choice(len(points), count, replace=False)]
    for _ in range(_LLOYD_STEPS):
        nearest = NearestSearch(centers).find(points, 1).positions[:, 0]
        sizes = np.bincount(nearest, minlength=count)[:, np.newaxis]
        sums = np.zeros(centers.shape)
        np.add.at(sums, nearest, points)
        means = (sums / np.maximum(sizes, 1)).astype(np.float32)
        centers = np.where(sizes > 0, means, centers)
    return centers


def _learn(parts: _Parts, points: _Array, labels: Labels, rng: np.random.Generator) -> None:
    """Lower the log loss of the labels by Adam, which moves each part in its own proportions."""
    sizes = [float(np.sqrt(np.square(part).mean())) for part in parts[:2]] + [1.0]
    means, squares = ([np.zeros_like(part) for part in parts] for _ in range(2))
    for step in range(_STEPS):
        chosen = rng.choice(len(points), min(_BATCH, len(points)), replace=False)
        slopes = _gradient(parts, points[chosen], labels[chosen])
        rate = _RATE * (1 - step / _STEPS)
        fresh = [1 - decay ** (step + 1) for decay in _DECAYS]
        for part, slope, mean, square, size in zip(
            parts, slopes, means, squares, sizes, strict=True
        ):
            mean += (1 - _DECAYS[0]) * (slope - mean)
            square += (1 - _DECAYS[1]) * (np.square(slope) - square)
            # Whole steps by slopes of almost nothing would undo a start that needs no learning.
            floor = _VANISHING / max(size, float(_TINY))
            part -= rate * size / fresh[0] * mean / (np.sqrt(square / fresh[1]) + floor)


def _gradient(parts: _Parts, points: _Array, labels: Labels) -> _Parts:
    """Return the slopes of the mean of -log Σ_j softmax_j(-d_j) says_j(label)."""
    projection, positions, logits = parts
    projected = points @ projection.T
    distances = _distances(projected, positions)
    weights, says = _softmax(-distances), _softmax(logits)
    merits = weights * says[:, labels].T
    merits /= np.maximum(merits.sum(axis=1, keepdims=True), _TINY)
    # By each distance, and by its square's half. Shape (num_examples, num_prototypes).
    pulls = (merits - weights) / np.float32(len(points)) / np.maximum(distances, _CLOSEST)
    by_projected = projected * pulls.sum(axis=1, keepdims=True) - pulls @ positions
    by_positions = positions * pulls.sum(axis=0)[:, np.newaxis] - pulls.T @ projected
    merits /= np.float32(len(points))
    is_label = np.eye(logits.shape[1], dtype=np.float32)[labels]
    by_logits = says * merits.sum(axis=0)[:, np.newaxis] - merits.T @ is_label
    return _Parts(by_projected.T @ points, by_positions, by_logits)


def _softmax(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]


def _distances(points: npt.NDArray[Any], others: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return Euclidean distances. Shape (num_points, num_others)."""
    norms = [np.einsum("ij,ij->i", each, each) for each in (points, others)]
    squares = norms[0][:, np.newaxis] + norms[1] - 2 * (points @ others.T)
    return np.sqrt(np.maximum(squares, 0))  # type: ignore[no-any-return]
