"""Arithmetic on whole models that several baselines share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peer.algorithm import average_models
from peer.data import Examples
from peer.learner import Learner
from protocol.tensors import Tensors
from sim.cohort import Member


def average(members: Sequence[Member], models: Sequence[Tensors]) -> Tensors:
    """Average models, or parts of models, weighted by local size: Σ_k n_k / n θ_k."""
    total = sum(member.num_train for member in members)
    return average_models(
        {member.peer_id: member.num_train / total for member in members},
        {member.peer_id: model for member, model in zip(members, models, strict=True)},
    )


def average_clusters(
    members: Sequence[Member], models: Sequence[Tensors], clusters: Sequence[int]
) -> dict[int, Tensors]:
    """Average the members' models inside each cluster, as `average` does.

    Args:
        members: All of them.
        models: The model of each.
        clusters: The cluster of each.

    Returns:
        The average of every cluster that has a member.
    """
    averages = {}
    for cluster in sorted(set(clusters)):
        inside = [place for place, number in enumerate(clusters) if number == cluster]
        averages[cluster] = average(
            [members[place] for place in inside], [models[place] for place in inside]
        )
    return averages


def cluster_weights(members: Sequence[Member], clusters: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the weight matrix of averaging inside clusters.

    Args:
        members: All of them.
        clusters: The cluster of each.

    Returns:
        Row i holds n_j / n of i's cluster. Shape (num_members, num_members).
    """
    sizes = np.array([member.num_train for member in members], dtype=np.float64)
    together = np.equal.outer(clusters, clusters) * sizes
    weights: npt.NDArray[np.float64] = together / together.sum(axis=1, keepdims=True)
    return weights


def shuffled(model: Tensors, rng: np.random.Generator) -> Tensors:
    """Draw another initial model: each trainable tensor's entries in another order.

    Where initial parameters are independent and alike within a tensor, as torch's layers draw them,
    this is a fresh draw from the same distribution; constants stay what they are.
    """
    result = Tensors.of(model.layout, model)
    for name in model.layout.gradient.index:
        values = result[name]
        values[...] = rng.permutation(values.reshape(-1)).reshape(values.shape)
    return result


def example_losses(learner: Learner, model: Tensors, examples: Examples) -> npt.NDArray[np.float64]:
    """Return the cross-entropy of each example under a model. Shape (num_examples,)."""
    probabilities = learner.predict(model, examples.inputs).astype(np.float64)
    of_label = probabilities[np.arange(len(examples)), examples.labels]
    losses: npt.NDArray[np.float64] = -np.log(np.maximum(of_label, np.finfo(np.float64).tiny))
    return losses
