"""What the peers of a regression problem end with: the variants of ODCL, and what it is held to.

Source: odcl.txt (Armacki, Bajović, Jakovetić, Kar), whose names these are. Every peer solves its
own problem; the models are clustered once, and each peer gets its cluster's average. Held to it:
peers alone; oracles that know the clusters, averaging too or solving all of a cluster's examples at
once; and IFCA (see `sim.baselines.ifca`), with one gradient a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from scipy.spatial.distance import pdist

from peer.clustering.convex import ConvexClustering
from peer.clustering.gradient import GradientClustering
from peer.clustering.interface import Clustering, Labels, Points, in_order_of_appearance
from peer.clustering.kmeans import KMeans
from peer.clustering.linkage import AverageLinkage
from sim.regression import LARGEST, Examples, Problem, step_lengths

LOCAL = "Local"
ODCL = "ODCL-KM++"
LINKAGE = "ODCL-AL"
CONVEX = "ODCL-CC"
RANDOM_KMEANS = "ODCL-KM"
ORACLE = "oracle, averaging"
POOLED = "oracle, pooled"
IFCA_RANDOM = "IFCA, random start"
IFCA_NEAR = "IFCA, near start"

CLUSTERINGS: Mapping[str, Callable[[int], Clustering]] = {
    RANDOM_KMEANS: lambda number: KMeans(num_clusters=number, start="random", restarts=1),
    ODCL: lambda number: KMeans(num_clusters=number),
    CONVEX: lambda _: ConvexClustering(),
    LINKAGE: lambda _: AverageLinkage(),
    "ODCL-GC": lambda number: GradientClustering(num_clusters=number),
}
"""From K to what clusters; those that find K themselves aren't told it, and draw nothing."""

DETERMINISTIC = (CONVEX, LINKAGE)

BUDGET = 100
"""Gradients of each peer in IFCA, which are its rounds, and in the longer inexact solve."""

INEXACT_STEPS = (10, BUDGET)
REFINEMENTS = (1, 5, 20)
"""Rounds of distributed gradient inside the clusters that ODCL-KM++ found."""

NEAR = 0.25
"""How far IFCA's near starts are from the truth: in parts of the least distance of two truths. Its
theory asks for less than a half."""

_SCALAR_BYTES = 4  # as models travel: f32


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """How one variant did on one problem.

    Attributes:
        variant: Its name.
        errors: Normalized MSE, for each start; of one number if nothing is drawn.
        recovered: Whether the true clusters were found, for each start; empty if none were sought.
        rounds: Exchanges of models or gradients.
        gradients: That a peer computed; an exact solve isn't among them.
        sent_bytes: By a peer, to the one that clusters and averages.
        received_bytes: By a peer, from that one.
    """

    variant: str
    errors: tuple[float, ...]
    recovered: tuple[bool, ...] = ()
    rounds: int = 0
    gradients: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


def inexact(steps: int) -> str:
    """Return the name of ODCL-KM++ with local problems solved by so many gradient steps."""
    return f"I-{ODCL} {steps} steps"


def refined(rounds: int) -> str:
    """Return the name of ODCL-KM++ that is followed by so many rounds of gradients."""
    return f"{ODCL} + {rounds} round{'s' * (rounds > 1)}"


NAMES = (
    LOCAL,
    *CLUSTERINGS,
    *map(inexact, INEXACT_STEPS),
    *map(refined, REFINEMENTS),
    IFCA_RANDOM,
    IFCA_NEAR,
    ORACLE,
    POOLED,
)
"""All variants, oracles last."""


def attempt_all(problem: Problem, starts: int, rng: np.random.Generator) -> Iterator[Attempt]:
    """Let every variant make the peers' models, in the order of `NAMES`.

    Args:
        problem: What they are to learn.
        starts: How often those are repeated that draw where they start.
        rng: Gives each start a generator of its own.
    """
    models = problem.examples.solve()
    yield Attempt(variant=LOCAL, errors=(problem.error(models),))
    labels: dict[str, Labels] = {}
    for name, make in CLUSTERINGS.items():
        cluster = make(len(problem.parameters))
        repeats = 1 if name in DETERMINISTIC else starts
        found = [_labels(cluster, models, each) for each in rng.spawn(repeats)]
        labels[name] = found[0]
        yield _one_shot(problem, name, models, found)
    cluster = CLUSTERINGS[ODCL](len(problem.parameters))
    for steps in INEXACT_STEPS:
        rough = problem.examples.descend(np.zeros_like(models), steps)
        found = [_labels(cluster, rough, each) for each in rng.spawn(starts)]
        attempt = _one_shot(problem, inexact(steps), rough, found)
        yield msgspec.structs.replace(attempt, gradients=steps)
    for rounds in REFINEMENTS:
        yield _refine(problem, models, labels[ODCL], rounds)
    for name, draw in ((IFCA_RANDOM, draw_start), (IFCA_NEAR, draw_near_start)):
        yield _ifca(problem, name, [draw(problem, each) for each in rng.spawn(starts)])
    yield _one_shot(problem, ORACLE, models, [problem.truth])
    yield _pool(problem)


