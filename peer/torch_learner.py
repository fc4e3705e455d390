"""The learner over a `torch.nn.Module`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from peer.data import Examples, Split
from peer.head import embeddings_of, find_head
from peer.hooks import ForeignCode
from peer.learner import Batch, Gradient, Measurement, Probabilities, TrainingSettings
from peer.nearest import Embeddings
from peer.optimizers import Adam, Optimizer, Sgd
from protocol.errors import CheckpointError, ModelError
from protocol.tensors import Layout, Tensors, TensorSpec, allocate

_DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}
_PREDICT_BATCH = 64
"""Bounds the memory of a forward pass; larger ones fall out of the caches, and are slower."""


class TorchLearner:
    """Measures, differentiates and steps with one module, into which models are loaded in turn.

    Args:
        module: Maps inputs to logits; its present parameters are the initial model.
        split: The peer's examples.
        num_classes: Number of classes, at least every label + 1.
        settings: The optimizer's.
        loss: Whether `measure` sums or averages over examples.
        measure_on: Which examples `measure` uses; train when there is no holdout.
        seed: Decides the batches.

    Raises:
        ModelError: The module doesn't fit the examples; checked on one batch.
    """

    def __init__(
        self,
        module: nn.Module,
        split: Split,
        num_classes: int,
        settings: TrainingSettings,
        *,
        loss: Literal["mean", "sum"] = "mean",
        measure_on: Literal["holdout", "train"] = "holdout",
        seed: int = 0,
    ) -> None:
        self.task = f"classification:{num_classes}"
        self._settings = settings
        self._seed = seed
        self._loss: Literal["mean", "sum"] = loss
        self._device = _device(settings.device)
        self._module = module.to(self._device)
        self._measure_on = measure_on
        self.use_examples(split)
        trainable = {name for name, p in module.named_parameters() if p.requires_grad}
        tensors = _exchanged(module)
        for name, tensor in tensors.items():
            if is_lazy(tensor):
                raise ModelError(
                    f"the shape of {name!r} isn't known yet: give the model its sizes, or run it "
                    "on one batch before returning it"
                )
        self.layout = Layout(
            TensorSpec(name, _dtype_of(name, tensor), tuple(tensor.shape), name in trainable)
            for name, tensor in tensors.items()
        )
        if not trainable:
            raise ModelError("the model has no parameter that takes a gradient: nothing to learn")
        self._work = _Window(self.layout, tensors)
        self._trainable = {name: tensors[name] for name in self.layout.gradient.index}
        # The own model lives apart from the working module: the optimizer steps on it in place.
        own = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._own = _Window(self.layout, own)
        self._owned = {name: own[name] for name in self._trainable}
        self._buffers = {name: own[name] for name in own if name not in trainable}
        self._optimizer = self._new_optimizer()
        self._head: nn.Module | None = None
        self._check(num_classes)

    @property
    def measured_labels(self) -> npt.NDArray[np.int64]:
        """The labels of the measuring examples. Shape (num_examples,)."""
        labels: npt.NDArray[np.int64] = self._measured[1].cpu().numpy()
        return labels

    def parameters(self) -> Tensors:
        """Return a copy of the own model."""
        return self._own.save()

    def measure(self, model: Tensors) -> Measurement:
        """Return cross-entropy and probabilities on the measuring examples."""
        inputs, labels = self._measured
        self._work.load(model)
        logits = self._forward(inputs)
        loss = functional.cross_entropy(logits, labels, reduction=self._loss)
        return Measurement(float(loss), _to_numpy(torch.softmax(logits, dim=1)))

    def use_examples(self, split: Split) -> None:
        """Measure and train on these examples from now on."""
        on_holdout = self._measure_on == "holdout" and len(split.holdout)
        self._measured = self._on_device(split.holdout if on_holdout else split.train)
        self._fit = self._on_device(split.fit)
        self._train = self._on_device(split.train) if len(split.holdout) else self._fit
        self._orders: dict[bool, tuple[int, torch.Tensor]] = {}

    def differentiate(
        self,
        model: Tensors,
        batch: Batch,
        *,
        own: bool,
        example_weights: npt.NDArray[np.float32] | None = None,
    ) -> Gradient:
        """Return the gradient of the mean, or weighted, cross-entropy on the batch, in f32."""
        inputs, labels = self._examples_of(batch)
        self._work.load(model)
        _set_training(self._module, len(labels))
        with self._randomness(batch), _named_failure(inputs):
            loss = self._loss_of(self._logits(inputs), labels, example_weights)
            gradients = torch.autograd.grad(loss, list(self._trainable.values()), allow_unused=True)
        result = Tensors.zeros(self.layout.gradient)
        for target, gradient in zip(result.values(), gradients, strict=True):
            if gradient is not None:  # a parameter that this batch didn't touch has gradient zero
                torch.from_numpy(target).copy_(gradient)
        if own:
            for name, buffer in self._buffers.items():
                buffer.copy_(self._work.tensors[name])
        return Gradient(result, loss.item(), len(labels))

    def step(self, gradient: Tensors) -> Tensors:
        """Feed the gradient to the own model's optimizer."""
        self._apply(gradient)
        return self._own.save()

    def _apply(self, gradient: Tensors) -> None:
        self._optimizer.step(
            {
                name: torch.from_numpy(gradient[name]).to(parameter.device, parameter.dtype)
                for name, parameter in self._owned.items()
            }
        )

    def train(
        self, model: Tensors | None, batches: Sequence[Batch], held: Tensors | None = None
    ) -> Tensors:
        """Take local steps, from another model or the own one, with the optimizer as it is."""
        if model is not None:
            self._own.load(model)
        for batch in batches:
            gradient = self.differentiate(self._own.save(), batch, own=True).tensors
            if held is not None:
                flat = gradient.flat_f32()
                flat += held.flat_f32()
            self._apply(gradient)
        return self._own.save()

    def adopt(self, model: Tensors) -> Tensors:
        """Start over from another model."""
        self._own.load(model)
        self._optimizer = self._new_optimizer()
        return self._own.save()

    def predict(self, model: Tensors, inputs: npt.NDArray[np.float32]) -> Probabilities:
        """Return softmax of the model's logits."""
        self._work.load(model)
        logits = self._forward(torch.from_numpy(inputs).to(self._device))
        return _to_numpy(torch.softmax(logits, dim=1))

    def embed(self, model: Tensors, inputs: npt.NDArray[np.float32]) -> Embeddings:
        """Return what comes into the last module with trainable parameters, flattened, in f32.

        Raises:
            ModelError: It can't be told which module that is, or what comes into it.
        """
        self._work.load(model)
        if self._head is None:
            self._head = find_head(self._module, self._forward, self._fit[0][:1])
        with embeddings_of(self._head) as gathered:
            self._forward(torch.from_numpy(inputs).to(self._device))
        embeddings = _to_numpy(torch.cat(gathered))
        if len(embeddings) != len(inputs):
            raise ModelError(
                f"the model's head takes {len(embeddings)} rows for {len(inputs)} examples: let "
                "its last module take one row an example, or leave out personalization.kind"
            )
        return embeddings

    def optimizer_state(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return `<parameter>/<moment>` arrays of the optimizer."""
        return {key: np.array(_to_numpy(value.float())) for key, value in self._moments().items()}

    def _moments(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{key}": value
            for name, moments in self._optimizer.state.items()
            for key, value in moments.items()
        }

    def restore(self, model: Tensors, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Load a model and the optimizer state saved with it.

        Raises:
            CheckpointError: The state is of another model or optimizer.
        """
        self.adopt(model)
        if not state:  # it was saved before the first step
            return
        moments = self._moments()
        if strange := sorted(state.keys() ^ moments.keys()):
            raise CheckpointError(
                f"the optimizer state {strange[0]!r} is of another model or optimizer"
            )
        for key, array in state.items():
            if array.shape != moments[key].shape:
                raise CheckpointError(f"the optimizer state {key!r} has the shape {array.shape}")
            moments[key].copy_(torch.from_numpy(array))

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._module.eval()  # torch's mode: no dropout, running statistics
        with torch.inference_mode(), _named_failure(inputs):
            return torch.cat([self._logits(part) for part in torch.split(inputs, _PREDICT_BATCH)])

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self._module(inputs)
        if not isinstance(output, torch.Tensor):
            raise ModelError(
                f"the model returned a {type(output).__name__}: it must return a tensor of logits"
            )
        return output.float()

    def _loss_of(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        example_weights: npt.NDArray[np.float32] | None,
    ) -> torch.Tensor:
        if example_weights is None:
            return functional.cross_entropy(logits, labels)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return (losses * torch.from_numpy(example_weights).to(self._device)).mean()

    def positions(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return the positions of the batch's examples in `split.train`."""
        positions: npt.NDArray[np.int64] = self._chosen(batch).cpu().numpy()
        return positions

    def _examples_of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = self._train if batch.full else self._fit
        chosen = self._chosen(batch)
        return inputs[chosen], labels[chosen]

    def _chosen(self, batch: Batch) -> torch.Tensor:
        """A batch's positions: epochs of shuffled full batches, a last smaller one left out."""
        labels = (self._train if batch.full else self._fit)[1]
        size = min(self._settings.batch_size, len(labels))
        epoch, position = divmod(batch.number, len(labels) // size)
        at, order = self._orders.get(batch.full, (-1, None))
        if order is None or at != epoch:
            rng = np.random.default_rng((self._seed, epoch, batch.full))
            order = torch.from_numpy(rng.permutation(len(labels))).to(self._device)
            self._orders[batch.full] = epoch, order
        return order[position * size : (position + 1) * size]

    @contextmanager
    def _randomness(self, batch: Batch) -> Iterator[None]:
        """Give dropout and its like a generator of their own: torch's global one, borrowed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed * 1_000_003 + batch.number)
            yield

    def _new_optimizer(self) -> Optimizer:
        kind = Adam if self._settings.optimizer == "adam" else Sgd
        return kind(self._owned, self._settings.learning_rate)

    def _on_device(self, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.from_numpy(examples.inputs).to(self._device)
        return inputs, torch.from_numpy(examples.labels).to(self._device)

    def _check(self, num_classes: int) -> None:
        """Try one batch, forward and backward."""
        labels = self._fit[1]
        shape = tuple(self._fit[0].shape[1:])
        if int(labels.max()) >= num_classes:
            raise ModelError(
                f"a label is {int(labels.max())}, but classes = {num_classes}: "
                "labels count from 0; set classes to the number of classes of the whole federation"
            )
        model = self.parameters()
        self._work.load(model)
        logits = self._forward(self._fit[0][:2])
        if logits.shape != (min(2, len(labels)), num_classes):
            raise ModelError(
                f"the model maps {min(2, len(labels))} inputs of shape {shape} to "
                f"{tuple(logits.shape)}; it must return logits of shape (n, {num_classes})"
            )
        gradient = self.differentiate(model, Batch(0), own=False)
        if not np.isfinite(gradient.loss):
            raise ModelError(
                f"the model's loss on its first batch is {gradient.loss}: "
                "check its initial parameters and the scale of the inputs"
            )


class _Window:
    """Torch tensors moved onto one blob, so that a whole model is loaded or saved by one copy."""

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._blob = Tensors.zeros(layout)
        self._on_cpu = all(tensor.device.type == "cpu" for tensor in tensors.values())
        self._views = {name: _as_torch(self._blob, name) for name in layout.index}
        for name, view in self._views.items():
            view.copy_(tensors[name].detach())
            if self._on_cpu:
                tensors[name].data = view

    def load(self, model: Tensors) -> None:
        """Copy a model in."""
        np.copyto(self._blob.buffer, model.buffer)
        if not self._on_cpu:
            for name, view in self._views.items():
                self.tensors[name].data.copy_(view)

    def save(self) -> Tensors:
        """Copy the model out."""
        if not self._on_cpu:
            for name, view in self._views.items():
                view.copy_(self.tensors[name].data)
        buffer = allocate(self._blob.layout.size_bytes)
        np.copyto(buffer, self._blob.buffer)
        return Tensors(self._blob.layout, buffer)


def _exchanged(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; tied ones once, under their first name."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {**dict(module.named_parameters()), **buffers}


def _dtype_of(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in _DTYPES:
        raise ModelError(f"tensor {name!r} has type {tensor.dtype}, which peers can't exchange")
    return _DTYPES[tensor.dtype]


def _as_torch(blob: Tensors, name: str) -> torch.Tensor:
    """View one tensor of a blob as torch's; numpy knows bf16 only as raw 16-bit integers."""
    array = blob[name]
    if blob.layout.specs[blob.layout.index[name]].dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = tensor.detach().cpu().numpy()
    return result


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"training.device {name!r} can't be used here: {reason}") from error
    return device


def _named_failure(inputs: torch.Tensor) -> ForeignCode:
    """What the user's module raises becomes a `ModelError` that says on what."""
    return ForeignCode(f"the model, given inputs of shape {tuple(inputs.shape)},", ModelError)


def _set_training(module: nn.Module, num_examples: int) -> None:
    """Put a module in torch's training mode; BatchNorm only where a batch has a variance."""
    module.train()
    if num_examples == 1:
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()  # torch's mode: its running statistics, since one example has none
