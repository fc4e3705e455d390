"""Evaluate a peer on its test examples: the mixture, its own model, and local-only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from peer.algorithm import mix_predictions
from peer.data import Examples
from peer.learner import Batch, Learner, Probabilities
from peer.validation import accuracy_of
from protocol.messages import PeerId
from protocol.tensors import Tensors


def evaluate(
    learner: Learner,
    test: Examples,
    mixture: Mapping[PeerId, Tensors],
    weights: Mapping[PeerId, float],
    own: Tensors,
    local: Tensors | None,
) -> dict[str, float | None]:
    """Return `accuracy` (of the mixture), `own_accuracy` and `local_accuracy`.

    Each is None where it is unknown: without test examples, or without a local-only model.
    """
    if not len(test):
        return dict.fromkeys(("accuracy", "own_accuracy", "local_accuracy"))
    predictions = {
        peer_id: learner.predict(model, test.inputs) for peer_id, model in mixture.items()
    }

    def accuracy(probabilities: Probabilities) -> float | None:
        return accuracy_of(probabilities, test.labels)

    return {
        "accuracy": accuracy(mix_predictions(weights, predictions)),
        "own_accuracy": accuracy(learner.predict(own, test.inputs)),
        "local_accuracy": accuracy(learner.predict(local, test.inputs)) if local else None,
    }


def train_alone(
    learner: Learner, steps: int, wanted: Callable[[], bool] = lambda: True
) -> Tensors | None:
    """Train local-only: so many local steps, without anybody else.

    Returns:
        The model, or None as soon as it isn't `wanted` any more.
    """
    for step in range(steps):
        if not wanted():
            return None
        learner.train(None, (Batch(step),))
    return learner.parameters()
