"""Ready-made networks and the loading of the user's own; all return logits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from peer.hooks import load_hook
from protocol.errors import ModelError

Shape = tuple[int, ...]


def logistic(input_shape: Shape, num_classes: int) -> nn.Module:
    """Build a linear classifier."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    """Build a perceptron with one hidden layer of 64."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


class _ChannelsLast(nn.Module):
    """Orders images by pixel, then channel: twice as fast on a CPU as by channel, then pixel."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.to(memory_format=torch.channels_last)


def cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Build a small convolutional network for images of at least 4 by 4 pixels.

    28x28 gray images give 105,866 parameters, 14x14 ones 23,946.

    Raises:
        ModelError: The inputs are no images, or too small.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise ModelError(
            'model "cnn" needs inputs of shape (channels, height, width), 4x4 pixels or more, '
            f"not {input_shape}: use mlp or logistic"
        )
    channels, height, width = input_shape
    return nn.Sequential(
        _ChannelsLast(),
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),  # (n, 16, height, width)
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),  # (n, 32, height / 2, width / 2)
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


class _Ids(nn.Module):
    """Makes whole numbers of inputs, which all come as floats."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.long()


class _LastStep(nn.Module):
    """What a recurrent network puts out at the end of each sequence."""

    def __init__(self, network: nn.LSTM) -> None:
        super().__init__()
        self.network = network

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.network(steps)[0]  # (n, length, hidden_size)
        return outputs[:, -1]


def lstm(input_shape: Shape, num_classes: int, hidden_size: int = 100) -> nn.Module:
    """Build a network that tells the next character of a text: a stacked LSTM of two layers.

    Inputs are ids of characters, from 0 to num_classes - 1, since what follows is a character, too.
    The hidden size is for CPUs; LEAF and the papers on it use 256. With 77 characters, 100 gives
    133,193 parameters.

    Raises:
        ModelError: The inputs are no sequences.
    """
    if len(input_shape) != 1:
        raise ModelError(
            f'model "lstm" needs inputs of shape (length,), ids of characters, not {input_shape}: '
            "use it with the data set shakespeare, or take cnn or mlp"
        )
    return nn.Sequential(
        _Ids(),
        nn.Embedding(num_classes, 8),  # (n, length, 8)
        _LastStep(nn.LSTM(8, hidden_size, num_layers=2, batch_first=True)),  # (n, hidden_size)
        nn.Linear(hidden_size, num_classes),
    )


READY_MADE: dict[str, Callable[[Shape, int], nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "lstm": lstm,
}


def build_model(
    reference: str,
    input_shape: Shape,
    num_classes: int,
    seed: int,
    import_paths: Sequence[Path] = (),
) -> nn.Module:
    """Build a model by its name, or by the user's `package.module:function`.

    The user's function takes nothing, or `(input_shape, num_classes)`, and returns a
    `torch.nn.Module` that maps inputs of shape (n, *input_shape) to logits (n, num_classes). The
    same seed gives the same initial parameters, as all peers of a federation need.

    Raises:
        ModelError: There is no such model, or it can't be built, or isn't a module.
    """
    if reference in READY_MADE:
        build = READY_MADE[reference]
    elif ":" in reference:
        build = _adapt(load_hook(reference, import_paths, ModelError))
    else:
        raise ModelError(
            f"model {reference!r} is not known: use one of {', '.join(READY_MADE)}, or your own as "
            '"package.module:function"'
        )
    # Modules draw their parameters from torch's global generator; this borrows and restores it.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = build(input_shape, num_classes)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model {reference!r} returned {type(model).__name__}: it must be a torch.nn.Module"
        )
    return model


def _adapt(function: Callable[..., nn.Module]) -> Callable[[Shape, int], nn.Module]:
    try:
        takes_arguments = bool(inspect.signature(function).parameters)
    except ValueError:  # some built-in types tell nothing about themselves
        takes_arguments = False
    if takes_arguments:
        return lambda input_shape, num_classes: function(input_shape, num_classes)
    return lambda input_shape, num_classes: function()
