"""The cluster oracle: FedAvg inside the true clusters, which no honest method can know.

A round is FedAvg's (see `fedavg`), with one model and one average for each true group. A member
whose data drift goes on from the model of its new group. It says what could be gained by knowing
the groups and averaging inside them; where data are no groups, others may beat it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peer.learner import Batch
from sim.baselines.arithmetic import average_clusters, cluster_weights
from sim.cohort import Budget, Member, Outcome, Spending


def oracle(members: Sequence[Member], budget: Budget, rng: np.random.Generator) -> Outcome:
    """Train one model for each true group."""
    learners = [member.new_learner() for member in members]
    initial = learners[0].parameters()
    size = initial.buffer.nbytes
    models = {member.group: initial for member in members}
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        trained = [
            learner.train(models.get(member.group, initial), batches)
            for member, learner in zip(members, learners, strict=True)
        ]
        models |= average_clusters(members, trained, [member.group for member in members])
        for spent in spending:
            spent.add(gradients=len(batches), sent=size, received=size)
    groups = [member.group for member in members]
    final = [models.get(group, initial) for group in groups]
    return Outcome.of_models(learners, final, spending, cluster_weights(members, groups))
