"""The optimizers, against the classes of torch that they stand in for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from peer.optimizers import Adam, Sgd

SHAPES = {"weight": (7, 5), "bias": (7,), "scale": ()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_steps_are_those_of_torch_to_the_bit(name: str, dtype: torch.dtype):
    rng = torch.Generator().manual_seed(3)

    def draw() -> dict[str, torch.Tensor]:
        return {key: torch.randn(shape, generator=rng).to(dtype) for key, shape in SHAPES.items()}

    ours = draw()
    theirs = {key: tensor.clone().requires_grad_() for key, tensor in ours.items()}
    if name == "adam":
        torchs = torch.optim.Adam(theirs.values(), lr=0.01, fused=True)
    else:
        torchs = torch.optim.SGD(theirs.values(), lr=0.01)
    optimizer = (Adam if name == "adam" else Sgd)(ours, 0.01)
    for _ in range(20):
        gradients = draw()
        optimizer.step(gradients)
        for key, parameter in theirs.items():
            parameter.grad = gradients[key].clone()
        torchs.step()
    for key, parameter in theirs.items():
        assert torch.equal(ours[key], parameter.detach()), key


def test_a_learner_imports_no_compiler():
    script = "import sys, peer.preload; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
