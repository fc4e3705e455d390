"""FedeRiCo's equations as functions of numbers and arrays.

Source: "Find Your Friends: Personalized Federated Learning with the Right Collaborators". Peer i
owns the model φ_i; l_ij is the loss of φ_j on i's data, L̂_ij its average, w_ij the collaboration
weight, g_ij the gradient that i makes for φ_j. Every reduction over peers runs in sorted peer-id
order, so that the order of arrival never changes a float.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.messages import PeerId

Vector = npt.NDArray[np.float32]


Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class AlgorithmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FedeRiCo's settings; `PROFILES` holds what a profile presets."""

    profile: Literal["default", "paper"] = "default"
    """Presets for the settings below that aren't given: `default`, or the literal `paper`."""
    num_neighbors: Natural = 3
    """M, neighbors sampled a round. More find friends sooner and cost more traffic; 0 is learning
    alone. Paper: 3."""
    epsilon: Fraction = 0.3
    """Probability of sampling uniformly. 1 explores only, 0 never does. Paper: 0.3."""
    beta: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.6
    """How much of the loss average is the newest loss. Paper: 0.6."""
    temperature: Positive = 0.3
    """T of softmax(-loss/T). Small makes weights one-hot, large makes them even. Paper: 1."""
    loss: Literal["mean", "sum"] = "mean"
    """Whether the E-step's loss is the mean over the examples, or their sum. Paper: sum."""
    measure_on: Literal["holdout", "train"] = "holdout"
    """Which examples the E-step measures on; a holdout is never trained on. Paper: train."""
    holdout_fraction: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.2
    """Part of the local training examples that is the holdout, when measuring on it."""
    anchor: bool = True
    """Whether a peer trains its own model with weight 1 rather than w_ii. Paper: false."""
    defended: bool = True
    """Whether to clip remote gradients to the own norm and refuse opposed ones. Paper: false."""
    min_gradient_weight: Fraction = 0.05
    """Gradients of a smaller collaboration weight are not made: Adam would make vanishing ones full
    steps. The paper names no bound."""
    min_prediction_weight: Fraction = 0.01
    """Models of a smaller weight are left out of the mixture, and not kept."""
    staleness: Natural = 5
    """Gradients made on a model more than this many rounds old are refused."""
    refresh_after: Annotated[int, msgspec.Meta(ge=1)] = 10
    """Kept models this many rounds old are fetched again, to stay right in the mixture."""
    survey: Natural = 16
    """Most peers that a newcomer measures in its first round, to find its friends at once."""
    adopt_after: Natural = 10
    """A newcomer starts from the best measured model that is at least this many rounds old; with 0
    it never does, as in the paper."""


PROFILES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "paper": {
        "temperature": 1.0,
        "loss": "sum",
        "measure_on": "train",
        "anchor": False,
        "defended": False,
        "survey": 0,
        "adopt_after": 0,
    },
}


def update_loss_average(average: float | None, loss: float, beta: float) -> float | None:
    """Fold a new measurement into the loss average: L̂ ← (1 - β) L̂ + β l (section 3.3).

    A large β favors the new loss. The first measurement sets the average. A loss that is not
    finite forgets the peer: None, as if never measured, so that no average ever holds a NaN.
    """
    if not math.isfinite(loss):
        return None
    return loss if average is None else (1.0 - beta) * average + beta * loss


def collaboration_weights(
    loss_averages: Mapping[PeerId, float], temperature: float
) -> dict[PeerId, float]:
    """Return w_j = softmax(-L̂_j / T) over the peers given (equation 3 with a flat prior).

    Args:
        loss_averages: Finite loss averages by peer; peers never measured are absent.
        temperature: T > 0; 1 is the paper's, with losses summed over the local data.

    Returns:
        Weights that sum to 1, in peer-id order; empty when nothing was measured.
    """
    if not loss_averages:
        return {}
    peer_ids = sorted(loss_averages)
    best = min(loss_averages.values())
    scores = [math.exp((best - loss_averages[peer_id]) / temperature) for peer_id in peer_ids]
    total = math.fsum(scores)
    return {peer_id: score / total for peer_id, score in zip(peer_ids, scores, strict=True)}


def prune_weights(weights: Mapping[PeerId, float], minimum: float) -> dict[PeerId, float]:
    """Drop weights under `minimum` and scale the rest to sum to 1; the largest always stays."""
    largest = max(weights.values(), default=0.0)
    kept = {
        peer_id: weights[peer_id]
        for peer_id in sorted(weights)
        if weights[peer_id] >= min(minimum, largest)
    }
    total = math.fsum(kept.values())
    return {peer_id: weight / total for peer_id, weight in kept.items()}


