"""The `Learner` interface: what a peer does with models and its own examples, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from peer.data import Split
from peer.nearest import Embeddings
from protocol.tensors import Layout, Tensors

Probabilities = npt.NDArray[np.float32]
"""Shape (num_examples, num_classes); each row sums to 1."""


class Batch(NamedTuple):
    """Names one batch of a peer's examples; the same name always means the same examples.

    Attributes:
        number: Batches are numbered from 0, one for each step of the own model.
        full: Whether it is drawn from all local training examples, the holdout included.
    """

    number: int
    full: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """How well a model does on the peer's measuring examples.

    Attributes:
        loss: Cross-entropy, mean or sum over the examples as the settings say.
        probabilities: Its predictions there.
    """

    loss: float
    probabilities: Probabilities


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a model's mean loss over one batch of the peer's examples.

    Attributes:
        tensors: In f32, with the layout `Learner.layout.gradient`.
        loss: Mean loss over the batch.
        num_examples: Size of the batch.
    """

    tensors: Tensors
    loss: float
    num_examples: int


class TrainingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a peer takes its gradient steps."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Paper: adam. It keeps its state at the owner of a model."""
    learning_rate: Annotated[float, msgspec.Meta(gt=0.0)] = 0.01
    """Step size. Paper: 0.01."""
    batch_size: Annotated[int, msgspec.Meta(ge=1)] = 32
    """Examples in a batch; fewer when a peer has fewer."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Threads of torch's arithmetic; 1 is best where many peers share a machine."""
    device: str = "cpu"
    """Where torch computes: `cpu`, or `cuda` as in `torch.device`."""


class Learner(Protocol):
    """Works on one peer's examples and owns its model and optimizer.

    Methods are called from one thread at a time. Tensors handed in are never changed; tensors
    handed out are never changed afterwards.

    Attributes:
        layout: The layout of all models of the federation.
        task: What the models do, such as `classification:10`.
    """

    layout: Layout
    task: str

    @property
    def measured_labels(self) -> npt.NDArray[np.int64]:
        """The labels of the examples that `measure` uses. Shape (num_examples,)."""

    def parameters(self) -> Tensors:
        """Return the own model as it is now."""

    def measure(self, model: Tensors) -> Measurement:
        """Measure any model on the holdout, or on the training examples."""

    def differentiate(
        self,
        model: Tensors,
        batch: Batch,
        *,
        own: bool,
        example_weights: npt.NDArray[np.float32] | None = None,
    ) -> Gradient:
        """Differentiate any model on a batch; `own` keeps what the model's buffers became.

        With `example_weights`, shape (batch size,), the loss is Σ weight * loss / batch size.
        """

    def positions(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return where a batch's examples lie among the training examples: fit, then holdout."""

    def use_examples(self, split: Split) -> None:
        """Go on with other examples of the same kind: the data have changed."""

    def step(self, gradient: Tensors) -> Tensors:
        """Take one optimizer step on the own model and return the new one."""

    def train(
        self, model: Tensors | None, batches: Sequence[Batch], held: Tensors | None = None
    ) -> Tensors:
        """Take a local step on each batch and return the new own model.

        It goes on from `model`, or from the own one, with the optimizer as it is; `held`, a
        gradient of others, is added to the gradient of each step.
        """

    def adopt(self, model: Tensors) -> Tensors:
        """Make another's model the own one, with a fresh optimizer, and return a copy."""

    def predict(self, model: Tensors, inputs: npt.NDArray[np.float32]) -> Probabilities:
        """Predict with any model on any inputs."""

    def embed(self, model: Tensors, inputs: npt.NDArray[np.float32]) -> Embeddings:
        """Return what any model makes of any inputs before its head, (num_examples, dim) in f32."""

    def optimizer_state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Return the optimizer's state by name, to be saved."""

    def restore(self, model: Tensors, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Go on from a saved model and optimizer state."""
