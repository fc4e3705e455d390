"""Where a torch module's head begins: what comes into it is the embedding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from protocol.errors import ModelError

Run = Callable[[torch.Tensor], torch.Tensor]
"""Runs the whole module on inputs, without gradients."""


def find_head(module: nn.Module, run: Run, inputs: torch.Tensor) -> nn.Module:
    """Return the last module that has trainable parameters, found by running the whole.

    Args:
        module: The whole model.
        run: Runs it.
        inputs: One example.

    Raises:
        ModelError: It can't be told where the head begins.
    """
    owners = [part for part in module.modules() if _own_parameters(part)]
    calls = _calls({module, *owners}, run, inputs)
    returned = next(output for part, output in reversed(calls) if part is module)
    heads = [
        at
        for at, (part, _) in enumerate(calls)
        if _own_parameters(part) and not any(map(_own_parameters, list(part.modules())[1:]))
    ]
    if not heads or (calls[heads[-1]][0] is module and not isinstance(module, nn.Linear)):
        raise _unknown("it has no part of its own that is called and has trainable parameters")
    head, made = calls[heads[-1]]
    name = next(repr(name) for name, part in module.named_modules() if part is head)
    if sum(part is head for part, _ in calls) > 1:
        raise _unknown(f"its last part, {name}, is called more than once")
    # Else what comes after may use parameters that no simple module has, such as a weight that a
    # forward method multiplies by.
    called = {part for part, _ in calls[: heads[-1] + 1]}
    if made is not returned and not called.issuperset(owners):
        raise _unknown(f"{name} is not its last step, and others may use parameters after it")
    return head


def _calls(
    parts: Collection[nn.Module], run: Run, inputs: torch.Tensor
) -> list[tuple[nn.Module, object]]:
    """Return which of these parts were called, in the order in which they returned what."""
    calls: list[tuple[nn.Module, object]] = []

    def called(part: nn.Module, _: object, output: object) -> None:
        calls.append((part, output))

    with ExitStack() as hooks:
        for part in parts:
            hooks.enter_context(part.register_forward_hook(called))
        run(inputs)
    return calls


@contextmanager
def embeddings_of(head: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Gather what comes into the head while the model runs, each of shape (num_examples, dim), f32.

    Raises:
        ModelError: It is no single tensor with a row for each example.
    """
    gathered: list[torch.Tensor] = []

    def gather(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [each for each in (*args, *named.values()) if isinstance(each, torch.Tensor)]
        if len(tensors) != 1 or not tensors[0].ndim:
            raise _unknown(f"its head takes {len(tensors)} tensors, not one with a row an example")
        # A copy: what comes after may work in place.
        rows = tensors[0].detach().to(torch.float32, copy=True)
        gathered.append(rows.flatten(1) if rows.ndim > 1 else rows.unsqueeze(1))

    with head.register_forward_pre_hook(gather, with_kwargs=True):
        yield gathered


def _own_parameters(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _unknown(reason: str) -> ModelError:
    return ModelError(
        f"it can't be told where the embedding of this model is, since {reason}: make its last "
        "step a module of its own, such as nn.Linear, called once on one tensor, or leave out "
        "personalization.kind"
    )