def average(models: Points, labels: Labels) -> Points:
    """Return the mean of each cluster's models. Shape (num_clusters, dim)."""
    return np.array([models[labels == label].mean(axis=0) for label in range(labels.max() + 1)])


def draw_start(problem: Problem, rng: np.random.Generator) -> Points:
    """Draw IFCA's K models as the true ones are drawn. Shape (num_clusters, dim)."""
    return rng.uniform(-LARGEST, LARGEST, problem.parameters.shape)


def draw_near_start(problem: Problem, rng: np.random.Generator) -> Points:
    """Draw a model in a random direction of each true one, as far as `NEAR` says."""
    directions = rng.standard_normal(problem.parameters.shape)
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    apart = pdist(problem.parameters).min()
    return np.asarray(problem.parameters + NEAR * apart * directions / lengths)


def train_ifca(examples: Examples, models: Points, rounds: int) -> tuple[Points, Labels]:
    """Let each peer choose the model of least loss, and each model follow its choosers' gradient.

    A step has the length in `step_lengths`, by the mean curvature of those who chose the model; a
    model that nobody chose stays as it is.

    Args:
        examples: A problem for each peer.
        models: Where to start. Shape (num_models, dim).
        rounds: How often they step.

    Returns:
        The models at the end, and which of them each peer chooses.
    """
    models = models.copy()
    pools: dict[bytes, tuple[Examples, Points]] = {}  # choosers seldom change
    choices = examples.losses(models).argmin(axis=1)
    for _ in range(rounds):
        used: dict[bytes, tuple[Examples, Points]] = {}
        for choice in np.unique(choices):
            members = np.flatnonzero(choices == choice)
            key = members.tobytes()
            if key not in pools:
                pooled = examples.pooled(members)
                pools[key] = pooled, step_lengths(pooled.curvatures())[:, np.newaxis]
            pool, length = used[key] = pools[key]
            own = models[choice : choice + 1]
            models[choice] = (own - length * pool.gradients(own))[0]
        pools = used
        choices = examples.losses(models).argmin(axis=1)
    return models, choices


def _labels(cluster: Clustering, models: Points, rng: np.random.Generator) -> Labels:
    return cluster(models, np.ones(len(models)), rng).labels


def _one_shot(problem: Problem, name: str, models: Points, found: Sequence[Labels]) -> Attempt:
    """Average inside clusters, once for each clustering."""
    size = _size(problem)
    return Attempt(
        variant=name,
        errors=tuple(problem.error(average(models, labels)[labels]) for labels in found),
        recovered=tuple(bool(np.array_equal(labels, problem.truth)) for labels in found),
        rounds=1,
        sent_bytes=size,
        received_bytes=size,
    )


def _refine(problem: Problem, models: Points, labels: Labels, rounds: int) -> Attempt:
    """Average, then follow the gradients' mean in each cluster: that of its pooled examples."""
    averages = average(models, labels)
    better = [
        problem.examples.pooled(np.flatnonzero(labels == label)).descend(averages[[label]], rounds)
        for label in range(len(averages))
    ]
    size = (1 + rounds) * _size(problem)
    return Attempt(
        variant=refined(rounds),
        errors=(problem.error(np.concatenate(better)[labels]),),
        recovered=(bool(np.array_equal(labels, problem.truth)),),
        rounds=1 + rounds,
        gradients=rounds,
        sent_bytes=size,
        received_bytes=size,
    )


def _ifca(problem: Problem, name: str, starts: Sequence[Points]) -> Attempt:
    errors, recovered = [], []
    for start in starts:
        models, choices = train_ifca(problem.examples, start, BUDGET)
        errors.append(problem.error(models[choices]))
        labels = in_order_of_appearance(choices.tolist())
        recovered.append(bool(np.array_equal(labels, problem.truth)))
    return Attempt(
        variant=name,
        errors=tuple(errors),
        recovered=tuple(recovered),
        rounds=BUDGET,
        gradients=BUDGET,
        sent_bytes=BUDGET * _size(problem),
        # All models each round, and once more to choose at the end.
        received_bytes=(BUDGET + 1) * len(problem.parameters) * _size(problem),
    )


def _pool(problem: Problem) -> Attempt:
    """Solve all examples of each true cluster as one problem, as if they had been sent."""
    solved = [
        problem.examples.pooled(np.flatnonzero(problem.truth == label)).solve()
        for label in range(len(problem.parameters))
    ]
    numbers = problem.examples.inputs[0].size + problem.examples.outputs[0].size
    return Attempt(
        variant=POOLED,
        errors=(problem.error(np.concatenate(solved)[problem.truth]),),
        recovered=(True,),
        rounds=1,
        sent_bytes=numbers * _SCALAR_BYTES,
        received_bytes=_size(problem),
    )


def _size(problem: Problem) -> int:
    """Return the bytes of a model, and of a gradient."""
    return int(problem.parameters.shape[1]) * _SCALAR_BYTES
