"""FedRep: one body for all, a head for each peer.

Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
2021, algorithm 1. A round at peer i: first local steps on its head with the body at rest, then
local steps on the body with the head at rest; then the body becomes the average of all bodies.

Decided here: the head is the model's last layer, the body everything else, buffers included. Steps
are divided between the two, so that both together keep to the budget: `head_share` of them train
the head. With one step a round, rounds take turns, and one that trains no body moves none. The last
round trains heads only, on the final body, as the authors' code does. One optimizer holds the state
of both parts and stays at the peer; the part at rest doesn't move, but its moments go on following
its gradient. Bodies are weighted by local size.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from peer.algorithm import Fraction
from peer.learner import Batch, Learner
from protocol.errors import ModelError
from protocol.tensors import Layout, Tensors
from sim.baselines.arithmetic import average
from sim.cohort import Budget, Member, Outcome, Spending


def fedrep(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    head_share: Fraction = 0.5,
) -> Outcome:
    """Train a body together and every member's head alone.

    Args:
        members: The peers.
        budget: What they may spend on both parts together.
        rng: Unused: nothing is drawn.
        head_share: Part of each round's steps that train the head, the rest the body.

    Raises:
        ModelError: The model has no layer that can be told to be its last.
    """
    learners = [member.new_learner() for member in members]
    head = head_of(learners[0].layout, int(learners[0].task.rpartition(":")[2]))
    models = [learner.parameters() for learner in learners]
    body_layout = Layout(spec for spec in learners[0].layout.specs if spec.name not in head)
    size = body_layout.size_bytes
    spending = [Spending() for _ in members]
    for steps in budget.rounds(members):
        batches = [Batch(step, full=True) for step in steps]
        last = steps.stop == budget.steps
        num_head = len(batches) if last else head_steps(steps, head_share)
        for place, learner in enumerate(learners):
            model = train_part(learner, models[place], batches[:num_head], head)
            models[place] = train_part(learner, model, batches[num_head:], body_layout.index)
            spending[place].add(gradients=len(batches))
        if num_head < len(batches):
            body = average(members, [part_of(model, body_layout) for model in models])
            models = [merge(model, body) for model in models]
            for spent in spending:
                spent.add(sent=size, received=size)
    return Outcome.of_models(learners, models, spending)


def head_steps(steps: range, head_share: float) -> int:
    """Return how many of a round's steps train the head, so that the share holds over rounds."""
    return math.ceil(head_share * steps.stop) - math.ceil(head_share * steps.start)


def train_part(
    learner: Learner, model: Tensors, batches: Sequence[Batch], names: Collection[str]
) -> Tensors:
    """Take local steps from a model that move only the named tensors; return the result."""
    for batch in batches:
        stepped = learner.train(model, (batch,))
        model = Tensors.of(
            model.layout,
            {name: stepped[name] if name in names else model[name] for name in model},
        )
    return model


def part_of(model: Tensors, layout: Layout) -> Tensors:
    """Return some tensors of a model."""
    return Tensors.of(layout, {name: model[name] for name in layout.index})


def merge(model: Tensors, part: Tensors) -> Tensors:
    """Return the model with a part of it replaced."""
    return Tensors.of(model.layout, {**model, **part})


def head_of(layout: Layout, num_classes: int) -> frozenset[str]:
    """Return the names of the last layer's tensors.

    A layout knows names and shapes, not the order of layers. The last layer is the module with the
    most trainable tensors of one row for each class, as weights and bias are and an embedding of
    words isn't; of several, the last in the natural order of names.

    Raises:
        ModelError: No module has.
    """
    rows = Counter(
        spec.name.rpartition(".")[0]
        for spec in layout.specs
        if spec.trainable and spec.shape[:1] == (num_classes,)
    )
    if not rows:
        raise ModelError(
            f"no layer has {num_classes} outputs, one for each class: FedRep needs a last layer "
            "to keep apart; let the model end in a linear layer, or leave this method out"
        )
    last = max(rows, key=lambda module: (rows[module], _natural(module)))
    return frozenset(spec.name for spec in layout.specs if spec.name.rpartition(".")[0] == last)


def _natural(name: str) -> list[int | str]:
    """Sort key by which "10" comes after "9": text and numbers in turn."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
