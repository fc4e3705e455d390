"""What every method of a comparison is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from peer.data import Split
from peer.learner import Learner, Probabilities
from protocol.messages import PeerId
from protocol.tensors import Tensors

Loss = Literal["mean", "sum"]
MeasureOn = Literal["holdout", "train"]

Predict = Callable[[npt.NDArray[np.float32]], Probabilities]
"""Maps inputs, shape (n, *input_shape), to probabilities, shape (n, num_classes)."""


class Build(Protocol):
    """Makes learners; those of one member draw the same batches."""

    def __call__(self, split: Split, /, *, loss: Loss, measure_on: MeasureOn) -> Learner:
        """Make one over these examples, with the initial parameters and a fresh optimizer.

        What it measures is the `loss` over the examples of `measure_on`.
        """


class Member:
    """One peer as a method sees it: its examples, and learners over them.

    A member serves one run of one method: what it makes and how its data drift is remembered.

    Args:
        peer_id: Names it; members are listed in the order of their ids.
        split: Its examples.
        build: Makes its learners; those of all members start from the same initial parameters.
        group: The true one.
        later: What the examples become half-way, where they drift.
        later_group: The true one then.

    Attributes:
        peer_id: As given.
        split: Its examples at present.
    """

    def __init__(
        self,
        peer_id: PeerId,
        split: Split,
        build: Build,
        *,
        group: int = 0,
        later: Split | None = None,
        later_group: int = 0,
    ) -> None:
        self.peer_id = peer_id
        self.split = split
        self._build = build
        self._group = group
        self._later = later
        self._later_group = later_group
        self._learners: list[Learner] = []

    @property
    def num_train(self) -> int:
        """Number of local training examples, the holdout included."""
        return len(self.split.fit) + len(self.split.holdout)

    @property
    def group(self) -> int:
        """The true group at present, which only an oracle may look at."""
        return self._group

    def new_learner(self, *, loss: Loss = "mean", measure_on: MeasureOn = "holdout") -> Learner:
        """Make another learner, with a model and an optimizer of its own."""
        learner = self._build(self.split, loss=loss, measure_on=measure_on)
        self._learners.append(learner)
        return learner

    def drift(self) -> None:
        """Let the data change, in all learners made, if they are to."""
        if self._later is None:
            return
        self.split, self._group = self._later, self._later_group
        for learner in self._learners:
            learner.use_examples(self.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What every method may spend, the same for all.

    Attributes:
        steps: Optimizer steps that each peer's prediction may build on.
        local_steps: Steps between two exchanges.
        on_round: Told how many of how many rounds are done; may raise to stop.
    """

    steps: int
    local_steps: int
    on_round: Callable[[int, int], None] = lambda done, total: None

    def rounds(self, members: Sequence[Member]) -> Iterator[range]:
        """Yield the numbers of each round's steps; half-way, data that drift do.

        The last round may be shorter.
        """
        starts = range(0, self.steps, self.local_steps)
        for done, start in enumerate(starts):
            if done == (len(starts) + 1) // 2:
                for member in members:
                    member.drift()
            yield range(start, min(start + self.local_steps, self.steps))
            self.on_round(done + 1, len(starts))


@dataclass(slots=True)
class Spending:
    """What one peer spent.

    Attributes:
        gradients: Gradients computed, of all models it trained.
        bytes_sent: Bytes of models and gradients sent, to a server or to peers. The initial
            parameters follow from the federation's seed, and so move no bytes.
        bytes_received: The same received.
    """

    gradients: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def add(self, *, gradients: int = 0, sent: int = 0, received: int = 0) -> None:
        """Spend more."""
        self.gradients += gradients
        self.bytes_sent += sent
        self.bytes_received += received


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a method came to, one entry a member.

    Attributes:
        predict: How each predicts.
        spending: What each spent.
        weights: Who collaborates with whom where the method chooses: row i sums to 1.
            Shape (num_members, num_members).
    """

    predict: Sequence[Predict]
    spending: Sequence[Spending]
    weights: npt.NDArray[np.float64] | None = None

    @classmethod
    def of_models(
        cls,
        learners: Sequence[Learner],
        models: Sequence[Tensors],
        spending: Sequence[Spending],
        weights: npt.NDArray[np.float64] | None = None,
    ) -> Outcome:
        """Make the outcome of members that predict with one model each."""
        pairs = zip(learners, models, strict=True)
        return cls(
            predict=[partial(learner.predict, model) for learner, model in pairs],
            spending=spending,
            weights=weights,
        )


class Method(Protocol):
    """A way to learn together, or alone."""

    def __call__(
        self, members: Sequence[Member], budget: Budget, rng: np.random.Generator
    ) -> Outcome:
        """Train, and return how each member predicts now.

        Nothing in it may look at a test example, and only an oracle at the true groups.
        """
