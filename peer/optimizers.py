"""Adam and SGD by torch's functions for them.

With its first step, a class of `torch.optim` imports torch's compiler, which nobody here uses: a
second of the processor's time and some 80 MB in every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.optim.adam import adam

State = Mapping[str, Mapping[str, torch.Tensor]]
"""What an optimizer remembers of each parameter: by name, then by moment, such as `exp_avg`."""


class Optimizer(Protocol):
    """Steps on some parameters in place."""

    @property
    def state(self) -> State:
        """What it remembers; loaded by copying into it."""

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take one step.

        Args:
            gradients: Of every parameter, by name, with its shape, type and device.
        """


class Adam:
    """Adam with torch's defaults: decay rates 0.9 and 0.999, epsilon 1e-8.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        self._parameters = parameters
        self._learning_rate = learning_rate
        self.state: State = {
            name: {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for name, parameter in parameters.items()
        }

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take one step."""
        moments = self.state.values()
        adam(
            list(self._parameters.values()),
            [gradients[name] for name in self._parameters],
            [each["exp_avg"] for each in moments],
            [each["exp_avg_sq"] for each in moments],
            [],
            [each["step"] for each in moments],
            fused=True,  # one pass over each tensor instead of a dozen
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._learning_rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )


class Sgd:
    """Stochastic gradient descent without momentum; it remembers nothing."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        self._parameters = parameters
        self._learning_rate = learning_rate
        self.state: State = {}

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take one step."""
        for name, parameter in self._parameters.items():
            parameter.add_(gradients[name], alpha=-self._learning_rate)
