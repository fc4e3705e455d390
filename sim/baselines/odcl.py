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

from collections.abc import Mapping, Sequence

import numpy as np

from peer.algorithm import Vector
from peer.clustering.choice import Choice, choose
from peer.clustering.interface import Clustering, in_order_of_appearance
from peer.clustering.span import gather
from peer.learner import Batch
from protocol.messages import PeerId
from protocol.tensors import Tensors
from sim.baselines.arithmetic import average_clusters, cluster_weights, trainable
from sim.cohort import Budget, Member, Outcome, Spending


def odcl(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    start_steps: int = 0,
    clustering: Choice = "linkage",
    num_clusters: int = 0,
) -> Outcome:
    """Train alone, cluster once, and average.

    Args:
        members: The peers.
        budget: What they may spend.
        rng: Draws the clustering's starts, if it has any.
        start_steps: Local steps before the exchange, up to a whole round; 0 leaves none for after
            it, as in the paper.
        clustering: How to cluster.
        num_clusters: See `choose`.
    """
    learners = [member.new_learner() for member in members]
    initial = learners[0].parameters()
    cluster = choose(clustering, num_clusters)
    alone = start_steps or budget.steps
    models = [initial] * len(members)
    clusters: list[int] = []
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        models = [learner.train(m, batches) for learner, m in zip(learners, models, strict=True)]
        meets = steps.stop >= min(alone, budget.steps)
        if meets:
            clusters = clusters or cluster_models(members, models, initial, cluster, rng)
            averages = average_clusters(members, models, clusters)
            models = [averages[number] for number in clusters]
        size = initial.buffer.nbytes if meets else 0
        for spent in spending:
            spent.add(gradients=len(batches), sent=size, received=size)
    return Outcome.of_models(learners, models, spending, cluster_weights(members, clusters))


def cluster_models(
    members: Sequence[Member],
    models: Sequence[Tensors],
    initial: Tensors,
    cluster: Clustering,
    rng: np.random.Generator,
) -> list[int]:
    """Return the cluster of each member, numbered as they appear, by the direction of its update.

    Args:
        members: All of them.
        models: θ_i of each.
        initial: θ_0, where all started.
        cluster: What clusters.
        rng: As `cluster` takes it.
    """
    start = trainable(initial)
    directions: Mapping[PeerId, Mapping[str, Vector]] = {
        member.peer_id: {"direction": _direction(trainable(model) - start)}
        for member, model in zip(members, models, strict=True)
    }
    gathered = gather(directions)
    sizes = {member.peer_id: float(member.num_train) for member in members}
    found = cluster(
        gathered.points, np.array([sizes[peer_id] for peer_id in gathered.peer_ids]), rng
    )
    numbers = dict(zip(gathered.peer_ids, found.labels.tolist(), strict=True))
    alone = {peer_id: found.number + place for place, peer_id in enumerate(gathered.left_out)}
    labels = in_order_of_appearance((numbers | alone)[member.peer_id] for member in members)
    result: list[int] = labels.tolist()
    return result


def _direction(update: Vector) -> Vector:
    """Scale to length 1; no update has no direction."""
    length = float(np.linalg.norm(update))
    return update if length == 0.0 else update / np.float32(length)
