"""Memory that one batch freed is there for the next."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, threading
import numpy as np
import torch
from peer.allocator import keep_freed_memory
from peer.data import Examples, Split
from peer.learner import Batch, TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner

def learn():
    examples = Examples(np.zeros((100, 1, 28, 28), np.float32), np.zeros(100, np.int64))
    split = Split(fit=examples, holdout=examples, test=examples)
    model = build_model("cnn", (1, 28, 28), 2, 0)
    learner = TorchLearner(model, split, 2, TrainingSettings())
    for number in range(60):
        if number == 30:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        learner.measure(learner.train(None, (Batch(number),)))
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
thread = threading.Thread(target=learn)
thread.start()
thread.join()
"""


def page_faults(freed_memory: str) -> int:
    """Return how often the kernel mapped memory for a learner in 30 batches."""
    command = [sys.executable, "-c", SCRIPT, freed_memory]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries are left as they are")
def test_a_learner_that_keeps_what_it_freed_needs_no_new_memory_for_later_batches():
    # Up to 400 against 1,600 to 7,900 were seen. When memory goes back depends on its layout: in
    # three of eight runs none did anyway, so that one may need some more to show it.
    kept = max(page_faults("keep") for _ in range(2))
    assert any(3 * kept < page_faults("return") for _ in range(12))
