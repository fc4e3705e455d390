"""FedeRiCo's equations as functions of numbers and arrays.

Source: "Find Your Friends: Personalized Federated Learning with the Right Collaborators". Peer i
owns the model φ_i; l_ij is the loss of φ_j on i's data, L̂_ij its average, w_ij the collaboration
weight, g_ij the gradient that i makes for φ_j. Every reduction over peers runs in sorted peer-id
order, so that the order of arrival never changes a float.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from peer.row import Row
from protocol.lowbit import Bits
from protocol.messages import PeerId
from protocol.tensors import Tensors

Vector = npt.NDArray[np.float32]

ClusteringName = Literal["linkage", "convex", "kmeans", "gradient"]
"""The clusterings of `peer.clustering` that settings can name."""


Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
Nonnegative = Annotated[float, msgspec.Meta(ge=0.0)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class AlgorithmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FedeRiCo's settings; `PROFILES` holds what a profile presets.

    Raises:
        ValueError: Two settings exclude each other.
    """

    profile: Literal["default", "thrifty", "odcl", "newcomer", "paper"] = "default"
    """Presets for the settings below that aren't given: `default`; `thrifty`, which averages models
    for about half the traffic; `odcl`, which averages inside the clusters of a warm start;
    `newcomer`, which with `rounds = 1` predicts by the models of its best collaborators and, if one
    of them answers and beats its fresh one, makes no gradient; or the literal `paper`."""
    num_neighbors: Natural = 3
    """M, neighbors sampled a round. More find friends sooner and cost more traffic; 0 is learning
    alone. Paper: 3."""
    epsilon: Fraction = 0.0
    """Probability that a round explores: samples strangers, and trains with them in place of its
    best. 1 explores only; with 0 strangers are only measured, see `probes`. Paper: 0.3."""
    exploration: Literal["friends", "uniform"] = "friends"
    """Whom a round looks at beside its best neighbors. `friends` gives the places that none earns,
    and all in a round that explores, to friends of friends, to peers that come again for the own
    model and to peers never measured; `uniform` lets the best have all places, however bad, and
    samples anybody in a round that explores. Paper: uniform."""
    probes: Annotated[float, msgspec.Meta(ge=0.0, le=64.0)] = 2.0
    """Models a round that are fetched only to be measured, while some place is not earned and peers
    are unknown. More find friends in fewer rounds, for about as many models in all. Paper: 0."""
    min_probes: Annotated[float, msgspec.Meta(ge=0.0, le=64.0)] = 0.1
    """What the number of probes falls to; below 1 it is a probability. Paper: 0."""
    beta: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.6
    """How much of the loss average is the newest loss. Paper: 0.6."""
    accumulate: bool = False
    """Sum losses instead, and never forget. It is what the posterior says, but weights soon become
    one-hot, for whoever was better at first or is measured seldom; the paper shows that, too. No
    loss stands out from a sum, so nothing alarms."""
    temperature: Positive = 0.3
    """T of softmax(-loss/T). Small makes weights one-hot, large makes them even. Paper: 1."""
    loss: Literal["mean", "sum"] = "mean"
    """Whether the E-step's loss is the mean over the examples, or their sum. Paper: sum."""
    measure_on: Literal["holdout", "train"] = "holdout"
    """Which examples the E-step measures on; a holdout is not trained on. Paper: train."""
    holdout_fraction: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.2
    """Part of the local training examples that is the holdout, when measuring on it."""
    final_full: Fraction = 0.8
    """Last part of the rounds, if their number is known, in which weights stay and the holdout is
    trained on, too: else a peer would know less than one that learns alone. See `alarm`; who has
    changed, or is new, still gets another weight. Half of it, at most, goes to the search of a peer
    that has not found its friends yet. Paper: 0."""
    start: Literal["oneshot", "cold"] = "oneshot"
    """`oneshot` takes `start_steps` local steps before the first exchange, so that the first losses
    already tell friends from strangers. Paper: cold."""
    start_steps: Count = 10
    """Local steps of a one-shot start."""
    warm_start: Literal["none", "odcl"] = "none"
    """`odcl` fetches everybody's model once after a one-shot start, and clusters the directions in
    which they have gone: those of the own cluster are the first collaborators, all alike until they
    are measured; averaged, they count by their examples at first. It costs a model of each peer,
    finds groups at once, and hurts where there are none. Needs some forty `start_steps`. Paper:
    none."""
    clustering: ClusteringName = "linkage"
    """How `odcl` clusters: `linkage` and `convex` find the number of clusters themselves, `kmeans`
    and `gradient` are told it by `num_clusters`, or find it by silhouette."""
    num_clusters: Natural = 0
    """See `clustering`; 0 is not to tell it."""
    clustered_by: Literal["all", "one"] = "all"
    """Who clusters: `all` fetch everybody's model, and nobody depends on anybody; or only `one`
    does, the first in reach by peer id, and tells the others, who fetch no more than the models of
    their own cluster. That saves most of the traffic where peers are many and clusters small."""
    exchange: Literal["gradients", "average"] = "gradients"
    """What collaboration is: gradients for the sampled neighbors' models and a mixture of models to
    predict with; or averaging the fetched models into the own one, the only one that predicts,
    which costs a fraction of the traffic, and accuracy where no two peers are alike. The last round
    of all, if their number is known, averages and takes no steps. Paper: gradients."""
    exchange_every: Count = 3
    """Steps of the own model a round: one with what others sent, the rest on its own data. More
    save traffic, and too many let models drift apart. Paper: 1."""
    codec: Literal["f32", "8bit", "4bit"] = "4bit"
    """How models and gradients travel: as they are, or in 8 or 4 bits a number, with what rounding
    takes away given back later. 4 bits cost less than a tenth of the traffic. Paper: f32."""
    hold: bool = True
    """Whether the gradients of others count in all steps of a round, or only in its first."""
    anchor: bool = True
    """Whether a peer trains its own model with weight 1 rather than w_ii. Paper: false."""
    defended: bool = True
    """Whether to clip others' gradients, see `clip`, and to refuse opposed ones. Paper: false."""
    clip: Positive = 3.0
    """Greatest norm of another's gradient, in units of the own one's. That falls as a peer fits its
    own examples: a small bound then keeps out what others know, a large one lets liars in."""
    min_gradient_weight: Fraction = 0.05
    """Gradients of a smaller collaboration weight are not made, nor models of a smaller one
    averaged: Adam would make vanishing gradients full steps. The paper names no bound."""
    min_prediction_weight: Fraction = 0.01
    """Models of a smaller weight are left out of the mixture, and not kept."""
    min_own_weight: Fraction = 0.25
    """Least weight of the own model in the mixture: a holdout of a few examples may misjudge it,
    and in the last rounds it learns what the holdout knows. Paper: 0."""
    staleness: Natural = 5
    """Gradients made on a model more than this many rounds old are refused."""
    refresh_after: Count = 10
    """Kept models this many rounds old are fetched again, to stay right in the mixture."""
    survey: Natural = 16
    """Most peers that a newcomer measures at once at its start, and anybody after an alarm."""
    alarm: Nonnegative = 1.0
    """A loss so far above its average says that the data have changed: if it is the own model's,
    others are surveyed anew, and the last rounds wait until weights have settled again; if it is a
    friend's, its weight falls even in the last rounds. In units of the loss; 0 never alarms, as in
    the paper."""
    adopt_after: Natural = 10
    """A newcomer starts from the best measured model that is at least this many rounds old; with 0
    it never does, as in the paper."""

    def __post_init__(self) -> None:
        if not self.anchor and (self.exchange_every > 1 or self.exchange == "average"):
            raise ValueError(
                "anchor = false leaves the own model to others, without local steps: set "
                'exchange_every = 1 and exchange = "gradients", or anchor = true'
            )

        if self.warm_start == "odcl" and self.start != "oneshot":
            raise ValueError(
                'warm_start = "odcl" clusters what peers learned alone: set start = "oneshot"'
            )

    @property
    def forgetting(self) -> float | None:
        """The beta of `update_loss_average`; None when losses are summed."""
        return None if self.accumulate else self.beta

    @property
    def bits(self) -> Bits | None:
        """Width of the codec; None when numbers travel as they are."""
        widths: dict[str, Bits | None] = {"f32": None, "8bit": 8, "4bit": 4}
        return widths[self.codec]

    @property
    def codes_first_models(self) -> bool:
        """Whether first models travel coded: those that are to be clustered don't."""
        return self.warm_start == "none"

    @property
    def tells_sizes(self) -> bool:
        """Whether peers say how many examples they have: only where clusters are averaged by it."""
        return self.warm_start == "odcl" and self.exchange == "average"

    @property
    def first_steps(self) -> int:
        """Local steps before the first round."""
        return self.start_steps if self.start == "oneshot" else 0

    def steps_after(self, rounds: int, *, closed: bool = False) -> int:
        """Return how many steps a model has taken after so many rounds: its gradient budget.

        Args:
            rounds: How many.
            closed: Whether the last of them was the last of all, in which averaging takes no steps.
        """
        closing = int(closed and rounds > 0 and self.exchange == "average")
        return self.first_steps + (rounds - closing) * self.exchange_every

    def rounds_for(self, steps: int) -> int:
        """Return the most rounds in which no more than so many steps are taken; 0 for none."""
        rounds = (steps - self.first_steps) // self.exchange_every
        return rounds + 1 if rounds > 0 and self.exchange == "average" else max(rounds, 0)