def sample_neighbors(
    candidates: Iterable[PeerId],
    weights: Mapping[PeerId, float],
    count: int,
    epsilon: float,
    rng: np.random.Generator,
) -> tuple[PeerId, ...]:
    """Sample a round's neighbors ε-greedily (section 3.3, "Sampling scheme").

    One coin a round: with probability ε all are drawn uniformly, otherwise those of highest weight
    are taken. Ties, such as peers never measured, are broken at random.

    Args:
        candidates: The reachable peers, self not among them.
        weights: Collaboration weights; a peer that is absent counts as 0.
        count: M, the number of neighbors to sample.
        epsilon: Probability of sampling uniformly, in [0, 1].
        rng: Draws exactly one number and one permutation, whatever the outcome.

    Returns:
        min(count, number of candidates) distinct peers, in peer-id order.
    """
    peer_ids = sorted(candidates)
    uniform = rng.random() < epsilon
    shuffled = [peer_ids[position] for position in rng.permutation(len(peer_ids))]
    if not uniform:
        shuffled.sort(key=lambda peer_id: -weights.get(peer_id, 0.0))
    return tuple(sorted(shuffled[:count]))


class Verdict(StrEnum):
    """What became of a gradient that arrived."""

    APPLIED = "applied"
    NOT_FINITE = "not_finite"
    STALE = "stale"
    OPPOSED = "opposed"
    DEPARTED = "departed"


@dataclass(frozen=True, slots=True)
class WeightedGradient:
    """A remote gradient, not yet multiplied by its weight w_ji.

    Attributes:
        weight: The sender's collaboration weight, as claimed.
        gradient: Shape (num_parameters,), f32.
    """

    weight: float
    gradient: Vector


def combine_gradients(
    own: Vector | None,
    own_weight: float,
    remote: Mapping[PeerId, WeightedGradient],
    *,
    defended: bool,
) -> tuple[Vector | None, dict[PeerId, Verdict]]:
    """Aggregate the M-step's gradient for the own model: Σ_j w_ji g_ji (equation 6).

    Remote weights are capped at 1. A gradient that is not finite is always refused. Defended, a
    gradient of negative cosine with the own one is refused and the others are clipped to the own
    one's norm, so that no single sender can outweigh the owner.

    Args:
        own: The owner's mean gradient, shape (num_parameters,), or None when it made none.
        own_weight: 1 when the model is anchored to its owner, else w_ii.
        remote: At most one gradient a sender.
        defended: Whether to clip and to test the cosine; without an own gradient there is nothing
            to compare with, and defended means that no remote one is used.

    Returns:
        The aggregate, or None when nothing contributed; and the verdict on each sender.
    """
    verdicts: dict[PeerId, Verdict] = {}
    own_norm = _norm(own) if own is not None else 0.0
    if own is None or not math.isfinite(own_norm):
        own, own_norm = None, 0.0
    total = np.float32(own_weight) * own if own is not None and own_weight > 0 else None
    for sender in sorted(remote):
        gradient = remote[sender].gradient
        norm = _norm(gradient)
        scale = min(remote[sender].weight, 1.0)
        if not math.isfinite(norm):
            verdicts[sender] = Verdict.NOT_FINITE
            continue
        if defended:
            if own is None or float(np.dot(own, gradient)) < 0.0:
                verdicts[sender] = Verdict.OPPOSED
                continue
            scale *= min(1.0, own_norm / norm) if norm > 0 else 1.0
        contribution = np.float32(scale) * gradient
        total = contribution if total is None else np.add(total, contribution, out=total)
        verdicts[sender] = Verdict.APPLIED
    return total, verdicts


def _norm(vector: Vector) -> float:
    """Euclidean norm; infinite or NaN exactly when something isn't finite, or overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(squared) if (squared := float(np.dot(vector, vector))) >= 0 else math.nan


def mix_predictions(
    weights: Mapping[PeerId, float],
    probabilities: Mapping[PeerId, npt.NDArray[np.float32]],
) -> npt.NDArray[np.float32]:
    """Predict with the mixture: ĥ_i(x) = Σ_j w_ij softmax(h_φj(x)), on probabilities.

    Args:
        weights: Weights that sum to 1 over the mixture's members.
        probabilities: Each member's, shape (num_examples, num_classes).

    Returns:
        Shape (num_examples, num_classes).
    """
    members = sorted(weights)
    mixed = np.float32(weights[members[0]]) * probabilities[members[0]]
    for peer_id in members[1:]:
        mixed += np.float32(weights[peer_id]) * probabilities[peer_id]
    return mixed
