"""FedAvg+: the global model, tuned by one local epoch at each peer.

Source: Jiang et al., "Improving Federated Learning Personalization via Model Agnostic Meta
Learning", 2019; one epoch as in Marfoq et al., "Federated Multi-Task Learning under a Mixture of
Distributions", 2021, whom FedeRiCo's paper follows.

Decided here: the epoch comes on top of the budget and is counted in the gradients. It is as many
batches as hold all examples, the last one filled up from the next epoch, with the optimizer as
FedAvg left it at the peer: a fresh Adam would begin with steps of full size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peer.learner import Batch, Learner
from sim.baselines.fedavg import train_global
from sim.cohort import Budget, Member, Outcome


def fedavg_plus(members: Sequence[Member], budget: Budget, rng: np.random.Generator) -> Outcome:
    """Train one model together, then a copy of it alone."""
    learners = [member.new_learner() for member in members]
    model, spending = train_global(members, learners, budget)
    tuned = []
    for member, learner, spent in zip(members, learners, spending, strict=True):
        epoch = next_epoch(member, learner, budget.steps)
        tuned.append(learner.train(model, epoch))
        spent.add(gradients=len(epoch))
    return Outcome.of_models(learners, tuned, spending)


def next_epoch(member: Member, learner: Learner, steps: int) -> list[Batch]:
    """Return the batches of the first epoch that begins after so many steps."""
    batch_size = len(learner.positions(Batch(0, full=True)))
    whole = member.num_train // batch_size
    first = -(-steps // whole) * whole
    length = -(-member.num_train // batch_size)
    return [Batch(number, full=True) for number in range(first, first + length)]
