"""FedFomo: each peer averages the models that help it on its holdout.

Source: Zhang et al., "Personalized Federated Learning with First Order Model Optimization", 2021,
equations 3 and 4. With θ_i before a round's local steps and θ_n, of any peer n, after them,

    w_in ∝ max((L_i(θ_i) - L_i(θ_n)) / ‖θ_n - θ_i‖, 0),    θ_i ← θ_i + Σ_n w_in (θ_n - θ_i)

over the downloaded models and the peer's own; L_i is the loss on i's holdout, which isn't trained
on. Whom to download: those of highest affinity p_in, the sum over all rounds of w_in before the
max; with probability ε, for each download, somebody at random.

Decided here: when no model is better than θ_i, a peer keeps what its own steps made. By the letter
it would undo them, and with a holdout of a dozen examples, on which an overconfident model's loss
grows while its accuracy does, too, it would stop learning for good; the rule here is the better
baseline. The holdout is the split's, 20 % as in FedeRiCo's paper. ‖·‖ is the Euclidean norm over
the trainable parameters. What is added to affinities is scaled to absolute values of sum 1. They
begin at 0, so that strangers come before peers that have hurt, ties in random order; ε falls round
by round and four models are downloaded, both as in the authors' code. The optimizer's state stays
at the peer, where the authors begin it anew each round. The weight matrix is the mean of all
rounds'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peer.algorithm import Fraction, Natural, Nonnegative, average_models, trainable
from peer.learner import Batch, Learner
from protocol.tensors import Tensors
from sim.cohort import Budget, Member, Outcome, Spending

Row = npt.NDArray[np.float64]
"""One number for each member. Shape (num_members,)."""
Matrix = npt.NDArray[np.float64]
"""A row for each member. Shape (num_members, num_members)."""


def fedfomo(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    downloads: Natural = 4,
    epsilon: Fraction = 0.3,
    epsilon_decay: Nonnegative = 0.05,
) -> Outcome:
    """Train every member's model and let it move towards those that help.

    Args:
        members: The peers.
        budget: What they may spend.
        rng: Draws whom to download.
        downloads: M, models downloaded a round.
        epsilon: ε, the probability that a download is of anybody.
        epsilon_decay: How much ε falls with each round, down to 0.
    """
    learners = [member.new_learner() for member in members]
    models = [learner.parameters() for learner in learners]
    size = models[0].buffer.nbytes
    affinities = np.zeros((len(members), len(members)))
    totals = np.zeros_like(affinities)
    spending = [Spending() for _ in members]
    for number, steps in enumerate(budget.rounds(members)):
        batches = [Batch(step) for step in steps]
        pairs = zip(learners, models, strict=True)
        trained = [learner.train(model, batches) for learner, model in pairs]
        chance = max(epsilon - epsilon_decay * number, 0.0)
        helpful = np.zeros_like(affinities)
        for place, learner in enumerate(learners):
            chosen = choose(place, affinities[place], downloads, chance, rng)
            helpful[place] = helpfulness(learner, models[place], trained, [place, *chosen])
            spending[place].add(gradients=len(batches), sent=size, received=len(chosen) * size)
        affinities += helpful
        models, weights = combine(members, helpful, trained)
        totals += weights
    mean_weights = totals / totals.sum(axis=1, keepdims=True)
    return Outcome.of_models(learners, models, spending, mean_weights)


def choose(
    place: int, affinities: Row, downloads: int, epsilon: float, rng: np.random.Generator
) -> list[int]:
    """Choose whose models to download: by affinity, or with probability ε anybody's."""
    others = [other for other in rng.permutation(len(affinities)).tolist() if other != place]
    chosen: list[int] = []
    for _ in range(min(downloads, len(others))):
        anybody = rng.random() < epsilon
        other = others[0] if anybody else max(others, key=affinities.__getitem__)
        others.remove(other)
        chosen.append(other)
    return sorted(chosen)


def helpfulness(
    learner: Learner, before: Tensors, trained: Sequence[Tensors], candidates: Sequence[int]
) -> Row:
    """Return (L(before) - L(θ_n)) / ‖θ_n - before‖ of each candidate n, 0 of all others.

    Absolute values are scaled to sum to 1, unless all are 0.
    """
    loss, origin = learner.measure(before).loss, trainable(before)
    helpful = np.zeros(len(trained))
    for candidate in candidates:
        distance = float(np.linalg.norm(trainable(trained[candidate]) - origin))
        gain = loss - learner.measure(trained[candidate]).loss
        if distance > 0 and math.isfinite(gain / distance):  # else a diverged model would spread
            helpful[candidate] = gain / distance
    total = np.abs(helpful).sum()
    return helpful / total if total > 0 else helpful


def combine(
    members: Sequence[Member], helpful: Matrix, trained: Sequence[Tensors]
) -> tuple[list[Tensors], Matrix]:
    """Return each member's next model, and the weights w that made it."""
    by_peer = {member.peer_id: model for member, model in zip(members, trained, strict=True)}
    weights = np.maximum(helpful, 0.0)
    alone = np.flatnonzero(weights.sum(axis=1) == 0.0)
    weights[alone, alone] = 1.0
    weights /= weights.sum(axis=1, keepdims=True)
    models = []
    for row in weights.tolist():
        pairs = zip(by_peer, row, strict=True)
        models.append(average_models({peer_id: w for peer_id, w in pairs if w > 0}, by_peer))
    return models, weights
