"""The claims of kNN-Per's paper, small and seeded.

Ten peers with Dirichlet shares of Fashion-MNIST's labels, a CNN at 14x14 that eight of them
train for 60 steps; digits where Fashion-MNIST isn't installed. Bounds lie well inside what was
seen, so that another CPU's rounding can't cross them. `tests/bench/bench_knn_claims.py` measures
the same at a larger size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from helpers_cohort import accuracies, run
from helpers_knn import (
    DEFAULT,
    FOLDS,
    World,
    compare_newcomers,
    compare_settings,
    compare_sizes,
    compare_strategies,
    make_peers,
    remember,
)

from peer.interpolation import LAMBDAS, KnnSettings
from sim.federico_knn import federico_knn

SKEWED, USUAL, EVEN = (World(peers=10, alpha=alpha, steps=60) for alpha in (0.1, 0.3, 1.0))


def judged(world: World, *settings: KnnSettings) -> list[dict]:
    return compare_settings(remember(world, 0), settings or [DEFAULT])


def test_the_gain_over_the_shared_model_grows_with_skew():
    skewed, usual, even = (
        row["blend"] - row["model"] for world in (SKEWED, USUAL, EVEN) for row in judged(world)
    )
    assert skewed > usual > even > 0


def test_the_more_a_peer_remembers_the_more_its_memory_is_worth():
    rows = compare_sizes(remember(USUAL, 0), (5, 25, 100))
    for key in ("memory", "blend", "mean_lam"):
        values = [row[key] for row in rows]
        assert values == sorted(values)
    few, many = (LAMBDAS[int(np.argmax(rows[at]["holdout_by_lam"]))] for at in (0, -1))
    assert few < many


def test_how_many_speak_changes_little():
    rows = judged(USUAL, *(KnnSettings(k_nearest=k) for k in range(5, 15)))
    blends = [row["blend"] for row in rows]
    assert max(blends) - min(blends) < 0.03


def test_a_large_sigma_changes_little_and_a_small_one_takes_the_memorys_sense():
    tiny, *others = judged(USUAL, *(KnnSettings(sigma=sigma) for sigma in (0.1, 1, 10, 1000)))
    blends = [row["blend"] for row in others]
    assert max(blends) - min(blends) < 0.03
    assert tiny["memory"] < min(row["memory"] for row in others)  # the nearest alone speaks


def test_newcomers_do_as_well_as_those_who_trained():
    found = compare_newcomers([remember(USUAL, fold) for fold in range(FOLDS)])
    newcomers, trained = found["newcomers"], found["trained"]
    assert abs(newcomers["blend"] - trained["blend"]) < 0.03
    assert newcomers["blend"] > newcomers["model"] + 0.05


def test_after_a_change_fifo_recovers_fast_concatenate_slowly_and_fixed_never():
    found = compare_strategies(remember(USUAL, 0), start=60, half=12, steps=(0, 12, 13, 24))
    start, before, after, end = (
        {name: values[at] for name, values in found.items()} for at in range(4)
    )
    assert end["fifo"] > end["concatenate"] + 0.01
    assert end["concatenate"] > end["fixed"] + 0.05
    assert abs(end["fifo"] - before["fifo"]) < 0.05
    assert end["fixed"] < end["model"]
    assert before["concatenate"] > start["concatenate"]
    assert after["fifo"] < before["fifo"] - 0.05


def test_beside_models_that_are_personal_already_a_memory_does_no_harm():
    peers = make_peers(USUAL)
    outcome = run(federico_knn, peers, steps=100)
    mixtures = [predict.args[0] for predict in outcome.predict]  # what each blends with its memory
    alone = replace(
        outcome,
        predict=[
            partial(mixture.predict, peer.new_learner())
            for mixture, peer in zip(mixtures, peers, strict=True)
        ],
    )
    assert accuracies(outcome, peers).mean() > accuracies(alone, peers).mean() - 0.01
