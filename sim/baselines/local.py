"""Local-only: every peer trains alone on all of its training examples.

It is the baseline that no peer may fall below. Its holdout is trained on, too: nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peer.learner import Batch
from sim.cohort import Budget, Member, Outcome, Spending


def local(members: Sequence[Member], budget: Budget, rng: np.random.Generator) -> Outcome:
    """Train every member alone."""
    learners = [member.new_learner() for member in members]
    for steps in budget.rounds(members):
        for learner in learners:
            learner.train(None, [Batch(step, full=True) for step in steps])
    spending = [Spending(gradients=budget.steps) for _ in members]
    return Outcome.of_models(learners, [learner.parameters() for learner in learners], spending)
