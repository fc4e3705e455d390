"""Import what a peer needs, and warm it up, before a fork server forks peers.

A fresh interpreter that imports torch and takes a first step costs more than a second and some 200
MB of its own; a peer forked after that shares nearly all of it. Nothing here starts a thread or
opens a socket, since neither survives a fork.
"""

from __future__ import annotations

import gc


def warm_up() -> None:
    """Import, and take one step with a tiny model: torch sets up its kernels only then.

    Meanwhile the collector rests: in what importing makes it would find next to no garbage, and to
    look for it once takes a tenth of the time.
    """
    gc.disable()
    import numpy as np
    import torch

    import peer.process  # noqa: F401  what the forked peers run
    from peer.data import Examples, Split
    from peer.learner import Batch, TrainingSettings
    from peer.models import build_model
    from peer.torch_learner import TorchLearner

    torch.set_num_threads(1)
    examples = Examples(np.zeros((2, 1, 4, 4), np.float32), np.zeros(2, np.int64))
    split = Split(fit=examples, holdout=examples, test=examples)
    learner = TorchLearner(build_model("cnn", (1, 4, 4), 2, 0), split, 2, TrainingSettings())
    learner.train(None, (Batch(0),))
    gc.freeze()  # it would touch, and so copy, every shared page
    gc.enable()


warm_up()
