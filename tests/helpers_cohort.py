"""Members for methods to train: real learners on small real data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType

import numpy as np

from peer.data import Dataset, Split, split
from peer.learner import Learner, TrainingSettings
from peer.models import build_model
from peer.sources import load_source
from peer.torch_learner import TorchLearner
from protocol.messages import PeerId
from sim.cohort import Budget, Member, Outcome
from sim.partition import PartitionSettings, Slice, partition

ADAM = TrainingSettings(learning_rate=0.01)
SGD = TrainingSettings(optimizer="sgd", learning_rate=0.1)
FULL_SGD = TrainingSettings(optimizer="sgd", learning_rate=1.0, batch_size=10_000)


class CountingLearner(TorchLearner):
    """Counts the gradients it computes, apart from the one that checks the model."""

    gradients = -1

    def differentiate(self, *args, **kwargs):
        self.gradients += 1
        return super().differentiate(*args, **kwargs)


@cache
def digits(num_peers: int, groups: int = 1, seed: int = 0, size: int = 60) -> tuple[Slice, ...]:
    """Digits whose groups permute the labels; one group means all alike."""
    settings = PartitionSettings(
        kind="permuted", groups=groups, min_examples=size - 20, max_examples=size
    )
    return tuple(partition(load_source("digits"), num_peers, settings, np.random.default_rng(seed)))


def make_members(
    slices: Sequence[Slice],
    *,
    model: str = "logistic",
    training: TrainingSettings = ADAM,
    member: Callable[..., Member] = Member,
    hide: Callable[[Split], Split] = lambda parts: parts,
    later: Mapping[int, Slice] = MappingProxyType({}),
    made: list[CountingLearner] | None = None,
) -> list[Member]:
    """Make a member for each slice.

    `hide` may change what it sees, `later` says what members drift to, `made` collects learners.
    """

    def new_member(index: int, part: Slice) -> Member:
        parts, after = (
            split(each.dataset, 0.2, np.random.default_rng(index))
            for each in (part, later.get(index, part))
        )

        def build(examples: Split, **measuring) -> Learner:
            learner = make_learner(part.dataset, examples, model, training, index, **measuring)
            if made is not None:
                made.append(learner)
            return learner

        drift = {"later": hide(after), "later_group": later[index].group} if index in later else {}
        return member(PeerId(f"peer-{index:02d}"), hide(parts), build, group=part.group, **drift)

    return [new_member(index, part) for index, part in enumerate(slices)]


def make_learner(
    dataset: Dataset,
    examples: Split,
    model: str,
    training: TrainingSettings,
    seed: int,
    **measuring,
) -> CountingLearner:
    module = build_model(model, dataset.input_shape, dataset.num_classes, 0)
    return CountingLearner(module, examples, dataset.num_classes, training, seed=seed, **measuring)


def run(method, members: Sequence[Member], steps: int = 20, local_steps: int = 4, **settings):
    """Run a method with the same seed always."""
    budget = Budget(steps=steps, local_steps=local_steps)
    return method(members, budget, np.random.default_rng(0), **settings)


def probabilities(outcome: Outcome, slices: Sequence[Slice]) -> list[np.ndarray]:
    """Return what each member predicts on its whole slice."""
    return [
        predict(part.dataset.train.inputs)
        for predict, part in zip(outcome.predict, slices, strict=True)
    ]


def accuracies(outcome: Outcome, members: Sequence[Member]) -> np.ndarray:
    """Return each member's accuracy on its test examples."""
    return np.array(
        [
            (predict(member.split.test.inputs).argmax(axis=1) == member.split.test.labels).mean()
            for predict, member in zip(outcome.predict, members, strict=True)
        ]
    )


def assert_same_bits(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> None:
    """Assert that two lists of arrays are equal to the bit."""
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def models_of(outcome: Outcome) -> list:
    """Return the one model that each member predicts with, of methods where there is one."""
    return [predict.args[0] for predict in outcome.predict]
