"""ODCL: train alone, exchange models once, cluster them, average inside the clusters.

Source: Armacki, Bajović, Jakovetić, Kar, "One-Shot Federated Learning for Model Clustering and
Learning in Heterogeneous Environments", 2022. Each peer solves its own problem; one clustering of
the models θ_i says who belongs together; everyone ends with its cluster's average, weighted by n_i.

Decided here: a network's problem is never solved to the end, so that peers train for a number of
steps from the common initial parameters θ_0; what is clustered are the directions of the updates,
(θ_i - θ_0) / ‖θ_i - θ_0‖, since how far a peer gets depends on its data, too. Peers that train on
after the exchange do FedAvg inside their cluster: the clustering is a start then, and some forty
steps tell groups apart, long before the models are too far apart to be averaged.
A model that isn't finite belongs to no cluster, so that its owner goes on alone. Spending is that
of asking one peer to cluster: each model travels once, and each average back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peer.algorithm import ClusteringName, Natural
from peer.learner import Batch
from peer.oneshot import group
from sim.baselines.arithmetic import average_clusters, cluster_weights
from sim.cohort import Budget, Member, Outcome, Spending


def odcl(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    start_steps: Natural = 0,
    clustering: ClusteringName = "linkage",
    num_clusters: Natural = 0,
) -> Outcome:
    """Train alone, cluster once, and average.

    Args:
        members: The peers.
        budget: What they may spend.
        rng: Unused: nothing is drawn.
        start_steps: Local steps before the exchange, up to a whole round; 0 leaves none for after
            it, as in the paper.
        clustering: How to cluster.
        num_clusters: What it is told; 0 lets it find the number.
    """
    learners = [member.new_learner() for member in members]
    initial = learners[0].parameters()
    alone = start_steps or budget.steps
    models = [initial] * len(members)
    clusters: list[int] = []
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        models = [learner.train(m, batches) for learner, m in zip(learners, models, strict=True)]
        meets = steps.stop >= min(alone, budget.steps)
        if meets:
            if not clusters:
                groups, _ = group(
                    {m.peer_id: model for m, model in zip(members, models, strict=True)},
                    initial,
                    clustering=clustering,
                    num_clusters=num_clusters,
                    sizes={member.peer_id: member.num_train for member in members},
                )
                clusters = [groups.labels[member.peer_id] for member in members]
            averages = average_clusters(members, models, clusters)
            models = [averages[number] for number in clusters]
        size = initial.buffer.nbytes if meets else 0
        for spent in spending:
            spent.add(gradients=len(batches), sent=size, received=size)
    return Outcome.of_models(learners, models, spending, cluster_weights(members, clusters))