_THRIFTY: Mapping[str, Any] = {
    "exchange": "average",
    "exchange_every": 10,
    "num_neighbors": 6,
    "temperature": 1.0,
    "min_gradient_weight": 0.02,
    "final_full": 0.4,
}

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "thrifty": _THRIFTY,
    "odcl": {**_THRIFTY, "warm_start": "odcl", "start_steps": 40},
    "newcomer": {
        "start": "cold",
        "adopt_after": 1,
        "anchor": False,
        "exchange_every": 1,
        "min_gradient_weight": 1.0,
        "min_own_weight": 0.0,
        "final_full": 0.0,
    },
    "paper": {
        "exploration": "uniform",
        "epsilon": 0.3,
        "probes": 0.0,
        "min_probes": 0.0,
        "temperature": 1.0,
        "loss": "sum",
        "measure_on": "train",
        "final_full": 0.0,
        "min_own_weight": 0.0,
        "start": "cold",
        "exchange_every": 1,
        "codec": "f32",
        "anchor": False,
        "defended": False,
        "survey": 0,
        "alarm": 0.0,
        "adopt_after": 0,
    },
}


def update_loss_average(average: float | None, loss: float, beta: float | None) -> float | None:
    """Fold a new measurement into the loss average: L̂ ← (1 - β) L̂ + β l (section 3.3).

    A large β favors the new loss; None never forgets, and sums: L ← L + l. The first measurement
    sets either. A loss that is not finite forgets the peer: None, as if never measured, so that
    nothing here ever holds a NaN.
    """
    if not math.isfinite(loss):
        return None
    if average is None:
        return loss
    return average + loss if beta is None else (1.0 - beta) * average + beta * loss


