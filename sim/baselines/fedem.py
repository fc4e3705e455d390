"""FedEM: every peer mixes the same few models in its own proportions.

Source: Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", 2021,
algorithm 1. There are M components θ_m; peer i holds the proportions π_i. A round at peer i:

    E-step   q_s(m) ∝ π_im exp(-l(h_θm(x_s), y_s)) for each of its training examples s,
    M-step   π_im = mean_s q_s(m); for each m, local steps on mean_s q_s(m) l(h_θm(x_s), y_s);

then each component is averaged, weighted by local size. Prediction: Σ_m π_im softmax(h_θm(x)).

Decided here: components start from different draws of the common initial parameters (see
`shuffled`), since equal ones would stay equal for ever; the authors seed them differently, too.
Posteriors are those at the round's start for all its steps, as in their code, and π_i is brought up
to date once more after the last average. Each component has an optimizer of its own at each peer,
whose state stays there. The paper steps with SGD, where a component of vanishing posterior stands
still; Adam would make it take full steps, so that a batch of mean posterior below `min_posterior`
leaves it alone, with its gradient neither made nor counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peer.algorithm import Count, Fraction, mix_predictions
from peer.learner import Batch, Learner, Probabilities
from protocol.messages import PeerId
from protocol.tensors import Tensors
from sim.baselines.arithmetic import average, example_losses, shuffled
from sim.cohort import Budget, Member, Outcome, Spending


def fedem(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    components: Count = 4,
    min_posterior: Fraction = 0.05,
) -> Outcome:
    """Train the components together and each member's proportions apart.

    Args:
        members: The peers.
        budget: What they may spend on each component.
        rng: Draws the components' initial parameters.
        components: M. FedeRiCo's paper compares with 4; FedEM's own has 3.
        min_posterior: Below it a component isn't trained on a batch.
    """
    mixtures = [_Mixture(member, components, min_posterior) for member in members]
    initial = mixtures[0].learners[0].parameters()
    models = [initial, *(shuffled(initial, rng) for _ in range(components - 1))]
    size = components * initial.buffer.nbytes
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        trained = [mixture.train(models, batches) for mixture in mixtures]
        models = [average(members, component) for component in zip(*trained, strict=True)]
        for mixture in mixtures:
            mixture.spending.add(sent=size, received=size)
    for mixture in mixtures:
        mixture.update(models)
    return Outcome(
        predict=[mixture.predict for mixture in mixtures],
        spending=[mixture.spending for mixture in mixtures],
    )


class _Mixture:
    """One peer's proportions, and its learner for each component."""

    def __init__(self, member: Member, components: int, min_posterior: float) -> None:
        self.learners = [member.new_learner() for _ in range(components)]
        self.spending = Spending()
        self._member = member
        self._min_posterior = min_posterior
        self._models: Sequence[Tensors] = ()
        self._proportions = np.full(components, 1 / components)

    def update(self, models: Sequence[Tensors]) -> npt.NDArray[np.float64]:
        """Do the E-step, and the M-step for π; return q. Shape (num_train, components)."""
        train = self._member.split.train
        losses = [example_losses(self.learners[0], model, train) for model in models]
        prior = np.log(np.maximum(self._proportions, np.finfo(np.float64).tiny))
        scores = prior - np.stack(losses, axis=1)
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        posteriors: npt.NDArray[np.float64] = exponentials / exponentials.sum(axis=1, keepdims=True)
        self._models, self._proportions = models, posteriors.mean(axis=0)
        return posteriors

    def train(self, models: Sequence[Tensors], batches: Sequence[Batch]) -> list[Tensors]:
        """Do both steps, and return the components after local steps."""
        weights = self.update(models).astype(np.float32)
        return [
            self._train_component(learner, model, batches, weights[:, component])
            for component, (learner, model) in enumerate(zip(self.learners, models, strict=True))
        ]

    def predict(self, inputs: npt.NDArray[np.float32]) -> Probabilities:
        """Predict with the mixture of the components."""
        names = [PeerId(f"{component:04d}") for component in range(len(self._models))]
        return mix_predictions(
            dict(zip(names, self._proportions.tolist(), strict=True)),
            {
                name: self.learners[0].predict(model, inputs)
                for name, model in zip(names, self._models, strict=True)
            },
        )

    def _train_component(
        self,
        learner: Learner,
        model: Tensors,
        batches: Sequence[Batch],
        weights: npt.NDArray[np.float32],
    ) -> Tensors:
        own = learner.train(model, ())
        for batch in batches:
            chosen = weights[learner.positions(batch)]
            if chosen.mean() >= self._min_posterior:
                gradient = learner.differentiate(own, batch, own=True, example_weights=chosen)
                own = learner.step(gradient.tensors)
                self.spending.add(gradients=1)
        return own
