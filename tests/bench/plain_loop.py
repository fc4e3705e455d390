"""The bare arithmetic of a swarm in one plain torch loop: no peers, no processes, no network.

Usage: plain_loop.py RUN GRADIENTS STEPS MEASUREMENTS
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from peer.models import build_model


def main(run: Path, num_gradients: int, num_steps: int, num_measurements: int) -> None:
    torch.set_num_threads(1)
    slices = []
    for path in sorted(run.glob("peers/*/data.npz")):
        with np.load(path) as arrays:
            inputs = torch.from_numpy(arrays["train_inputs"].astype(np.float32))
            slices.append((inputs, torch.from_numpy(arrays["train_labels"])))
    shape = tuple(slices[0][0].shape[1:])
    models = [build_model("cnn", shape, 10, 0) for _ in slices]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    rng = np.random.default_rng(0)
    measured = 0
    for number in range(num_gradients):
        index = number % len(models)
        model, optimizer, (inputs, labels) = models[index], optimizers[index], slices[index]
        holdout = len(labels) // 5
        batch = torch.from_numpy(rng.choice(len(labels), 32, replace=False))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        if number < num_steps:
            optimizer.step()
        while measured * num_gradients < num_measurements * (number + 1):
            with torch.inference_mode():  # in parts that fit the caches, as peers do
                logits = torch.cat([model(part) for part in inputs[:holdout].split(64)])
                functional.cross_entropy(logits, labels[:holdout]).item()
            measured += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
