"""What the claims of kNN-Per are measured with: peers, a model that most of them share, memories.

Peers have Dirichlet shares of Fashion-MNIST's labels at 14x14, or of the digits' where it isn't
installed. In each of `FOLDS` folds every fifth peer is left out of training, so that each peer is
once a newcomer and four times one that trained, on the same test examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from helpers_cohort import make_members

from peer.data import Split, split
from peer.datastore import Datastore
from peer.interpolation import LAMBDAS, KnnSettings, Tuning, interpolate, tune
from peer.learner import Learner, TrainingSettings
from peer.sources import load_source
from peer.validation import accuracy_of
from protocol.errors import DataError
from protocol.tensors import Tensors
from sim.baselines.fedavg import train_global
from sim.cohort import Budget, Member
from sim.partition import PartitionSettings, Slice, partition

FOLDS = 5
MOST_FIT = 250
"""Examples of a peer that the shared model trains on, and that it remembers; the rest are fresh."""
MOST_HOLDOUT = 120
MOST_FRESH = 500
PER_STEP = 10
"""Fresh examples that arrive in a step of a stream."""
DEFAULT = KnnSettings()
PARTS = ("model", "memory", "blend")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class World:
    """Peers, and how the model that they share is trained.

    Attributes:
        peers: Their number; a multiple of `FOLDS` leaves out as many in each fold.
        alpha: Concentration of the Dirichlet distribution.
        steps: Of each peer that trains; averaged every five.
        seed: Of partition and splits.
    """

    peers: int
    alpha: float = 0.3
    steps: int = 100
    seed: int = 1


class Seen(NamedTuple):
    """Examples as a model sees them.

    Attributes:
        embeddings: Shape (num_examples, dim).
        predicted: Its probabilities. Shape (num_examples, num_classes).
        labels: The true ones. Shape (num_examples,).
    """

    embeddings: np.ndarray
    predicted: np.ndarray
    labels: np.ndarray

    def part(self, start: int, stop: int) -> Seen:
        return Seen(*(each[start:stop] for each in self))


@dataclass(frozen=True, kw_only=True)
class Remembering:
    """One peer's examples under the shared model.

    Attributes:
        fit: What it remembers, and the model trained on unless it is a newcomer.
        holdout: What it chooses λ by; nobody trained on them.
        fresh: Others that nobody trained on.
        test: What it is judged by, and chooses nothing by.
        newcomer: Whether it was left out of training.
    """

    fit: Seen
    holdout: Seen
    fresh: Seen
    test: Seen
    newcomer: bool


@cache
def deal(world: World) -> tuple[str, tuple[Slice, ...]]:
    """Return the model's name and the peers' slices."""
    settings = PartitionSettings(
        kind="dirichlet", alpha=world.alpha, min_examples=30, test_examples=250
    )
    rng = np.random.default_rng(world.seed)
    try:
        dataset, model = load_source("fashion-mnist", pool=2), "cnn"
    except DataError:
        dataset, model = load_source("digits"), "mlp"
    return model, tuple(partition(dataset, world.peers, settings, rng))


def make_peers(world: World) -> list[Member]:
    """Make all peers, with as much of their examples as they train on."""
    model, slices = deal(world)
    training = TrainingSettings(learning_rate=0.005)
    return make_members(slices, model=model, training=training, hide=_bounded)


@cache
def remember(world: World, fold: int) -> tuple[Remembering, ...]:
    """Train the model of one fold, and show it all that peers have."""
    slices, members = deal(world)[1], make_peers(world)
    left_out = {place for place in range(len(members)) if place % FOLDS == fold}
    training = [member for place, member in enumerate(members) if place not in left_out]
    model = _train(training, world.steps)
    return tuple(
        _show(member.new_learner(), model, member, part, place, newcomer=place in left_out)
        for place, (member, part) in enumerate(zip(members, slices, strict=True))
    )


def memory_of(
    peer: Remembering, settings: KnnSettings = DEFAULT, size: int = MOST_FIT
) -> Datastore:
    """Return a store of the first `size` examples that a peer remembers."""
    entries = peer.fit.part(0, size)
    store = Datastore(
        settings, entries.embeddings.shape[1], entries.predicted.shape[1], np.random.default_rng(0)
    )
    store.add(entries.embeddings, entries.labels)
    return store


def tuned(peer: Remembering, store: Datastore, settings: KnnSettings = DEFAULT) -> Tuning:
    """Choose λ on a peer's holdout."""
    held = peer.holdout
    return tune(
        store, settings, embeddings=held.embeddings, model=held.predicted, labels=held.labels
    )


def scores(tuning: Tuning, store: Datastore, seen: Seen) -> tuple[float, float, float]:
    """Return the accuracy of the model, the memory and their blend, the `PARTS`."""
    memory = tuning.blend.recall(store, seen.embeddings)
    blend = interpolate(memory, seen.predicted, tuning.blend.lam)
    found = [accuracy_of(each, seen.labels) for each in (seen.predicted, memory, blend)]
    return found[0], found[1], found[2]


def compare_sizes(peers: Sequence[Remembering], sizes: Sequence[int]) -> list[Row]:
    """Return, by entries of the memory, the best λ on the holdouts and what it brings.

    Only peers that have enough for the largest size take part, the same for all sizes.
    """
    able = [peer for peer in peers if len(peer.fit.labels) >= max(sizes)]
    return [
        {"entries": size, **_judge(able, DEFAULT, [memory_of(peer, size=size) for peer in able])}
        for size in sizes
    ]


