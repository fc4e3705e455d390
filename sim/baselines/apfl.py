"""APFL: each peer mixes a personal with the global model, in a proportion that it learns.

Source: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, algorithm 1. With
v̄_i = alpha_i v_i + (1 - alpha_i) w_i, a step at peer i is, all from the values before it,

    w_i ← w_i - η ∇f_i(w_i),    v_i ← v_i - η alpha_i ∇f_i(v̄_i),
    alpha_i ← alpha_i - η_alpha ⟨v_i - w_i, ∇f_i(v̄_i)⟩, clipped to [0, 1];

at the end of a round w_i becomes the average of all. Prediction: v̄_i.

Decided here: both gradients are of one batch, and v_i and w_i have an optimizer each, whose state
stays at the peer. The paper shares η among all three; alpha_i takes plain steps of a size of its
own, since η belongs to the optimizer. Averages are weighted by local size. alpha_i begins at 1/2,
as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peer.algorithm import Fraction, Nonnegative, average_models, trainable
from peer.learner import Batch, Learner
from protocol.messages import PeerId
from protocol.tensors import Tensors
from sim.baselines.arithmetic import average
from sim.cohort import Budget, Member, Outcome, Spending

PERSONAL, GLOBAL = PeerId("personal"), PeerId("global")


def apfl(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    alpha: Fraction = 0.5,
    alpha_rate: Nonnegative = 0.01,
) -> Outcome:
    """Train a global model together, and personal ones to be mixed with it.

    Args:
        members: The peers.
        budget: What they may spend on each of the two models.
        rng: Unused: nothing is drawn.
        alpha: What every alpha_i begins with; 1 is learning alone, 0 is FedAvg.
        alpha_rate: η_alpha; 0 leaves alpha_i as it is.
    """
    pairs = [_Pair(member.new_learner(), member.new_learner(), alpha) for member in members]
    model = pairs[0].shared.parameters()
    size = model.buffer.nbytes
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        model = average(members, [pair.train(model, batches, alpha_rate) for pair in pairs])
        for spent in spending:
            spent.add(gradients=2 * len(batches), sent=size, received=size)
    personal = [pair.personal for pair in pairs]
    mixed = [mix(pair.alpha, pair.personal.parameters(), model) for pair in pairs]
    return Outcome.of_models(personal, mixed, spending)


def mix(alpha: float, personal: Tensors, shared: Tensors) -> Tensors:
    """Return v̄ = alpha v + (1 - alpha) w."""
    weights = {PERSONAL: alpha, GLOBAL: 1.0 - alpha}
    return average_models(weights, {PERSONAL: personal, GLOBAL: shared})


@dataclass(slots=True)
class _Pair:
    """One peer's two models, and their proportion."""

    personal: Learner
    shared: Learner
    alpha: float

    def train(self, model: Tensors, batches: Sequence[Batch], alpha_rate: float) -> Tensors:
        """Take local steps, the shared model's from the average; return the shared model."""
        own, shared = self.personal.parameters(), self.shared.train(model, ())
        for batch in batches:
            mixed = mix(self.alpha, own, shared)
            gradient = self.personal.differentiate(mixed, batch, own=True).tensors
            slope = float(np.dot(trainable(own) - trainable(shared), gradient.flat_f32()))
            scaled = np.float32(self.alpha) * gradient.flat_f32()
            own = self.personal.step(Tensors(gradient.layout, scaled.view(np.uint8)))
            shared = self.shared.train(None, (batch,))
            self.alpha = min(max(self.alpha - alpha_rate * slope, 0.0), 1.0)
        return shared
