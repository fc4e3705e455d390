"""Synthetic regression problems of peers in clusters, and how one is solved, exactly or roughly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from peer.clustering.interface import Labels, Points
from protocol.errors import ConfigError, DataError

Kind = Literal["linear", "logistic"]
"""Least squares with noise of deviation 1, or classes drawn with the logistic probability."""

Vector = npt.NDArray[np.float64]

LARGEST = 3.0
"""Each coordinate of a true parameter is drawn from -LARGEST to LARGEST (odcl.txt)."""

_MOST_NEWTON_STEPS = 200
_FLAT = 1e-10  # a gradient so small, in every coordinate, is the end
_ENOUGH = 1e-4  # of the decrease that the slope promises
_ROUNDED = 1e-15  # of the loss: near the end it can't fall by more
_SHORTEST = 2.0**-30  # a shorter step is lost in rounding
_NO_EIGENVALUE = 1e-10  # of the largest: up to there it is 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """The examples of several learning problems, of equally many examples each.

    The loss is a mean over examples: ½ (x·θ - y)², or log(1 + exp(x·θ)) - y x·θ. What is minimized
    is, for logistic problems, that and a ridge: few examples can be told apart without an error,
    and then there is no minimizer. Models, one a problem, have the shape (num_problems, dim).

    Attributes:
        kind: Which loss.
        inputs: Standard normal. Shape (num_problems, num_examples, dim).
        outputs: Numbers, or 0 and 1. Shape (num_problems, num_examples).
    """

    kind: Kind
    inputs: npt.NDArray[np.float64]
    outputs: Points

    @property
    def ridge(self) -> float:
        """The factor of ½‖θ‖²: that of a normal prior with the variance that θ is drawn with.

        So it falls with the number of examples, and a pooled problem has less of it.
        """
        return 0.0 if self.kind == "linear" else 3 / LARGEST**2 / self.inputs.shape[1]

    def pooled(self, members: Labels) -> Examples:
        """Return one problem with all examples of some: its loss is the mean of their losses."""
        return Examples(
            kind=self.kind,
            inputs=self.inputs[members].reshape(1, -1, self.inputs.shape[2]),
            outputs=self.outputs[members].reshape(1, -1),
        )

    def losses(self, models: Points) -> Points:
        """Return the loss of each model in each problem, without the ridge.

        Args:
            models: Shape (num_models, dim).

        Returns:
            Shape (num_problems, num_models).
        """
        scores = self.inputs @ models.T  # (num_problems, num_examples, num_models)
        outputs = self.outputs[..., np.newaxis]
        if self.kind == "linear":
            return np.asarray(np.square(scores - outputs).mean(axis=1) / 2)
        return np.asarray(np.logaddexp(0, (1 - 2 * outputs) * scores).mean(axis=1))

    def gradients(self, models: Points) -> Points:
        """Return the gradient of what is minimized, in each problem at its own model."""
        scores = self._scores(models)
        slopes = (scores if self.kind == "linear" else expit(scores)) - self.outputs
        means = (slopes[:, np.newaxis] @ self.inputs)[:, 0] / self.inputs.shape[1]
        return np.asarray(means + self.ridge * models)

    def curvatures(self) -> npt.NDArray[np.float64]:
        """Return a matrix that no Hessian exceeds, for linear problems the Hessian itself.

        Returns:
            Shape (num_problems, dim, dim).
        """
        squares = np.swapaxes(self.inputs, 1, 2) @ self.inputs / self.inputs.shape[1]
        if self.kind == "linear":
            return np.asarray(squares)
        return np.asarray(squares / 4 + self.ridge * np.eye(self.inputs.shape[2]))

    def solve(self) -> Points:
        """Return the minimizers: least squares, of least norm where there are several, or Newton's.

        Raises:
            DataError: Newton's method doesn't get there.
        """
        if self.kind == "linear":
            return np.array(
                [np.linalg.lstsq(x, y)[0] for x, y in zip(self.inputs, self.outputs, strict=True)]
            )
        models = np.zeros((len(self.inputs), self.inputs.shape[2]))
        for _ in range(_MOST_NEWTON_STEPS):
            gradients = self.gradients(models)
            if np.abs(gradients).max() <= _FLAT:
                return models
            models = self._newton_step(models, gradients)
        raise DataError(f"a logistic problem isn't solved by {_MOST_NEWTON_STEPS} Newton steps")

    def descend(self, models: Points, steps: int) -> Points:
        """Take gradient steps of the length in `step_lengths`."""
        lengths = step_lengths(self.curvatures())[:, np.newaxis]
        for _ in range(steps):
            models = models - lengths * self.gradients(models)
        return models

    def _newton_step(self, models: Points, gradients: Points) -> Points:
        """Step as far as the loss falls enough, halving from 1."""
        chances = expit(self._scores(models))
        weighted = self.inputs * (chances * (1 - chances))[..., np.newaxis]
        hessians = np.swapaxes(weighted, 1, 2) @ self.inputs / self.inputs.shape[1]
        hessians += self.ridge * np.eye(models.shape[1])
        steps = np.linalg.solve(hessians, gradients[..., np.newaxis])[..., 0]
        slopes = (steps * gradients).sum(axis=1)
        before = self._own_losses(models)
        lengths = np.ones((len(models), 1))
        while lengths.min() > _SHORTEST:
            after = self._own_losses(models - lengths * steps)
            bound = before - _ENOUGH * lengths[:, 0] * slopes + _ROUNDED * before
            lengths[after > bound] /= 2
            if (after <= bound).all():
                break
        moved: Points = models - lengths * steps
        return moved

    def _own_losses(self, models: Points) -> Vector:
        scores = self._scores(models)
        losses = np.logaddexp(0, (1 - 2 * self.outputs) * scores).mean(axis=1)
        return np.asarray(losses + self.ridge / 2 * np.square(models).sum(axis=1))

    def _scores(self, models: Points) -> Points:
        return np.asarray((self.inputs @ models[..., np.newaxis])[..., 0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Peers, what they know, and what is true.

    Attributes:
        examples: A problem for each peer.
        truth: The cluster of each peer, in order of appearance. Shape (num_peers,).
        parameters: θ of each cluster. Shape (num_clusters, dim).
    """

    examples: Examples
    truth: Labels
    parameters: Points

    def error(self, models: Points) -> float:
        """Return the normalized MSE: the mean over peers of ‖θ̂ - θ‖² / ‖θ‖²."""
        true = self.parameters[self.truth]
        wrong = np.square(models - true).sum(axis=1) / np.square(true).sum(axis=1)
        return float(wrong.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What problems are like; the defaults are those of the study of ODCL."""

    peers: int = 100
    """m."""

    clusters: int = 10
    """K; peer i is in cluster i mod K."""

    dim: int = 20
    """d, the number of parameters."""

    def __post_init__(self) -> None:
        """Check that there is something to cluster.

        Raises:
            ConfigError: It can't be so.
        """
        if not 2 <= self.clusters <= self.peers:
            raise ConfigError(
                f"clusters = {self.clusters}: with {self.peers} peers it must be from 2 to "
                f"{self.peers}"
            )
        if self.dim < 1:
            raise ConfigError(f"dim = {self.dim}: a model has at least one parameter")

    def draw(self, kind: Kind, num_examples: int, rng: np.random.Generator) -> Problem:
        """Draw a problem; the same state of `rng` gives the same θ for any number of examples.

        Raises:
            ConfigError: There are no examples.
        """
        if num_examples < 1:
            raise ConfigError(f"examples = {num_examples}: each peer has at least one")
        parameters = rng.uniform(-LARGEST, LARGEST, (self.clusters, self.dim))
        truth = np.arange(self.peers) % self.clusters
        inputs = rng.standard_normal((self.peers, num_examples, self.dim))
        scores = (inputs @ parameters[truth][..., np.newaxis])[..., 0]
        if kind == "linear":
            outputs = scores + rng.standard_normal(scores.shape)
        else:
            outputs = (rng.random(scores.shape) < expit(scores)).astype(np.float64)
        examples = Examples(kind=kind, inputs=inputs, outputs=outputs)
        return Problem(examples=examples, truth=truth, parameters=parameters)


def kinds_of(names: Iterable[str]) -> tuple[Kind, ...]:
    """Return the kinds of problems by their names, each once.

    Raises:
        ConfigError: There is no such kind.
    """
    kinds: list[Kind] = []
    for name in dict.fromkeys(names):
        match name:
            case "linear" | "logistic":
                kinds.append(name)
            case _:
                known = ", ".join(get_args(Kind))
                raise ConfigError(f"unknown problem {name!r}; known are {known}")
    return tuple(kinds)


def step_lengths(curvatures: npt.NDArray[np.float64]) -> Vector:
    """Return 2 / (the largest + the least eigenvalue above 0) of each matrix.

    Of all constant steps it is the one that serves the worst direction best. With one example
    there is one such eigenvalue, and the step solves the problem.

    Returns:
        Shape (num_problems,).
    """
    values = np.linalg.eigvalsh(curvatures)
    largest = values[..., -1:]
    least = np.where(values > _NO_EIGENVALUE * largest, values, np.inf).min(axis=-1)
    return np.asarray(2 / (largest[..., 0] + least))
