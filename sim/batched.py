"""The learners of many peers with linear classifiers, whose jobs are done in batched products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from peer.data import Examples, Split
from peer.events import (
    Adopt,
    Cluster,
    Differentiate,
    Differentiated,
    Measure,
    Measured,
    Step,
    Stepped,
    Train,
)
from peer.learner import Batch, Probabilities, TrainingSettings
from peer.work import Done, Job, cluster
from protocol.errors import LocalProtocolError
from protocol.messages import PeerId
from protocol.tensors import Layout, Tensors, TensorSpec

_CHUNK_FLOATS = 1 << 18
"""Numbers gathered for one product, 1 MB of them: bounds the memory, and stays in the caches."""

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
"""Adam's, as torch has them."""

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
_Change = Step | Train | Adopt
T = TypeVar("T")


def linear_layout(num_features: int, num_classes: int) -> Layout:
    """Return the layout of `peer.models.logistic`."""
    return Layout(
        [
            TensorSpec("1.bias", "f32", (num_classes,)),
            TensorSpec("1.weight", "f32", (num_classes, num_features)),
        ]
    )


class BatchedCrowd:
    """Does the jobs of all peers' logistic models, those of one kind together; a `Crowd`.

    It does what a `TorchLearner` over `peer.models.logistic` does for each peer: same batches, same
    optimizer, equal up to the rounding of f32. What comes out doesn't depend on which jobs are
    done together: each has a matrix product of its own shape, and every reduction its own row.

    Args:
        splits: Each peer's examples; peers may have different numbers of them.
        num_classes: Number of classes, at least every label + 1.
        model: All peers' initial model, of the layout `linear_layout`.
        settings: The optimizer's; it computes in numpy, in the calling thread.
        seeds: What decides each peer's batches.
        loss: Whether measuring sums or averages over examples.
        measure_on: Which examples are measured on; train when a peer has no holdout.

    Attributes:
        layout: The layout of all models.
        task: What the models do.

    Raises:
        LocalProtocolError: The model has another layout.
    """

    def __init__(
        self,
        splits: Mapping[PeerId, Split],
        num_classes: int,
        model: Tensors,
        settings: TrainingSettings,
        *,
        seeds: Mapping[PeerId, int],
        loss: Literal["mean", "sum"] = "mean",
        measure_on: Literal["holdout", "train"] = "holdout",
    ) -> None:
        peers = sorted(splits)
        parts = [splits[peer_id] for peer_id in peers]
        self.task = f"classification:{num_classes}"
        self._rows = {peer_id: row for row, peer_id in enumerate(peers)}
        self._seeds = [seeds[peer_id] for peer_id in peers]
        self._settings = settings
        self._mean = loss == "mean"
        self._num_fit = [len(part.fit) for part in parts]
        self._train = _Stack.of([part.train for part in parts])
        measured = [
            part.holdout if measure_on == "holdout" and len(part.holdout) else part.train
            for part in parts
        ]
        self._measured = _Stack.of(measured)
        self.layout = linear_layout(self._train.inputs.shape[2], num_classes)
        if model.layout != self.layout:
            raise LocalProtocolError(
                "a batched crowd needs the model 'logistic' over these examples: "
                + self.layout.first_difference(self.task, model.layout.canonical(self.task))
            )
        self._orders: dict[tuple[int, bool], tuple[int, Integers]] = {}
        # What each peer owns. Shape (num_peers, size of a blob in numbers).
        self._own: Floats = np.repeat(model.flat_f32()[None], len(peers), axis=0)
        self._moments = [np.zeros_like(self._own) for _ in _BETAS]
        self._steps = np.zeros(len(peers), np.int64)

    def work(self, jobs: Sequence[tuple[PeerId, Job]]) -> Sequence[Done]:
        """Do jobs and return their answers in the order of jobs."""
        measures: list[tuple[int, int, Measure]] = []
        differentiations: list[tuple[int, int, Differentiate]] = []
        changes: dict[int, list[tuple[int, _Change]]] = {}
        answers: dict[int, Done] = {}
        for position, (peer_id, job) in enumerate(jobs):
            row = self._rows[peer_id]
            match job:
                case Measure():
                    measures.append((position, row, job))
                case Differentiate():
                    differentiations.append((position, row, job))
                case Cluster():
                    answers[position] = cluster(job)
                case Step() | Train() | Adopt():
                    changes.setdefault(row, []).append((position, job))
        answers.update(self._measure_all(measures))
        answers.update(self._differentiate_all(differentiations))
        while changes:  # one job a peer at a time: the next one goes on from its model
            answers.update(
                self._change_all([(row, *todo.pop(0)) for row, todo in sorted(changes.items())])
            )
            changes = {row: todo for row, todo in changes.items() if todo}
        return [answers[position] for position in range(len(jobs))]

    def parameters(self, peer_id: PeerId) -> Tensors:
        """Return a copy of a peer's own model."""
        return Tensors(self.layout, self._own[self._rows[peer_id]].copy().view(np.uint8))

    def predict(self, model: Tensors, inputs: Floats) -> Probabilities:
        """Predict with any model on any inputs, of shape (num_examples, *input_shape)."""
        weight, bias = self._unpack(model.flat_f32()[None])
        scores = inputs.reshape(1, len(inputs), -1) @ weight.transpose(0, 2, 1) + bias[:, None]
        _exponentiate(scores, axis=2)
        probabilities: Probabilities = (scores / scores.sum(axis=2, keepdims=True))[0]
        return probabilities

    def _measure_all(self, jobs: list[tuple[int, int, Measure]]) -> Iterator[tuple[int, Done]]:
        for chunk in _chunks(jobs, self._measured.floats_each):
            rows = np.array([row for _, row, _ in chunk])
            inputs, labels = self._measured.inputs[rows], self._measured.labels[rows]
            weight, bias = self._unpack(_blobs([job.model for _, _, job in chunk]))
            scores = weight @ inputs.transpose(0, 2, 1) + bias[:, :, None]
            at_label = np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
            highest = _exponentiate(scores, axis=1)[:, 0]
            losses = np.log(scores.sum(axis=1)) + highest - at_label  # (num_jobs, num_examples)
            totals = (losses * self._measured.shares(rows, mean=self._mean)).sum(axis=1)
            for (position, _, job), loss in zip(chunk, totals.tolist(), strict=True):
                yield position, Measured(job.peer_id, job.round_number, loss)

    def _differentiate_all(
        self, jobs: list[tuple[int, int, Differentiate]]
    ) -> Iterator[tuple[int, Done]]:
        for chunk in _chunks(jobs, self._floats_of_a_batch):
            rows = [row for _, row, _ in chunk]
            models = _blobs([job.model for _, _, job in chunk])
            gradients, sizes = self._gradients(rows, models, [job.batch for _, _, job in chunk])
            for (position, _, job), gradient, size in zip(
                chunk, gradients, sizes.tolist(), strict=True
            ):
                tensors = Tensors(self.layout, gradient.copy().view(np.uint8))
                yield position, Differentiated(job.peer_id, job.round_number, tensors, size)

    def _change_all(self, jobs: list[tuple[int, int, _Change]]) -> Iterator[tuple[int, Done]]:
        """Let own models change: at most one job a peer."""
        for chunk in _chunks(jobs, self._floats_of_a_batch):
            self._take_over([(row, job) for row, _, job in chunk])
            self._take_local_steps(
                [(row, job) for row, _, job in chunk if not isinstance(job, Adopt)]
            )
            for row, position, job in chunk:
                # A row of its own for each: one that is kept for long keeps nothing else alive.
                model = Tensors(self.layout, self._own[row].copy().view(np.uint8))
                yield position, Stepped(job.round_number, model)

    def _take_over(self, jobs: Sequence[tuple[int, _Change]]) -> None:
        """Do what jobs ask for before their local steps."""
        steps = [(row, job.gradient) for row, job in jobs if isinstance(job, Step)]
        if steps:
            self._descend([row for row, _ in steps], _blobs([gradient for _, gradient in steps]))
        for row, job in jobs:
            if isinstance(job, Train | Adopt):
                self._own[row] = job.model.flat_f32()
            if isinstance(job, Adopt):
                self._steps[row] = 0
                for moment in self._moments:
                    moment[row] = 0.0

    def _take_local_steps(self, jobs: Sequence[tuple[int, Step | Train]]) -> None:
        for number in range(max((len(job.batches) for _, job in jobs), default=0)):
            going = [(row, job) for row, job in jobs if len(job.batches) > number]
            rows = [row for row, _ in going]
            batches = [job.batches[number] for _, job in going]
            gradients, _ = self._gradients(rows, self._own[rows], batches)
            for target, (_, job) in enumerate(going):
                if isinstance(job, Step) and job.held is not None:
                    gradients[target] += job.held.flat_f32()
            self._descend(rows, gradients)

    def _descend(self, rows: Sequence[int], gradients: Floats) -> None:
        """Take one optimizer step on the own models of some peers."""
        rate = np.float32(self._settings.learning_rate)
        if self._settings.optimizer == "sgd":
            self._own[rows] -= rate * gradients
            return
        self._steps[rows] += 1
        corrections = [1.0 - beta ** self._steps[rows][:, None] for beta in _BETAS]
        first, second = self._moments
        mean = first[rows]
        mean += np.float32(1.0 - _BETAS[0]) * (gradients - mean)
        square = np.float32(_BETAS[1]) * second[rows]
        square += np.float32(1.0 - _BETAS[1]) * gradients * gradients
        first[rows], second[rows] = mean, square
        spread = np.sqrt(square) / np.sqrt(corrections[1]).astype(np.float32)
        spread += np.float32(_EPSILON)
        self._own[rows] -= (rate / corrections[0]).astype(np.float32) * mean / spread

    def _gradients(
        self, rows: Sequence[int], models: Floats, batches: Sequence[Batch]
    ) -> tuple[Floats, Integers]:
        """Return the gradients of mean cross-entropy, as blobs, and the batches' sizes.

        Args:
            rows: Whose examples each is computed on.
            models: Blobs of the models. Shape (num_jobs, size of a blob in numbers).
            batches: Which of the examples.
        """
        positions, sizes = self._positions(rows, batches)
        inputs, labels = self._train.take(rows, positions)
        weight, bias = self._unpack(models)
        scores = weight @ inputs.transpose(0, 2, 1) + bias[:, :, None]  # (num_jobs, classes, batch)
        _exponentiate(scores, axis=1)
        scores /= scores.sum(axis=1, keepdims=True)
        jobs, columns = np.ogrid[: len(rows), : positions.shape[1]]
        scores[jobs, labels, columns] -= 1.0
        scores *= np.where(columns < sizes[:, None], np.float32(1) / sizes[:, None], 0)[:, None]
        gradients = np.zeros_like(models)
        weight_gradient, bias_gradient = self._unpack(gradients)
        np.matmul(scores, inputs, out=weight_gradient)
        np.sum(scores, axis=2, out=bias_gradient)
        return gradients, sizes

    def _positions(
        self, rows: Sequence[int], batches: Sequence[Batch]
    ) -> tuple[Integers, Integers]:
        """Return where batches lie among the training examples, and how many each has.

        Where a peer has fewer examples than a batch, the first one fills the places left over.
        """
        positions = np.zeros((len(rows), self._longest_batch), np.int64)
        sizes = np.empty(len(rows), np.int64)
        for target, (row, batch) in enumerate(zip(rows, batches, strict=True)):
            chosen = self._chosen(row, batch)
            sizes[target] = len(chosen)
            positions[target, : len(chosen)] = chosen
        return positions, sizes

    def _chosen(self, row: int, batch: Batch) -> Integers:
        """A batch's positions: epochs of shuffled full batches, a last smaller one left out."""
        number = int(self._train.sizes[row]) if batch.full else self._num_fit[row]
        size = min(self._settings.batch_size, number)
        epoch, position = divmod(batch.number, number // size)
        at, order = self._orders.get((row, batch.full), (-1, None))
        if order is None or at != epoch:
            order = np.random.default_rng((self._seeds[row], epoch, batch.full)).permutation(number)
            self._orders[row, batch.full] = epoch, order
        return order[position * size : (position + 1) * size]

    @property
    def _longest_batch(self) -> int:
        return min(self._settings.batch_size, int(self._train.inputs.shape[1]))

    @property
    def _floats_of_a_batch(self) -> int:
        return self._longest_batch * int(self._train.inputs.shape[2])

    def _unpack(self, blobs: Floats) -> tuple[Floats, Floats]:
        """View blobs as weights, (num_jobs, classes, features), and biases, (num_jobs, classes)."""
        (bias, weight), offsets = self.layout.specs, [at // 4 for at in self.layout.offsets]
        end = offsets[1] + weight.size_bytes // 4
        weights = blobs[:, offsets[1] : end].reshape(len(blobs), *weight.shape)
        return weights, blobs[:, offsets[0] : offsets[0] + bias.shape[0]]


@dataclass(frozen=True, slots=True)
class _Stack:
    """The examples of all peers, filled up to the largest number with zeros.

    Attributes:
        inputs: Shape (num_peers, largest number, num_features).
        labels: Shape (num_peers, largest number).
        sizes: How many examples each peer has. Shape (num_peers,).
    """

    inputs: Floats
    labels: Integers
    sizes: Integers

    @classmethod
    def of(cls, parts: Sequence[Examples]) -> _Stack:
        """Stack the peers' examples, inputs flattened."""
        sizes = np.array([len(part) for part in parts])
        inputs = np.zeros((len(parts), sizes.max(), parts[0].inputs[0].size), np.float32)
        labels = np.zeros(inputs.shape[:2], np.int64)
        for row, part in enumerate(parts):
            inputs[row, : len(part)] = part.inputs.reshape(len(part), -1)
            labels[row, : len(part)] = part.labels
        return cls(inputs, labels, sizes)

    @property
    def floats_each(self) -> int:
        """Numbers that one peer's inputs are."""
        return int(self.inputs[0].size)

    def take(self, rows: Sequence[int], positions: Integers) -> tuple[Floats, Integers]:
        """Gather examples; `positions` has shape (number of rows, number of examples)."""
        whose = np.asarray(rows)[:, None]
        return self.inputs[whose, positions], self.labels[whose, positions]

    def shares(self, rows: npt.NDArray[np.intp], *, mean: bool) -> Floats:
        """What each example counts in a mean, or a sum. Shape (number of rows, largest number)."""
        sizes = self.sizes[rows][:, None]
        there = np.arange(self.labels.shape[1]) < sizes
        return (there / sizes if mean else there).astype(np.float32)


def _blobs(models: Sequence[Tensors]) -> Floats:
    return np.stack([model.buffer for model in models]).view(np.float32)


def _exponentiate(scores: Floats, axis: int) -> Floats:
    """Replace scores by exp(score - highest) in place, and return the highest along the axis."""
    highest: Floats = scores.max(axis=axis, keepdims=True)
    scores -= highest
    np.exp(scores, out=scores)
    return highest


def _chunks(jobs: Sequence[T], floats_each: int) -> Iterator[Sequence[T]]:
    """Cut jobs into parts that gather a bounded number of floats each."""
    size = max(1, _CHUNK_FLOATS // max(1, floats_each))
    for start in range(0, len(jobs), size):
        yield jobs[start : start + size]
