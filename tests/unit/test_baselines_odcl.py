"""ODCL as a method of a comparison: train alone, cluster once, average inside the clusters."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_cohort import accuracies, assert_same_bits, digits, make_members, probabilities, run

from peer.clustering.choice import choose
from protocol.errors import ConfigError
from sim.baselines.local import local
from sim.baselines.odcl import odcl
from sim.baselines.oracle import oracle


def test_a_few_steps_alone_tell_groups_apart_and_then_it_is_as_good_as_the_oracle():
    slices = digits(6, groups=2)
    members = make_members(slices)
    found = run(odcl, members, steps=80, start_steps=20)
    same = np.equal.outer(*[[member.group for member in members]] * 2)
    np.testing.assert_array_equal(found.weights > 0, same)
    known = accuracies(run(oracle, make_members(slices), steps=80), members)
    alone = accuracies(run(local, make_members(slices), steps=80), members)
    ours = accuracies(found, members)
    assert ours.mean() > alone.mean()
    # It spends a quarter of its steps alone, and each peer has a dozen test examples.
    assert ours.mean() > known.mean() - 0.03


def test_of_one_cluster_one_shot_is_the_average_of_local_models():
    slices = digits(3)
    members = make_members(slices)
    everybody = run(odcl, members, clustering="kmeans", num_clusters=1)
    assert [spent.bytes_sent for spent in everybody.spending] == [
        members[0].new_learner().parameters().buffer.nbytes
    ] * 3
    assert_same_bits(*[[p] for p in probabilities(everybody, [slices[0]] * 3)[:2]])


@pytest.mark.parametrize(
    ("name", "number", "what"),
    [
        ("linkage", 3, "linkage finds the number itself"),
        ("ward", 0, "unknown clustering 'ward'; known are linkage, convex"),
    ],
)
def test_a_clustering_that_cannot_be_is_named(name, number, what):
    with pytest.raises(ConfigError, match=what):
        choose(name, number)


def test_more_clusters_than_peers_are_refused():
    with pytest.raises(ConfigError, match=r"num_clusters = 5.*from 1 to 4"):
        run(odcl, make_members(digits(4)), clustering="kmeans", num_clusters=5)