def compare_settings(peers: Sequence[Remembering], settings: Sequence[KnnSettings]) -> list[Row]:
    """Return, by k and sigma, test accuracies with λ chosen for each on the holdouts."""
    return [
        {
            "k_nearest": each.k_nearest,
            "sigma": each.sigma,
            "sigma_unit": each.sigma_unit,
            **_judge(peers, each, [memory_of(peer, each) for peer in peers]),
        }
        for each in settings
    ]


def compare_newcomers(folds: Sequence[Sequence[Remembering]]) -> dict[str, dict[str, float]]:
    """Return test accuracies of the same peers as newcomers and as peers that trained."""
    found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    for peer in (peer for peers in folds for peer in peers):
        store = memory_of(peer)
        found[peer.newcomer].append(scores(tuned(peer, store), store, peer.test))
    return {
        who: dict(zip(PARTS, np.mean(found[newcomer], axis=0).tolist(), strict=True))
        for who, newcomer in (("newcomers", True), ("trained", False))
    }


def compare_strategies(
    peers: Sequence[Remembering], *, start: int, half: int, steps: Sequence[int]
) -> dict[str, list[float]]:
    """Return mean test accuracies over time by strategy; half-way a peer's data become another's.

    Each peer begins with `start` examples and the λ that suits them, and keeps λ. In every step a
    few fresh examples arrive, after `half` steps those of the next peer, and what it is tested on
    are the next peer's test examples then.

    Args:
        peers: Those with too few fresh examples are left out.
        start: Entries of the memory at first, and all that `fifo` keeps.
        half: Steps before the change, and after it.
        steps: After which to measure, ascending; `half` is the last before the change.

    Returns:
        "step", "model" and one list a strategy.
    """
    need = half * PER_STEP
    able = [
        peer
        for peer in peers
        if len(peer.fresh.labels) >= 2 * need and len(peer.fit.labels) >= start
    ]
    pairs = list(zip(able, [*able[1:], *able[:1]], strict=True))
    strategies = {
        "fifo": KnnSettings(strategy="fifo", capacity=start),
        "concatenate": KnnSettings(strategy="concatenate"),
        "fixed": KnnSettings(strategy="fixed"),
    }
    lines = {
        name: np.mean([_stream(*pair, each, start, half, steps) for pair in pairs], axis=0)
        for name, each in strategies.items()
    }
    return {
        "step": list(steps),
        "model": lines["fixed"][:, 0].tolist(),
        **{name: line[:, 1].tolist() for name, line in lines.items()},
    }


def _stream(
    peer: Remembering,
    other: Remembering,
    settings: KnnSettings,
    start: int,
    half: int,
    measured: Sequence[int],
) -> list[tuple[float, float]]:
    """Return the accuracy of model and blend at the measured steps of one peer."""
    store = memory_of(peer, settings, start)
    tuning = tuned(peer, store, settings)
    found = []
    for step in range(2 * half + 1):
        changed = step > half
        if step:
            source = other.fresh if changed else peer.fresh
            arriving = source.part((step - 1) * PER_STEP, step * PER_STEP)
            store.add(arriving.embeddings, arriving.labels)
        if step in measured:
            model, _, blend = scores(tuning, store, (other if changed else peer).test)
            found.append((model, blend))
    return found


def _judge(peers: Sequence[Remembering], settings: KnnSettings, stores: Sequence[Datastore]) -> Row:
    """Return the chosen λ, the holdout accuracy by λ alike for all, and the test accuracies."""
    lams, curves, tests = [], [], []
    for peer, store in zip(peers, stores, strict=True):
        tuning = tuned(peer, store, settings)
        held = peer.holdout
        memory = tuning.blend.recall(store, held.embeddings)
        blends = (interpolate(memory, held.predicted, lam) for lam in LAMBDAS)
        lams.append(tuning.blend.lam)
        curves.append([accuracy_of(blend, held.labels) for blend in blends])
        tests.append(scores(tuning, store, peer.test))
    curve = np.mean(curves, axis=0)
    return {
        "mean_lam": float(np.mean(lams)),
        "holdout_by_lam": curve.tolist(),
        **dict(zip(PARTS, np.mean(tests, axis=0).tolist(), strict=True)),
    }


def _train(members: Sequence[Member], steps: int) -> Tensors:
    learners = [member.new_learner() for member in members]
    budget = Budget(steps=steps, local_steps=5)
    return train_global(members, learners, budget, full=False)[0]


def _show(
    learner: Learner, model: Tensors, member: Member, part: Slice, place: int, *, newcomer: bool
) -> Remembering:
    whole = split(part.dataset, 0.2, np.random.default_rng(place)).fit  # as `make_members` did
    own = member.split
    fresh = whole.take(np.arange(len(own.fit), min(len(own.fit) + MOST_FRESH, len(whole))))
    parts = (own.fit, own.holdout, fresh, own.test)
    inputs = np.concatenate([each.inputs for each in parts])
    seen = Seen(
        learner.embed(model, inputs),
        learner.predict(model, inputs),
        np.concatenate([each.labels for each in parts]),
    )
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    fit, holdout, fresh_seen, test = (seen.part(*pair) for pair in pairwise(ends))
    return Remembering(fit=fit, holdout=holdout, fresh=fresh_seen, test=test, newcomer=newcomer)


def _bounded(parts: Split) -> Split:
    fit = parts.fit.take(np.arange(min(MOST_FIT, len(parts.fit))))
    holdout = parts.holdout.take(np.arange(min(MOST_HOLDOUT, len(parts.holdout))))
    return Split(fit=fit, holdout=holdout, test=parts.test)
