"""kNN-Per: the global model, blended with each peer's memory of its own examples.

Source: Marfoq et al., "Personalized Federated Learning through Local Memorization", 2022.

Decided here: the global model trains on each peer's examples but the holdout, on which the peer
then chooses λ; the memory holds both. The paper has validation data besides, and its released code
chooses one λ for all on test data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from peer.interpolation import KnnSettings
from peer.personalization import PersonalizedModel
from sim.baselines.fedavg import train_global
from sim.cohort import Budget, Member, Outcome

DEFAULT = KnnSettings()


def knn_per(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    settings: KnnSettings = DEFAULT,
) -> Outcome:
    """Train one model together; then each peer remembers."""
    learners = [member.new_learner() for member in members]
    model, spending = train_global(members, learners, budget, full=False)
    predict = []
    for member, learner in zip(members, learners, strict=True):
        personalized = PersonalizedModel.build(learner, model, member.split, settings, rng)
        predict.append(partial(personalized.predict, learner))
    return Outcome(predict=predict, spending=spending)
