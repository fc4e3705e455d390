"""D-PSGD: decentralized averaging with fixed neighbors.

Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017,
algorithm 1. Peers form a connected graph; a round at peer i: local steps on its own model x_i, then

    x_i ← Σ_j W_ij x_j,    W_ij = 1 / (1 + max(d_i, d_j)) for neighbors, W_ii = 1 - Σ_j W_ij

with the number d_i of i's neighbors: Metropolis weights (Xiao, Boyd, 2004), symmetric and doubly
stochastic on any graph, so that mixing keeps the mean of all models. Each peer predicts with x_i.

Decided here: the graph is the union of `rings` rings through all peers, each in an order of its own
drawn at random; the paper has one ring. The order of peers would be unfair: they may be numbered by
group. The paper mixes at every step and steps with SGD; here peers mix after each round's local
steps, and keep their optimizer's state. The mean isn't weighted by local size, which only the
stationary state of W could do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peer.algorithm import Count, average_models
from peer.learner import Batch
from protocol.tensors import Tensors
from sim.cohort import Budget, Member, Outcome, Spending

Matrix = npt.NDArray[np.float64]


def dpsgd(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    rings: Count = 1,
) -> Outcome:
    """Train every member's model and average it with its neighbors'.

    Args:
        members: The peers.
        budget: What they may spend.
        rng: Draws the graph.
        rings: How many rings make the graph: each gives a peer two neighbors.
    """
    learners = [member.new_learner() for member in members]
    matrix = metropolis_weights(draw_graph(len(members), rings, rng))
    models = [learner.parameters() for learner in learners]
    size = models[0].buffer.nbytes
    degrees = (matrix > 0).sum(axis=1) - 1
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        trained = [
            learner.train(model, batches) for learner, model in zip(learners, models, strict=True)
        ]
        models = gossip(members, matrix, trained)
        for spent, degree in zip(spending, degrees.tolist(), strict=True):
            spent.add(gradients=len(batches), sent=degree * size, received=degree * size)
    return Outcome.of_models(learners, models, spending, matrix)


def draw_graph(num_peers: int, rings: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Draw a connected graph: rings through all peers, symmetric, nobody its own neighbor.

    Shape (num_peers, num_peers).
    """
    graph = np.zeros((num_peers, num_peers), dtype=np.bool_)
    for _ in range(rings):
        order = rng.permutation(num_peers)
        graph[order, np.roll(order, 1)] = graph[np.roll(order, 1), order] = True
    np.fill_diagonal(graph, False)
    return graph


def metropolis_weights(graph: npt.NDArray[np.bool_]) -> Matrix:
    """Return W: symmetric, and each row sums to 1."""
    degrees = graph.sum(axis=1)
    matrix: Matrix = graph / (1.0 + np.maximum.outer(degrees, degrees))
    np.fill_diagonal(matrix, 1.0 - matrix.sum(axis=1))
    return matrix


def gossip(members: Sequence[Member], matrix: Matrix, models: Sequence[Tensors]) -> list[Tensors]:
    """Average each member's model with its neighbors': one multiplication by W."""
    by_peer = {member.peer_id: model for member, model in zip(members, models, strict=True)}
    return [
        average_models(
            {peer_id: weight for peer_id, weight in zip(by_peer, row, strict=True) if weight > 0},
            by_peer,
        )
        for row in matrix.tolist()
    ]
