"""Put together what learns at one peer, from settings: alike for real and simulated peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peer.algorithm import AlgorithmSettings
from peer.config import DataSettings
from peer.data import Dataset, Split, split
from peer.learner import TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner


def split_examples(
    dataset: Dataset, algorithm: AlgorithmSettings, rng: np.random.Generator
) -> Split:
    """Split a peer's examples, with a holdout if the algorithm measures on one.

    Args:
        dataset: The peer's.
        algorithm: Says whether there is a holdout, and how large.
        rng: Decides which examples are test and holdout.

    Raises:
        DataError: There is no training example.
    """
    on_holdout = algorithm.measure_on == "holdout"
    return split(dataset, algorithm.holdout_fraction if on_holdout else 0.0, rng)


def without_holdout(examples: Split) -> Split:
    """Return the split that local-only trains on: it measures nothing, so it holds nothing out."""
    return Split(fit=examples.train, holdout=examples.holdout, test=examples.test)


def new_learner(
    settings: DataSettings,
    algorithm: AlgorithmSettings,
    training: TrainingSettings,
    examples: Split,
    *,
    num_classes: int,
    seed: int,
    import_paths: Sequence[Path],
) -> TorchLearner:
    """Make a learner that starts from the federation's initial parameters.

    Args:
        settings: Name the model and its seed.
        algorithm: Says what is measured, and on what.
        training: How steps are taken.
        examples: The peer's.
        num_classes: In the whole federation.
        seed: Decides the batches.
        import_paths: Where to look for a model of the user's own.

    Raises:
        ModelError: The model can't be built, or doesn't fit the examples.
    """
    input_shape = examples.fit.inputs.shape[1:]
    return TorchLearner(
        build_model(settings.model, input_shape, num_classes, settings.model_seed, import_paths),
        examples,
        num_classes,
        training,
        loss=algorithm.loss,
        measure_on=algorithm.measure_on,
        seed=seed,
    )
