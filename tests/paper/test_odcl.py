"""The claims about one-shot clustered learning, small and seeded.

Linear regressions as in odcl.txt: a hundred peers in ten clusters, of twenty parameters. What of
the claims was not seen is held here, too: a change that makes it true should be noticed.
"""

from __future__ import annotations

from functools import cache

import pytest

from sim.regression import Design
from sim.study_claims import WITHIN
from sim.study_rows import Cell, Row, do_cell, intervals, sum_up
from sim.variants import (
    CONVEX,
    IFCA_NEAR,
    IFCA_RANDOM,
    LINKAGE,
    LOCAL,
    ODCL,
    RANDOM_KMEANS,
    inexact,
    refined,
)

SIZES = (25, 200)
SEEDS = (1, 2)
STARTS = 3
EQUAL = 1 + WITHIN


@cache
def cells() -> list[Cell]:
    design = Design()
    return [do_cell(design, "linear", size, seed, STARTS) for size in SIZES for seed in SEEDS]


def row(variant: str, size: int) -> Row:
    return next(r for r in sum_up(cells()) if (r.variant, r.examples) == (variant, size))


@pytest.mark.parametrize("size", SIZES)
def test_kmeans_plus_plus_equals_the_averaging_oracle_from_25_examples_on(size):
    assert row(ODCL, size).to_averaging <= EQUAL
    assert row(ODCL, size).recovered == 1
    assert row(LOCAL, size).to_averaging > 5  # ten peers in a cluster: about 10


def test_average_linkage_equals_the_averaging_oracle_but_cuts_wrongly_at_25_examples():
    assert row(LINKAGE, 200).to_averaging <= EQUAL
    assert row(LINKAGE, 25).recovered == 0.5  # of 40 seeds 13 were wrong, here the first of two


def test_convex_clustering_equals_it_at_200_examples_though_no_penalty_is_sure_to():
    assert row(CONVEX, 200).to_averaging <= EQUAL
    assert row(CONVEX, 25).to_averaging > 5  # no better than alone
    assert all(interval.open == 0 for interval in intervals(cells()))


@pytest.mark.parametrize("size", SIZES)
def test_five_gradient_rounds_afterwards_equal_the_pooled_oracle(size):
    assert row(refined(5), size).to_pooled <= EQUAL
    assert row(ODCL, size).to_pooled > 1.05  # what there is to gain


def test_rough_solves_do_where_examples_are_many():
    assert row(inexact(10), 200).to_averaging <= EQUAL
    assert row(inexact(10), 25).to_averaging > 2
    assert row(inexact(100), 25).to_averaging == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("size", SIZES)
def test_the_start_decides_for_random_kmeans_and_ifca_and_not_for_kmeans_plus_plus(size):
    for variant in (RANDOM_KMEANS, IFCA_RANDOM):
        factor = row(variant, size).start_factor
        assert factor is not None and factor > 1.5
        assert row(variant, size).to_averaging > 5
    assert row(ODCL, size).start_factor == pytest.approx(1)
    assert row(IFCA_NEAR, size).to_pooled <= EQUAL


def test_one_round_costs_a_five_hundredth_of_ifcas_bytes():
    once, often = row(ODCL, 200), row(IFCA_RANDOM, 200)
    assert (once.rounds, often.rounds) == (1, 100)
    assert often.moved_bytes > 500 * once.moved_bytes
