"""Accuracy, and the mixture's on the measuring examples from what was predicted when measuring."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from peer.algorithm import mix_predictions
from peer.learner import Probabilities
from protocol.messages import PeerId


def accuracy_of(probabilities: Probabilities, labels: npt.NDArray[np.int64]) -> float | None:
    """Return the part of examples whose most probable label is right; None without examples.

    A prediction that isn't finite is wrong.

    Args:
        probabilities: Shape (num_examples, num_classes).
        labels: Shape (num_examples,).
    """
    if not len(labels):
        return None
    right = probabilities.argmax(axis=1) == labels
    return float((right & np.isfinite(probabilities).all(axis=1)).mean())


class Validation:
    """Keeps the newest predictions of the mixture's members: no model predicts twice.

    Args:
        labels: Of the measuring examples, shape (num_examples,).
    """

    def __init__(self, labels: npt.NDArray[np.int64]) -> None:
        self._labels = labels
        self._probabilities: dict[PeerId, Probabilities] = {}

    def measured(self, peer_id: PeerId, probabilities: Probabilities) -> None:
        """Keep what a model predicted, shape (num_examples, num_classes)."""
        self._probabilities[peer_id] = probabilities

    def accuracy(self, weights: Mapping[PeerId, float]) -> float | None:
        """Return the mixture's accuracy, 0 to 1, and forget all who aren't members.

        Args:
            weights: The mixture's. Members measured by another process, whose checkpoint this
                one went on from, don't take part; None when nobody else is there.
        """
        self._probabilities = {
            peer_id: self._probabilities[peer_id]
            for peer_id in weights
            if peer_id in self._probabilities
        }
        if not self._probabilities:
            return None
        known = {peer_id: weights[peer_id] for peer_id in self._probabilities}
        mixed = mix_predictions(known, self._probabilities)
        return accuracy_of(mixed, self._labels)
