"""Ditto: a personal model beside the global one, pulled towards it.

Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", 2021,
algorithm 1. The global model w is trained by FedAvg. In the same round, with the w that the round
began with, peer k takes as many steps on its personal model:

    v_k ← v_k - η (∇F_k(v_k) + λ (v_k - w)).

Decided here: both models see the same batches, and each has an optimizer of its own, whose state
stays at the peer; what Adam is fed is the whole bracket. The paper lets each peer choose λ from
0.1, 1 and 2 on validation data; here one λ holds for all, so that nothing needs a holdout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peer.algorithm import Nonnegative, trainable
from peer.learner import Batch, Learner
from protocol.tensors import Tensors
from sim.baselines.arithmetic import average
from sim.cohort import Budget, Member, Outcome, Spending


def ditto(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    lam: Nonnegative = 0.1,
) -> Outcome:
    """Train a global model together and personal ones near it.

    Args:
        members: The peers.
        budget: What they may spend on each of the two models.
        rng: Unused: nothing is drawn.
        lam: λ, how strongly a personal model is pulled; 0 is learning alone.
    """
    learners = [member.new_learner() for member in members]
    personal = [member.new_learner() for member in members]
    model = learners[0].parameters()
    size = model.buffer.nbytes
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        for learner in personal:
            train_near(learner, model, batches, lam)
        model = average(members, [learner.train(model, batches) for learner in learners])
        for spent in spending:
            spent.add(gradients=2 * len(batches), sent=size, received=size)
    return Outcome.of_models(personal, [learner.parameters() for learner in personal], spending)


def train_near(learner: Learner, center: Tensors, batches: Sequence[Batch], lam: float) -> None:
    """Take local steps on the own model, each pulled towards the center."""
    towards = trainable(center)
    own = learner.parameters()
    for batch in batches:
        gradient = learner.differentiate(own, batch, own=True).tensors
        pulled = gradient.flat_f32() + np.float32(lam) * (trainable(own) - towards)
        own = learner.step(Tensors(gradient.layout, pulled.view(np.uint8)))
