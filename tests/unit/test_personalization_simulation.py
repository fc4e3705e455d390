"""Simulated peers remember as real ones do, and training takes no notice of it."""

from __future__ import annotations

import numpy as np
import pytest

from peer.config import build_settings
from peer.sources import load_source
from sim.experiment import SwarmSettings
from sim.partition import partition
from sim.simulation import Simulation


def evaluated(personalization: dict[str, object], *, drifting: int = 0) -> list[dict[str, object]]:
    tree = {
        "name": "x",
        "data": "digits",
        "model": "logistic",
        "peers": 4,
        "rounds": 10,
        "partition": {
            "kind": "permuted",
            "groups": 2,
            "min_examples": 40,
            "max_examples": 60,
            "drifting": drifting,
        },
        "swarm": {"local_baseline": False},
        "personalization": personalization,
    }
    settings = build_settings(tree, SwarmSettings, "test.toml")
    rng = np.random.default_rng(0)
    slices = partition(load_source("digits"), settings.peers, settings.partition, rng)
    simulation = Simulation(settings, slices)
    simulation.run()
    results = [simulation.evaluate(peer) for peer in simulation.peers.values()]
    return [result for result in results if result is not None]


def test_models_are_the_same_bits_with_and_without_a_memory():
    with_memory, without = evaluated({"kind": "knn", "every": 3}), evaluated({})
    assert [each["digest"] for each in with_memory] == [each["digest"] for each in without]
    assert [each["accuracy"] for each in with_memory] == [each["accuracy"] for each in without]
    assert all(each["blend_accuracy"] is not None for each in with_memory)
    assert not any("blend_accuracy" in each for each in without)


@pytest.mark.parametrize("strategy", ["fixed", "concatenate", "fifo"])
def test_when_labels_change_their_meaning_what_is_remembered_decides(strategy: str):
    capacity = 40 if strategy == "fifo" else 1000
    settings = {"kind": "knn", "strategy": strategy, "capacity": capacity}
    found = [each["memory_accuracy"] for each in evaluated(settings, drifting=4)]
    mean = np.mean(found)
    if strategy == "fixed":
        assert mean < 0.4  # it knows the former names alone
    elif strategy == "fifo":
        assert mean > 0.7  # it knows the new ones alone
    else:
        assert 0.3 < mean < 0.9
