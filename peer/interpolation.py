"""kNN-Per's prediction: what the datastore says, blended with what the model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from peer.datastore import Datastore, DatastoreSettings, Labels
from peer.learner import Probabilities
from peer.nearest import Embeddings, Nearest
from peer.validation import accuracy_of
from protocol.errors import ConfigError, DataError

LAMBDAS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""The paper's grid."""


class KnnSettings(DatastoreSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a peer remembers, and blends its memory with its model.

    Raises:
        ValueError: The grid or sigma can't be used, or the datastore's settings exclude each other.
    """

    k_nearest: Annotated[int, msgspec.Meta(ge=1)] = 10
    """Entries that speak for a query; all where there are fewer. Paper: 10."""
    sigma: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """The distance over which an entry's say falls by e. Small lets the nearest alone speak, large
    lets all k speak alike. Paper: 1, of distance itself."""
    sigma_unit: Literal["distance", "spacing"] = "distance"
    """What sigma is counted in: distance as the model embeds, which depends on the model's scale,
    or the median distance from an entry to the nearest other. Paper: distance."""
    lambdas: tuple[float, ...] = LAMBDAS
    """Interpolation weights to choose from on the validation examples: 0 is the model alone, 1 the
    memory alone. Paper: these seven."""

    def __post_init__(self) -> None:
        DatastoreSettings.__post_init__(self)
        if not np.isfinite(self.sigma):
            raise ValueError(f"sigma = {self.sigma}: it must be above 0, and finite")
        if fault := _fault_of(self.lambdas):
            raise ValueError(fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """How memory and model are blended.

    Attributes:
        lam: Interpolation weight λ: 0 is the model alone, 1 the memory alone.
        k_nearest: Entries that speak for a query.
        sigma: In units of distance.
    """

    lam: float
    k_nearest: int
    sigma: float

    def recall(self, store: Datastore, queries: Embeddings) -> Probabilities | None:
        """Return what the store says of queries of shape (num_queries, dim); an empty one nothing.

        Raises:
            DataError: A query is not finite or of another dimension.
        """
        if not len(store):
            return None
        nearest = store.nearest(queries, self.k_nearest)
        return label_distribution(nearest, store.labels, store.num_classes, self.sigma)

    def predict(self, store: Datastore, queries: Embeddings, model: Probabilities) -> Probabilities:
        """Return λ p_kNN + (1 - λ) p_model, or the latter alone where the store is empty.

        Args:
            store: The memory.
            queries: The examples' embeddings, by the model that embedded the store's entries.
            model: What the model predicts for them. Shape (num_queries, num_classes).

        Raises:
            DataError: A query is not finite, or a shape doesn't fit.
        """
        return interpolate(self.recall(store, queries), model, self.lam)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The blend that does best on validation examples, and how well each part does there.

    Attributes:
        blend: What to predict with.
        num_examples: Validation examples; with none the model is used alone, and there is no
            accuracy.
        accuracy: Of the blend, 0 to 1.
        model_accuracy: Of the model alone.
        memory_accuracy: Of the memory alone; None where it is empty.
    """

    blend: Blend
    num_examples: int
    accuracy: float | None
    model_accuracy: float | None
    memory_accuracy: float | None


def label_distribution(
    nearest: Nearest, labels: Labels, num_classes: int, sigma: float
) -> Probabilities:
    """Return p_kNN(y|x) = softmax(-d / sigma) over the nearest, summed by label (Knowl 2).

    Args:
        nearest: Of the queries, at least one each.
        labels: Of all entries. Shape (num_entries,).
        num_classes: Labels are below.
        sigma: Positive, in units of distance.

    Raises:
        ConfigError: Sigma is not a positive number.
        DataError: There is no entry.
    """
    if not 0 < sigma < np.inf:
        raise ConfigError(f"sigma = {sigma}: it must be above 0, and finite")
    num_queries, count = nearest.positions.shape
    if not count:
        raise DataError("an empty datastore says nothing about labels: use the model alone")
    with np.errstate(over="ignore"):  # infinitely far beside the nearest: weight 0
        weights = np.exp((nearest.distances[:, :1] - nearest.distances) / sigma)
    weights /= weights.sum(axis=1, keepdims=True)
    rows = np.arange(num_queries)[:, np.newaxis] * num_classes
    cells = (rows + labels[nearest.positions]).reshape(-1)
    sums = np.bincount(cells, weights.reshape(-1), minlength=num_queries * num_classes)
    return sums.reshape(num_queries, num_classes).astype(np.float32)


def interpolate(memory: Probabilities | None, model: Probabilities, lam: float) -> Probabilities:
    """Return λ p_kNN + (1 - λ) p_model; the model's alone without a memory.

    Args:
        memory: Shape (num_examples, num_classes), or None from an empty store.
        model: Of the same shape; probabilities, never logits.
        lam: λ, 0 to 1.

    Raises:
        ConfigError: λ is out of range.
        DataError: The shapes differ, or the model's probabilities are not finite.
    """
    if fault := _fault_of((lam,)):
        raise ConfigError(fault)
    if not np.isfinite(model).all():
        raise DataError("the model's predictions are not finite: it diverged; go back to another")
    if memory is None:
        return model
    if memory.shape != model.shape:
        raise DataError(
            f"the memory predicts {memory.shape}, the model {model.shape}: both need the same "
            "examples and classes"
        )
    return np.float32(lam) * memory + np.float32(1 - lam) * model


def tune(
    store: Datastore,
    settings: KnnSettings,
    *,
    embeddings: Embeddings,
    model: Probabilities,
    labels: Labels,
    arrivals: npt.NDArray[np.int64] | None = None,
) -> Tuning:
    """Choose λ on validation examples, which the store forgets while it is asked about them.

    The most accurate λ wins, as in the paper; the smallest of equal ones, which stays nearest to
    what all peers share. By log loss, tried too, blends were chosen that did worse than the model
    alone where peers' data were alike. An empty store, or no examples to judge by, gives λ = 0.

    Args:
        store: The memory.
        settings: Among others the grid of λ.
        embeddings: Of the validation examples. Shape (num_examples, dim).
        model: What the model predicts for them, never having trained on them.
        labels: Theirs. Shape (num_examples,).
        arrivals: Theirs in the store, where they were offered to it. Shape (num_examples,).

    Raises:
        ConfigError: The grid is empty, or a λ is out of range.
        DataError: An embedding is not finite, or shapes don't fit.
    """
    if labels.shape != model.shape[:1] or len(embeddings) != len(model):
        raise DataError(
            f"{len(embeddings)} embeddings, {len(model)} predictions and labels of shape "
            f"{labels.shape}: give one of each for each validation example"
        )
    asked = store if arrivals is None else store.without(arrivals)
    blend = Blend(lam=0.0, k_nearest=settings.k_nearest, sigma=sigma_of(asked, settings))
    memory = blend.recall(asked, embeddings) if len(labels) else None
    return choose(memory, model, labels, blend, settings.lambdas)


def choose(
    memory: Probabilities | None,
    model: Probabilities,
    labels: Labels,
    blend: Blend,
    lambdas: Sequence[float],
) -> Tuning:
    """Choose λ by what memory and model say of examples that neither of them has seen; see `tune`.

    Args:
        memory: Shape (num_examples, num_classes), or None where it says nothing.
        model: Of the same shape.
        labels: The true ones. Shape (num_examples,).
        blend: How the memory was asked; its λ counts for nothing.
        lambdas: The grid of λ.

    Raises:
        ConfigError: The grid is empty, or a λ is out of range.
        DataError: The model's probabilities are not finite, or the shapes differ.
    """
    if fault := _fault_of(lambdas):
        raise ConfigError(fault)
    grid = sorted(lambdas) if memory is not None and len(labels) else (0.0,)
    lam = max(grid, key=lambda lam: accuracy_of(interpolate(memory, model, lam), labels) or 0.0)
    return Tuning(
        blend=replace(blend, lam=lam),
        num_examples=len(labels),
        accuracy=accuracy_of(interpolate(memory, model, lam), labels),
        model_accuracy=accuracy_of(model, labels),
        memory_accuracy=None if memory is None else accuracy_of(memory, labels),
    )


def sigma_of(store: Datastore, settings: KnnSettings) -> float:
    """Return sigma in units of distance."""
    if settings.sigma_unit == "distance":
        return settings.sigma
    return settings.sigma * store.spacing()


def _fault_of(lambdas: Sequence[float]) -> str | None:
    """Return what is wrong with interpolation weights, if anything."""
    if not lambdas:
        return "lambdas is empty: give interpolation weights from 0 to 1, such as [0.0, 0.5, 1.0]"
    wrong = [lam for lam in lambdas if not 0 <= lam <= 1]
    if wrong:
        return f"lambdas holds {wrong[0]}: interpolation weights are from 0 to 1"
    return None
