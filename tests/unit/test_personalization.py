"""A memory of the own examples makes any model personal, and harms none that has no use for it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_cohort import (
    accuracies,
    assert_same_bits,
    digits,
    make_members,
    probabilities,
    run,
)

from peer.data import Split
from peer.interpolation import KnnSettings
from peer.personalization import PersonalizedModel
from sim.baselines.fedavg import fedavg, train_global
from sim.baselines.knn_per import knn_per
from sim.cohort import Budget, Outcome


def fedavg_without_holdout(members, budget: Budget, rng: np.random.Generator) -> Outcome:
    learners = [member.new_learner() for member in members]
    model, spending = train_global(members, learners, budget, full=False)
    return Outcome.of_models(learners, [model] * len(learners), spending)


def test_with_the_model_alone_it_is_fedavg_to_the_bit():
    slices = digits(3)
    alone = KnnSettings(lambdas=(0.0,))
    blended = run(knn_per, make_members(slices), settings=alone)
    plain = run(fedavg_without_holdout, make_members(slices))
    assert_same_bits(probabilities(blended, slices), probabilities(plain, slices))


def test_where_peers_call_things_by_different_names_memory_puts_the_model_right():
    slices = digits(6, groups=2)
    members = make_members(slices)
    blended = accuracies(run(knn_per, members, steps=60), members)
    members = make_members(slices)
    shared = accuracies(run(fedavg, members, steps=60), members)
    # One model for two namings is right half the time at best.
    assert blended.mean() > shared.mean() + 0.2


def test_a_peer_that_never_trained_remembers_and_predicts_without_a_gradient():
    slices = digits(5)
    (newcomer,), others = make_members(slices[:1]), make_members(slices[1:])
    learners = [member.new_learner() for member in others]
    budget = Budget(steps=60, local_steps=4)
    model, _ = train_global(others, learners, budget, full=False)
    learner = newcomer.new_learner()
    before = learner.parameters()
    personalized = PersonalizedModel.build(
        learner, model, newcomer.split, KnnSettings(), np.random.default_rng(0)
    )
    test = newcomer.split.test
    found = personalized.predict(learner, test.inputs)
    assert (found.argmax(axis=1) == test.labels).mean() > 0.6  # ten classes
    assert learner.parameters() == before
    assert len(personalized.store) == newcomer.num_train


@pytest.mark.parametrize("with_holdout", [True, False])
def test_the_holdout_is_remembered_but_not_asked_of_itself(with_holdout: bool):
    (part,) = digits(1)
    (member,) = make_members((part,))
    split = member.split
    if not with_holdout:
        split = Split(fit=split.train, holdout=split.holdout.take(slice(0)), test=split.test)
    learner = member.new_learner()
    personalized = PersonalizedModel.build(
        learner, learner.parameters(), split, KnnSettings(), np.random.default_rng(0)
    )
    assert len(personalized.store) == member.num_train
    tuning = personalized.tuning
    if with_holdout:
        # Each would be its own nearest, and the memory never wrong.
        assert tuning.memory_accuracy is not None
        assert tuning.memory_accuracy < 1.0
        assert tuning.blend.lam > 0  # the model has learned nothing yet
    else:
        assert tuning.blend.lam == 0
        assert tuning.accuracy is None
