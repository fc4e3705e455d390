"""IFCA: k models; each peer trains the one that fits its data best.

Source: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", 2020, algorithm 1
with model averaging. A round at peer i: ĵ = argmin_j F_i(θ_j) with F_i the mean loss on i's own
training examples; local steps from θ_ĵ; then θ_j becomes the average of what its choosers made,
and stays as it is when nobody chose it.

IFCA needs starts that differ, and fails from unlucky ones. Decided here: the k models start from
other draws of the common initial parameters (see `shuffled`); several such starts run side by side,
and the one of least final training loss, Σ_i n_i min_j F_i(θ_j), is kept. All of them are paid for.
Averages are weighted by local size, as in `fedavg`, whose word on the optimizer's state holds here,
too, whichever model a peer chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from peer.algorithm import Count
from peer.learner import Batch, Learner
from protocol.tensors import Tensors
from sim.baselines.arithmetic import average_clusters, cluster_weights, example_losses, shuffled
from sim.cohort import Budget, Member, Outcome, Spending

Start = Callable[[Tensors, int, np.random.Generator], list[Tensors]]
"""Makes k models to start from, given the common initial one."""


def draw_start(initial: Tensors, count: int, rng: np.random.Generator) -> list[Tensors]:
    """Draw models to start from, the common initial one among them."""
    return [initial, *(shuffled(initial, rng) for _ in range(count - 1))]


def ifca(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    clusters: Count = 4,
    starts: Count = 3,
    start: Start = draw_start,
) -> Outcome:
    """Train k models from several starts and keep the best start's.

    Args:
        members: The peers.
        budget: What they may spend on each start.
        rng: Draws the starts.
        clusters: k, the number of models.
        starts: How many starts to try.
        start: Makes one.
    """
    attempts = [_Attempt.begin(members, clusters, start, rng) for _ in range(starts)]
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        for attempt in attempts:
            size = attempt.models[0].buffer.nbytes
            attempt.do_round(members, batches)
            for spent in spending:
                spent.add(gradients=len(batches), sent=size, received=clusters * size)
    best = min(attempts, key=lambda attempt: attempt.choose(members))
    final = [best.models[choice] for choice in best.choices]
    weights = cluster_weights(members, best.choices)
    return Outcome.of_models(best.learners, final, spending, weights)


@dataclass(slots=True)
class _Attempt:
    """IFCA from one start."""

    learners: list[Learner]
    models: list[Tensors]
    choices: list[int]

    @classmethod
    def begin(
        cls, members: Sequence[Member], clusters: int, start: Start, rng: np.random.Generator
    ) -> _Attempt:
        learners = [member.new_learner() for member in members]
        return cls(learners, start(learners[0].parameters(), clusters, rng), [0] * len(members))

    def do_round(self, members: Sequence[Member], batches: Sequence[Batch]) -> None:
        self.choose(members)
        trained = [
            learner.train(self.models[choice], batches)
            for learner, choice in zip(self.learners, self.choices, strict=True)
        ]
        for choice, model in average_clusters(members, trained, self.choices).items():
            self.models[choice] = model

    def choose(self, members: Sequence[Member]) -> float:
        """Let each member choose its model; return the sum of their losses."""
        total = 0.0
        for place, (member, learner) in enumerate(zip(members, self.learners, strict=True)):
            train = member.split.train
            losses = [float(example_losses(learner, m, train).sum()) for m in self.models]
            self.choices[place] = int(np.argmin(losses))
            total += min(losses)
        return total
