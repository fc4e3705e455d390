"""How soon peers find their own kind, and for how many models, by rule of exploration.

A round is counted once nine tenths of all best collaborators, min(M, group size - 1) a peer by
training weight, are of the peer's group.

Usage: bench_exploration.py PEERS...
"""

from __future__ import annotations

import heapq
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from crowd import linear_crowd

from peer.algorithm import AlgorithmSettings
from peer.core import MAX_CLUSTERED
from peer.events import RoundFinished
from protocol.messages import PeerId
from sim.engine import Lockstep

PEERS = (8, 32, 128, 512, 2048)
GROUP_SIZES = (2, 4, 8, 32)
SEEDS = (0, 1, 2)
LONGEST = 150
WANTED = 0.9
RULES: Mapping[str, Mapping[str, Any]] = {
    "as in the paper": {"exploration": "uniform", "probes": 0.0, "survey": 0},
    "uniform, survey": {"exploration": "uniform", "probes": 0.0},
    "friends": {"probes": 0.0},
    "friends, 2 probes (default)": {},
    "friends, 4 probes": {"probes": 4.0},
    "clusters first (odcl)": {"warm_start": "odcl", "start_steps": 40},
}
MANY = 256
"""With more peers, rules that take too long to wait for are left out, and all seeds but one."""
FOR_MANY = ("friends", "friends, 2 probes (default)", "clusters first (odcl)")


def bench() -> list[dict[str, object]]:
    """Return all rows of this module."""
    return list(rows(PEERS))


def rows(peers: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Yield a row for each number of peers, size of the groups and rule."""
    for num_peers in peers:
        for group_size in GROUP_SIZES:
            if 2 * group_size > num_peers:
                continue
            for name, options in RULES.items():
                many = num_peers > MANY
                if many and name not in FOR_MANY:
                    continue
                if "warm_start" in options and num_peers > MAX_CLUSTERED:
                    continue
                seeds = SEEDS[:1] if many else SEEDS
                found = [find_friends(num_peers, group_size, seed, options) for seed in seeds]
                yield _row(f"{num_peers} peers in groups of {group_size}, {name}", found)


def find_friends(
    num_peers: int, group_size: int, seed: int, options: Mapping[str, Any]
) -> tuple[int, float]:
    """Return the number of rounds until friends are found, and of models fetched a peer.

    Steps are large and there is one a round, so that models differ from the first round on, and
    what counts is who was looked at.
    """
    settings = AlgorithmSettings(**{"exchange_every": 1, "final_full": 0.0, **options})
    cores, crowd, groups = linear_crowd(
        num_peers, group_size, settings, rounds=LONGEST, seed=seed, learning_rate=0.05
    )
    wanted = WANTED * num_peers * min(settings.num_neighbors, group_size - 1)
    right = [0] * LONGEST

    def count(peer_id: PeerId, finished: RoundFinished) -> None:
        weights = {p: w for p, w in finished.training_weights.items() if p != peer_id}
        best = heapq.nlargest(settings.num_neighbors, weights, key=weights.__getitem__)
        same = sum(groups[other] == groups[peer_id] for other in best[: group_size - 1])
        right[finished.round_number] += same

    def done() -> int:
        return next((number for number, each in enumerate(right, 1) if each >= wanted), 0)

    engine = Lockstep(cores, crowd, on_round=count)
    engine.run(lambda: not done())
    rounds = done() or LONGEST + 1
    measured = sum(work.measured for work in engine.work.values()) / num_peers
    clustered = num_peers - 1 if settings.warm_start == "odcl" else 0  # fetched, not measured
    # The own model is measured, too.
    return rounds, measured - min(rounds, LONGEST) + clustered


def _row(name: str, found: list[tuple[int, float]]) -> dict[str, object]:
    rounds, models = zip(*found, strict=True)
    cost = f"{statistics.median(models):.0f} ({min(models):.0f} to {max(models):.0f})"
    more = f"; {LONGEST + 1} is more than {LONGEST}" if max(rounds) > LONGEST else ""
    return {
        "name": name,
        "value": statistics.median(rounds),
        "spread": [min(rounds), max(rounds)],
        "unit": "rounds",
        "compared_with": f"models fetched a peer: {cost}{more}",
        "command": "make bench only=exploration",
    }


if __name__ == "__main__":
    for row in rows(tuple(map(int, sys.argv[1:])) or PEERS):
        print(row["name"], row["value"], row["spread"], row["compared_with"], flush=True)
