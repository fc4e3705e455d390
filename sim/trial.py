"""Run one trial of a comparison: from its peers' slices to what each of them scored and spent."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from peer.algorithm import AlgorithmSettings
from peer.assembly import new_learner
from peer.data import HOLDOUT_FRACTION, Examples, Split, split
from peer.hooks import ForeignCode
from peer.learner import Learner
from peer.streams import Streams
from peer.validation import accuracy_of
from protocol.errors import ModelError
from protocol.messages import PeerId
from sim.cohort import Budget, Loss, MeasureOn, Member, Outcome, Predict
from sim.comparison import Trial
from sim.methods import find_method
from sim.plan import peer_names
from sim.slices import Slice
from sim.supply import Task


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one trial came to: its file in the result folder. All but `seconds` is reproducible.

    Attributes:
        trial: Which.
        code: Digest of the code that did it.
        accuracy: Of each peer on its test examples, those after a drift; null without any.
        num_train: Training examples of each peer, the holdout included.
        num_test: Test examples of each peer.
        gradients: Gradients that each peer computed.
        bytes_sent: Of models and gradients, by peer.
        bytes_received: The same received.
        weights: Who collaborates with whom, a row for each peer; null where the method doesn't
            choose, or while tuning.
        groups: The true group of each peer, after a drift.
        seconds: Wall clock of the training.
    """

    trial: Trial
    code: str
    accuracy: list[float | None]
    num_train: list[int]
    num_test: list[int]
    gradients: list[int]
    bytes_sent: list[int]
    bytes_received: list[int]
    weights: list[list[float]] | None
    groups: list[int]
    seconds: float

    def check(self, trial: Trial) -> None:
        """Check what was read from the file of a trial.

        Raises:
            ValueError: It is another's, or can't be.
        """
        if self.trial != trial:
            raise ValueError(f"it is of another trial: {self.trial}")
        counts = (self.num_train, self.num_test, self.gradients, self.bytes_sent)
        by_peer = (self.accuracy, *counts, self.bytes_received, self.groups)
        if len({len(each) for each in by_peer}) != 1:
            raise ValueError("its lists are of more peers or fewer")
        known = [value for value in self.accuracy if value is not None]
        if not known or not all(0.0 <= value <= 1.0 for value in known):
            raise ValueError("its accuracies are none")

    @property
    def mean(self) -> float:
        """Mean accuracy over the peers that have test examples; one of them has."""
        known = [value for value in self.accuracy if value is not None]
        return sum(known) / len(known)


def run_trial(task: Task) -> TrialResult:
    """Train by the trial's method and test every peer.

    Raises:
        ModelError: The method failed, whatever it raised.
    """
    trial, settings = task.trial, task.settings
    torch.set_num_threads(settings.training.threads)
    members = make_members(task)
    name, options = settings.method_of(trial.method)
    method: Callable[..., Outcome] = find_method(name)
    budget = Budget(steps=settings.steps, local_steps=trial.local_steps or 1)
    rng = Streams.of(trial.seed, name).sampling
    began_s = time.perf_counter()
    tests = [(part.later or part.dataset).test for part in task.slices]
    with ForeignCode(str(trial), ModelError):
        outcome = method(members, budget, rng, **options)
        seconds = time.perf_counter() - began_s
        accuracy = [measure_accuracy(*pair) for pair in zip(outcome.predict, tests, strict=True)]
    weights = None
    if outcome.weights is not None and not trial.tuning:
        weights = np.round(outcome.weights, 6).tolist()
    return TrialResult(
        trial=trial,
        code=task.code,
        accuracy=accuracy,
        num_train=[member.num_train for member in members],
        num_test=[len(test or ()) for test in tests],
        gradients=[spent.gradients for spent in outcome.spending],
        bytes_sent=[spent.bytes_sent for spent in outcome.spending],
        bytes_received=[spent.bytes_received for spent in outcome.spending],
        weights=weights,
        groups=[
            part.group if part.later_group is None else part.later_group for part in task.slices
        ],
        seconds=round(seconds, 3),
    )


def make_members(task: Task) -> list[Member]:
    """Make the peers of a trial; all methods get the same ones.

    Raises:
        DataError: A peer has no training example.
    """
    names = peer_names(len(task.slices))
    return [
        _make_member(task, number, name, part)
        for number, (name, part) in enumerate(zip(names, task.slices, strict=True))
    ]


def measure_accuracy(predict: Predict, test: Examples | None) -> float | None:
    """Return the share of test examples that are predicted right; None when there are none."""
    if not test:
        return None
    return accuracy_of(predict(test.inputs), test.labels)


def _make_member(task: Task, number: int, name: str, part: Slice) -> Member:
    streams = Streams.of(task.trial.seed, name)
    examples = split(part.dataset, HOLDOUT_FRACTION, streams.split)
    later = None if part.later is None else split(part.later, HOLDOUT_FRACTION, streams.split)

    def build(present: Split, /, *, loss: Loss, measure_on: MeasureOn) -> Learner:
        return new_learner(
            task.settings,
            AlgorithmSettings(loss=loss, measure_on=measure_on),
            task.settings.training_at(task.trial.learning_rate),
            present,
            num_classes=part.dataset.num_classes,
            seed=streams.batches,
            import_paths=task.import_paths,
        )

    return Member(
        PeerId(f"{number:032x}"),
        examples,
        build,
        group=part.group,
        later=later,
        later_group=part.group if part.later_group is None else part.later_group,
    )
