"""FedAvg: one model for all, averaged after local steps.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
2017, algorithm 1. A round at peer k: θ_k ← local steps from θ; then θ ← Σ_k n_k / n θ_k.

Decided here: all peers take part in every round. The paper steps with SGD; an optimizer with state,
such as Adam, keeps it at the peer from round to round, while the model under it is replaced by the
average. Buffers, such as BatchNorm's statistics, are averaged like parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peer.learner import Batch, Learner
from protocol.tensors import Tensors
from sim.baselines.arithmetic import average
from sim.cohort import Budget, Member, Outcome, Spending


def fedavg(members: Sequence[Member], budget: Budget, rng: np.random.Generator) -> Outcome:
    """Train one model together."""
    learners = [member.new_learner() for member in members]
    model, spending = train_global(members, learners, budget)
    return Outcome.of_models(learners, [model] * len(learners), spending)


def train_global(
    members: Sequence[Member], learners: Sequence[Learner], budget: Budget, *, full: bool = True
) -> tuple[Tensors, list[Spending]]:
    """Return the global model, and what each member spent on it.

    With `full` it trains on the holdout, too.
    """
    model = learners[0].parameters()
    size = model.buffer.nbytes
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full) for step in steps]
        model = average(members, [learner.train(model, batches) for learner in learners])
        for spent in spending:
            spent.add(gradients=len(batches), sent=size, received=size)
    return model, spending
