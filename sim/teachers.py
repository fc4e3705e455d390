"""Cheap classification problems for crowds: groups of peers, each with a linear teacher."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peer.data import Examples, Split


def linear_problems(
    num_peers: int,
    group_size: int,
    rng: np.random.Generator,
    *,
    num_features: int = 10,
    num_classes: int = 10,
    num_fit: int = 64,
    num_holdout: int = 32,
    num_test: int = 0,
    noise: float = 0.3,
) -> tuple[list[Split], npt.NDArray[np.int64]]:
    """Draw one peer's examples after the other's, labelled by the teacher of its group.

    Inputs are standard normal. A teacher scores the classes by W x, its weights normal of variance
    4 / num_features, so that scores have a standard deviation of 2; the label is the class of the
    highest score after Gumbel noise, which makes the teacher the best possible logistic model.

    Args:
        num_peers: K.
        group_size: Peers a teacher has; the last one may have fewer.
        rng: Decides everything.
        num_features: Size of an input.
        num_classes: Number of classes.
        num_fit: Examples a peer computes gradients on.
        num_holdout: Examples a peer measures on.
        num_test: Examples a peer is tested on.
        noise: Scale of the Gumbel noise; 0 makes labels certain.

    Returns:
        The peers' examples, and the number of each one's group, shape (num_peers,).
    """
    groups = np.arange(num_peers) // group_size
    spread = 2.0 / np.sqrt(num_features)
    teachers = rng.normal(scale=spread, size=(groups[-1] + 1, num_classes, num_features))
    splits = []
    for group in groups:
        inputs = rng.standard_normal((num_fit + num_holdout + num_test, num_features), np.float32)
        scores = inputs @ teachers[group].T  # (num_examples, num_classes)
        scores += noise * rng.gumbel(size=scores.shape)
        labels = scores.argmax(axis=1)
        bounds = [num_fit, num_fit + num_holdout]
        parts = zip(np.split(inputs, bounds), np.split(labels, bounds), strict=True)
        fit, holdout, test = (Examples(*part) for part in parts)
        splits.append(Split(fit=fit, holdout=holdout, test=test))
    return splits, groups
