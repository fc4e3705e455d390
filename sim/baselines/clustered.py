"""Clustered FL: FedAvg that splits a cluster in two when its members' updates oppose each other.

Source: Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task
Optimization under Privacy Constraints", 2019. All peers begin in one cluster. A round at peer i of
cluster c: Δ_i = local steps from θ_c, less θ_c; then θ_c ← θ_c + Σ_i n_i / n_c Δ_i. A cluster is
at a point that suits it as a whole but not its members, and is split, when both

    ‖Σ_i n_i / n_c Δ_i‖ < ε1    and    max_i ‖Δ_i‖ > ε2.

The halves minimize a, the largest cosine similarity between a member of one and a member of the
other (their algorithm 1): pairs are joined from the most similar down until two parts are left.
The paper lets one ask, too, that √((1 - a) / 2) > g for a bound g on the noise in the updates.

Decided here: ε1 and ε2 are relative, since norms depend on the model, the step size and the number
of steps. The mean update must be below `eps1` times the largest update in the cluster this round:
1/4, which is what the authors' code says in absolute numbers, 0.4 against 1.6. That largest update
must be above `eps2` times the largest that anybody made in any round. g² is 1/2, so that a must be
negative: where peers are alike, updates end in noise, which cancels out, too, without opposing
anything. Clusters of two are not split, as in the authors' code. A round that splits averages
within the halves. Averages and the optimizer's state are as in `fedavg`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peer.algorithm import Nonnegative, trainable
from peer.learner import Batch
from sim.baselines.arithmetic import average_clusters, cluster_weights
from sim.cohort import Budget, Member, Outcome, Spending

Updates = npt.NDArray[np.float32]
"""Shape (num_members, num_parameters)."""


def clustered(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    eps1: Nonnegative = 0.25,
    eps2: Nonnegative = 0.5,
) -> Outcome:
    """Train one model for each cluster, splitting clusters on the way.

    Args:
        members: The peers.
        budget: What they may spend.
        rng: Unused: nothing is drawn.
        eps1: Bound on the mean update, relative to the cluster's largest.
        eps2: Bound on the largest update, relative to the largest ever.
    """
    learners = [member.new_learner() for member in members]
    clusters = [0] * len(members)
    models = {0: learners[0].parameters()}
    size = models[0].buffer.nbytes
    criterion = Criterion(eps1, eps2)
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        before = [models[cluster] for cluster in clusters]
        trained = [learner.train(b, batches) for learner, b in zip(learners, before, strict=True)]
        updates = [trainable(a) - trainable(b) for a, b in zip(trained, before, strict=True)]
        sizes = [member.num_train for member in members]
        clusters = criterion.split(clusters, np.stack(updates), sizes)
        models = average_clusters(members, trained, clusters)
        for spent in spending:
            spent.add(gradients=len(batches), sent=size, received=size)
    final = [models[cluster] for cluster in clusters]
    return Outcome.of_models(learners, final, spending, cluster_weights(members, clusters))


@dataclass(slots=True)
class Criterion:
    """Tells when to split, and remembers the largest update so far."""

    eps1: float
    eps2: float
    largest_ever: float = 0.0

    def split(self, clusters: Sequence[int], updates: Updates, sizes: Sequence[int]) -> list[int]:
        """Return the clusters after a round; a new one has the next free number.

        Args:
            clusters: The cluster of each member so far, numbered from 0.
            updates: Δ_i of each.
            sizes: n_i of each.
        """
        norms = np.linalg.norm(updates, axis=1)
        self.largest_ever = max(self.largest_ever, float(norms.max()))
        result = list(clusters)
        for cluster in sorted(set(clusters)):
            inside = [place for place, number in enumerate(clusters) if number == cluster]
            mean = np.average(updates[inside], axis=0, weights=[sizes[place] for place in inside])
            largest = float(norms[inside].max())
            stationary = float(np.linalg.norm(mean)) < self.eps1 * largest
            if stationary and largest > self.eps2 * self.largest_ever and len(inside) > 2:
                half, similarity = bipartition(updates[inside])
                new = max(result) + 1
                for row in half if similarity < 0 else ():
                    result[inside[row]] = new
        return result


def bipartition(updates: Updates) -> tuple[list[int], float]:
    """Split by cosine similarity, so that the largest across the halves is as small as can be.

    Returns:
        The rows of the half without row 0, and that similarity.
    """
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    directions = updates / np.maximum(norms, np.finfo(np.float32).tiny)
    similarities = directions @ directions.T
    pairs = itertools.combinations(range(len(updates)), 2)
    part = list(range(len(updates)))
    for first, second in sorted(pairs, key=lambda pair: -similarities[pair]):
        joined, absorbed = part[first], part[second]
        if len(set(part)) == 2 and joined != absorbed:
            break
        part = [joined if number == absorbed else number for number in part]
    half = [row for row, number in enumerate(part) if number != part[0]]
    return half, float(similarities[first, second])
