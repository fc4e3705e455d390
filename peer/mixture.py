"""What a peer predicts with: the models that it keeps, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peer.algorithm import mix_predictions
from peer.learner import Learner, Probabilities
from protocol.messages import PeerId
from protocol.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What a peer predicts with, as of the end of a round.

    Attributes:
        own: The peer.
        model: Its own model.
        models: The mixture's members.
        weights: Theirs; they sum to 1.
    """

    own: PeerId
    model: Tensors
    models: Mapping[PeerId, Tensors]
    weights: Mapping[PeerId, float]

    def predict(self, learner: Learner, inputs: npt.NDArray[np.float32]) -> Probabilities:
        """Return the mixture prediction. Shape (num_examples, num_classes)."""
        predictions = {
            peer_id: learner.predict(model, inputs) for peer_id, model in self.models.items()
        }
        return mix_predictions(self.weights, predictions)

    @property
    def strongest(self) -> Tensors:
        """The member of most weight; of equal ones the own, else the first by peer id."""
        best = max(
            sorted(self.weights),
            key=lambda peer_id: (self.weights[peer_id], peer_id == self.own),
        )
        return self.models[best]
