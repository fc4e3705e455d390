"""Many peers with linear problems in one process; as a script, one run measured, as JSON.

Usage: crowd.py PEERS ROUNDS
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peer.algorithm import AlgorithmSettings
from peer.core import PeerCore
from peer.data import Split
from peer.events import RoundFinished
from peer.learner import TrainingSettings
from protocol.messages import PeerId
from protocol.tensors import Tensors
from sim.batched import BatchedCrowd, linear_layout
from sim.engine import Lockstep
from sim.teachers import linear_problems

GROUP_SIZE = 8
NUM_FEATURES, NUM_CLASSES = 10, 10
INITIAL = Tensors.zeros(linear_layout(NUM_FEATURES, NUM_CLASSES))


def peer_ids(count: int) -> list[PeerId]:
    return [PeerId(f"{number:032x}") for number in range(count)]


def linear_crowd(
    num_peers: int,
    group_size: int,
    settings: AlgorithmSettings,
    *,
    rounds: int | None,
    seed: int = 0,
    learning_rate: float = 0.01,
) -> tuple[dict[PeerId, PeerCore], BatchedCrowd, dict[PeerId, int]]:
    """Return cores, their learners, and the number of each peer's group."""
    rng = np.random.default_rng((seed, 0))
    splits, groups = linear_problems(
        num_peers, group_size, rng, num_features=NUM_FEATURES, num_classes=NUM_CLASSES
    )
    cores, crowd = crowd_of(splits, settings, rounds=rounds, seed=seed, learning_rate=learning_rate)
    return cores, crowd, dict(zip(cores, groups.tolist(), strict=True))


def crowd_of(
    splits: Sequence[Split],
    settings: AlgorithmSettings,
    *,
    rounds: int | None,
    seed: int,
    learning_rate: float = 0.01,
) -> tuple[dict[PeerId, PeerCore], BatchedCrowd]:
    """Return a core for each split, and their learners."""
    ids = peer_ids(len(splits))
    crowd = BatchedCrowd(
        dict(zip(ids, splits, strict=True)),
        NUM_CLASSES,
        INITIAL,
        TrainingSettings(learning_rate=learning_rate),
        seeds={peer_id: number for number, peer_id in enumerate(ids)},
        loss=settings.loss,
        measure_on=settings.measure_on,
    )
    cores = {
        peer_id: PeerCore(
            peer_id=peer_id,
            settings=settings,
            model=INITIAL,
            incarnation=0,
            rounds=rounds,
            rng=np.random.default_rng((seed, 1, number)),
        )
        for number, peer_id in enumerate(ids)
    }
    return cores, crowd


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
        "peak_mb": _peak_mb(),
        "right": 100 * right / others,
        "models": sum(work.measured for work in engine.work.values()) / num_peers / rounds,
        "gradients": sum(work.gradients for work in engine.work.values()) / num_peers / rounds,
    }


def _peak_mb() -> float:
    """The most memory this process had; `ru_maxrss` would count who started it, too."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 / 1e6  # type: ignore[index]


if __name__ == "__main__":
    print(json.dumps(measure_crowd(int(sys.argv[1]), int(sys.argv[2]))))
