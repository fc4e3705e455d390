"""What a crowd of small models costs: seconds, CPU a peer and round, memory, gradients a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import crowd
import numpy as np
import torch
from bench_swarm import _row

from peer.events import Differentiate
from peer.learner import Batch, TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner
from sim.batched import BatchedCrowd
from sim.engine import Crowd, LearnerCrowd
from sim.teachers import linear_problems

ROUNDS = 100
REPEATS = {128: 3, 512: 3, 2048: 1}
COMMAND = "make bench only=scale"


def bench() -> list[dict[str, object]]:
    """Return all rows of this module."""
    return [*bench_gradients(), *bench_crowds()]


def bench_crowds() -> list[dict[str, object]]:
    """Whole runs, each in a process of its own, so that its memory is nobody else's."""
    rows = []
    for num_peers, repeats in REPEATS.items():
        runs = [_run_apart(num_peers) for _ in range(repeats)]
        largest = num_peers == max(REPEATS)
        name = f"{num_peers} peers, {ROUNDS} rounds"
        for key, what, unit, bound in (
            ("wall_s", name, "s", "at most 300 s" if largest else ""),
            ("cpu_us", f"{name}, CPU a peer and round", "us", "flat from 128 on"),
            ("models", f"{name}, models measured a peer and round", "", "the own one included"),
            ("gradients", f"{name}, gradients a peer and round", "", "those of own steps included"),
            ("peak_mb", f"{name}, peak memory", "MB", "at most 2000 MB" if largest else ""),
            ("right", f"{name}, weight on the own group", "%", "of what goes to others"),
        ):
            rows.append(_row(what, [run[key] for run in runs], unit, bound, COMMAND))
    return rows


def bench_gradients(num_peers: int = 256) -> list[dict[str, object]]:
    """Gradients a second of one thread: jobs done together, and one learner after another."""
    ids = crowd.peer_ids(num_peers)
    splits, _ = linear_problems(num_peers, crowd.GROUP_SIZE, np.random.default_rng(0))
    by_id = dict(zip(ids, splits, strict=True))
    classes, settings = crowd.NUM_CLASSES, TrainingSettings()
    seeds = {peer_id: number for number, peer_id in enumerate(ids)}
    batched = BatchedCrowd(by_id, classes, crowd.INITIAL, settings, seeds=seeds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        looped = LearnerCrowd(
            {
                peer_id: TorchLearner(
                    build_model("logistic", (crowd.NUM_FEATURES,), classes, 0),
                    split,
                    classes,
                    settings,
                    seed=seeds[peer_id],
                )
                for peer_id, split in by_id.items()
            }
        )
        together, apart = _gradients_per_s(batched, num_peers), _gradients_per_s(looped, num_peers)
    finally:
        torch.set_num_threads(threads)
    size = f"batches of {settings.batch_size}"
    return [
        _row("gradients of logistic models, batched", together, "1/s", size, COMMAND),
        _row("the same, one learner after another", apart, "1/s", size, COMMAND),
    ]


def _run_apart(num_peers: int) -> dict[str, float]:
    script = str(Path(__file__).with_name("crowd.py"))
    command = [sys.executable, script, str(num_peers), str(ROUNDS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, float] = json.loads(run.stdout)
    return result


def _gradients_per_s(learners: Crowd, num_peers: int, repeats: int = 5) -> list[float]:
    jobs = [
        (peer_id, Differentiate(peer_id, 0, crowd.INITIAL, Batch(0)))
        for peer_id in crowd.peer_ids(num_peers)
    ]
    learners.work(jobs)  # the first time, batches are drawn
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        learners.work(jobs)
        rates.append(num_peers / (time.perf_counter() - began))
    return rates
