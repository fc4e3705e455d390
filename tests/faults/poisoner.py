"""A peer that sends poisoned gradients, serves poisoned models, or has a clock that jumps.

Usage: poisoner.py nan|huge|flipped|zero|stale|nan-model|clock CONFIG
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from peer.cli import set_up_logging
from peer.config import PeerSettings, read_settings
from peer.daemon import Daemon
from peer.learner import Gradient
from peer.process import RunOptions, run_peer
from peer.torch_learner import TorchLearner
from protocol.messages import ModelSnapshot, Version
from protocol.tensors import Tensors
from protocol.transport.zeromq import ZeroMQTransport

FACTORS = {"nan": np.nan, "huge": -100.0, "flipped": -1.0, "zero": 0.0}


def poison_gradients(factor: float) -> None:
    """Multiply every gradient for somebody else's model."""
    honest = TorchLearner.differentiate

    def differentiate(self: TorchLearner, *args: Any, own: bool, **options: Any) -> Gradient:
        gradient = honest(self, *args, own=own, **options)
        if not own:
            flat = gradient.tensors.flat_f32()
            flat *= np.float32(factor)
        return gradient

    TorchLearner.differentiate = differentiate  # type: ignore[method-assign]


def age_gradients() -> None:
    """Say of every gradient that it was made on the receiver's first model."""
    honest = Daemon._send

    def send(self: Daemon, peer_id: Any, update: Any) -> None:
        old = Version(update.on_version.incarnation, 0)
        honest(self, peer_id, dataclasses.replace(update, on_version=old))

    Daemon._send = send  # type: ignore[method-assign]


def poison_models() -> None:
    """Publish models that are not finite."""
    honest = ZeroMQTransport.publish

    def publish(self: ZeroMQTransport, snapshot: ModelSnapshot) -> None:
        tensors = Tensors(snapshot.tensors.layout, snapshot.tensors.buffer.copy())
        for array in tensors.values():
            if array.dtype.kind == "f":
                array[...] = np.nan
        honest(self, dataclasses.replace(snapshot, tensors=tensors))

    ZeroMQTransport.publish = publish  # type: ignore[method-assign]


def upset_clock() -> None:
    """Set the wall clock an hour forth and back at every look."""
    honest, hours = time.time, itertools.cycle((3600.0, -3600.0))
    time.time = lambda: honest() + next(hours)


def main(kind: str, config: Path) -> None:
    set_up_logging()
    match kind:
        case "stale":
            age_gradients()
        case "nan-model":
            poison_models()
        case "clock":
            upset_clock()
        case "":
            pass
        case _:
            poison_gradients(FACTORS[kind])
    settings = read_settings(config, PeerSettings)
    run_peer(settings, config.parent, RunOptions(keep_serving=True))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