def collaboration_weights(
    loss_averages: Mapping[PeerId, float],
    temperature: float,
    prior: Mapping[PeerId, float] | None = None,
) -> Row:
    """Return w_j ∝ p_j exp(-L̂_j / T) over the peers given (equation 3).

    Args:
        loss_averages: Finite loss averages by peer; peers never measured are absent.
        temperature: T > 0; 1 is the paper's, with losses summed over the local data.
        prior: p_j > 0 of all these peers, up to a factor; flat if None.

    Returns:
        Weights that sum to 1; empty when nothing was measured.
    """
    row = Row.of(loss_averages)
    averages = row.numbers.tolist()
    best = min(averages, default=0.0)
    scores = [math.exp((best - average) / temperature) for average in averages]
    if prior is not None:
        scores = [prior[each] * score for each, score in zip(row.positions, scores, strict=True)]
    return Row(row.positions, np.array(scores, np.float64) / (math.fsum(scores) or 1.0))


def prune_weights(weights: Mapping[PeerId, float], minimum: float) -> dict[PeerId, float]:
    """Drop weights under `minimum` and scale the rest to sum to 1; the largest always stays."""
    row = Row.of(weights)
    largest = row.numbers.max(initial=0.0)
    kept = dict(sorted(row.at_least(min(minimum, largest)).items()))
    total = math.fsum(kept.values())
    return {peer_id: weight / total for peer_id, weight in kept.items()}


def raise_weight(
    weights: Mapping[PeerId, float], peer_id: PeerId, minimum: float
) -> dict[PeerId, float]:
    """Give a peer at least this weight, and scale the others so that all sum to 1 again."""
    present = weights.get(peer_id, 0.0)
    if present >= minimum:
        return dict(weights)
    scale = (1.0 - minimum) / (1.0 - present)
    raised = {other: weight * scale for other, weight in weights.items()}
    return dict(sorted({**raised, peer_id: minimum}.items()))


