"""What a crowd of small models costs: seconds, CPU a peer and round, memory, gradients a second.

Usage: bench_scale.py PEERS ROUNDS
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from bench_swarm import _row

from peer.algorithm import AlgorithmSettings
from peer.core import PeerCore
from peer.events import Differentiate, RoundFinished
from peer.learner import Batch, TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner
from protocol.messages import PeerId
from protocol.tensors import Tensors
from sim.batched import BatchedCrowd, linear_layout
from sim.engine import Crowd, LearnerCrowd, Lockstep
from sim.teachers import linear_problems

ROUNDS = 100
REPEATS = {128: 3, 512: 3, 2048: 1}
GROUP_SIZE = 8
NUM_FEATURES, NUM_CLASSES = 10, 10
COMMAND = "make bench only=scale"


def bench() -> list[dict[str, object]]:
    """Return all rows of this module."""
    return [*bench_gradients(), *bench_crowds()]


def bench_crowds() -> list[dict[str, object]]:
    """Whole runs, each in a process of its own, so that its memory is nobody else's."""
    rows = []
    for num_peers, repeats in REPEATS.items():
        runs = [_run_apart(num_peers, ROUNDS) for _ in range(repeats)]
        most = num_peers == max(REPEATS)
        name = f"{num_peers} peers, {ROUNDS} rounds"
        for key, what, unit, bound in (
            ("wall_s", name, "s", "at most 300 s" if most else ""),
            ("cpu_us", f"{name}, CPU a peer and round", "us", "flat from 128 on"),
            ("peak_mb", f"{name}, peak memory", "MB", "at most 2000 MB" if most else ""),
            ("right", f"{name}, weight on the own group", "%", "of what goes to others"),
        ):
            rows.append(_row(what, [run[key] for run in runs], unit, bound, COMMAND))
    return rows


def bench_gradients(num_peers: int = 512) -> list[dict[str, object]]:
    """Gradients a second of one thread: jobs done together, and one learner after another."""
    splits, _ = linear_problems(num_peers, GROUP_SIZE, np.random.default_rng(0))
    peer_ids = _peer_ids(num_peers)
    initial = Tensors.zeros(linear_layout(NUM_FEATURES, NUM_CLASSES))
    settings = TrainingSettings()
    learners = {
        peer_id: TorchLearner(
            build_model("logistic", (NUM_FEATURES,), NUM_CLASSES, 0),
            split,
            NUM_CLASSES,
            settings,
            seed=number,
        )
        for number, (peer_id, split) in enumerate(zip(peer_ids, splits, strict=True))
    }
    seeds = {peer_id: number for number, peer_id in enumerate(peer_ids)}
    batched = BatchedCrowd(
        dict(zip(peer_ids, splits, strict=True)), NUM_CLASSES, initial, settings, seeds=seeds
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = [_gradients_per_s(crowd, initial) for crowd in (batched, LearnerCrowd(learners))]
    finally:
        torch.set_num_threads(threads)
    return [
        _row("gradients of logistic models, batched", rates[0], "1/s", "batches of 32", COMMAND),
        _row("the same, one learner after another", rates[1], "1/s", "torch", COMMAND),
    ]


def linear_crowd(
    num_peers: int,
    group_size: int,
    settings: AlgorithmSettings,
    *,
    rounds: int | None,
    seed: int = 0,
    training: TrainingSettings | None = None,
) -> tuple[dict[PeerId, PeerCore], BatchedCrowd, dict[PeerId, int]]:
    """Make peers with linear problems; return cores, learners and the groups' numbers."""
    splits, groups = linear_problems(
        num_peers,
        group_size,
        np.random.default_rng((seed, 0)),
        num_features=NUM_FEATURES,
        num_classes=NUM_CLASSES,
    )
    peer_ids = _peer_ids(num_peers)
    model = Tensors.zeros(linear_layout(NUM_FEATURES, NUM_CLASSES))
    crowd = BatchedCrowd(
        dict(zip(peer_ids, splits, strict=True)),
        NUM_CLASSES,
        model,
        training or TrainingSettings(),
        seeds={peer_id: number for number, peer_id in enumerate(peer_ids)},
        loss=settings.loss,
        measure_on=settings.measure_on,
    )
    cores = {
        peer_id: PeerCore(
            peer_id=peer_id,
            settings=settings,
            model=model,
            incarnation=0,
            rounds=rounds,
            rng=np.random.default_rng((seed, 1, number)),
        )
        for number, peer_id in enumerate(peer_ids)
    }
    return cores, crowd, dict(zip(peer_ids, groups.tolist(), strict=True))


def measure_crowd(num_peers: int, rounds: int) -> dict[str, float]:
    """Run a crowd and measure this process."""
    cores, crowd, groups = linear_crowd(num_peers, GROUP_SIZE, AlgorithmSettings(), rounds=rounds)
    last: dict[PeerId, RoundFinished] = {}
    engine = Lockstep(cores, crowd, on_round=last.__setitem__)
    wall, cpu = time.perf_counter(), time.process_time()
    engine.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    right = others = 0.0
    for peer_id, finished in last.items():
        for other, weight in finished.training_weights.items():
            others += weight * (other != peer_id)
            right += weight * (other != peer_id and groups[other] == groups[peer_id])
    return {
        "wall_s": wall,
        "cpu_us": cpu / num_peers / rounds * 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "right": 100 * right / others,
    }


def _run_apart(num_peers: int, rounds: int) -> dict[str, float]:
    command = [sys.executable, __file__, str(num_peers), str(rounds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


def _gradients_per_s(crowd: Crowd, model: Tensors) -> list[float]:
    peer_ids = _peer_ids(512)
    jobs = [(peer_id, Differentiate(peer_id, 0, model, Batch(0))) for peer_id in peer_ids]
    crowd.work(jobs)  # the first time, batches are drawn
    return [len(jobs) / _seconds(lambda: crowd.work(jobs)) for _ in range(5)]


def _seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _peer_ids(count: int) -> list[PeerId]:
    return [PeerId(f"{number:032x}") for number in range(count)]


if __name__ == "__main__":
    print(json.dumps(measure_crowd(int(sys.argv[1]), int(sys.argv[2]))))
