"""Personalize any model by the memory of a peer's own examples (kNN-Per, Marfoq et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peer.data import Split
from peer.datastore import Datastore
from peer.interpolation import KnnSettings, Tuning, tune
from peer.learner import Learner, Probabilities
from protocol.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonalizedModel:
    """A model, the memory of local examples in its embedding, and how the two are blended.

    Attributes:
        model: The one that embeds and predicts.
        store: The local training examples, the holdout included.
        tuning: How the blend was chosen on the holdout, which the model must not have trained on.
    """

    model: Tensors
    store: Datastore
    tuning: Tuning

    @classmethod
    def build(
        cls,
        learner: Learner,
        model: Tensors,
        split: Split,
        settings: KnnSettings,
        rng: np.random.Generator,
    ) -> PersonalizedModel:
        """Remember the local training examples, and choose λ on the holdout.

        While λ is chosen the store forgets the holdout; without one the model is used alone.

        Args:
            learner: Embeds and predicts.
            model: Any model of its layout; one that has not trained on the holdout.
            split: The peer's examples.
            settings: The memory's.
            rng: Decides what the strategy `random` keeps.

        Raises:
            ModelError: The model's head can't be told.
            DataError: An embedding is not finite.
        """
        fit, holdout = split.fit, split.holdout
        embedded = learner.embed(model, fit.inputs)
        predicted = learner.predict(model, (holdout if len(holdout) else fit).inputs[:1])
        store = Datastore(settings, embedded.shape[1], predicted.shape[1], rng)
        store.add(embedded, fit.labels)
        if not len(holdout):
            nothing = np.empty((0, predicted.shape[1]), np.float32)
            tuning = tune(
                store, settings, embeddings=embedded[:0], model=nothing, labels=holdout.labels
            )
            return cls(model=model, store=store, tuning=tuning)
        queries = learner.embed(model, holdout.inputs)
        arrivals = store.num_offered + np.arange(len(holdout))
        store.add(queries, holdout.labels)
        tuning = tune(
            store,
            settings,
            embeddings=queries,
            model=learner.predict(model, holdout.inputs),
            labels=holdout.labels,
            arrivals=arrivals,
        )
        return cls(model=model, store=store, tuning=tuning)

    def predict(self, learner: Learner, inputs: npt.NDArray[np.float32]) -> Probabilities:
        """Return λ p_kNN + (1 - λ) p_model. Shape (num_examples, num_classes)."""
        queries = learner.embed(self.model, inputs)
        return self.tuning.blend.predict(self.store, queries, learner.predict(self.model, inputs))