def best_neighbors(
    candidates: Sequence[PeerId],
    weights: Mapping[PeerId, float],
    count: int,
    rng: np.random.Generator,
) -> tuple[PeerId, ...]:
    """Return the candidates of highest weight (section 3.3, "Sampling scheme", greedy).

    The cost depends on how many peers were ever measured, not on how many there are.

    Args:
        candidates: The reachable peers, self not among them.
        weights: Collaboration weights of candidates; one that is absent counts as 0.
        count: M, the number of neighbors to return.
        rng: Breaks ties, such as between peers never measured.

    Returns:
        min(count, number of candidates) distinct peers, in peer-id order.
    """
    last = min(heapq.nlargest(count, filter(None, weights.values())), default=math.inf)
    known = [each for each, weight in weights.items() if weight >= last]
    best = [peer_id for peer_id in known if weights[peer_id] > last]
    tied = sorted(peer_id for peer_id in known if weights[peer_id] == last)
    best += uniform_neighbors(tied, count - len(best), rng)
    if len(best) < count:
        taken = set(best)
        drawn = uniform_neighbors(candidates, count + len(taken), rng, ordered=False)
        best += [peer_id for peer_id in drawn if peer_id not in taken][: count - len(best)]
    return tuple(sorted(best))


def uniform_neighbors(
    candidates: Sequence[PeerId], count: int, rng: np.random.Generator, *, ordered: bool = True
) -> tuple[PeerId, ...]:
    """Draw distinct candidates uniformly (section 3.3, "Sampling scheme", exploring).

    Returns:
        min(count, number of candidates) peers, in peer-id order, or as drawn.
    """
    positions = rng.choice(len(candidates), min(count, len(candidates)), replace=False)
    drawn = [candidates[position] for position in positions]
    return tuple(sorted(drawn) if ordered else drawn)


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
    clip: float | None,
) -> tuple[Vector | None, dict[PeerId, Verdict]]:
    """Aggregate the M-step's gradient for the own model: Σ_j w_ji g_ji (equation 6).

    Remote weights are capped at 1. A gradient that is not finite is always refused. Defended, a
    gradient of negative cosine with the own one is refused and the others are clipped, so that no
    single sender can outweigh the owner by more than that.

    Args:
        own: The owner's mean gradient, shape (num_parameters,), or None when it made none.
        own_weight: 1 when the model is anchored to its owner, else w_ii.
        remote: At most one gradient a sender.
        clip: Greatest norm of a remote one, in units of the own one's; None neither clips nor tests
            the cosine. Without an own gradient there is nothing to compare with, and defended means
            that no remote one is used.

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
        if clip is not None:
            if own is None or float(np.dot(own, gradient)) < 0.0:
                verdicts[sender] = Verdict.OPPOSED
                continue
            scale *= min(1.0, clip * own_norm / norm) if norm > 0 else 1.0
        contribution = np.float32(scale) * gradient
        total = contribution if total is None else np.add(total, contribution, out=total)
        verdicts[sender] = Verdict.APPLIED
    return total, verdicts


def _norm(vector: Vector) -> float:
    """Euclidean norm; infinite or NaN exactly when something isn't finite, or overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(squared) if (squared := float(np.dot(vector, vector))) >= 0 else math.nan


def trainable(model: Tensors) -> Vector:
    """Return the trainable parameters as one vector, aligned with gradients; gaps are zero."""
    layout = model.layout.gradient
    return Tensors.of(layout, {name: model.as_f32(name) for name in layout.index}).flat_f32()


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


def average_models(weights: Mapping[PeerId, float], models: Mapping[PeerId, Tensors]) -> Tensors:
    """Average models: P ← Σ_j w_ij P_j, in f32.

    Args:
        weights: Weights that sum to 1 over the models.
        models: Models of one layout. Tensors that aren't floating-point, such as counters, have no
            mean: they become those of the largest weight.

    Returns:
        A new model of the same layout.
    """
    members = sorted(weights)
    layout = models[members[0]].layout
    leader = max(members, key=weights.__getitem__)
    result = Tensors.of(layout, models[leader])
    for name in layout.floating:
        mixed = np.float32(weights[members[0]]) * models[members[0]].as_f32(name)
        for peer_id in members[1:]:
            mixed += np.float32(weights[peer_id]) * models[peer_id].as_f32(name)
        result.set_f32(name, mixed)
    return result
