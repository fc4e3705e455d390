"""How soon peers find their own kind, for how many models, and what they know for as many bytes.

A round is counted once nine tenths of all best collaborators, min(M, group size - 1) a peer by
training weight, are of the peer's group.

Usage: bench_exploration.py [bytes] PEERS...
"""

from __future__ import annotations

import heapq
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from crowd import INITIAL, NUM_CLASSES, NUM_FEATURES, crowd_of, linear_crowd

from peer.algorithm import AlgorithmSettings, mix_predictions
from peer.core import PeerCore
from peer.data import Examples
from peer.events import Effect, Event, Publish, RoundFinished
from peer.gathering import MAX_CLUSTERED
from protocol.messages import PeerId
from protocol.publication import copy_size_bytes
from protocol.tensors import Tensors
from sim.batched import BatchedCrowd
from sim.engine import Lockstep
from sim.teachers import linear_problems

PEERS = (8, 32, 128, 512, 2048)
GROUP_SIZES = (2, 4, 8, 32)
SEEDS = (0, 1, 2)
LONGEST = 150
WANTED = 0.9
SAMPLED = {"epsilon": 0.3, "probes": 0.0, "min_probes": 0.0}
RULES: Mapping[str, Mapping[str, Any]] = {
    "as in the paper": {**SAMPLED, "exploration": "uniform", "survey": 0},
    "uniform, survey": {**SAMPLED, "exploration": "uniform"},
    "friends": SAMPLED,
    "friends, 2 probes (default)": {},
    "friends, 4 probes": {"probes": 4.0},
    "clusters first (odcl)": {"warm_start": "odcl", "start_steps": 40},
}
MANY = 256
"""With more peers, rules that take too long to wait for are left out, and all seeds but one; with
as many, so are groups of one at equal bytes."""
FOR_MANY = ("friends", "friends, 2 probes (default)", "clusters first (odcl)")

START_STEPS = 40
TO_SPEND: Mapping[str, Mapping[str, Any]] = {
    "uniform": {**SAMPLED, "exploration": "uniform", "survey": 0},
    "friends (default)": {},
    "clusters first": {"warm_start": "odcl"},
}
"""What is compared at equal bytes, all with `START_STEPS` steps alone first."""
BUDGETS = (0.25, 0.5, 1.1, 1.5)
"""Bytes received a peer, as shares of what a model in f16 of every peer takes."""
SPENDERS = (16, 64, 256)
SPENDERS_GROUPS = (1, 8)
TESTED = 32
"""Most peers that are tested, evenly spread."""


def bench() -> list[dict[str, object]]:
    """Return all rows of this module."""
    return [*rows(PEERS), *rows_of_bytes(SPENDERS)]


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


def rows_of_bytes(peers: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Yield the accuracy at each budget, for each number of peers, size of the groups and rule."""
    for num_peers in peers:
        for group_size in SPENDERS_GROUPS if num_peers < MANY else SPENDERS_GROUPS[-1:]:
            for name, options in TO_SPEND.items():
                found = [Spenders.of(num_peers, group_size, s, options).spend() for s in SEEDS]
                for budget, *accuracies in zip((0.0, *BUDGETS), *found, strict=True):
                    yield {
                        "name": f"{num_peers} peers in groups of {group_size}, {name}, "
                        f"{budget * num_peers:.0f} models of bytes",
                        "value": round(statistics.mean(accuracies), 1),
                        "spread": [round(min(accuracies), 1), round(max(accuracies), 1)],
                        "unit": "% accuracy",
                        "compared_with": "at equal bytes received a peer",
                        "command": "make bench only=exploration",
                    }


@dataclass
class Spenders:
    """Peers with few examples, and how well they predict for how many bytes.

    Attributes:
        cores: The peers.
        crowd: Their learners.
        tests: What some of them are tested on.
        settings: The algorithm's.
    """

    cores: Mapping[PeerId, PeerCore]
    crowd: BatchedCrowd
    tests: Mapping[PeerId, Examples]
    settings: AlgorithmSettings

    @classmethod
    def of(cls, num_peers: int, group_size: int, seed: int, options: Mapping[str, Any]) -> Spenders:
        """Draw the peers: 48 examples to train on, 16 to measure on, and 200 to be tested on."""
        settings = AlgorithmSettings(**{"start_steps": START_STEPS, **options})
        splits, _ = linear_problems(
            num_peers,
            group_size,
            np.random.default_rng((seed, 0)),
            num_features=NUM_FEATURES,
            num_classes=NUM_CLASSES,
            num_fit=48,
            num_holdout=16,
            num_test=200,
        )
        cores, crowd = crowd_of(splits, settings, rounds=None, seed=seed)
        tests = dict(zip(cores, (each.test for each in splits), strict=True))
        step = max(1, num_peers // TESTED)
        return cls(cores, crowd, {each: tests[each] for each in list(tests)[::step]}, settings)

    def spend(self) -> list[float]:
        """Return the accuracy before anything was received, and at the last round of each budget.

        Percent, mean over the peers that are tested.
        """
        unit = copy_size_bytes(INITIAL.layout.coded.size_bytes // 4)
        last, alone = max(self.cores), dict[PeerId, Tensors]()
        accuracies: list[float] = []
        reached = 0.0

        def on_event(peer_id: PeerId, event: Event, effects: Sequence[Effect]) -> None:
            for effect in effects:
                if isinstance(effect, Publish):
                    alone.setdefault(peer_id, effect.snapshot.tensors)

        def on_round(peer_id: PeerId, finished: RoundFinished) -> None:
            nonlocal reached
            if peer_id != last:
                return
            if not accuracies:
                ones = {each: {each: alone[each]} for each in self.tests}
                reached = self._accuracy(ones, {each: {each: 1.0} for each in self.tests})
                accuracies.append(reached)
            received = sum(work.bytes_received for work in engine.work.values())
            spent = received / len(self.cores) ** 2 / unit
            while not done() and spent > BUDGETS[len(accuracies) - 1]:
                accuracies.append(reached)
            reached = self._accuracy(
                {each: self.cores[each].mixture() for each in self.tests},
                {each: self.cores[each].prediction_weights() for each in self.tests},
            )

        def done() -> bool:
            return len(accuracies) > len(BUDGETS)

        engine = Lockstep(
            self.cores, self.crowd, bits=self.settings.bits, on_round=on_round, on_event=on_event
        )
        engine.run(lambda: not done())
        return accuracies

    def _accuracy(
        self,
        models: Mapping[PeerId, Mapping[PeerId, Tensors]],
        weights: Mapping[PeerId, Mapping[PeerId, float]],
    ) -> float:
        right = []
        for peer_id, test in self.tests.items():
            predicted = mix_predictions(
                weights[peer_id],
                {
                    each: self.crowd.predict(model, test.inputs)
                    for each, model in models[peer_id].items()
                },
            )
            right.append(float(np.mean(predicted.argmax(axis=1) == test.labels)))
        return 100 * statistics.mean(right)


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
    by_bytes = sys.argv[1:2] == ["bytes"]
    wanted, all_of_it = (rows_of_bytes, SPENDERS) if by_bytes else (rows, PEERS)
    for row in wanted(tuple(map(int, sys.argv[1 + by_bytes :])) or all_of_it):
        print(row["name"], row["value"], row["spread"], row["compared_with"], flush=True)
